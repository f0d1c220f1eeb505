//! What `plan` reads of a checkpoint's configs. Sizes only: whether the model can be served is for the server
//! to say when it opens the checkpoint.
use std::{fs, path::Path};

use base::Failure;
use parallel::cost::{ModelSizes, VaeSizes};
use parallel::{LayerShape, ModelShape};
use serde::{Deserialize, de::DeserializeOwned};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// Largest config file read, in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Bounds that keep every product of sizes within 64 bits.
const MAX_WIDTH: usize = 1 << 18;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_TOP_K: usize = 64;
const MAX_LAYERS: usize = 1024;
const MAX_CHANNELS: usize = 1 << 14;
const MAX_BLOCKS: usize = 64;
const MAX_FACTOR: usize = 256;

/// A model to plan for, and what its pictures are like unless the command line says otherwise.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) sizes: ModelSizes,
    /// Side of the square picture in pixels.
    pub(super) base_size: usize,
    pub(super) steps: usize,
    pub(super) guidance: f64,
}

/// One number for all layers, or one for each.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum PerLayer {
    One(usize),
    Each(Vec<usize>),
}

#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    attention_head_dim: Option<usize>,
    head_dim: Option<usize>,
    moe_intermediate_size: Option<PerLayer>,
    intermediate_size: Option<usize>,
    num_experts: PerLayer,
    moe_topk: PerLayer,
    num_shared_expert: Option<PerLayer>,
    use_mixed_mlp_moe: Option<bool>,
    use_qk_norm: Option<bool>,
    patch_embed_hidden_dim: Option<usize>,
    image_base_size: Option<usize>,
    cfg_distilled: Option<bool>,
    use_meanflow: Option<bool>,
    vae: Vae,
}

#[derive(Debug, Deserialize)]
struct Vae {
    latent_channels: usize,
    block_out_channels: Vec<usize>,
    layers_per_block: usize,
    ffactor_spatial: usize,
    ffactor_temporal: usize,
}

#[derive(Debug, Default, Deserialize)]
struct Generation {
    diff_infer_steps: Option<usize>,
    diff_guidance_scale: Option<f64>,
}

/// An error about the flag `--model`.
fn refused(file: &str, problem: impl std::fmt::Display) -> Failure {
    Failure::invalid("--model", format!("{file}: {problem}"))
}

/// `got` unless it is zero or above `max`.
fn within(field: &str, got: usize, max: usize) -> Result<usize, Failure> {
    if (1..=max).contains(&got) {
        return Ok(got);
    }
    Err(refused(
        CONFIG,
        format!("`{field}` must be 1 to {max}, got {got}"),
    ))
}

impl Subject {
    /// Reads a config file, or both files of a checkpoint directory. No weights are touched.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let (config, folder) = if path.is_dir() {
            (path.join(CONFIG), path)
        } else {
            (path.to_owned(), path.parent().unwrap_or(Path::new("")))
        };
        let config: Config = read(&config)?;
        let generation = folder.join(GENERATION);
        let generation = if generation.exists() {
            read(&generation)?
        } else {
            Generation::default()
        };
        Ok(Self {
            base_size: within(
                "image_base_size",
                config.image_base_size.unwrap_or(1024),
                1 << 16,
            )?,
            sizes: config.sizes()?,
            steps: generation.diff_infer_steps.unwrap_or(50),
            guidance: generation.diff_guidance_scale.unwrap_or(7.5),
        })
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let name = path.display().to_string();
    let size = fs::metadata(path).map_err(|e| refused(&name, format!("cannot be read: {e}")))?;
    if !size.is_file() {
        return Err(refused(&name, "is no file"));
    }
    if size.len() > MAX_BYTES {
        let problem = format!("has {} bytes, more than the bound {MAX_BYTES}", size.len());
        return Err(refused(&name, problem));
    }
    let text = fs::read(path).map_err(|e| refused(&name, format!("cannot be read: {e}")))?;
    serde_json::from_slice(&text).map_err(|e| refused(&name, e))
}

