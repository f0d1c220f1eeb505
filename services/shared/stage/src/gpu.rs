//! The ranks of a plan on GPUs of this process: one model part and, while they work, one thread each.
use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kernels::cuda::{Comm, CommId, CommOptions, CudaError, Gpu};
use model::{
    Latents, ModelConfig, ModelError, PrefixKv, RankShard, RgbImage,
    cond::CondFeatures,
    gpu::{
        GpuCache, GpuConditions, GpuGroup, GpuModel, GpuNeeds, GpuOptions, GpuPrefix, GpuShare,
        GpuVae, GpuVaeParts, PrefixPort, WeightType,
    },
    vae::{Posterior, Tiles},
    vit::Patches,
};
use parallel::Plan;
use telemetry::{Metrics, names};

use crate::{RANK_PATIENCE, StageError, device::GpuSettings, engine::guard, ranks::gathered};

/// Prefix tokens of the smallest load that a stage must have room for: two rows of a long prompt.
const LEAST_PREFIX: usize = 4096;
/// Of the room for keys and values, what requests may reserve: runs of it are not always in one piece.
const USABLE: f64 = 0.9;

/// What a stage does on its GPUs.
#[derive(Debug, Clone)]
pub struct GpuLoad {
    /// Checkpoint directory.
    pub dir: PathBuf,
    /// The plan.
    pub plan: Plan,
    /// Which GPUs, and how.
    pub settings: GpuSettings,
    /// Whether text is read and written.
    pub text: bool,
    /// Tokens of the largest pass.
    pub max_tokens: usize,
    /// Tokens of all prefixes that are there at once, at most.
    pub kv_tokens: usize,
    /// Rows that get fresh keys and values in a pass, at most.
    pub max_rows: usize,
    /// What is done with pictures.
    pub vae: GpuVaeParts,
    /// Whether they are decoded whole or in tiles.
    pub tiles: Tiles,
}

/// The ranks of one plan on GPUs.
pub struct GpuRanks {
    plan: Plan,
    gpus: Vec<Arc<Gpu>>,
    /// In the order of ranks; never empty.
    models: Vec<Mutex<GpuModel>>,
    ports: Vec<PrefixPort>,
    /// What each rank has of a prefix.
    shards: Vec<RankShard>,
    /// On the first rank's GPU, with a stream of its own.
    vae: Mutex<GpuVae>,
    /// Beside it, where pictures are shown to the model.
    conditions: Option<Mutex<GpuConditions>>,
    /// Sizes of keys and values, see [`GpuRanks::picture_bytes`].
    kv_bytes: usize,
    reserve: PictureBytes,
}

/// What pictures take of the first rank's room.
#[derive(Debug, Clone, Copy)]
struct PictureBytes {
    /// Bytes of 128 prefix tokens, and of 128 fresh tokens.
    prefix: usize,
    fresh: usize,
    pieces: usize,
}

impl fmt::Debug for GpuRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuRanks")
            .field("plan", &self.plan)
            .field("gpus", &self.gpus)
            .finish_non_exhaustive()
    }
}

/// What was found to fit.
struct Fit {
    config: ModelConfig,
    ordinals: Vec<usize>,
    options: GpuOptions,
}

impl GpuLoad {
    /// Whether the GPUs are there and the model fits, before a port opens or any weight is read.
    ///
    /// # Errors
    /// `Config` naming `device`, `plan`, `gpu_memory` or `resident_layers`, saying how much is missing and what would
    /// fit.
    pub fn check(&self) -> Result<(), StageError> {
        self.fit().map(drop)
    }

