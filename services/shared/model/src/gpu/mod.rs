//! The GPU engine: the decoder and the denoiser on one GPU, in bf16 or with FP8 weights.
//!
//! The CPU path of this crate says what is computed; this path computes the same from the same checkpoint
//! with other kernels and a layout of its own: weights of a layer in one block, keys and values in one arena,
//! every row of a batch packed, and nothing that waits for the host within a step.

mod advance;
mod arena;
mod batch;
mod cond;
mod convs;
mod deal;
mod decode;
mod ends;
mod fit;
mod group;
mod job;
mod layer;
mod layout;
mod needs;
mod places;
mod port;
mod prefill;
mod prefix;
mod rotary;
mod rows;
mod scratch;
mod share;
mod source;
mod step;
mod store;
mod text;
mod time;
mod timings;
mod vae;
mod vit;
mod weights;
mod workspace;

use std::path::Path;
use std::sync::Arc;

use kernels::AttnHeads;
use kernels::cuda::{DeviceBuffer, Gpu};
use kv::{KvDType, KvGeometry};
use parallel::Plan;

pub use self::advance::GpuAdvance;
use self::arena::KvArena;
use self::batch::Batch;
pub use self::cond::GpuConditions;
use self::convs::{From, GpuHead, GpuStem};
use self::decode::Decoder;
pub use self::group::GpuGroup;
pub use self::job::{GpuJob, GpuJobOutline, GpuJobSpec};
use self::layout::LayerDims;
pub use self::layout::WeightType;
pub use self::needs::GpuNeeds;
pub use self::port::PrefixPort;
pub use self::prefill::GpuCache;
pub use self::prefix::GpuPrefix;
use self::rotary::Rotary;
use self::rows::PassShape;
pub use self::share::GpuShare;
use self::share::{Attention, Flow};
use self::source::DeviceSource;
pub use self::step::{SeeVelocities, Watch};
use self::store::LayerStore;
use self::text::TextEnds;
pub use self::timings::Timings;
pub use self::vae::{GpuVae, GpuVaeParts};
use self::weights::{LayerSmall, Loader};
use self::workspace::{Extent, Sizes};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::prefix::PrefixKv;
use crate::weights::{Checkpoint, expected_tensors};

/// Keys that attention reads at once; runs of the arena are multiples of it.
pub(crate) const KEY_TILE: usize = 128;

/// Tokens that a rank may have beyond an equal part: less than one for each row of a batch.
const SLACK: usize = 256;

/// How to put a model on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuOptions {
    /// Number of the GPU among those the driver shows.
    pub ordinal: usize,
    /// How the large matrices are held.
    pub weights: WeightType,
    /// Most tokens of one pass, over all rows of a batch.
    pub max_tokens: usize,
    /// Memory for keys and values, in bytes.
    pub kv_bytes: usize,
    /// Layers that stay on the device; the others are kept in pinned host memory and copied in turn. All
    /// stay where this is absent.
    pub resident_layers: Option<usize>,
    /// Whether text is embedded and sampled, that is, whether prefixes are made here.
    pub text: bool,
}

/// A model on one GPU.
#[derive(Debug)]
pub struct GpuModel {
    gpu: Arc<Gpu>,
    config: ModelConfig,
    share: GpuShare,
    /// The other GPUs of the plan.
    group: Option<Arc<dyn GpuGroup>>,
    weights: WeightType,
    shape: PassShape,
    dims: Vec<LayerDims>,
    small: Vec<LayerSmall>,
    store: LayerStore,
    arena: Arc<KvArena>,
    /// Activations of a pass.
    memory: Arc<DeviceBuffer>,
    stem: GpuStem,
    head: GpuHead,
    text: Option<TextEnds>,
    /// For passes of one token a row, where there are kernels for these sizes.
    decoder: Option<Decoder>,
    /// Of the first positions of text, as far as they were needed.
    text_positions: Option<Rotary>,
    /// Jobs made so far: each has its number.
    jobs: u64,
    batch: Option<Batch>,
}

impl GpuModel {
    /// Opens a checkpoint directory. The whole set of tensors is checked before any value is read.
    ///
    /// # Errors
    /// A bad config or checkpoint, each with the field, file or tensor named; `Gpu` without a usable GPU; `TooLarge`
    /// when its memory does not suffice, saying what would fit.
    pub fn open(dir: &Path, options: GpuOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let alone = Place::alone(&config, options.ordinal)?;
        Self::open_at(dir, config, options, alone)
    }

