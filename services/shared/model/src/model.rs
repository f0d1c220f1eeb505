//! An opened model: its parts, and what it says about itself.

use std::path::Path;
use std::sync::Arc;

use kernels::{Tensor, memory};
use kv::KvGeometry;
use parallel::eplb::LayerChange;
use parallel::{Collective, Plan, RankContext};

use crate::backbone::{Backbone, BalanceOptions, NoProbe, Probe, Residency, Travelling};
use crate::buckets::{Bucket, BucketSet, ResolutionGroup};
use crate::cache::KvCache;
use crate::config::{ModelConfig, Template};
use crate::diffusion::{DenoiseJob, ImageHead, ImageStem, Modules, Observer};
use crate::error::ModelError;
use crate::input::{self, RowInput};
use crate::pages::KvPool;
use crate::picture::{Latents, RgbImage};
use crate::rank::{RankShard, agreed};
use crate::source::{Scope, WeightSource};
use crate::system_prompts::SystemPrompts;
use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::vae::{Tiles, Vae};
use crate::vit::Vit;
use crate::weights::{Checkpoint, StoredType, expected_tensors};

/// Which parts of a checkpoint to hold in memory (HunyuanImage-3.0 specification, which stage needs what).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Decoder layers, token embedding and the text head.
    pub text: bool,
    /// Decoder layers, token embedding and everything that denoises latents.
    pub diffusion: bool,
    /// VAE encoder, and the stem that makes tokens of its latents.
    pub vae_encoder: bool,
    /// VAE decoder.
    pub vae_decoder: bool,
    /// Vision transformer and aligner.
    pub vit: bool,
}

impl Parts {
    /// Everything.
    pub const ALL: Self = Self {
        text: true,
        diffusion: true,
        vae_encoder: true,
        vae_decoder: true,
        vit: true,
    };
    /// Text and prefixes, without conditioning images.
    pub const PREFIX: Self = Self {
        text: true,
        diffusion: false,
        vae_encoder: false,
        vae_decoder: false,
        vit: false,
    };
    /// Text and prefixes, with conditioning images.
    pub const PREFIX_WITH_IMAGES: Self = Self {
        vae_encoder: true,
        vit: true,
        ..Self::PREFIX
    };
    /// Sizes, tokens and layouts alone: where the weights are is another's matter.
    pub const NONE: Self = Self {
        text: false,
        ..Self::PREFIX
    };
    /// Denoising and decoding from prefixes made elsewhere.
    pub const DENOISE: Self = Self {
        text: false,
        diffusion: true,
        vae_decoder: true,
        ..Self::PREFIX
    };
}

impl Default for Parts {
    fn default() -> Self {
        Self::ALL
    }
}

/// How to open a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadOptions {
    /// What to hold in memory.
    pub parts: Parts,
    /// Whole or tiled VAE passes.
    pub tiles: Tiles,
    /// The plan of the pool, and which of its ranks this is.
    pub plan: Plan,
    /// Number of the rank within the plan.
    pub rank: usize,
    /// Whether and how experts move between ranks.
    pub balance: BalanceOptions,
    /// How many layers of the rank stay in memory.
    pub residency: Residency,
}

/// What a model says about itself.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Name of the release.
    pub name: String,
    /// Hex digest that names the weights.
    pub weights_id: String,
    /// Picture sizes the model makes.
    pub buckets: Vec<Bucket>,
    /// Steps of a request that does not say.
    pub default_steps: usize,
    /// Guidance scale of a request that does not say.
    pub default_guidance: f64,
    /// Whether guidance is a token and one row suffices.
    pub cfg_distilled: bool,
    /// Longest row.
    pub max_sequence_tokens: usize,
    /// Template of a request that does not say.
    pub default_template: Template,
    /// Shape of a prefix.
    pub kv: KvGeometry,
    /// Pixels per image token along each side.
    pub pixels_per_token: usize,
    /// Task of a request that does not say, as the checkpoint names it: `image`, `think_recaption`, ….
    pub default_mode: String,
    /// Selectors of the system prompts that the checkpoint ships, with their fingerprints.
    pub system_prompts: Vec<(&'static str, String)>,
    /// Most tokens of one text pass, when a request does not say.
    pub max_new_tokens: usize,
}

