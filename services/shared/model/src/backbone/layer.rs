//! One decoder layer: attention and mixture of experts, each behind a norm and a residual.

use kernels::{RopeTable, Tensor, add_assign, rms_norm};
use parallel::{Axis, RankContext};

use super::attention::Attention;
use super::balance::Balance;
use super::moe::Moe;
use super::packing::Packing;
use super::probe::{Probe, Site};
use super::row::Row;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::RankShard;
use crate::source::Scope;

/// One rank's part of one layer.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Among all layers of the model.
    index: usize,
    eps: f32,
    input_norm: Tensor,
    post_norm: Tensor,
    attention: Attention,
    moe: Moe,
}

/// What the layers share within one pass.
pub(crate) struct Pass<'p, 'r> {
    pub(crate) ctx: &'p RankContext,
    pub(crate) rank: &'p RankShard,
    pub(crate) rows: &'p mut [Row<'r>],
    pub(crate) packing: &'p Packing,
    /// Of this rank's tokens.
    pub(crate) rope: &'p RopeTable,
}

impl Pass<'_, '_> {
    /// Number in the model of this rank's layer `index`.
    pub(super) fn layer(&self, index: usize) -> usize {
        self.rank.layers().start + index
    }

    /// The sum of all tensor-parallel ranks' parts; as it is where there is one rank.
    pub(super) fn sum_over_tp(&self, part: Tensor) -> Result<Tensor, ModelError> {
        let Some(group) = self.ctx.group(Axis::Tp.into()) else {
            return Ok(part);
        };
        let sum = group.all_reduce(part.to_f32_vec())?.wait()?;
        Ok(Tensor::from_f32(part.shape(), sum)?)
    }
}

impl Layer {
    /// Layer `index` of the model, which is one of the rank's.
    pub(crate) fn load(
        scope: &Scope<'_>,
        config: &ModelConfig,
        rank: &RankShard,
        index: usize,
        balance: Option<&Balance>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let norm = |name: &str| scope.child(name).f32("weight", &[hidden]);
        let local = index - rank.layers().start;
        Ok(Self {
            index,
            eps: config.rms_norm_eps as f32,
            input_norm: norm("input_layernorm")?,
            post_norm: norm("post_attention_layernorm")?,
            attention: Attention::load(&scope.child("self_attn"), config, rank, local)?,
            moe: Moe::load(&scope.child("mlp"), config, rank, local, balance)?,
        })
    }

    /// The experts.
    pub(super) fn moe(&self) -> &Moe {
        &self.moe
    }

    /// Runs the layer over this rank's packed tokens; fresh keys and values go where each row says.
    pub(crate) fn forward<P: Probe>(
        &self,
        x: &mut Tensor,
        pass: &mut Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<(), ModelError> {
        let normed = self.normed(x, probe)?;
        let attention = self.attention.forward(&normed, pass, probe)?;
        probe.tensor(self.index, Site::Attention, &attention);
        add_assign(x, &attention)?;
        let normed = rms_norm(x, &self.post_norm, self.eps)?;
        probe.tensor(self.index, Site::PostNorm, &normed);
        let mlp = self.moe.forward(&normed, pass, probe)?;
        probe.tensor(self.index, Site::Mlp, &mlp);
        add_assign(x, &mlp)?;
        probe.tensor(self.index, Site::Output, x);
        Ok(())
    }

    /// Only what fills the cache: all that the last layer of a prefill has to do.
    pub(crate) fn forward_kv_only<P: Probe>(
        &self,
        x: &Tensor,
        pass: &mut Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<(), ModelError> {
        let normed = self.normed(x, probe)?;
        self.attention.fill(&normed, pass, probe)
    }

    fn normed<P: Probe>(&self, x: &Tensor, probe: &mut P) -> Result<Tensor, ModelError> {
        let normed = rms_norm(x, &self.input_norm, self.eps)?;
        probe.tensor(self.index, Site::InputNorm, &normed);
        Ok(normed)
    }
}