impl Config {
    fn sizes(&self) -> Result<ModelSizes, Failure> {
        let hidden = within("hidden_size", self.hidden_size, MAX_WIDTH)?;
        let heads = within("num_attention_heads", self.num_attention_heads, MAX_WIDTH)?;
        let dim = self.attention_head_dim.or(self.head_dim);
        let kv_heads = self.num_key_value_heads.unwrap_or(heads);
        let experts = self.per_layer("num_experts", &self.num_experts, MAX_EXPERTS)?;
        let top_k = self.per_layer("moe_topk", &self.moe_topk, MAX_TOP_K)?;
        if let Some((k, n)) = top_k.iter().zip(&experts).find(|(k, n)| k > n) {
            return Err(refused(CONFIG, format!("`moe_topk` is {k} of {n} experts")));
        }
        let (inner, shared) = self.inner_widths()?;
        let layers = experts.iter().zip(inner.iter().zip(shared));
        let layers = layers.map(|(&experts, (&expert_inner, shared_inner))| LayerShape {
            experts,
            expert_inner,
            shared_inner,
        });
        let (distilled, meanflow) = (
            self.cfg_distilled.unwrap_or(false),
            self.use_meanflow.unwrap_or(false),
        );
        let stem = self.patch_embed_hidden_dim.unwrap_or(1024);
        Ok(ModelSizes {
            shape: ModelShape {
                hidden,
                heads,
                kv_heads: within("num_key_value_heads", kv_heads, heads)?,
                head_dim: within("attention_head_dim", dim.unwrap_or(hidden / heads), 1024)?,
                layers: layers.collect(),
                cfg_distilled: distilled,
            },
            top_k,
            qk_norm: self.use_qk_norm.unwrap_or(false),
            vocab: within("vocab_size", self.vocab_size, 1 << 24)?,
            stem_inner: within("patch_embed_hidden_dim", stem, MAX_WIDTH)?,
            specials: 1 + usize::from(distilled) + usize::from(meanflow),
            pixels_per_token: self.vae.ffactor_spatial,
            vae: self.vae.sizes()?,
        })
    }

    /// One number for each layer.
    fn per_layer(&self, field: &str, value: &PerLayer, max: usize) -> Result<Vec<usize>, Failure> {
        let layers = within("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS)?;
        let all = match value {
            PerLayer::One(n) => vec![*n; layers],
            PerLayer::Each(list) if list.len() == layers => list.clone(),
            PerLayer::Each(list) => {
                let problem = format!("`{field}` has {} entries, not {layers}", list.len());
                return Err(refused(CONFIG, problem));
            }
        };
        for n in &all {
            within(field, *n, max)?;
        }
        Ok(all)
    }

    /// Inner widths of routed and of shared experts, by layer; a shared one is as wide as so many routed.
    fn inner_widths(&self) -> Result<(Vec<usize>, Vec<Option<usize>>), Failure> {
        let wide = self.moe_intermediate_size.clone();
        let wide = wide.or(self.intermediate_size.map(PerLayer::One));
        let missing = || refused(CONFIG, "missing field `moe_intermediate_size`");
        let wide = wide.ok_or_else(missing)?;
        let inner = self.per_layer("moe_intermediate_size", &wide, MAX_WIDTH)?;
        if !self.use_mixed_mlp_moe.unwrap_or(false) {
            let none = vec![None; inner.len()];
            return Ok((inner, none));
        }
        let missing = || refused(CONFIG, "missing field `num_shared_expert`");
        let count = self.num_shared_expert.as_ref().ok_or_else(missing)?;
        let counts = self.per_layer("num_shared_expert", count, MAX_TOP_K)?;
        let shared = counts.iter().zip(&inner).map(|(n, width)| Some(n * width));
        let shared = shared.collect();
        Ok((inner, shared))
    }
}

impl Vae {
    fn sizes(&self) -> Result<VaeSizes, Failure> {
        let levels = |field: &str, factor: usize| {
            within(field, factor, MAX_FACTOR)?;
            if factor.is_power_of_two() {
                return Ok(factor.ilog2() as usize);
            }
            Err(refused(
                CONFIG,
                format!("`{field}` = {factor} is no power of two"),
            ))
        };
        let spatial_levels = levels("vae.ffactor_spatial", self.ffactor_spatial)?;
        let temporal_levels = levels("vae.ffactor_temporal", self.ffactor_temporal)?;
        if temporal_levels > spatial_levels {
            return Err(refused(
                CONFIG,
                "`vae.ffactor_temporal` is above ffactor_spatial",
            ));
        }
        if self.block_out_channels.len() != spatial_levels + 1 {
            let got = self.block_out_channels.len();
            let problem = format!(
                "`vae.block_out_channels` has {got} levels, not {}",
                spatial_levels + 1
            );
            return Err(refused(CONFIG, problem));
        }
        for channels in &self.block_out_channels {
            within("vae.block_out_channels", *channels, MAX_CHANNELS)?;
        }
        let blocks = within("vae.layers_per_block", self.layers_per_block, MAX_BLOCKS)?;
        Ok(VaeSizes {
            latent: within("vae.latent_channels", self.latent_channels, MAX_CHANNELS)?,
            channels: self.block_out_channels.clone(),
            // A level of the decoder has one block more than one of the encoder.
            blocks: blocks + 1,
            spatial_levels,
            temporal_levels,
        })
    }
}
