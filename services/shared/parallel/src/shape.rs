//! What a plan must know of a model.

/// Sizes of one decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Routed experts.
    pub experts: usize,
    /// Inner width of one routed expert: `down` is `[hidden, inner]`.
    pub expert_inner: usize,
    /// Inner width of the shared expert, `None` without one.
    pub shared_inner: Option<usize>,
}

/// The sizes of a model that decide which plans can run it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The decoder layers in order.
    pub layers: Vec<LayerShape>,
    /// True when guidance is an embedded token, so that a request has one row.
    pub cfg_distilled: bool,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The published model: 32 layers, 32 query and 8 KV heads of 128, 64 experts of 3072.
    pub(crate) fn published() -> ModelShape {
        let layer = LayerShape {
            experts: 64,
            expert_inner: 3072,
            shared_inner: Some(3072),
        };
        ModelShape {
            hidden: 4096,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            layers: vec![layer; 32],
            cfg_distilled: false,
        }
    }
}