/// An opened model.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    info: ModelInfo,
    rank: RankShard,
    buckets: ResolutionGroup,
    text: Option<TextParts>,
    backbone: Option<Backbone>,
    stem: Option<ImageStem>,
    head: Option<ImageHead>,
    vae: Vae,
    vit: Option<Vit>,
    tiles: Tiles,
}

/// What turns text into tokens.
#[derive(Debug)]
struct TextParts {
    tokenizer: Tokenizer,
    special: SpecialTokens,
    system_prompts: SystemPrompts,
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        Self::tensor(self, name, shape)
    }

    fn value_bytes(&self, name: &str) -> usize {
        match self.entry(name).map(|entry| entry.dtype) {
            Some(StoredType::Bf16) => size_of::<u16>(),
            _ => size_of::<f32>(),
        }
    }

    fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        Self::tensor_f32(self, name, shape)
    }
}

impl Model {
    /// Opens a checkpoint directory. The whole set of tensors is checked before any value is read.
    ///
    /// # Errors
    /// A bad config, checkpoint or tokenizer, each with the field, file or tensor named.
    pub fn open(dir: &Path, options: LoadOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify(&expected_tensors(&config))?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let special = SpecialTokens::lookup(&tokenizer, &config)?;
        let weights_id = checkpoint.weights_id()?;
        let mut model = Self::build(config, Arc::new(checkpoint), options, weights_id)?;
        let system_prompts = SystemPrompts::from_dir(dir)?;
        let named = system_prompts.iter();
        model.info.system_prompts = named.map(|p| (p.name, p.fingerprint.clone())).collect();
        model.text = Some(TextParts {
            tokenizer,
            special,
            system_prompts,
        });
        Ok(model)
    }

    /// Builds the parts from any source of weights; the result has no tokenizer.
    pub(crate) fn build(
        config: ModelConfig,
        source: Arc<dyn WeightSource>,
        options: LoadOptions,
        weights_id: String,
    ) -> Result<Self, ModelError> {
        let (root, parts) = (Scope::root(&*source), options.parts);
        let buckets = resolution_group(&config)?;
        let rank = RankShard::new(&config, &options.plan, options.rank)?;
        let decoder = parts.text || parts.diffusion;
        let stem = parts.diffusion || parts.vae_encoder || parts.vit;
        Ok(Self {
            backbone: decoder
                .then(|| {
                    let hold = (&options.balance, options.residency);
                    Backbone::load(&source, &config, &rank, hold, parts.text)
                })
                .transpose()?,
            stem: stem.then(|| ImageStem::load(&root, &config)).transpose()?,
            head: parts
                .diffusion
                .then(|| ImageHead::load(&root, &config))
                .transpose()?,
            vae: Vae::load(&root, &config, parts.vae_encoder, parts.vae_decoder)?,
            vit: parts.vit.then(|| Vit::load(&root, &config)).transpose()?,
            info: info(&config, &buckets, weights_id),
            rank,
            buckets,
            text: None,
            tiles: options.tiles,
            config,
        })
    }

    /// What the model says about itself.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// What this rank holds of the model.
    pub fn rank(&self) -> &RankShard {
        &self.rank
    }

    /// An empty cache for a row of at most `tokens` tokens, of this rank's layers and heads.
    ///
    /// # Errors
    /// Those of [`KvCache::new`].
    pub fn cache(&self, tokens: usize) -> Result<KvCache, ModelError> {
        KvCache::new(self.rank.kv_geometry(&self.info.kv), tokens)
    }

    /// A pool of at most `pages` pages of this rank's layers and heads.
    ///
    /// # Errors
    /// Those of [`KvPool::new`].
    pub fn pool(&self, pages: usize) -> Result<KvPool, ModelError> {
        KvPool::new(self.rank.kv_geometry(&self.info.kv), pages)
    }

    /// The checkpoint's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Picture sizes the model makes.
    pub fn buckets(&self) -> &ResolutionGroup {
        &self.buckets
    }

