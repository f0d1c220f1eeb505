//! The nested dictionaries `vae`, `vit`, `vit_processor` and `vit_aligner`.

use super::fields::Fields;
use super::{MAX_BLOCKS, MAX_LAYERS};
use crate::error::ModelError;

/// Channels in one normalisation group of every GroupNorm of the model is `channels / NORM_GROUPS`.
pub const NORM_GROUPS: usize = 32;

/// The video VAE that turns pictures into latents and back.
#[derive(Clone, Debug, PartialEq)]
pub struct VaeConfig {
    /// Picture channels in.
    pub in_channels: usize,
    /// Picture channels out.
    pub out_channels: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Channels of each resolution level, encoder order (the decoder runs them backwards).
    pub block_out_channels: Vec<usize>,
    /// Residual blocks of one encoder level; a decoder level has one more.
    pub layers_per_block: usize,
    /// Pixels per latent cell along each side; a power of two.
    pub spatial_factor: usize,
    /// Frames per latent frame; a power of two, at most `spatial_factor`.
    pub temporal_factor: usize,
    /// Tile side in pixels for tiled decode and encode.
    pub sample_size: usize,
    /// Frames of one tile (a picture never reaches it).
    pub sample_frames: usize,
    /// Latents are divided by this before decoding.
    pub scaling_factor: f64,
    /// Added after that division, when present.
    pub shift_factor: Option<f64>,
}

impl VaeConfig {
    /// Encoder levels that halve the picture's sides: levels `0..spatial_levels()`.
    pub fn spatial_levels(&self) -> usize {
        self.spatial_factor.ilog2() as usize
    }

    /// Levels that also halve the frames: the last ones of the encoder's, the first ones of the decoder's.
    pub fn temporal_levels(&self) -> usize {
        self.temporal_factor.ilog2() as usize
    }

    pub(super) fn parse(root: &Fields<'_>) -> Result<Self, ModelError> {
        let f = root.object("vae")?;
        f.only_flag("downsample_match_channel", true, true)?;
        f.only_flag("upsample_match_channel", true, true)?;
        let block_out_channels = f.sizes("block_out_channels")?;
        let config = Self {
            in_channels: f.size_or("in_channels", Some(3))?,
            out_channels: f.size_or("out_channels", Some(3))?,
            latent_channels: f.size("latent_channels")?,
            layers_per_block: f.size_up_to("layers_per_block", None, MAX_BLOCKS)?,
            spatial_factor: f.size("ffactor_spatial")?,
            temporal_factor: f.size("ffactor_temporal")?,
            sample_size: f.size_or("sample_size", Some(384))?,
            sample_frames: f.size_or("sample_tsize", Some(96))?,
            scaling_factor: f.positive("scaling_factor", None)?,
            shift_factor: f.opt_number("shift_factor")?,
            block_out_channels,
        };
        config.check(&f)?;
        Ok(config)
    }

    fn check(&self, f: &Fields<'_>) -> Result<(), ModelError> {
        if self.in_channels != 3 || self.out_channels != 3 {
            return Err(f.error("in_channels", "only RGB pictures (3 channels) are possible"));
        }
        for (name, factor) in [
            ("ffactor_spatial", self.spatial_factor),
            ("ffactor_temporal", self.temporal_factor),
        ] {
            if !factor.is_power_of_two() {
                return Err(f.error(name, format!("{factor} is not a power of two")));
            }
        }
        if self.temporal_factor > self.spatial_factor {
            return Err(f.error("ffactor_temporal", "is above ffactor_spatial"));
        }
        let levels = &self.block_out_channels;
        if levels.len() != self.spatial_levels() + 1 {
            return Err(f.error(
                "block_out_channels",
                format!(
                    "has {} levels; ffactor_spatial {} needs {}",
                    levels.len(),
                    self.spatial_factor,
                    self.spatial_levels() + 1
                ),
            ));
        }
        if let Some(c) = levels.iter().find(|c| *c % NORM_GROUPS != 0) {
            return Err(f.error(
                "block_out_channels",
                format!("{c} channels do not split into {NORM_GROUPS} groups"),
            ));
        }
        let deepest = levels[levels.len() - 1];
        if !deepest.is_multiple_of(2 * self.latent_channels) {
            return Err(f.error(
                "latent_channels",
                format!("twice {} does not divide {deepest}", self.latent_channels),
            ));
        }
        self.check_resampling(f)
    }

