//! How much device memory a model takes, known from its sizes before anything is allocated.

use parallel::Plan;

use super::layout::{LayerDims, LayerLayout};
use super::store::SLOTS;
use super::workspace::Sizes;
use super::{GpuOptions, GpuShare, GpuVaeParts, WeightType, largest, shape};
use crate::config::{ModelConfig, VaeConfig};
use crate::error::ModelError;
use crate::weights::expected_tensors;

/// Bytes of a weight that is held in 16 bits.
const HALF: usize = 2;
/// Small tables, library handles and the driver's own memory, in bytes.
const RESERVE: usize = 1 << 30;
/// Buffers of activations that the VAE uses in turn.
const VAE_BUFFERS: usize = 3;

/// Device memory of one GPU, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuNeeds {
    /// Layers of this rank, and the bytes of one.
    pub layers: usize,
    /// Bytes of a layer's large matrices.
    pub layer: usize,
    /// Layers that stay on the device.
    pub resident: usize,
    /// Norms, routers and the ends.
    pub small: usize,
    /// Activations of the largest pass.
    pub pass: usize,
    /// The VAE with the activations of its largest picture, and what else shown pictures need.
    pub vae: usize,
    /// What is nobody's in particular.
    pub reserve: usize,
}

impl GpuNeeds {
    /// What rank 0 of `plan` needs, which has the VAE, without keys and values.
    ///
    /// # Errors
    /// Those of [`GpuShare::new`], `Unimplemented` for layers that the engine does not run.
    pub fn new(
        config: &ModelConfig,
        plan: &Plan,
        options: &GpuOptions,
        (vae, latents): (GpuVaeParts, usize),
    ) -> Result<Self, ModelError> {
        Self::of_share(
            config,
            &GpuShare::new(config, plan, 0)?,
            options,
            (vae, latents),
        )
    }

    /// What the rank of `share` needs.
    pub(super) fn of_share(
        config: &ModelConfig,
        share: &GpuShare,
        options: &GpuOptions,
        (vae, latents): (GpuVaeParts, usize),
    ) -> Result<Self, ModelError> {
        let range = share.shard().layers();
        let dims = LayerDims::new(config, share, range.start)?;
        let layers = range.len();
        let sizes = Sizes {
            dims: &dims,
            heads: shape(config, share).heads,
            weights: options.weights,
        };
        Ok(Self {
            layers,
            layer: LayerLayout::new(&dims, options.weights).bytes,
            resident: options.resident_layers.unwrap_or(layers).min(layers),
            small: ends(config, options.text) + staging(&dims, options.weights),
            pass: sizes.bytes(&largest(share, options.max_tokens)),
            vae: vae_bytes(config, vae, latents) + conditions(config, vae),
            reserve: RESERVE,
        })
    }

    /// Everything but layers.
    fn rest(&self) -> usize {
        self.small + self.pass + self.vae + self.reserve
    }

    /// All of it.
    pub fn total(&self) -> usize {
        let slots = SLOTS.min(self.layers - self.resident);
        (self.resident + slots) * self.layer + self.rest()
    }

    /// Most layers that may stay where `free` bytes are free and `kv` of them are for keys and values.
    pub fn layers_that_fit(&self, free: usize, kv: usize) -> Option<usize> {
        (0..=self.layers).rev().find(|resident| {
            let fits = Self {
                resident: *resident,
                ..*self
            };
            fits.total() + kv <= free
        })
    }
}

/// Norms, routers, stem and head, and where text is needed its embedding and vocabulary.
fn ends(config: &ModelConfig, text: bool) -> usize {
    let kept = |name: &str| {
        if name.starts_with("vae.") || name.starts_with("vision_") {
            return false;
        }
        if name.starts_with("model.layers.") {
            return name.contains("norm") || name.contains(".gate.");
        }
        let of_text = ["model.wte.", "model.ln_f.", "lm_head."];
        text || !of_text.iter().any(|t| name.starts_with(t))
    };
    let all = expected_tensors(config);
    let values = all.iter().filter(|spec| kept(&spec.name));
    let values = values.map(|spec| spec.shape.iter().product::<usize>());
    // Some are F32.
    2 * HALF * values.sum::<usize>()
}

