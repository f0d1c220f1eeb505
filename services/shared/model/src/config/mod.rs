//! `config.json` and `generation_config.json` of a checkpoint, as far as inference uses them.
//!
//! Unknown fields are ignored; a field whose value asks for mathematics that is not built is a typed error,
//! never a silent difference.

mod fields;
mod generation;
mod vision;

use std::path::Path;

use kv::{KvDType, KvGeometry};
use serde_json::Value;

use self::fields::Fields;
pub use self::generation::{GenerationConfig, Template};
pub use self::vision::{AlignerConfig, NORM_GROUPS, VaeConfig, VitConfig, VitProcessorConfig};
use crate::error::ModelError;

/// Name of the model config inside a checkpoint directory.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the generation config inside a checkpoint directory.
pub const GENERATION_FILE: &str = "generation_config.json";
/// Largest accepted JSON config, in bytes; a real one has a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Most layers of a model; the released one has 32.
const MAX_LAYERS: usize = 1024;
/// Most routed experts of all layers together; the released one has 2048. Bounds the list of expected tensors.
const MAX_EXPERTS: usize = 1 << 16;
/// Most repetitions of any smaller block: blocks of a VAE level, linear layers of the aligner.
const MAX_BLOCKS: usize = 64;

/// The mixture-of-experts MLP of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts of one token.
    pub top_k: usize,
    /// Inner width of one routed expert.
    pub intermediate: usize,
    /// Inner width of the shared MLP, `None` when the model has none.
    pub shared_intermediate: Option<usize>,
}

/// Everything a checkpoint says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_version`, or the architecture's name when the file has none.
    pub name: String,
    /// Rows of the embedding table (the tokenizer may use fewer ids).
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of one head; even, because RoPE turns pairs.
    pub head_dim: usize,
    /// One entry per layer.
    pub layers: Vec<MoeConfig>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Whether queries and keys are normalised per head (after RoPE).
    pub use_qk_norm: bool,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the RoPE frequencies.
    pub rope_theta: f64,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Inner channels of `patch_embed` and `final_layer`.
    pub patch_embed_hidden: usize,
    /// Side of the square bucket in pixels; names the `<img_size_N>` token.
    pub image_base_size: usize,
    /// Whether the model takes the guidance scale as a token and runs one row only.
    pub cfg_distilled: bool,
    /// Whether the model takes the next timestep as a token.
    pub use_meanflow: bool,
    /// Whether ratio indices 33..=36 exist.
    pub extra_ratios: bool,
    /// The VAE.
    pub vae: VaeConfig,
    /// The vision transformer.
    pub vit: VitConfig,
    /// Picture preparation for the vision transformer.
    pub vit_processor: VitProcessorConfig,
    /// Vision width to model width.
    pub vit_aligner: AlignerConfig,
    /// Defaults of generation.
    pub generation: GenerationConfig,
}

