//! A packed batch of attention rows: random tensors, the segments over them, and the definition.

use kernels::{
    AttnHeads, AttnRow, KvPart, PartialAttention, Segment, Tensor, plain, varlen_attention,
};
use proptest::prelude::*;

use super::{causal, full, random, values};

/// One row of a test batch: cached tokens, fresh tokens, and how many of them are causal; the rest are full.
#[derive(Debug, Clone)]
pub(crate) struct RowSpec {
    pub(crate) past: usize,
    pub(crate) causal: usize,
    pub(crate) full: usize,
}

pub(crate) struct Batch {
    pub(crate) heads: AttnHeads,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    /// Per row, head-major `[kv][past][dim]`.
    pub(crate) past: Vec<(Vec<f32>, Vec<f32>)>,
    pub(crate) specs: Vec<RowSpec>,
    /// Tokens of a page of the cached part; it is in one piece otherwise.
    pub(crate) page: Option<usize>,
}

impl Batch {
    pub(crate) fn new(heads: AttnHeads, specs: Vec<RowSpec>, seed: u64) -> Self {
        let tokens: usize = specs.iter().map(|s| s.causal + s.full).sum();
        let past = specs
            .iter()
            .enumerate()
            .map(|(i, s)| {
                let n = heads.kv * s.past * heads.dim;
                let seed = seed ^ (1000 + i as u64);
                (values(seed, n), values(seed ^ 77_000, n))
            })
            .collect();
        Self {
            heads,
            q: random(seed ^ 1, &[tokens, heads.q, heads.dim]),
            k: random(seed ^ 2, &[tokens, heads.kv, heads.dim]),
            v: random(seed ^ 3, &[tokens, heads.kv, heads.dim]),
            past,
            specs,
            page: None,
        }
    }

    pub(crate) fn rows(&self) -> Vec<AttnRow<'_>> {
        let mut at = 0;
        self.specs
            .iter()
            .zip(&self.past)
            .map(|(s, (k, v))| {
                let fresh = at..at + s.causal + s.full;
                at = fresh.end;
                let (head_stride, token_stride) = (s.past * self.heads.dim, self.heads.dim);
                // A view of the same memory, cut into pages.
                let page = self.page.unwrap_or(s.past).max(1);
                let parts = (0..s.past).step_by(page).map(|first| KvPart {
                    k: &k[first * token_stride..],
                    v: &v[first * token_stride..],
                    head_stride,
                    token_stride,
                    len: page.min(s.past - first),
                });
                AttnRow {
                    past: parts.collect(),
                    fresh,
                }
            })
            .collect()
    }

    pub(crate) fn segments(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        for (i, (row, s)) in self.rows().iter().zip(&self.specs).enumerate() {
            let cut = row.fresh.start + s.causal;
            segments.push(full(i, cut..row.fresh.end, s.past + s.causal + s.full));
            segments.push(causal(i, row.fresh.start..cut, s.past));
        }
        segments
    }

    pub(crate) fn scale(&self) -> f32 {
        2.0 / (self.heads.dim as f32).sqrt()
    }

    pub(crate) fn run(&self) -> Tensor {
        let segments = self.segments();
        varlen_attention(
            &self.q,
            &self.k,
            &self.v,
            &self.rows(),
            &segments,
            self.scale(),
        )
        .unwrap()
    }

    /// The definition, with the log of the sum of exponentials.
    pub(crate) fn definition(&self) -> PartialAttention {
        let AttnHeads { q: hq, kv, dim } = self.heads;
        let (q, k, v) = (
            self.q.to_f32_vec(),
            self.k.to_f32_vec(),
            self.v.to_f32_vec(),
        );
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (row, (s, (past_k, past_v))) in
            self.rows().iter().zip(self.specs.iter().zip(&self.past))
        {
            for t in row.fresh.clone() {
                let i = t - row.fresh.start;
                let visible = if i < s.causal {
                    s.past + i + 1
                } else {
                    row.keys()
                };
                for h in 0..hq {
                    let head = h / (hq / kv);
                    let pick = |fresh: &[f32], past: &[f32], j: usize| {
                        let (from, at) = if j < s.past {
                            (past, (head * s.past + j) * dim)
                        } else {
                            (fresh, ((row.fresh.start + j - s.past) * kv + head) * dim)
                        };
                        from[at..at + dim].to_vec()
                    };
                    let keys: Vec<_> = (0..visible).map(|j| pick(&k, past_k, j)).collect();
                    let vals: Vec<_> = (0..visible).map(|j| pick(&v, past_v, j)).collect();
                    let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                    let vals: Vec<&[f32]> = vals.iter().map(Vec::as_slice).collect();
                    let at = (t * hq + h) * dim;
                    let part =
                        plain::attention_partial(&q[at..at + dim], &keys, &vals, self.scale());
                    out.extend(part.0);
                    lse.push(part.1);
                }
            }
        }
        PartialAttention {
            out: Tensor::from_f32(&[self.q.dim(0), hq * dim], out).unwrap(),
            lse: Tensor::from_f32(&[self.q.dim(0), hq], lse).unwrap(),
        }
    }
}

pub(crate) fn row_spec() -> impl Strategy<Value = RowSpec> {
    (
        prop_oneof![Just(0usize), Just(1), 2usize..300],
        0usize..30,
        0usize..40,
    )
        .prop_map(|(past, causal, full)| RowSpec { past, causal, full })
}

pub(crate) fn head_shapes() -> impl Strategy<Value = AttnHeads> {
    (
        1usize..3,
        prop_oneof![Just(1usize), Just(3), Just(4)],
        prop::sample::select(vec![2usize, 12, 16, 64, 72, 128]),
    )
        .prop_map(|(kv, group, dim)| AttnHeads {
            q: kv * group,
            kv,
            dim,
        })
}