    /// Text to ids and back.
    ///
    /// # Errors
    /// `Internal` for a model that was not opened from a checkpoint directory.
    pub fn tokenizer(&self) -> Result<&Tokenizer, ModelError> {
        self.text.as_ref().map(|t| &t.tokenizer).ok_or_else(no_text)
    }

    /// The special tokens' ids.
    ///
    /// # Errors
    /// `Internal` for a model that was not opened from a checkpoint directory.
    pub fn special_tokens(&self) -> Result<&SpecialTokens, ModelError> {
        self.text.as_ref().map(|t| &t.special).ok_or_else(no_text)
    }

    /// The system prompts that the checkpoint ships.
    ///
    /// # Errors
    /// `Internal` for a model that was not opened from a checkpoint directory.
    pub fn system_prompts(&self) -> Result<&SystemPrompts, ModelError> {
        let text = self.text.as_ref().ok_or_else(no_text)?;
        Ok(&text.system_prompts)
    }

    /// What is read from the checkpoint in every pass.
    ///
    /// # Errors
    /// Those of [`Model::backbone`].
    pub fn travelling(&self) -> Result<Travelling, ModelError> {
        Ok(self.backbone()?.travelling())
    }

    /// The decoder.
    ///
    /// # Errors
    /// `Internal` when it was not loaded.
    pub fn backbone(&self) -> Result<&Backbone, ModelError> {
        self.backbone
            .as_ref()
            .ok_or_else(|| absent("text or diffusion"))
    }

    /// What turns latents into tokens.
    ///
    /// # Errors
    /// `Internal` when it was not loaded.
    pub fn image_stem(&self) -> Result<&ImageStem, ModelError> {
        self.stem
            .as_ref()
            .ok_or_else(|| absent("diffusion or vae_encoder"))
    }

    /// What turns hidden states into velocity.
    ///
    /// # Errors
    /// `Internal` when it was not loaded.
    pub fn image_head(&self) -> Result<&ImageHead, ModelError> {
        self.head.as_ref().ok_or_else(|| absent("diffusion"))
    }

    /// The VAE; a half that was not loaded answers with an error when used.
    pub fn vae(&self) -> &Vae {
        &self.vae
    }

    /// The vision transformer.
    ///
    /// # Errors
    /// `Internal` when it was not loaded.
    pub fn vit(&self) -> Result<&Vit, ModelError> {
        self.vit.as_ref().ok_or_else(|| absent("vit"))
    }

    /// Advances every job by one step, all rows packed in one pass. Each job has its own size, step,
    /// guidance and prefix; its result is, bit for bit, what it would be alone. Nothing changes when an
    /// error is returned.
    ///
    /// # Errors
    /// `Internal` when a job is done already or a part was not loaded, `Exhausted` when memory runs out.
    pub fn denoise_step(
        &self,
        ctx: &RankContext,
        jobs: &mut [&mut DenoiseJob],
    ) -> Result<(), ModelError> {
        self.denoise_step_observed(ctx, jobs, &mut NoProbe, &mut |_, _| {})
    }

    /// Like [`Model::denoise_step`], showing inner states to `probe` and velocities to `observe`.
    ///
    /// # Errors
    /// Those of [`Model::denoise_step`].
    pub fn denoise_step_observed<P: Probe>(
        &self,
        ctx: &RankContext,
        jobs: &mut [&mut DenoiseJob],
        probe: &mut P,
        observe: Observer<'_>,
    ) -> Result<(), ModelError> {
        let modules = Modules {
            backbone: self.backbone()?,
            stem: self.image_stem()?,
            head: self.image_head()?,
            rank: &self.rank,
            ctx,
        };
        // Jobs change when nothing can fail any more.
        let stepped = memory::guarded(|| modules.denoise_step(jobs, probe, observe));
        agreed(ctx, stepped.map_err(ModelError::from).flatten())
    }

    /// Ends a step for the balance of experts: at the end of an interval, hot experts get replicas and
    /// experts move between ranks. Called by every rank between the same two steps, with what changed as
    /// the answer; results of later steps are the same with and without.
    ///
    /// # Errors
    /// `Ranks` when another rank fails.
    pub fn rebalance(&self, ctx: &RankContext) -> Result<Vec<LayerChange>, ModelError> {
        agreed(ctx, self.backbone()?.rebalance(ctx))
    }

