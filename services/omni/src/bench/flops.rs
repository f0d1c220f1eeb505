//! Floating-point operations of one denoising step, a multiplication and an addition counted as two
//! (HunyuanImage-3.0: sizes and FLOPs).
//!
//! For one row of T query tokens (the special tokens and the N image tokens) on a prefix of P tokens:
//!
//! * linear, per token and layer: 2 x the weights a token meets, which are
//!   hidden x (heads + 2 kv_heads) x head_dim (joint projection) + heads x head_dim x hidden (output)
//!   + hidden x experts (router) + 3 x hidden x inner x (top_k experts, and the shared one);
//! * attention, per layer: 4 x heads x head_dim x (query, key) pairs, where an image token sees all
//!   P + T keys and special token i sees P + i + 1;
//! * stem and head: 2 x the convolution weights x N.
//!
//! Norms, embeddings, softmax and activations are left out; they are well below one per cent.
use model::{ModelConfig, expected_tensors};

/// One row of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowShape {
    /// Prefix tokens.
    pub(super) prefix: usize,
    /// Tokens before the image.
    pub(super) specials: usize,
    /// Image tokens.
    pub(super) image: usize,
}

/// Of all layers, for one row.
pub(super) fn layers(config: &ModelConfig, row: RowShape) -> f64 {
    let width = config.num_heads * config.head_dim;
    let projections = config.hidden_size * (width + 2 * config.num_kv_heads * config.head_dim)
        + width * config.hidden_size;
    let tokens = row.specials + row.image;
    let pairs = row.image * (row.prefix + tokens)
        + (0..row.specials).map(|i| row.prefix + i + 1).sum::<usize>();
    config
        .layers
        .iter()
        .map(|layer| {
            let inner = layer.top_k * layer.intermediate + layer.shared_intermediate.unwrap_or(0);
            let weights =
                projections + config.hidden_size * layer.experts + 3 * config.hidden_size * inner;
            2.0 * weights as f64 * tokens as f64 + 4.0 * width as f64 * pairs as f64
        })
        .sum()
}

/// Of stem and head, for one row.
pub(super) fn convolutions(config: &ModelConfig, row: RowShape) -> f64 {
    let weights: usize = expected_tensors(config)
        .iter()
        .filter(|spec| {
            let part =
                spec.name.starts_with("patch_embed.") || spec.name.starts_with("final_layer.");
            part && spec.shape.len() == 4
        })
        .map(|spec| spec.shape.iter().product::<usize>())
        .sum();
    2.0 * weights as f64 * row.image as f64
}