    /// Opens the part of a checkpoint that one rank of a plan has; `ordinal` is ignored. Every rank then makes the
    /// same calls with the same jobs.
    ///
    /// # Errors
    /// Those of [`GpuModel::open`]; `Internal` for a group of other ranks than the plan's, `Unimplemented` for
    /// text under a plan of [`GpuShare::writes_text`].
    pub fn open_rank(
        dir: &Path,
        options: GpuOptions,
        share: GpuShare,
        group: Arc<dyn GpuGroup>,
    ) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let place = Place::of_rank(share, group)?;
        Self::open_at(dir, config, options, place)
    }

    fn open_at(
        dir: &Path,
        config: ModelConfig,
        options: GpuOptions,
        place: Place,
    ) -> Result<Self, ModelError> {
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify(&expected_tensors(&config))?;
        Self::build(config, DeviceSource::Stored(&checkpoint), options, place)
    }

    /// A model of `config` whose weights are those of [`crate::Model::random`], made on the device.
    ///
    /// # Errors
    /// Those of [`GpuModel::open`].
    pub fn random(config: ModelConfig, options: GpuOptions, seed: u64) -> Result<Self, ModelError> {
        let alone = Place::alone(&config, options.ordinal)?;
        Self::build(config, DeviceSource::Random { seed }, options, alone)
    }

    /// The part of such a model that one rank of a plan has.
    ///
    /// # Errors
    /// Those of [`GpuModel::open_rank`].
    pub fn random_rank(
        config: ModelConfig,
        options: GpuOptions,
        seed: u64,
        share: GpuShare,
        group: Arc<dyn GpuGroup>,
    ) -> Result<Self, ModelError> {
        let place = Place::of_rank(share, group)?;
        Self::build(config, DeviceSource::Random { seed }, options, place)
    }

    fn build(
        config: ModelConfig,
        source: DeviceSource<'_>,
        options: GpuOptions,
        place: Place,
    ) -> Result<Self, ModelError> {
        let Place { gpu, share, group } = place;
        if options.text {
            share.writes_text()?;
        }
        fit::check(&gpu, &config, &share, options)?;
        let range = share.shard().layers();
        let dims: Vec<_> = range
            .clone()
            .map(|index| LayerDims::new(&config, &share, index))
            .collect::<Result<_, _>>()?;
        if dims.windows(2).any(|pair| pair[0] != pair[1]) {
            let message = "layers of different sizes on a gpu".to_owned();
            return Err(ModelError::Unimplemented(message));
        }
        let shape = shape(&config, &share);
        let geometry = KvGeometry {
            layers: shape.layers,
            kv_heads: shape.heads.kv,
            head_dim: config.head_dim,
            dtype: KvDType::F32,
        };
        // What requests need is taken before the weights: a model that leaves no room for them is of no use.
        let arena = KvArena::new(&gpu, geometry, options.kv_bytes)?;
        let sizes = Sizes {
            dims: &dims[0],
            heads: shape.heads,
            weights: options.weights,
        };
        let bytes = sizes.bytes(&largest(&share, options.max_tokens));
        let memory = Arc::new(DeviceBuffer::new(&gpu, bytes, "workspace of a pass")?);
        let from = From { gpu: &gpu, source };
        let stem = GpuStem::load(from, &config)?;
        let head = GpuHead::load(from, &config)?;
        let text = options
            .text
            .then(|| TextEnds::load(from, &config, &share))
            .transpose()?;
        let decoder = match &text {
            Some(_) => Decoder::new(&gpu, &dims[0], shape, options.weights)?,
            None => None,
        };
        let loader = Loader::new(&gpu, (source, &share), options.weights, &dims)?;
        let small = range.clone().zip(&dims);
        let small = small.map(|(index, dims)| loader.small(index, dims));
        let small = small.collect::<Result<_, _>>()?;
        let resident = options.resident_layers.unwrap_or(range.len());
        let loader = (&loader, range.start);
        let store = LayerStore::load(&gpu, loader, (&dims, options.weights), resident)?;
        gpu.synchronize()?;
        Ok(Self {
            weights: options.weights,
            shape,
            gpu,
            config,
            share,
            group,
            dims,
            small,
            store,
            arena,
            memory,
            stem,
            head,
            text,
            decoder,
            text_positions: None,
            jobs: 0,
            batch: None,
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The checkpoint's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the large matrices are held.
    pub fn weights(&self) -> WeightType {
        self.weights
    }

    /// Layers whose weights travel from the host, and their bytes in one pass.
    pub fn travelling(&self) -> (usize, usize) {
        (self.store.travelling().len(), self.store.travelling_bytes())
    }

    /// What this rank has of the model.
    pub fn share(&self) -> &GpuShare {
        &self.share
    }

    /// Joins another group of the same ranks, after the last one has ended.
    pub fn rejoin(&mut self, group: Arc<dyn GpuGroup>) {
        // Their tables belong to the old group.
        self.batch = None;
        if let Some(decoder) = &mut self.decoder {
            decoder.part();
        }
        self.group = (self.share.ranks() > 1).then_some(group);
    }

    /// Waits until everything enqueued has run; results of several GPUs count only then.
    ///
    /// # Errors
    /// `Gpu` when the device or another rank failed.
    pub fn wait(&self) -> Result<(), ModelError> {
        self.gpu.synchronize()?;
        self.all_came()
    }

    /// After everything enqueued has run: whether no rank was waited for in vain.
    fn all_came(&self) -> Result<(), ModelError> {
        if let Some(group) = &self.group {
            group.wait()?;
        }
        self.decoder.as_ref().map_or(Ok(()), Decoder::check)
    }

    /// Brings a prefix to the device, rounded to bf16: a whole one, of which the rank keeps its part, or that part.
    ///
    /// # Errors
    /// `Exhausted` when there is no room, `Internal` for a prefix of another model.
    pub fn upload(&self, prefix: &PrefixKv) -> Result<GpuPrefix, ModelError> {
        let whole = prefix.geometry().layers == self.config.num_layers()
            && prefix.geometry().kv_heads == self.config.num_kv_heads;
        if whole && self.share.ranks() > 1 {
            let part = prefix.part_of(self.share.shard())?;
            return GpuPrefix::upload(&self.arena, &part);
        }
        GpuPrefix::upload(&self.arena, prefix)
    }
}

/// Where a model, or a part of one, is computed.
struct Place {
    gpu: Arc<Gpu>,
    share: GpuShare,
    group: Option<Arc<dyn GpuGroup>>,
}

impl Place {
    fn alone(config: &ModelConfig, ordinal: usize) -> Result<Self, ModelError> {
        let share = GpuShare::new(config, &Plan::default(), 0)?;
        Ok(Self {
            gpu: Gpu::open(ordinal)?,
            share,
            group: None,
        })
    }

    fn of_rank(share: GpuShare, group: Arc<dyn GpuGroup>) -> Result<Self, ModelError> {
        if (group.rank(), group.ranks()) != (share.rank(), share.ranks()) {
            return Err(ModelError::Internal(format!(
                "rank {} of a group of {} computes rank {} of a plan of {}",
                group.rank(),
                group.ranks(),
                share.rank(),
                share.ranks()
            )));
        }
        Ok(Self {
            gpu: group.gpu().clone(),
            group: (share.ranks() > 1).then_some(group),
            share,
        })
    }
}

fn shape(config: &ModelConfig, share: &GpuShare) -> PassShape {
    let (q, kv) = share.attended();
    PassShape {
        heads: AttnHeads {
            q,
            kv,
            dim: config.head_dim,
        },
        layers: share.shard().layers().len(),
        eps: config.rms_norm_eps as f32,
        renormalise: config.norm_topk_prob,
    }
}

/// The largest pass of `tokens` tokens, over all ranks.
fn largest(share: &GpuShare, tokens: usize) -> Extent {
    let (flow, ranks) = (share.flow(), share.ranks());
    let apart = share.is_staged() || ranks == 1;
    if apart || flow == Flow::ALONE {
        // The rows of guidance are alike, so that each rank has half of them.
        let own = if apart {
            tokens
        } else {
            tokens.div_ceil(ranks)
        };
        return Extent::alone(own);
    }
    let cuts = flow.attention != Attention::Own;
    Extent {
        first: 0,
        own: tokens.div_ceil(ranks) + SLACK,
        all: tokens,
        ranks,
        whole: if cuts { tokens } else { 0 },
        flow,
    }
}