    /// For each of this rank's layers the load of the rank with the most choices of experts over the mean, in the last
    /// whole interval of the balance of experts; empty before one has ended, and without a balance.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded.
    pub fn imbalance(&self) -> Result<Vec<f64>, ModelError> {
        Ok(self.backbone()?.imbalance())
    }

    /// The picture of denoised latents.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded or the latents are not numbers, `Exhausted` when memory runs
    /// out.
    pub fn decode(&self, _ctx: &RankContext, latents: &Latents) -> Result<RgbImage, ModelError> {
        let decoded = memory::guarded(|| self.vae.decode(latents, self.tiles));
        decoded.map_err(ModelError::from).flatten()
    }

    /// Like [`Model::decode`], the tiles dealt out over the ranks of `group`, which all make this call; each
    /// answers the whole picture. Where pictures are not tiled each decodes all of it.
    ///
    /// # Errors
    /// Those of [`Model::decode`]; `Ranks` when another rank fails.
    pub fn decode_over(
        &self,
        group: &dyn Collective,
        latents: &Latents,
    ) -> Result<RgbImage, ModelError> {
        let Tiles::Overlapping(overlap) = self.tiles else {
            return self.vae.decode(latents, self.tiles);
        };
        let decoded = memory::guarded(|| {
            let values = self.vae.decode_values_over(group, latents, overlap)?;
            RgbImage::from_unit_values(values.dim(0), values.dim(1), values.as_f32()?)
        });
        decoded.map_err(ModelError::from).flatten()
    }

    /// Whether pictures are decoded whole or in tiles.
    pub fn tiles(&self) -> Tiles {
        self.tiles
    }

    /// Runs packed tokens of rows on top of their caches and appends to them; returns hidden states
    /// `[tokens, hidden]`, without the final norm.
    ///
    /// # Errors
    /// `InvalidArgument` for a row beyond the model's positions, `Internal` when rows and caches disagree.
    pub fn run_rows<P: Probe>(
        &self,
        ctx: &RankContext,
        rows: &[RowInput<'_>],
        caches: &mut [&mut KvCache],
        probe: &mut P,
    ) -> Result<Tensor, ModelError> {
        let backbone = self.backbone()?;
        let ran = input::run(&self.config, backbone, ctx, (rows, caches), probe);
        agreed(ctx, ran)
    }

    /// Like [`Model::run_rows`], but only to fill the caches.
    ///
    /// # Errors
    /// Those of [`Model::run_rows`].
    pub fn fill_rows(
        &self,
        ctx: &RankContext,
        rows: &[RowInput<'_>],
        caches: &mut [&mut KvCache],
    ) -> Result<(), ModelError> {
        let backbone = self.backbone()?;
        let filled = input::fill(&self.config, backbone, ctx, (rows, caches));
        agreed(ctx, filled)
    }
}

/// Picture sizes of a model.
///
/// # Errors
/// Those of [`ResolutionGroup::new`].
pub fn resolution_group(config: &ModelConfig) -> Result<ResolutionGroup, ModelError> {
    let set = if config.extra_ratios {
        BucketSet::Instruct
    } else {
        BucketSet::Base
    };
    ResolutionGroup::new(config.image_base_size, config.pixels_per_token(), set)
}

fn info(config: &ModelConfig, buckets: &ResolutionGroup, weights_id: String) -> ModelInfo {
    ModelInfo {
        name: config.name.clone(),
        weights_id,
        buckets: buckets.buckets().to_vec(),
        default_steps: config.generation.steps,
        default_guidance: config.generation.guidance,
        cfg_distilled: config.cfg_distilled,
        max_sequence_tokens: config.max_position_embeddings,
        default_template: config.generation.template,
        kv: config.kv_geometry(),
        pixels_per_token: config.pixels_per_token(),
        default_mode: config.generation.bot_task.clone(),
        system_prompts: Vec::new(),
        max_new_tokens: config.generation.max_new_tokens,
    }
}

fn absent(parts: &str) -> ModelError {
    ModelError::Internal(format!("the model was opened without its {parts} parts"))
}

fn no_text() -> ModelError {
    ModelError::Internal("the model has no tokenizer".into())
}