/// Where a matrix arrives before it is quantised.
fn staging(dims: &LayerDims, weights: WeightType) -> usize {
    let widest = dims.qkv_width().max(2 * dims.inner).max(dims.q_width());
    match weights {
        WeightType::Bf16 => 0,
        WeightType::Fp8 => HALF * dims.hidden * widest,
    }
}

/// Weights of the halves that are loaded, and buffers for pictures of `latents` positions.
fn vae_bytes(config: &ModelConfig, parts: GpuVaeParts, latents: usize) -> usize {
    let half = |name: &str| {
        (parts.decoder && name.starts_with("vae.decoder."))
            || (parts.encoder && name.starts_with("vae.encoder."))
    };
    let all = expected_tensors(config);
    let weights = all.iter().filter(|spec| half(&spec.name));
    let weights: usize = weights.map(|s| s.shape.iter().product::<usize>()).sum();
    let buffers = if parts.decoder || parts.encoder {
        VAE_BUFFERS * latents * widest(&config.vae)
    } else {
        0
    };
    HALF * (weights + buffers)
}

/// The stem and the vision transformer of shown pictures, which go with the encoder, and their activations.
fn conditions(config: &ModelConfig, parts: GpuVaeParts) -> usize {
    if !parts.encoder {
        return 0;
    }
    let stem = ["vision_", "patch_embed.", "time_embed.", "timestep_emb."];
    let all = expected_tensors(config);
    let weights = all
        .iter()
        .filter(|spec| stem.iter().any(|s| spec.name.starts_with(s)));
    let weights = weights.map(|spec| spec.shape.iter().product::<usize>());
    let vit = &config.vit;
    let widest = 8 * vit.hidden_size + 3 * vit.intermediate_size + 4 * config.hidden_size;
    let tokens = config.vit_processor.max_num_patches + 1;
    HALF * (weights.sum::<usize>() + 2 * tokens * widest)
}

/// Values of the widest activation for each latent position.
fn widest(vae: &VaeConfig) -> usize {
    let levels = vae.block_out_channels.iter().rev().enumerate();
    let level = |(level, channels): (usize, &usize)| {
        let frames = 1_usize << level.min(vae.temporal_levels());
        let pixels = 1_usize << (2 * level.min(vae.spatial_levels()));
        frames * pixels * channels
    };
    levels.map(level).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(weights: WeightType, resident_layers: Option<usize>) -> GpuNeeds {
        let text = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../../integration-tests/fixtures/published/config.json"
        ));
        let published = serde_json::from_str(text).unwrap();
        let none = serde_json::Value::Object(serde_json::Map::new());
        let config = ModelConfig::parse(&published, &none).unwrap();
        let options = GpuOptions {
            ordinal: 0,
            weights,
            max_tokens: 8192,
            kv_bytes: 0,
            resident_layers,
            text: false,
        };
        let vae = GpuVaeParts {
            decoder: true,
            encoder: false,
        };
        GpuNeeds::new(&config, &Plan::default(), &options, (vae, 4096)).unwrap()
    }

    #[test]
    fn the_released_model_fits_one_large_gpu_in_fp8_and_with_a_part_of_its_layers_in_bf16() {
        let free = 139 << 30;
        let kv = 4 << 30;
        let small = needs(WeightType::Fp8, None);
        assert_eq!(small.layers_that_fit(free, kv), Some(32));
        // The decoder has three buffers of 1.07 GB and 1.7 GB of weights.
        assert!(
            (4_500_000_000..5_500_000_000).contains(&small.vae),
            "{}",
            small.vae
        );
        let large = needs(WeightType::Bf16, None);
        assert!(large.total() + kv > free);
        let most = large.layers_that_fit(free, kv).unwrap();
        let fits = |resident| needs(WeightType::Bf16, Some(resident)).total() + kv <= free;
        assert!(fits(most) && !fits(most + 1), "{most}");
        assert!((20..28).contains(&most), "{most}");
        assert_eq!(large.layers_that_fit(1 << 30, kv), None);
    }
}
