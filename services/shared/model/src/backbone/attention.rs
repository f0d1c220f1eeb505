//! Attention of one layer on one rank: its heads, its tokens, and keys that go round a ring.

use std::ops::Range;

use kernels::{
    AttnHeads, AttnRow, KvPart, LinearWeight, PartialAttention, Tensor, linear, merge_attention,
    qkv_split_rope_norm, varlen_attention, varlen_attention_partial,
};
use parallel::{Axis, ByHead, HeadShard};

use super::layer::Pass;
use super::packing::Source;
use super::probe::{Probe, Site};
use super::row::RowKv;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::{RankShard, group};
use crate::source::Scope;

/// Weights of one rank's heads, prepared for the kernels.
#[derive(Debug)]
pub(super) struct Attention {
    /// Among this rank's layers.
    index: usize,
    /// Heads that this rank projects for its tokens.
    projected: AttnHeads,
    /// Heads that this rank attends with, for the tokens of its Ulysses group.
    attended: AttnHeads,
    /// Elements of the query and of the key heads that each Ulysses rank takes.
    columns: Columns,
    eps: f32,
    qkv: LinearWeight,
    output: LinearWeight,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
}

#[derive(Debug)]
struct Columns {
    q: Vec<Range<usize>>,
    kv: Vec<Range<usize>>,
}

/// Queries, keys and values, each `[tokens, heads, dim]`.
struct Qkv {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Columns {
    fn new(rank: &RankShard) -> Self {
        let (outer, dim) = (rank.projected(), rank.shape().head_dim);
        let within = |own: &Range<usize>, all: &Range<usize>| {
            (own.start - all.start) * dim..(own.end - all.start) * dim
        };
        let each = rank.attended().iter();
        Self {
            q: each.clone().map(|h| within(&h.q, &outer.q)).collect(),
            kv: each.map(|h| within(&h.kv, &outer.kv)).collect(),
        }
    }
}

impl Attention {
    /// `index` counts within this rank's layers.
    pub(super) fn load(
        scope: &Scope<'_>,
        config: &ModelConfig,
        rank: &RankShard,
        index: usize,
    ) -> Result<Self, ModelError> {
        let (shape, own) = (rank.shape(), rank.projected());
        let (hidden, dim) = (shape.hidden, shape.head_dim);
        let heads = |shard: &HeadShard| AttnHeads {
            q: shard.q.len(),
            kv: shard.kv.len(),
            dim,
        };
        let head_norm = |name: &str| {
            let norm = config
                .use_qk_norm
                .then(|| scope.child(name).f32("weight", &[dim]));
            norm.transpose()
        };
        let width = (shape.heads + 2 * shape.kv_heads) * dim;
        let rows = own.qkv_rows(shape);
        let qkv = scope.child("qkv_proj").linear_rows(hidden, width, &rows)?;
        let columns = own.o_columns(shape);
        let output = scope.child("o_proj");
        Ok(Self {
            index,
            projected: heads(own),
            attended: heads(&rank.attended()[rank.place(Axis::Ulysses).index]),
            columns: Columns::new(rank),
            eps: config.rms_norm_eps as f32,
            qkv,
            output: output.linear_columns(shape.heads * dim, hidden, &columns)?,
            query_norm: head_norm("query_layernorm")?,
            key_norm: head_norm("key_layernorm")?,
        })
    }

