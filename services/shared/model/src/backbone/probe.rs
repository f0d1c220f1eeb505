//! A look inside a forward pass, for tests that compare inner states with recorded ones.

use kernels::{Routing, Tensor};

/// A named place inside one decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Site {
    /// After the first norm, `[tokens, hidden]`.
    InputNorm,
    /// The joint projection, `[tokens, (q + 2 kv) * dim]`, grouped per KV head.
    Qkv,
    /// Fresh keys after rotation and norm, `[tokens, kv_heads, dim]`.
    Key,
    /// Fresh values, `[tokens, kv_heads, dim]`.
    Value,
    /// After the output projection, before the residual, `[tokens, hidden]`.
    Attention,
    /// After the second norm, `[tokens, hidden]`.
    PostNorm,
    /// Output of the shared expert, `[tokens, hidden]`.
    SharedMlp,
    /// Routed plus shared experts, before the residual, `[tokens, hidden]`.
    Mlp,
    /// The residual stream after the layer, `[tokens, hidden]`.
    Output,
}

/// Receives inner states; every method does nothing by default, so that a pass without a probe costs
/// nothing.
pub trait Probe {
    /// A tensor of layer `layer`.
    fn tensor(&mut self, _layer: usize, _site: Site, _value: &Tensor) {}
    /// The router's decision in layer `layer`.
    fn routing(&mut self, _layer: usize, _routing: &Routing) {}
}

/// The probe of the service path: sees nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {}
