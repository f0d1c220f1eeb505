//! One decoder layer: attention and mixture of experts, each behind a norm and a residual.

use kernels::{
    AttnHeads, ExpertWeights, LinearWeight, RopeTable, Tensor, add_assign, linear, moe_experts,
    moe_route, qkv_split_rope_norm, rms_norm, swiglu_up_gate, varlen_attention,
};

use super::probe::{Probe, Site};
use super::row::{Packing, Row, RowKv};
use crate::config::{ModelConfig, MoeConfig};
use crate::error::ModelError;
use crate::source::Scope;

/// Weights of one layer, prepared for the kernels.
#[derive(Debug)]
pub(crate) struct Layer {
    index: usize,
    shape: LayerShape,
    input_norm: Tensor,
    post_norm: Tensor,
    qkv: LinearWeight,
    output: LinearWeight,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
    router: LinearWeight,
    experts: ExpertWeights,
    shared: Option<SharedMlp>,
}

/// The numbers of a layer that are not weights.
#[derive(Clone, Copy, Debug)]
struct LayerShape {
    heads: AttnHeads,
    eps: f32,
    top_k: usize,
    renormalise: bool,
}

#[derive(Debug)]
struct SharedMlp {
    up_gate: LinearWeight,
    down: LinearWeight,
}

/// What the layers share within one pass.
pub(crate) struct Pass<'p, 'r> {
    pub(crate) rows: &'p mut [Row<'r>],
    pub(crate) packing: &'p Packing,
    pub(crate) rope: &'p RopeTable,
}

impl Layer {
    pub(crate) fn load(
        scope: &Scope<'_>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self, ModelError> {
        let moe = &config.layers[index];
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let heads = AttnHeads {
            q: config.num_heads,
            kv: config.num_kv_heads,
            dim,
        };
        let attention = scope.child("self_attn");
        let head_norm = |name: &str| {
            let norm = config
                .use_qk_norm
                .then(|| attention.child(name).f32("weight", &[dim]));
            norm.transpose()
        };
        Ok(Self {
            index,
            shape: LayerShape {
                heads,
                eps: config.rms_norm_eps as f32,
                top_k: moe.top_k,
                renormalise: config.norm_topk_prob,
            },
            input_norm: scope.child("input_layernorm").f32("weight", &[hidden])?,
            post_norm: scope
                .child("post_attention_layernorm")
                .f32("weight", &[hidden])?,
            qkv: attention.child("qkv_proj").linear(hidden, heads.width())?,
            output: attention.child("o_proj").linear(heads.q * dim, hidden)?,
            query_norm: head_norm("query_layernorm")?,
            key_norm: head_norm("key_layernorm")?,
            router: scope.child("mlp.gate.wg").linear(hidden, moe.experts)?,
            experts: load_experts(&scope.child("mlp.experts"), moe, hidden)?,
            shared: SharedMlp::load(&scope.child("mlp.shared_mlp"), moe, hidden)?,
        })
    }

    /// Runs the layer over packed rows; fresh keys and values go where each row says.
    pub(crate) fn forward<P: Probe>(
        &self,
        x: &mut Tensor,
        pass: &mut Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<(), ModelError> {
        let (q, k, v) = self.project(x, pass, probe)?;
        let keys = pass.packing.attention_rows(pass.rows, self.index);
        let scale = (self.shape.heads.dim as f32).sqrt().recip();
        let mixed = varlen_attention(&q, &k, &v, &keys, &pass.packing.segments, scale)?;
        drop(keys);
        self.store(&k, &v, pass)?;
        let attention = linear(&mixed, &self.output)?;
        probe.tensor(self.index, Site::Attention, &attention);
        add_assign(x, &attention)?;
        let mlp = self.mlp(x, probe)?;
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
        let (_, k, v) = self.project(x, pass, probe)?;
        self.store(&k, &v, pass)
    }

    fn project<P: Probe>(
        &self,
        x: &Tensor,
        pass: &Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<(Tensor, Tensor, Tensor), ModelError> {
        let normed = rms_norm(x, &self.input_norm, self.shape.eps)?;
        probe.tensor(self.index, Site::InputNorm, &normed);
        let qkv = linear(&normed, &self.qkv)?;
        probe.tensor(self.index, Site::Qkv, &qkv);
        // HunyuanImage-3.0: rotation before the query and key norms.
        let (q, k, v) = qkv_split_rope_norm(
            &qkv,
            pass.rope,
            self.query_norm.as_ref(),
            self.key_norm.as_ref(),
            self.shape.eps,
            self.shape.heads,
        )?;
        probe.tensor(self.index, Site::Key, &k);
        probe.tensor(self.index, Site::Value, &v);
        Ok((q, k, v))
    }

    fn store(&self, k: &Tensor, v: &Tensor, pass: &mut Pass<'_, '_>) -> Result<(), ModelError> {
        for (row, fresh) in pass.rows.iter_mut().zip(&pass.packing.fresh) {
            if let RowKv::Append(cache) = &mut row.kv {
                cache.write(self.index, k, v, fresh.clone())?;
            }
        }
        Ok(())
    }

    fn mlp<P: Probe>(&self, x: &Tensor, probe: &mut P) -> Result<Tensor, ModelError> {
        let normed = rms_norm(x, &self.post_norm, self.shape.eps)?;
        probe.tensor(self.index, Site::PostNorm, &normed);
        let routing = moe_route(
            &normed,
            &self.router,
            self.shape.top_k,
            self.shape.renormalise,
        )?;
        probe.routing(self.index, &routing);
        let mut out = moe_experts(&normed, &routing, &self.experts)?;
        if let Some(shared) = &self.shared {
            let extra = linear(
                &swiglu_up_gate(&linear(&normed, &shared.up_gate)?)?,
                &shared.down,
            )?;
            probe.tensor(self.index, Site::SharedMlp, &extra);
            add_assign(&mut out, &extra)?;
        }
        probe.tensor(self.index, Site::Mlp, &out);
        Ok(out)
    }
}

impl SharedMlp {
    fn load(scope: &Scope<'_>, moe: &MoeConfig, hidden: usize) -> Result<Option<Self>, ModelError> {
        let Some(inner) = moe.shared_intermediate else {
            return Ok(None);
        };
        Ok(Some(Self {
            up_gate: scope.child("gate_and_up_proj").linear(hidden, 2 * inner)?,
            down: scope.child("down_proj").linear(inner, hidden)?,
        }))
    }
}

fn load_experts(
    scope: &Scope<'_>,
    moe: &MoeConfig,
    hidden: usize,
) -> Result<ExpertWeights, ModelError> {
    let mut up_gate = Vec::with_capacity(moe.experts);
    let mut down = Vec::with_capacity(moe.experts);
    for expert in 0..moe.experts {
        let scope = scope.child(expert);
        up_gate.push(
            scope
                .child("gate_and_up_proj")
                .linear(hidden, 2 * moe.intermediate)?,
        );
        down.push(scope.child("down_proj").linear(moe.intermediate, hidden)?);
    }
    Ok(ExpertWeights::new(up_gate, down)?)
}
