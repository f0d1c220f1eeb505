//! The ranks of a pool's plan that run in this process: one model part and one thread each.
//!
//! All of them run every piece of work together. When one fails, the others end with it, and the groups are
//! made anew, so that the next piece of work does not inherit the failure.
use std::{
    fmt,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use model::{
    BalanceOptions, Latents, LoadOptions, Model, ModelError, ModelInfo, Parts, Residency, RgbImage,
    vae::Tiles,
};
use parallel::{ParallelError, Plan, RankContext, collective::threads};

use crate::{OnGpus, StageError, engine::guard};

/// Longest wait of one rank for another within a step. Ranks of one process do the same work at the same
/// time, so only a defect reaches this.
pub const RANK_PATIENCE: Duration = Duration::from_secs(300);

/// Most ranks of one process. Each has a thread and its part of the weights, so more would only take memory.
pub const MAX_LOCAL_RANKS: usize = 64;

/// What the ranks of a plan load.
#[derive(Debug, Clone, Copy)]
pub struct RankLoad {
    /// Parts of the model that every rank needs.
    pub parts: Parts,
    /// Those of rank 0, which also does what one rank does alone.
    pub alone: Parts,
    /// The plan.
    pub plan: Plan,
    /// Whether and how experts move between ranks.
    pub balance: BalanceOptions,
    /// How much of the decoder all ranks together keep in memory.
    pub residency: Residency,
    /// Whether pictures are decoded whole or in tiles.
    pub tiles: Tiles,
}

/// The ranks of one plan.
pub struct Ranks {
    plan: Plan,
    models: Vec<Arc<Model>>,
    /// Taken for the length of a piece of work.
    contexts: Mutex<Vec<RankContext>>,
    /// What computes in place of the models, which then have no weights.
    #[cfg(feature = "cuda")]
    gpus: Option<crate::GpuRanks>,
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks")
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Ranks {
    /// Opens each rank's part of a checkpoint.
    ///
    /// # Errors
    /// `Config` naming `plan` for a mesh that cannot be or has more than [`MAX_LOCAL_RANKS`], `Model` when
    /// the checkpoint does not load or the plan does not fit it.
    pub fn open(dir: &Path, load: RankLoad) -> Result<Self, StageError> {
        let plan = load.plan;
        let count: usize = plan.sizes().into_iter().fold(1, usize::saturating_mul);
        if count > MAX_LOCAL_RANKS {
            let message =
                format!("{plan} has {count} ranks, at most {MAX_LOCAL_RANKS} run in one process");
            return Err(StageError::config("plan", message));
        }
        let contexts = connect(&plan)?;
        let open = |ctx: &RankContext| {
            let options = LoadOptions {
                parts: if ctx.rank() == 0 {
                    load.alone
                } else {
                    load.parts
                },
                plan,
                rank: ctx.rank(),
                balance: load.balance,
                residency: load.residency.shared_by(count),
                tiles: load.tiles,
            };
            Ok(Arc::new(Model::open(dir, options)?))
        };
        let models = contexts
            .iter()
            .map(open)
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            plan,
            models,
            contexts: Mutex::new(contexts),
            #[cfg(feature = "cuda")]
            gpus: None,
        })
    }

    /// Opens a checkpoint on whatever computes; with GPUs goes what is loaded on the processor beside them.
    ///
    /// # Errors
    /// Those of [`Ranks::open`], or of the GPUs and of the parts on the processor.
    pub fn open_on(
        gpus: Option<(OnGpus, Parts)>,
        (dir, load): (&Path, RankLoad),
    ) -> Result<Self, StageError> {
        match gpus {
            #[cfg(feature = "cuda")]
            Some((gpus, host)) => Self::on_gpus(&gpus, host),
            _ => Self::open(dir, load),
        }
    }

    /// Opens a checkpoint on GPUs; `host` is what is loaded on the processor beside them.
    ///
    /// # Errors
    /// Those of [`crate::GpuRanks::open`], and of the parts on the processor.
    #[cfg(feature = "cuda")]
    fn on_gpus(load: &crate::GpuLoad, host: Parts) -> Result<Self, StageError> {
        let gpus = crate::GpuRanks::open(load)?;
        let options = LoadOptions {
            parts: host,
            ..LoadOptions::default()
        };
        Ok(Self {
            plan: load.plan,
            models: vec![Arc::new(Model::open(&load.dir, options)?)],
            contexts: Mutex::new(connect(&Plan::default())?),
            gpus: Some(gpus),
        })
    }

    /// The GPUs that compute, where they do.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn gpus(&self) -> Option<&crate::GpuRanks> {
        self.gpus.as_ref()
    }

    /// Which of the code paths computes.
    #[must_use]
    pub fn kernels(&self) -> &'static str {
        #[cfg(feature = "cuda")]
        if self.gpus.is_some() {
            return "cuda-sm90";
        }
        kernels::cpu_path()
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The models in the order of ranks; never empty.
    #[must_use]
    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// The model of rank 0, which has everything that one rank does alone.
    #[must_use]
    pub fn first(&self) -> &Arc<Model> {
        &self.models[0]
    }

    /// What the model says about itself.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        self.first().info()
    }

    /// The picture of latents. Whole, by rank 0; in tiles, they are dealt out over as many threads as there are
    /// ranks, with the decoder of rank 0. Steps may go on meanwhile.
    ///
    /// # Errors
    /// Those of [`Model::decode`], `Panicked` when a thread panics.
    pub fn decode(&self, latents: &Latents) -> Result<RgbImage, StageError> {
        let (model, ranks) = (self.first(), self.models.len());
        if ranks == 1 || model.tiles() == Tiles::Whole {
            return Ok(model.decode(&RankContext::single(), latents)?);
        }
        let groups = threads::group(ranks, RANK_PATIENCE);
        let groups = groups.map_err(|e| StageError::config("plan", e.to_string()))?;
        let results = std::thread::scope(|scope| {
            let decode = |group| move || guard("vae", || model.decode_over(&group, latents));
            let each: Vec<_> = groups.into_iter().map(|g| scope.spawn(decode(g))).collect();
            let stopped = |_| Err(StageError::EngineStopped { engine: "vae" });
            let ended = each.into_iter().map(|thread| match thread.join() {
                Ok(done) => done.and_then(|result| result.map_err(StageError::from)),
                Err(panic) => stopped(panic),
            });
            ended.collect::<Vec<_>>()
        });
        let pictures = gathered(results)?;
        let none = || ModelError::Internal("no rank has decoded".into()).into();
        pictures.into_iter().next().ok_or_else(none)
    }

    /// Runs `work` on every rank at the same time, each with its own input; results in rank order.
    ///
    /// # Errors
    /// The first error that is not merely another rank's, `Panicked` when a rank panics.
    pub fn run<I: Send, T: Send>(
        &self,
        inputs: Vec<I>,
        work: impl Fn(&Model, &RankContext, I) -> Result<T, ModelError> + Sync,
    ) -> Result<Vec<T>, StageError> {
        if inputs.len() != self.models.len() {
            let message = format!("{} inputs for {} ranks", inputs.len(), self.models.len());
            return Err(ModelError::Internal(message).into());
        }
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        let ranks = contexts.iter().zip(&self.models).zip(inputs);
        let one = |((ctx, model), input): ((&RankContext, &Arc<Model>), I)| {
            let done = guard("rank", || work(model, ctx, input));
            let done = done.and_then(|result| result.map_err(StageError::from));
            if let Err(error) = &done {
                // The groups are made anew below, so it does not matter whether all ranks failed alike.
                ctx.abort(&error.to_string());
            }
            done
        };
        let results: Vec<Result<T, StageError>> = if self.models.len() == 1 {
            ranks.map(one).collect()
        } else {
            std::thread::scope(|scope| {
                let one = &one;
                let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || one(rank))).collect();
                let stopped = |_| Err(StageError::EngineStopped { engine: "rank" });
                let ended = threads.into_iter().map(|t| t.join());
                ended.map(|end| end.unwrap_or_else(stopped)).collect()
            })
        };
        if results.iter().any(Result::is_err) && self.models.len() > 1 {
            *contexts = connect(&self.plan)?;
        }
        gathered(results)
    }
}