    /// `normed [own tokens, hidden]` to the output of all heads, `[own tokens, hidden]`; fresh keys and
    /// values go where each row says.
    pub(super) fn forward<P: Probe>(
        &self,
        normed: &Tensor,
        pass: &mut Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<Tensor, ModelError> {
        let fresh = self.fresh(normed, pass, probe)?;
        let mixed = self.attend(&fresh, pass)?;
        self.store(&fresh, pass)?;
        let mixed = self.to_tokens(mixed, pass)?;
        pass.sum_over_tp(linear(&mixed, &self.output)?)
    }

    /// Only what fills the cache.
    pub(super) fn fill<P: Probe>(
        &self,
        normed: &Tensor,
        pass: &mut Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<(), ModelError> {
        let fresh = self.fresh(normed, pass, probe)?;
        self.store(&fresh, pass)
    }

    /// Fresh queries, keys and values of the attended heads, for the tokens of the Ulysses group.
    fn fresh<P: Probe>(
        &self,
        normed: &Tensor,
        pass: &Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<Qkv, ModelError> {
        let layer = pass.layer(self.index);
        let qkv = linear(normed, &self.qkv)?;
        probe.tensor(layer, Site::Qkv, &qkv);
        // HunyuanImage-3.0: rotation before the query and key norms.
        let (q, k, v) = qkv_split_rope_norm(
            &qkv,
            pass.rope,
            self.query_norm.as_ref(),
            self.key_norm.as_ref(),
            self.eps,
            self.projected,
        )?;
        probe.tensor(layer, Site::Key, &k);
        probe.tensor(layer, Site::Value, &v);
        self.to_heads(Qkv { q, k, v }, pass)
    }

    /// Trades own tokens of the projected heads for the group's tokens of the attended heads.
    fn to_heads(&self, own: Qkv, pass: &Pass<'_, '_>) -> Result<Qkv, ModelError> {
        if self.columns.q.len() == 1 {
            return Ok(own);
        }
        let by_head = |tensor, heads: usize, columns| {
            Ok::<_, ModelError>(ByHead {
                data: Tensor::as_f32(tensor)?,
                width: heads * self.projected.dim,
                columns,
            })
        };
        let (q, kv) = (self.projected.q, self.projected.kv);
        let tensors = [
            by_head(&own.q, q, &self.columns.q)?,
            by_head(&own.k, kv, &self.columns.kv)?,
            by_head(&own.v, kv, &self.columns.kv)?,
        ];
        let exchange = pass.packing.exchange()?;
        let group = group(pass.ctx, Axis::Ulysses)?;
        let got = exchange.to_heads(group, &tensors)?.wait()?;
        let tokens = exchange.tokens();
        let shaped = |data: Option<Vec<f32>>, heads| {
            let data = data.unwrap_or_default();
            Tensor::from_f32(&[tokens, heads, self.attended.dim], data)
        };
        let mut got = got.into_iter();
        Ok(Qkv {
            q: shaped(got.next(), self.attended.q)?,
            k: shaped(got.next(), self.attended.kv)?,
            v: shaped(got.next(), self.attended.kv)?,
        })
    }

    /// The way back: `[group's tokens, attended heads]` to `[own tokens, projected heads]`.
    fn to_tokens(&self, mixed: Tensor, pass: &Pass<'_, '_>) -> Result<Tensor, ModelError> {
        if self.columns.q.len() == 1 {
            return Ok(mixed);
        }
        let exchange = pass.packing.exchange()?;
        let width = self.projected.q * self.projected.dim;
        let group = group(pass.ctx, Axis::Ulysses)?;
        let own = exchange
            .to_tokens(group, mixed.as_f32()?, width, &self.columns.q)?
            .wait()?;
        Ok(Tensor::from_f32(&[own.len() / width, width], own)?)
    }

    fn scale(&self) -> f32 {
        (self.attended.dim as f32).sqrt().recip()
    }

    /// `[tokens of the Ulysses group, attended heads * dim]`.
    fn attend(&self, fresh: &Qkv, pass: &Pass<'_, '_>) -> Result<Tensor, ModelError> {
        let ring = pass.packing.ring();
        let rows = pass.packing.own_rows(pass.rows, self.index);
        let own = &pass.packing.sources()[ring.index];
        let Qkv { q, k, v } = fresh;
        if ring.size == 1 {
            let segments = &own.segments;
            return Ok(varlen_attention(q, k, v, &rows, segments, self.scale())?);
        }
        let group = group(pass.ctx, Axis::Ring)?;
        // The next keys travel while those at hand are used.
        let mut travelling = Some(group.ring_shift(1, self.own_keys(fresh, pass)?)?);
        let segments = &own.segments;
        let mut sum = varlen_attention_partial(q, &rows, k, v, segments, self.scale())?;
        for step in 1..ring.size {
            let Some(pending) = travelling.take() else {
                break;
            };
            let keys = pending.wait()?;
            if step + 1 < ring.size {
                travelling = Some(group.ring_shift(1, keys.clone())?);
            }
            let source = &pass.packing.sources()[(ring.index + ring.size - step) % ring.size];
            let part = self.foreign(q, &keys, source)?;
            merge_attention(&mut sum, &part)?;
        }
        Ok(sum.out)
    }

    /// What travels round the ring: fresh keys, fresh values, then keys and values of every past that the
    /// ring's ranks hold in parts.
    fn own_keys(&self, fresh: &Qkv, pass: &Pass<'_, '_>) -> Result<Vec<f32>, ModelError> {
        let mut keys = [fresh.k.as_f32()?, fresh.v.as_f32()?].concat();
        for row in pass.rows.iter().filter(|row| row.kv.is_spread()) {
            let parts = row.kv.parts(self.index);
            let mut take = |side: for<'a> fn(&KvPart<'a>) -> &'a [f32]| {
                for head in 0..self.attended.kv {
                    for part in &parts {
                        let start = head * part.head_stride;
                        let end = start + part.len * part.token_stride;
                        keys.extend_from_slice(&side(part)[start..end]);
                    }
                }
            };
            take(|part| part.k);
            take(|part| part.v);
        }
        Ok(keys)
    }

    /// Attention over the keys of another rank of the ring.
    fn foreign(
        &self,
        q: &Tensor,
        keys: &[f32],
        source: &Source,
    ) -> Result<PartialAttention, ModelError> {
        let AttnHeads { kv, dim, .. } = self.attended;
        let tokens = source.fresh.last().map_or(0, |range| range.end);
        let fresh = tokens * kv * dim;
        let past: usize = source.past.iter().sum();
        if keys.len() != 2 * (fresh + past * kv * dim) {
            return Err(ModelError::Internal(format!(
                "{} elements of keys from a rank of {tokens} fresh and {past} past tokens",
                keys.len()
            )));
        }
        let (fresh, mut rest) = keys.split_at(2 * fresh);
        let both = Tensor::from_f32(&[2 * tokens, kv, dim], fresh.to_vec())?;
        let (k, v) = (both.narrow0(0, tokens)?, both.narrow0(tokens, tokens)?);
        let mut rows = Vec::with_capacity(source.past.len());
        for (len, fresh) in source.past.iter().zip(&source.fresh) {
            let side = len * kv * dim;
            let (keys, after) = rest.split_at(side);
            let (values, after) = after.split_at(side);
            rest = after;
            let past = KvPart {
                k: keys,
                v: values,
                head_stride: len * dim,
                token_stride: dim,
                len: *len,
            };
            rows.push(AttnRow {
                past: (*len > 0).then_some(past).into_iter().collect(),
                fresh: fresh.clone(),
            });
        }
        let segments = &source.segments;
        Ok(varlen_attention_partial(
            q,
            &rows,
            &k,
            &v,
            segments,
            self.scale(),
        )?)
    }

    fn store(&self, fresh: &Qkv, pass: &mut Pass<'_, '_>) -> Result<(), ModelError> {
        let own = &pass.packing.sources()[pass.packing.ring().index].fresh;
        for (row, tokens) in pass.rows.iter_mut().zip(own) {
            if let RowKv::Append(cache) = &mut row.kv {
                cache.write(self.index, &fresh.k, &fresh.v, tokens.clone())?;
            }
        }
        Ok(())
    }
}