    fn fit(&self) -> Result<Fit, StageError> {
        let config = ModelConfig::from_dir(&self.dir)?;
        let ordinals = self.settings.of_ranks(&self.plan)?;
        if self.text {
            let share = GpuShare::new(&config, &self.plan, 0)?;
            let refused = |error: ModelError| StageError::config("plan", error.to_string());
            share.writes_text().map_err(refused)?;
        }
        let layers = config.num_layers();
        if let Some(asked) = self.settings.resident_layers.filter(|n| *n > layers) {
            let message = format!("is {asked}, and the model has {layers} layers");
            return Err(StageError::config("resident_layers", message));
        }
        let mut free = usize::MAX;
        for ordinal in &ordinals {
            let gpu = Gpu::open(*ordinal).map_err(refused)?;
            free = free.min(gpu.memory().map_err(refused)?.free);
        }
        if let Some(budget) = self.settings.memory {
            let budget = usize::try_from(budget).unwrap_or(usize::MAX);
            if budget > free {
                let message = format!(
                    "is {budget} bytes, {free} are free: {} are missing",
                    budget - free
                );
                return Err(StageError::config("gpu_memory", message));
            }
            free = budget;
        }
        let needs = self.needs(&config, &self.plan)?;
        let (least, most) = self.kv_bounds(&config);
        if needs.total() + least > free {
            return Err(self.misfit(&config, &needs, (free, least)));
        }
        let kv_bytes = most.min(free - needs.total());
        let options = GpuOptions {
            kv_bytes,
            ..self.options()
        };
        Ok(Fit {
            config,
            ordinals,
            options,
        })
    }

    fn options(&self) -> GpuOptions {
        GpuOptions {
            ordinal: 0,
            weights: if self.settings.fp8 {
                WeightType::Fp8
            } else {
                WeightType::Bf16
            },
            max_tokens: self.max_tokens,
            kv_bytes: 0,
            resident_layers: self.settings.resident_layers,
            text: self.text,
        }
    }

    fn needs(&self, config: &ModelConfig, plan: &Plan) -> Result<GpuNeeds, StageError> {
        let largest = largest_grid(config)?;
        // Pictures are encoded whole.
        let piece = match self.vae.encoder {
            true => largest,
            false => self.tiles.largest(&config.vae, largest),
        };
        let vae = (self.vae, piece.0 * piece.1);
        Ok(GpuNeeds::new(config, plan, &self.options(), vae)?)
    }

    /// Room for keys and values: what one picture needs, and the most that is of use. Ranks that have a part of them
    /// need less.
    fn kv_bounds(&self, config: &ModelConfig) -> (usize, usize) {
        let token = 2 * config.num_kv_heads * config.head_dim * 2;
        let kept = token * config.num_layers();
        // A run is a multiple of 128 tokens.
        let fresh = (self.max_tokens + 128 * self.max_rows) * token;
        let longest = LEAST_PREFIX.min(config.max_position_embeddings);
        let least = 2 * longest * kept + fresh;
        let most = (self.kv_tokens + 128 * self.max_rows) * kept + fresh;
        (least, (most as f64 / USABLE) as usize)
    }

    /// Too little memory: how much is missing, and what would fit.
    fn misfit(
        &self,
        config: &ModelConfig,
        needs: &GpuNeeds,
        (free, kv): (usize, usize),
    ) -> StageError {
        let needed = needs.total() + kv;
        let mut ways = Vec::new();
        if let Some(layers) = needs.layers_that_fit(free, kv) {
            ways.push(format!("resident_layers={layers}"));
        }
        if !self.settings.fp8 {
            let smaller = Self {
                settings: GpuSettings {
                    fp8: true,
                    ..self.settings.clone()
                },
                ..self.clone()
            };
            let fits = smaller.needs(config, &self.plan);
            if fits.is_ok_and(|needs| needs.total() + kv <= free) {
                ways.push("weights=fp8".to_owned());
            }
        }
        let fits = |plan: &Plan| {
            let needs = self.needs(config, plan);
            needs.is_ok_and(|needs| needs.total() + kv <= free)
        };
        let more = if self.text {
            ["tp=2", "tp=4", "tp=8"]
        } else {
            [
                "cfg=2,ep=cfg",
                "ulysses=4,ep=ulysses",
                "ulysses=8,ep=ulysses",
            ]
        };
        let mut more = more.iter().filter_map(|text| text.parse::<Plan>().ok());
        if let Some(plan) = more.find(fits) {
            ways.push(format!("plan={plan}"));
        }
        let ways = match ways.len() {
            0 => "nothing smaller fits".to_owned(),
            _ => format!("would fit: {}", ways.join(", or ")),
        };
        let missing = needed.saturating_sub(free);
        let message =
            format!("has {free} bytes, {needed} are needed: {missing} are missing; {ways}");
        StageError::config("gpu_memory", message)
    }
}