fn connect(plan: &Plan) -> Result<Vec<RankContext>, StageError> {
    threads::contexts(plan, RANK_PATIENCE).map_err(|e| StageError::config("plan", e.to_string()))
}

/// All results, or the error that explains the others.
pub(crate) fn gathered<T>(results: Vec<Result<T, StageError>>) -> Result<Vec<T>, StageError> {
    let (mut all, mut errors) = (Vec::with_capacity(results.len()), Vec::new());
    for result in results {
        match result {
            Ok(value) => all.push(value),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(of_another);
    errors.into_iter().next().map_or(Ok(all), Err)
}

/// Whether a rank only tells that another one failed.
fn of_another(error: &StageError) -> bool {
    match error {
        StageError::Model(ModelError::Ranks(error)) => matches!(
            error,
            ParallelError::Aborted { .. } | ParallelError::Left { .. }
        ),
        #[cfg(feature = "cuda")]
        StageError::Model(ModelError::Gpu(error)) => {
            matches!(error, kernels::cuda::CudaError::GroupEnded { .. })
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use parallel::Axis;

    use super::*;

    const CHECKPOINT: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../integration-tests/fixtures/golden/model"
    );

    fn ranks(plan: &str) -> Ranks {
        let load = RankLoad {
            parts: Parts::PREFIX,
            alone: Parts::PREFIX,
            plan: plan.parse().unwrap(),
            balance: BalanceOptions::default(),
            residency: Residency::All,
            tiles: Tiles::Whole,
        };
        Ranks::open(Path::new(CHECKPOINT), load).unwrap()
    }

    /// Sums `value` over the tensor-parallel ranks.
    fn sum(ctx: &RankContext, value: f32) -> Result<f32, ModelError> {
        let group = ctx.group(Axis::Tp.into()).unwrap();
        Ok(group.all_reduce(vec![value])?.wait()?[0])
    }

    /// Rank 1 ends with `end` while rank 0 waits for it; then all ranks work again.
    fn after(end: impl Fn() -> ModelError + Sync) -> StageError {
        let ranks = ranks("tp=2");
        let failed = ranks.run(vec![false, true], |_, ctx, fails| {
            if fails { Err(end()) } else { sum(ctx, 1.0) }
        });
        let again = ranks.run(vec![1.0, 2.0], |_, ctx, value| sum(ctx, value));
        assert_eq!(again.unwrap(), [3.0, 3.0]);
        failed.unwrap_err()
    }

    #[test]
    fn a_rank_that_fails_is_the_one_reported_and_the_next_work_runs() {
        let error = after(|| ModelError::Internal("of rank one".into()));
        assert!(error.to_string().contains("of rank one"), "{error}");
        let internal = matches!(error, StageError::Model(ModelError::Internal(_)));
        assert!(internal, "not what the other rank saw of it: {error}");
    }

    #[test]
    fn a_rank_that_panics_is_the_one_reported_and_the_next_work_runs() {
        let error = after(|| panic!("on rank one"));
        assert!(matches!(error, StageError::Panicked { .. }), "{error}");
    }

    #[test]
    fn too_many_ranks_are_refused_before_anything_is_opened() {
        for (ring, ulysses) in [(65, 1), (1000, 1), (1024, 1024)] {
            let plan = Plan {
                ring,
                ulysses,
                ..Plan::default()
            };
            let load = RankLoad {
                parts: Parts::PREFIX,
                alone: Parts::PREFIX,
                plan,
                balance: BalanceOptions::default(),
                residency: Residency::All,
                tiles: Tiles::Whole,
            };
            let error = Ranks::open(Path::new("nowhere"), load).unwrap_err();
            let named = matches!(error, StageError::Config { field: "plan", .. });
            assert!(named, "{error}");
            assert!(error.to_string().contains("at most 64"), "{error}");
        }
    }

    #[test]
    fn ranks_share_the_tiles_of_a_picture_and_it_is_that_of_one_rank() {
        let decoder = Parts {
            vae_decoder: true,
            text: false,
            ..Parts::PREFIX
        };
        let picture = |plan: &str, tiles| {
            let load = RankLoad {
                parts: Parts {
                    vae_decoder: false,
                    ..decoder
                },
                alone: decoder,
                plan: plan.parse().unwrap(),
                balance: BalanceOptions::default(),
                residency: Residency::All,
                tiles,
            };
            let ranks = Ranks::open(Path::new(CHECKPOINT), load).unwrap();
            let vae = &ranks.first().config().vae;
            let side = vae.sample_size / vae.spatial_factor * 2 + 1;
            let values = (0..vae.latent_channels * side * side).map(|i| (i as f32 * 0.7).sin());
            let latents = Latents::new(vae.latent_channels, side, side, values.collect());
            ranks.decode(&latents.unwrap()).unwrap()
        };
        let tiled = picture("single", Tiles::Overlapping(0.25));
        assert_eq!(picture("ulysses=2", Tiles::Overlapping(0.25)), tiled);
        let whole = picture("single", Tiles::Whole);
        assert_eq!(picture("ulysses=2", Tiles::Whole), whole);
        assert_ne!(whole, tiled, "one tile only");
    }

    #[test]
    fn ranks_and_inputs_are_counted() {
        let ranks = ranks("single");
        assert!(ranks.run(vec![(), ()], |_, _, ()| Ok(())).is_err());
        assert_eq!(ranks.run(vec![7], |_, _, n| Ok(n)).unwrap(), [7]);
    }
}