impl ModelConfig {
    /// Reads both files of a checkpoint directory; the generation config may be absent.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let config = read_json(dir, CONFIG_FILE)?;
        let generation = if dir.join(GENERATION_FILE).exists() {
            read_json(dir, GENERATION_FILE)?
        } else {
            Value::Object(serde_json::Map::new())
        };
        Self::parse(&config, &generation)
    }

    /// Builds the config from the two parsed files.
    pub fn parse(config: &Value, generation: &Value) -> Result<Self, ModelError> {
        let f = Fields::root(config, CONFIG_FILE)?;
        refuse_unbuilt(&f)?;
        let vit = VitConfig::parse(&f)?;
        let hidden_size = f.size("hidden_size")?;
        let name = f.opt_text("model_version")?;
        let cfg_distilled = f.flag("cfg_distilled", false)?;
        let use_meanflow = f.flag("use_meanflow", false)?;
        let parsed = Self {
            // The Instruct releases know four more ratios; Distil is one of them.
            extra_ratios: cfg_distilled
                || use_meanflow
                || name.is_some_and(|n| n.to_ascii_lowercase().contains("instruct")),
            name: name.unwrap_or("HunyuanImage-3.0").to_owned(),
            vocab_size: f.size("vocab_size")?,
            num_heads: f.size("num_attention_heads")?,
            num_kv_heads: f.size_or("num_key_value_heads", Some(f.size("num_attention_heads")?))?,
            head_dim: head_dim(&f, hidden_size)?,
            layers: moe_layers(&f)?,
            norm_topk_prob: f.flag("norm_topk_prob", true)?,
            use_qk_norm: f.flag("use_qk_norm", false)?,
            rms_norm_eps: f.positive("rms_norm_eps", Some(1e-5))?,
            rope_theta: f.positive("rope_theta", Some(10_000.0))?,
            max_position_embeddings: f.size("max_position_embeddings")?,
            patch_embed_hidden: f.size_or("patch_embed_hidden_dim", Some(1024))?,
            image_base_size: f.size_or("image_base_size", Some(1024))?,
            cfg_distilled,
            use_meanflow,
            vae: VaeConfig::parse(&f)?,
            vit_processor: VitProcessorConfig::parse(&f, &vit)?,
            vit_aligner: AlignerConfig::parse(&f, &vit, hidden_size)?,
            vit,
            hidden_size,
            generation: GenerationConfig::parse(generation)?,
        };
        parsed.check(&f)?;
        Ok(parsed)
    }

    /// Layers of the backbone.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The KV of the whole model's prefixes, as it is held and sent.
    pub fn kv_geometry(&self) -> KvGeometry {
        KvGeometry {
            layers: self.num_layers(),
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            dtype: KvDType::F32,
        }
    }

    /// Pixels per image token along each side.
    pub fn pixels_per_token(&self) -> usize {
        self.vae.spatial_factor
    }

    /// Whether a guidance scale is answered with two rows (conditional and unconditional).
    pub fn guidance_needs_two_rows(&self, guidance: f64) -> bool {
        guidance > 1.0 && !self.cfg_distilled
    }

    /// Most text tokens of one sequence (pictures not counted).
    pub fn max_text_tokens(&self) -> usize {
        self.generation
            .max_length
            .unwrap_or(self.max_position_embeddings)
            .min(self.max_position_embeddings)
    }

    fn check(&self, f: &Fields<'_>) -> Result<(), ModelError> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(f.error(
                "num_key_value_heads",
                format!(
                    "{} does not divide {} heads",
                    self.num_kv_heads, self.num_heads
                ),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(f.error("attention_head_dim", format!("{} is odd", self.head_dim)));
        }
        for (name, channels) in [
            ("hidden_size", self.hidden_size),
            ("patch_embed_hidden_dim", self.patch_embed_hidden),
        ] {
            if !channels.is_multiple_of(NORM_GROUPS) {
                return Err(f.error(
                    name,
                    format!("{channels} does not split into {NORM_GROUPS} groups"),
                ));
            }
        }
        let factor = [self.vae.spatial_factor; 2];
        if let Some(v) = f.get("vae_downsample_factor")
            && v != &serde_json::json!(factor)
        {
            return Err(f.error(
                "vae_downsample_factor",
                format!("{v} differs from vae.ffactor_spatial {}", factor[0]),
            ));
        }
        let cell = self.pixels_per_token();
        if !self.image_base_size.is_multiple_of(cell) || self.image_base_size < 2 * cell {
            return Err(f.error(
                "image_base_size",
                format!(
                    "{} is not a multiple of {cell} from {} up",
                    self.image_base_size,
                    2 * cell
                ),
            ));
        }
        Ok(())
    }
}

/// Width of one head: `attention_head_dim`, else `head_dim`, else hidden size over heads.
fn head_dim(f: &Fields<'_>, hidden: usize) -> Result<usize, ModelError> {
    let first = f.opt_count("attention_head_dim")?;
    let second = f.opt_count("head_dim")?;
    match (first, second) {
        (Some(a), Some(b)) if a != b => Err(f.error(
            "attention_head_dim",
            format!("{a} differs from head_dim {b}"),
        )),
        (Some(0), _) | (_, Some(0)) => Err(f.error("attention_head_dim", "must be at least 1")),
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => {
            let heads = f.size("num_attention_heads")?;
            if !hidden.is_multiple_of(heads) {
                return Err(f.error("num_attention_heads", "does not divide hidden_size"));
            }
            Ok(hidden / heads)
        }
    }
}