impl GpuRanks {
    /// Opens each rank's part of a checkpoint, all at the same time.
    ///
    /// # Errors
    /// Those of [`GpuLoad::check`], and of loading the checkpoint.
    pub fn open(load: &GpuLoad) -> Result<Self, StageError> {
        let fit = load.fit()?;
        let config = &fit.config;
        let gpus: Vec<Arc<Gpu>> = fit
            .ordinals
            .iter()
            .map(|ordinal| Gpu::open(*ordinal))
            .collect::<Result<_, _>>()
            .map_err(refused)?;
        let groups = join(&gpus)?;
        let open = |rank: usize| -> Result<GpuModel, ModelError> {
            let Some(group) = groups.get(rank) else {
                let options = GpuOptions {
                    ordinal: fit.ordinals[rank],
                    ..fit.options
                };
                return GpuModel::open(&load.dir, options);
            };
            let share = GpuShare::new(config, &load.plan, rank)?;
            GpuModel::open_rank(&load.dir, fit.options, share, Arc::clone(group))
        };
        let opened = together((0..gpus.len()).collect(), &open);
        let models = opened.into_iter().collect::<Result<Vec<_>, StageError>>()?;
        let ports = models.iter().map(GpuModel::prefix_port);
        let ports = ports.collect::<Result<_, ModelError>>()?;
        // A handle of its own has a stream of its own: pictures are decoded beside the steps.
        let beside = Gpu::open(fit.ordinals[0]).map_err(refused)?;
        let mut vae = GpuVae::open(&beside, &load.dir, load.vae)?.in_tiles(load.tiles);
        let (height, width) = largest_grid(config)?;
        vae.reserve(height, width)?;
        let conditions = || GpuConditions::open(&beside, &load.dir).map(Mutex::new);
        let conditions = load.vae.encoder.then(conditions).transpose()?;
        let first = &models[0];
        let reserve = PictureBytes {
            prefix: first.picture_bytes(&[128], 0),
            fresh: first.picture_bytes(&[0], 1) / first.share().ranks(),
            pieces: first.share().ranks(),
        };
        let kv_bytes = first.kv_room().0;
        Ok(Self {
            plan: load.plan,
            gpus: models.iter().map(|model| model.gpu().clone()).collect(),
            shards: models
                .iter()
                .map(|model| model.share().shard().clone())
                .collect(),
            models: models.into_iter().map(Mutex::new).collect(),
            ports,
            vae: Mutex::new(vae),
            conditions,
            kv_bytes,
            reserve,
        })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.models.len()
    }

    /// Bytes for keys and values that requests may reserve on each rank.
    #[must_use]
    pub fn room(&self) -> usize {
        (self.kv_bytes as f64 * USABLE) as usize
    }

    /// Bytes of that room which a picture takes: prefixes of so many tokens, and rows of `fresh` tokens.
    #[must_use]
    pub fn picture_bytes(&self, prefixes: &[usize], fresh: usize) -> usize {
        let runs = |tokens: usize| tokens.div_ceil(128);
        let PictureBytes {
            prefix,
            fresh: each,
            pieces,
        } = self.reserve;
        let kept: usize = prefixes.iter().map(|tokens| runs(*tokens) * prefix).sum();
        kept + prefixes.len() * pieces * runs(fresh.div_ceil(pieces)) * each
    }