    /// The shortcut of a resampling averages or repeats whole groups of channels.
    fn check_resampling(&self, f: &Fields<'_>) -> Result<(), ModelError> {
        let spatial = self.spatial_levels();
        for level in 0..spatial {
            let (upper, lower) = (
                self.block_out_channels[level],
                self.block_out_channels[level + 1],
            );
            let temporal = level >= spatial - self.temporal_levels();
            let cells = if temporal { 8 } else { 4 };
            if !lower.is_multiple_of(cells) || (cells * upper) % lower != 0 {
                return Err(f.error(
                    "block_out_channels",
                    format!(
                        "{upper} and {lower} at level {level} do not match a factor of {cells}"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The SigLIP2 vision transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct VitConfig {
    /// Width of a token.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Picture channels.
    pub num_channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Side of the square position grid (`sqrt(num_patches)`).
    pub position_grid: usize,
    /// Epsilon of every LayerNorm.
    pub layer_norm_eps: f64,
}

impl VitConfig {
    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Values of one flattened patch: `patch_size * patch_size * num_channels`.
    pub fn patch_values(&self) -> usize {
        self.patch_size * self.patch_size * self.num_channels
    }

    pub(super) fn parse(root: &Fields<'_>) -> Result<Self, ModelError> {
        let f = root.object("vit")?;
        f.only_text("hidden_act", "gelu_pytorch_tanh")?;
        let patches = f.size("num_patches")?;
        let position_grid = patches.isqrt();
        if position_grid * position_grid != patches {
            return Err(f.error("num_patches", format!("{patches} is not a square")));
        }
        let config = Self {
            hidden_size: f.size("hidden_size")?,
            intermediate_size: f.size("intermediate_size")?,
            num_layers: f.size_up_to("num_hidden_layers", None, MAX_LAYERS)?,
            num_heads: f.size("num_attention_heads")?,
            num_channels: f.size_or("num_channels", Some(3))?,
            patch_size: f.size("patch_size")?,
            position_grid,
            layer_norm_eps: f.positive("layer_norm_eps", Some(1e-6))?,
        };
        if !config.hidden_size.is_multiple_of(config.num_heads) {
            return Err(f.error("num_attention_heads", "does not divide hidden_size"));
        }
        if config.num_channels != 3 {
            return Err(f.error(
                "num_channels",
                "only RGB pictures (3 channels) are possible",
            ));
        }
        Ok(config)
    }
}

/// How a picture becomes ViT patches.
#[derive(Clone, Debug, PartialEq)]
pub struct VitProcessorConfig {
    /// Tokens of every ViT block in the sequence; real patches first, padding after.
    pub max_num_patches: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Per channel: subtracted after rescaling.
    pub image_mean: [f64; 3],
    /// Per channel: divided by after that.
    pub image_std: [f64; 3],
    /// Factor that takes a byte to 0..1.
    pub rescale_factor: f64,
}

impl VitProcessorConfig {
    pub(super) fn parse(root: &Fields<'_>, vit: &VitConfig) -> Result<Self, ModelError> {
        let f = root.object("vit_processor")?;
        for name in ["do_resize", "do_rescale", "do_normalize"] {
            f.only_flag(name, true, true)?;
        }
        if f.opt_count("resample")?.unwrap_or(2) != 2 {
            return Err(ModelError::Unimplemented(
                "config field `vit_processor.resample` (only 2, bilinear, is built)".into(),
            ));
        }
        let config = Self {
            max_num_patches: f.size("max_num_patches")?,
            patch_size: f.size_or("patch_size", Some(vit.patch_size))?,
            image_mean: f.triple("image_mean", [0.5; 3])?,
            image_std: f.triple("image_std", [0.5; 3])?,
            rescale_factor: f.positive("rescale_factor", Some(1.0 / 255.0))?,
        };
        if config.patch_size != vit.patch_size {
            return Err(f.error("patch_size", "differs from vit.patch_size"));
        }
        if config.image_std.iter().any(|s| *s <= 0.0) {
            return Err(f.error("image_std", "must be above 0"));
        }
        Ok(config)
    }
}

/// The projection from ViT width to model width.
#[derive(Clone, Debug, PartialEq)]
pub struct AlignerConfig {
    /// ViT width.
    pub input_dim: usize,
    /// Model width.
    pub output_dim: usize,
    /// Linear layers, with a GELU (erf) between each two; layer `i` is tensor `layers.{2i}`.
    pub depth: usize,
}

impl AlignerConfig {
    pub(super) fn parse(
        root: &Fields<'_>,
        vit: &VitConfig,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let f = root.object("vit_aligner")?;
        f.only_text("projector_type", "mlp_gelu")?;
        let config = Self {
            input_dim: f.size("input_dim")?,
            output_dim: f.size("n_embed")?,
            depth: f.size_up_to("depth", Some(2), MAX_BLOCKS)?,
        };
        if config.input_dim != vit.hidden_size {
            return Err(f.error("input_dim", "differs from vit.hidden_size"));
        }
        if config.output_dim != hidden {
            return Err(f.error("n_embed", "differs from hidden_size"));
        }
        Ok(config)
    }
}