fn moe_layers(f: &Fields<'_>) -> Result<Vec<MoeConfig>, ModelError> {
    let layers = f.size_up_to("num_hidden_layers", None, MAX_LAYERS)?;
    let intermediate = if f.get("moe_intermediate_size").is_some() {
        f.per_layer("moe_intermediate_size", layers)?
    } else {
        vec![f.size("intermediate_size")?; layers]
    };
    let experts = f.per_layer("num_experts", layers)?;
    let all = experts
        .iter()
        .fold(0, |sum: usize, n| sum.saturating_add(*n));
    if all > MAX_EXPERTS {
        return Err(f.error(
            "num_experts",
            format!("{all} in all layers are above the bound {MAX_EXPERTS}"),
        ));
    }
    let top_k = f.per_layer("moe_topk", layers)?;
    let shared = if f.flag("use_mixed_mlp_moe", false)? {
        Some(shared_widths(f, layers, &intermediate)?)
    } else {
        None
    };
    (0..layers)
        .map(|l| {
            if experts[l] < 2 {
                return Err(ModelError::Unimplemented(format!(
                    "config field `num_experts` = {} at layer {l} (a layer without experts)",
                    experts[l]
                )));
            }
            if top_k[l] > experts[l] {
                return Err(f.error(
                    "moe_topk",
                    format!("{} of {} experts", top_k[l], experts[l]),
                ));
            }
            Ok(MoeConfig {
                experts: experts[l],
                top_k: top_k[l],
                intermediate: intermediate[l],
                shared_intermediate: shared.as_ref().map(|s| s[l]),
            })
        })
        .collect()
}

/// The shared MLP is as wide as `num_shared_expert` routed experts of its layer.
fn shared_widths(
    f: &Fields<'_>,
    layers: usize,
    intermediate: &[usize],
) -> Result<Vec<usize>, ModelError> {
    let counts = f.per_layer("num_shared_expert", layers)?;
    Ok(counts
        .iter()
        .zip(intermediate)
        .map(|(count, width)| count * width)
        .collect())
}

/// Options of the architecture that change the mathematics and are not built.
fn refuse_unbuilt(f: &Fields<'_>) -> Result<(), ModelError> {
    for name in [
        "use_mla",
        "use_cla",
        "group_limited_greedy",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "add_classification_head",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
    ] {
        f.only_flag(name, false, false)?;
    }
    f.only_flag("use_rotary_pos_emb", true, true)?;
    f.only_text("hidden_act", "silu")?;
    f.only_text("norm_type", "rms")?;
    f.only_text("rope_type", "2d")?;
    f.only_text("img_proj_type", "unet")?;
    f.only_text("cond_token_attn_type", "joint_full")?;
    f.only_text("cond_image_type", "vae_vit")?;
    if f.opt_count("patch_size")?.unwrap_or(1) != 1 {
        return Err(ModelError::Unimplemented(
            "config field `patch_size` (only 1 is built)".into(),
        ));
    }
    if f.opt_count("moe_layer_num_skipped")?.unwrap_or(0) != 0 {
        return Err(ModelError::Unimplemented(
            "config field `moe_layer_num_skipped` (only 0 is built)".into(),
        ));
    }
    let scaling = f.get("routed_scaling_factor").and_then(Value::as_f64);
    if !f.flag("norm_topk_prob", true)? && scaling.is_some_and(|s| s != 1.0) {
        return Err(ModelError::Unimplemented(
            "config field `routed_scaling_factor` (only 1 is built)".into(),
        ));
    }
    refuse_rope_scaling(f)
}

/// The released `rope_scaling` names factors that are all one: no scaling.
fn refuse_rope_scaling(f: &Fields<'_>) -> Result<(), ModelError> {
    if f.get("rope_scaling").is_none() {
        return Ok(());
    }
    let scaling = f.object("rope_scaling")?;
    for name in ["alpha", "factor"] {
        if scaling.opt_number(name)?.unwrap_or(1.0) != 1.0 {
            return Err(ModelError::Unimplemented(format!(
                "config field `{}` (only 1 is built)",
                scaling.path(name)
            )));
        }
    }
    Ok(())
}

/// Reads a JSON file of a checkpoint directory, refusing one that is too large to be a config.
pub(crate) fn read_json(dir: &Path, file: &str) -> Result<Value, ModelError> {
    let bytes = read_bounded(dir, file, MAX_CONFIG_BYTES)?;
    serde_json::from_slice(&bytes)
        .map_err(|e| ModelError::file(file, format!("is not valid JSON: {e}")))
}

/// Reads a whole file of at most `limit` bytes.
pub(crate) fn read_bounded(dir: &Path, file: &str, limit: u64) -> Result<Vec<u8>, ModelError> {
    let path = dir.join(file);
    let size = std::fs::metadata(&path)
        .map_err(|e| ModelError::file(file, format!("cannot be read: {e}")))?
        .len();
    if size > limit {
        return Err(ModelError::file(
            file,
            format!("has {size} bytes, more than the bound {limit}"),
        ));
    }
    std::fs::read(&path).map_err(|e| ModelError::file(file, format!("cannot be read: {e}")))
}

#[cfg(test)]
mod tests;