    /// Tokens whose keys and values fit into the room.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.room() / self.reserve.prefix.max(1) * 128
    }

    /// Exports the memory of every GPU.
    pub fn report(&self, metrics: &Metrics, stage: &str) {
        for gpu in &self.gpus {
            let Ok(memory) = gpu.memory() else { continue };
            let number = gpu.ordinal().to_string();
            let used = memory.total.saturating_sub(memory.free);
            for (kind, bytes) in [("used", used), ("total", memory.total)] {
                let labels = [stage, number.as_str(), kind];
                metrics.set(&names::GPU_MEMORY, &labels, bytes as f64);
            }
        }
    }

    /// Brings a whole prefix to every rank, each its part, beside whatever runs there.
    ///
    /// # Errors
    /// `Model` with `Exhausted` when there is no room.
    pub fn upload(&self, prefix: &PrefixKv) -> Result<Vec<Arc<GpuPrefix>>, StageError> {
        let ports = self.ports.iter().map(|port| port.upload(prefix));
        let all = ports.map(|placed| placed.map(Arc::new));
        Ok(all.collect::<Result<_, ModelError>>()?)
    }

    /// The picture of scaled latents, beside the steps.
    ///
    /// # Errors
    /// Those of [`GpuVae::decode`].
    pub fn decode(&self, latents: &Latents) -> Result<RgbImage, StageError> {
        Ok(self.vae().decode(latents)?)
    }

    /// The distribution of a picture's latents, beside the passes.
    ///
    /// # Errors
    /// Those of [`GpuVae::encode`].
    pub fn encode(&self, pixels: &kernels::Tensor) -> Result<Posterior, StageError> {
        Ok(self.vae().encode(pixels)?)
    }

    /// What a shown picture of these scaled latents and patches puts into a sequence, beside the passes.
    ///
    /// # Errors
    /// Those of [`GpuConditions::features`]; `Model` with `Internal` on GPUs that are shown no pictures.
    pub fn features(
        &self,
        latents: &Latents,
        patches: Patches<'_>,
    ) -> Result<CondFeatures, StageError> {
        let none = || ModelError::Internal("gpus that are shown no pictures".into());
        let conditions = self.conditions.as_ref().ok_or_else(none)?;
        let mut conditions = conditions.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(conditions.features(latents, patches)?)
    }

    /// The whole prefix whose parts the ranks have in these caches, in their order.
    ///
    /// # Errors
    /// Those of [`GpuPrefix::download`]; `Model` with `Internal` for other parts than the ranks'.
    pub fn download(&self, caches: Vec<GpuCache>) -> Result<PrefixKv, StageError> {
        let mut parts = self.run(caches, |_, cache| cache.into_prefix().download())?;
        if parts.len() == 1 {
            return Ok(parts.swap_remove(0));
        }
        let config = self.model(0).config().kv_geometry();
        let parts: Vec<_> = self.shards.iter().zip(&parts).collect();
        Ok(PrefixKv::whole_of(&config, &parts)?)
    }

    fn vae(&self) -> MutexGuard<'_, GpuVae> {
        self.vae.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on every rank at the same time, each with its own input; results in rank order. After a failure
    /// the ranks of a plan meet anew.
    ///
    /// # Errors
    /// The first error, `Panicked` when a rank panics.
    pub fn run<I: Send, T: Send>(
        &self,
        inputs: Vec<I>,
        work: impl Fn(&mut GpuModel, I) -> Result<T, ModelError> + Sync,
    ) -> Result<Vec<T>, StageError> {
        if inputs.len() != self.models.len() {
            let message = format!("{} inputs for {} ranks", inputs.len(), self.models.len());
            return Err(ModelError::Internal(message).into());
        }
        let one = |(rank, input): (usize, I)| {
            let mut model = self.model(rank);
            work(&mut model, input)
        };
        let results = together(inputs.into_iter().enumerate().collect(), &one);
        if results.iter().any(Result::is_err) && self.models.len() > 1 {
            self.meet()?;
        }
        gathered(results)
    }

    fn model(&self, rank: usize) -> MutexGuard<'_, GpuModel> {
        let model = &self.models[rank];
        model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the group of a plan anew.
    fn meet(&self) -> Result<(), StageError> {
        for (rank, group) in join(&self.gpus)?.into_iter().enumerate() {
            self.model(rank).rejoin(group);
        }
        Ok(())
    }
}

