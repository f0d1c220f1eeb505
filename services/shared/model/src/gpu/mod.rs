//! The GPU engine: the decoder and the denoiser on one GPU, in bf16 or with FP8 weights.
//!
//! The CPU path of this crate says what is computed; this path computes the same from the same checkpoint
//! with other kernels and a layout of its own: weights of a layer in one block, keys and values in one arena,
//! every row of a batch packed, and nothing that waits for the host within a step.

mod arena;
mod convs;
mod job;
mod layer;
mod layout;
mod prefill;
mod prefix;
mod rows;
mod scratch;
mod source;
mod step;
mod store;
mod text;
mod time;
mod timings;
mod vae;
mod weights;
mod workspace;

use std::path::Path;
use std::sync::Arc;

use kernels::AttnHeads;
use kernels::cuda::{DeviceBuffer, Gpu};
use kv::{KvDType, KvGeometry};

use self::arena::KvArena;
use self::convs::{From, GpuHead, GpuStem};
pub use self::job::{GpuJob, GpuJobSpec};
use self::layout::LayerDims;
pub use self::layout::WeightType;
pub use self::prefill::GpuCache;
pub use self::prefix::GpuPrefix;
use self::rows::PassShape;
use self::source::DeviceSource;
use self::step::Batch;
pub use self::step::{SeeVelocities, Watch};
use self::store::LayerStore;
use self::text::TextEnds;
pub use self::timings::Timings;
pub use self::vae::{GpuVae, GpuVaeParts};
use self::weights::{LayerSmall, Loader};
use self::workspace::Workspace;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::prefix::PrefixKv;
use crate::weights::{Checkpoint, expected_tensors};

/// Keys that attention reads at once; runs of the arena are multiples of it.
pub(crate) const KEY_TILE: usize = 128;

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
    /// Jobs made so far: each has its number.
    jobs: u64,
    batch: Option<Batch>,
}

impl GpuModel {
    /// Opens a checkpoint directory. The whole set of tensors is checked before any value is read.
    ///
    /// # Errors
    /// A bad config or checkpoint, each with the field, file or tensor named; `Gpu` without a usable GPU, or
    /// when its memory does not suffice (saying for what, and how much is missing).
    pub fn open(dir: &Path, options: GpuOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify(&expected_tensors(&config))?;
        Self::build(config, DeviceSource::Stored(&checkpoint), options)
    }

    /// A model of `config` whose weights are those of [`crate::Model::random`], made on the device.
    ///
    /// # Errors
    /// Those of [`GpuModel::open`].
    pub fn random(config: ModelConfig, options: GpuOptions, seed: u64) -> Result<Self, ModelError> {
        Self::build(config, DeviceSource::Random { seed }, options)
    }

    fn build(
        config: ModelConfig,
        source: DeviceSource<'_>,
        options: GpuOptions,
    ) -> Result<Self, ModelError> {
        let layers = config.num_layers();
        let dims: Vec<_> = (0..layers)
            .map(|index| LayerDims::new(&config, index))
            .collect::<Result<_, _>>()?;
        if dims.windows(2).any(|pair| pair[0] != pair[1]) {
            let message = "layers of different sizes on a gpu".to_owned();
            return Err(ModelError::Unimplemented(message));
        }
        let gpu = Gpu::open(options.ordinal)?;
        let geometry = KvGeometry {
            layers,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            dtype: KvDType::F32,
        };
        // What requests need is taken before the weights: a model that leaves no room for them is of no use.
        let arena = KvArena::new(&gpu, geometry, options.kv_bytes)?;
        let bytes = Workspace::bytes(&dims[0], options.weights, options.max_tokens);
        let memory = Arc::new(DeviceBuffer::new(&gpu, bytes, "workspace of a pass")?);
        let from = From { gpu: &gpu, source };
        let stem = GpuStem::load(from, &config)?;
        let head = GpuHead::load(from, &config)?;
        let text = options
            .text
            .then(|| TextEnds::load(from, &config))
            .transpose()?;
        let loader = Loader::new(&gpu, source, options.weights, &dims)?;
        let small = dims.iter().enumerate();
        let small = small.map(|(index, dims)| loader.small(index, dims));
        let small = small.collect::<Result<_, _>>()?;
        let resident = options.resident_layers.unwrap_or(layers);
        let store = LayerStore::load(&gpu, &loader, (&dims, options.weights), resident)?;
        gpu.synchronize()?;
        Ok(Self {
            weights: options.weights,
            shape: PassShape {
                heads: AttnHeads {
                    q: config.num_heads,
                    kv: config.num_kv_heads,
                    dim: config.head_dim,
                },
                layers,
                eps: config.rms_norm_eps as f32,
                renormalise: config.norm_topk_prob,
            },
            gpu,
            config,
            dims,
            small,
            store,
            arena,
            memory,
            stem,
            head,
            text,
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

    /// Brings a whole prefix to the device, rounded to bf16.
    ///
    /// # Errors
    /// `Exhausted` when there is no room, `Internal` for a prefix of another model.
    pub fn upload(&self, prefix: &PrefixKv) -> Result<GpuPrefix, ModelError> {
        GpuPrefix::upload(&self.arena, prefix)
    }
}