/// A group of these GPUs; none for one alone.
fn join(gpus: &[Arc<Gpu>]) -> Result<Vec<Arc<dyn GpuGroup>>, StageError> {
    if gpus.len() == 1 {
        return Ok(Vec::new());
    }
    let id = CommId::new().map_err(refused)?;
    let options = CommOptions {
        deadline: RANK_PATIENCE,
        blocks: None,
    };
    let one = |(rank, gpu): (usize, &Arc<Gpu>)| {
        let joined = Comm::join(gpu, &id, rank, gpus.len(), &options);
        joined
            .map(|comm| Arc::new(comm) as Arc<dyn GpuGroup>)
            .map_err(ModelError::from)
    };
    let joined = together(gpus.iter().enumerate().collect(), &one);
    joined.into_iter().collect()
}

/// One piece of work for each input, at the same time; a single one on this thread.
fn together<I: Send, T: Send>(
    inputs: Vec<I>,
    work: &(impl Fn(I) -> Result<T, ModelError> + Sync),
) -> Vec<Result<T, StageError>> {
    let one = |input: I| {
        let done = guard("gpu", || work(input));
        done.and_then(|result| result.map_err(StageError::from))
    };
    if inputs.len() == 1 {
        return inputs.into_iter().map(one).collect();
    }
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = inputs
            .into_iter()
            .map(|input| scope.spawn(move || one(input)))
            .collect();
        let stopped = |_| Err(StageError::EngineStopped { engine: "gpu" });
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|end| end.unwrap_or_else(stopped)).collect()
    })
}

/// Rows and columns of image tokens of the largest picture, which are also the positions of its latents.
///
/// # Errors
/// A model without sizes.
pub fn largest_grid(config: &ModelConfig) -> Result<(usize, usize), StageError> {
    let cell = config.pixels_per_token();
    let buckets = model::model::resolution_group(config)?;
    let grids = buckets.buckets().iter().map(|bucket| bucket.grid(cell));
    let largest = grids.max_by_key(|(height, width)| height * width);
    largest.ok_or_else(|| StageError::config("model", "has no sizes"))
}

/// A GPU that cannot be used is a matter of the setting that names it.
fn refused(error: CudaError) -> StageError {
    StageError::config("device", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(plan: &str, settings: GpuSettings) -> (ModelConfig, GpuLoad) {
        let published = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../../integration-tests/fixtures/published"
        );
        let load = GpuLoad {
            dir: published.into(),
            plan: plan.parse().unwrap(),
            settings,
            text: false,
            max_tokens: 16_384,
            kv_tokens: 65_536,
            max_rows: 16,
            vae: GpuVaeParts {
                decoder: true,
                encoder: false,
            },
            tiles: Tiles::Whole,
        };
        (ModelConfig::from_dir(&load.dir).unwrap(), load)
    }

    /// What is said of the released model on a GPU with so many free bytes.
    fn said(free: usize, settings: GpuSettings) -> String {
        let (config, load) = load("single", settings);
        let needs = load.needs(&config, &load.plan).unwrap();
        let (least, most) = load.kv_bounds(&config);
        assert!(least < most);
        load.misfit(&config, &needs, (free, least)).to_string()
    }

    #[test]
    fn too_little_memory_says_how_much_is_missing_and_what_would_fit() {
        let text = said(139 << 30, GpuSettings::default());
        assert!(
            text.starts_with("gpu_memory has 149250113536 bytes"),
            "{text}"
        );
        for part in [
            "are missing",
            "resident_layers=2",
            "weights=fp8",
            "plan=cfg=2,ep=cfg",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let small = GpuSettings {
            fp8: true,
            ..GpuSettings::default()
        };
        let text = said(16 << 30, small.clone());
        assert!(!text.contains("weights=fp8"), "{text}");
        let text = said(1 << 30, small);
        assert!(text.contains("nothing smaller fits"), "{text}");
    }

    #[test]
    fn layers_that_the_model_has_not_are_refused_before_a_gpu_is_touched() {
        let settings = GpuSettings {
            resident_layers: Some(33),
            ..GpuSettings::default()
        };
        let error = load("single", settings).1.check().unwrap_err().to_string();
        assert!(error.contains("resident_layers is 33"), "{error}");
    }
}
