//! What one rank has to compute in one pass, in operations and bytes.

use super::sizes::ModelSizes;
use super::{ACTIVATION_BYTES, Machine, Work};
use crate::{
    Axis, AxisSet, HeadShard, Mesh, ParallelError, Plan, RingPrefix, SequenceShards, SharedExpert,
    TokenOrder, near_even_range,
};

/// Times each residual vector passes through memory in a layer besides matrix products: two norms and a
/// rotation (read and written), and two sums (two read, one written).
const STREAM_PASSES: usize = 12;

/// Counts of one rank in one pass over `rows` rows; tokens of all rows together.
#[derive(Debug, Clone)]
pub(super) struct RankLoad<'a> {
    sizes: &'a ModelSizes,
    pub(super) plan: Plan,
    mesh: Mesh,
    /// Coordinates of the rank.
    at: [usize; 5],
    pub(super) heads: HeadShard,
    attended: HeadShard,
    /// Rows of the pass on this rank.
    pub(super) rows: usize,
    /// Query tokens and key tokens of one row.
    row: (usize, usize),
    /// Tokens of the rank.
    pub(super) own: usize,
    /// Tokens of the rank's ring chunk, which it attends for.
    chunk: usize,
    /// Tokens dispatched by all ranks of the expert group, and this rank's part of them.
    dispatched: (usize, usize),
}

impl<'a> RankLoad<'a> {
    pub(super) fn new(
        sizes: &'a ModelSizes,
        plan: &Plan,
        rank: usize,
        work: &Work,
        rows: usize,
    ) -> Result<Self, ParallelError> {
        let (shape, mesh) = (&sizes.shape, plan.mesh()?);
        let at = mesh.coordinates(rank)?;
        let index = |axis: Axis| at[axis as usize];
        let tokens = sizes.specials + work.image_tokens;
        let dealt = SequenceShards::new(tokens, plan.ring, plan.ulysses, TokenOrder::Contiguous)?;
        let share = |ring, ulysses, tp| {
            let own = rows * dealt.own_tokens(ring, ulysses);
            if plan.ep.contains(Axis::Tp) {
                return near_even_range(own, plan.tp, tp).map(|r| r.len());
            }
            Ok(own)
        };
        let mut all = 0;
        for member in mesh.group(rank, plan.ep)?.ranks {
            let at = mesh.coordinates(member)?;
            let index = |axis: Axis| at[axis as usize];
            all += share(index(Axis::Ring), index(Axis::Ulysses), index(Axis::Tp))?;
        }
        let (ring, ulysses, tp) = (index(Axis::Ring), index(Axis::Ulysses), index(Axis::Tp));
        Ok(Self {
            sizes,
            plan: *plan,
            at,
            heads: HeadShard::new(shape, plan.tp, tp)?,
            attended: HeadShard::under_ulysses(shape, (plan.tp, tp), (plan.ulysses, ulysses))?,
            rows,
            row: (tokens, work.prefix + tokens),
            own: rows * dealt.own_tokens(ring, ulysses),
            chunk: dealt.ring_tokens(ring),
            dispatched: (all, share(ring, ulysses, tp)?),
            mesh,
        })
    }

    /// Choices that this rank computes in a layer, experts being equally busy.
    fn choices(&self, layer: usize) -> usize {
        let ep = self.mesh.size_of(self.plan.ep);
        (self.dispatched.0 * self.sizes.top_k[layer]).div_ceil(ep)
    }

    /// Seconds of one layer, and those of its attention among them.
    pub(super) fn layer(
        &self,
        machine: &Machine,
        layer: usize,
    ) -> Result<(f64, f64), ParallelError> {
        let (shape, l) = (&self.sizes.shape, &self.sizes.shape.layers[layer]);
        let weights = self
            .sizes
            .layer(&self.plan, self.at[Axis::Tp as usize], layer)?;
        let bytes = machine.weights.bytes() as f64;
        // The time of two operations a weight and token, but never less than reading the weights takes.
        let product = |tokens: usize, weights: u64, rate: f64| {
            (2.0 * tokens as f64 * weights as f64 / rate)
                .max(weights as f64 * bytes / machine.memory_rate)
        };
        let router = (l.experts * shape.hidden) as u64;
        let split = self.plan.shared_expert == SharedExpert::Split;
        let shared = if split { self.own } else { self.dispatched.1 };
        let dense = product(self.own, weights.attention + router, machine.dense)
            + product(shared, weights.shared, machine.dense);
        let each = (3 * shape.hidden * l.expert_inner / self.inner_parts()) as f64;
        let experts = (2.0 * self.choices(layer) as f64 * each / machine.experts)
            .max(weights.experts as f64 * bytes / machine.memory_rate);
        let attention = self.attention_flops() / machine.attention;
        let streamed = (self.own * shape.hidden * STREAM_PASSES) as f64;
        let streamed = streamed * ACTIVATION_BYTES as f64 / machine.memory_rate;
        Ok((dense + experts + attention + streamed, attention))
    }

    /// Operations of attention in one layer: special tokens counted as if they saw all keys.
    fn attention_flops(&self) -> f64 {
        let width = self.attended.q.len() * self.sizes.shape.head_dim;
        4.0 * (self.rows * self.chunk) as f64 * self.row.1 as f64 * width as f64
    }

    /// Parts that the inner width of routed experts is cut into.
    fn inner_parts(&self) -> usize {
        if self.plan.ep.contains(Axis::Tp) {
            1
        } else {
            self.plan.tp
        }
    }

    /// Bytes of the prefixes of `rows` rows that this rank holds.
    pub(super) fn prefix_bytes(&self, rows: usize) -> Result<u64, ParallelError> {
        let (prefix, ring) = (self.row.1 - self.row.0, self.plan.ring);
        let held = if ring > 1 && self.plan.ring_prefix == RingPrefix::Sharded {
            SequenceShards::new(prefix, ring, 1, TokenOrder::ZigZag)?
                .ring_tokens(self.at[Axis::Ring as usize])
        } else {
            prefix
        };
        let stage = self.at[Axis::Pp as usize];
        let layers = near_even_range(self.sizes.shape.layers.len(), self.plan.pp, stage)?.len();
        let token = 2 * layers * self.attended.kv.len() * self.sizes.shape.head_dim;
        Ok((rows * held * token) as u64 * ACTIVATION_BYTES)
    }

    /// Largest bytes alive inside a layer and at the ends of a pass, of `step_rows` rows of a step.
    pub(super) fn activation_bytes(&self, step_rows: usize) -> u64 {
        let shape = &self.sizes.shape;
        let (hidden, dim) = (shape.hidden, shape.head_dim);
        // The residual stream, its norm, a branch's output and one to spare.
        let stream = 4 * self.own * hidden;
        let width = |h: &HeadShard| (h.q.len() + 2 * h.kv.len()) * dim;
        let mut attention = self.own * width(&self.heads);
        if self.plan.ulysses > 1 {
            attention += self.rows * self.chunk * width(&self.attended);
        }
        if self.plan.ring > 1 {
            // Keys and values of two ranks at a time, past ones included where they travel.
            let keys = self.row.1.div_ceil(self.plan.ring);
            attention += 2 * self.rows * keys * 2 * self.attended.kv.len() * dim;
        }
        let of_experts = |(layer, l): (usize, &crate::LayerShape)| {
            let inner = 3 * l.expert_inner / self.inner_parts();
            let routed = self.choices(layer) * (2 * hidden + inner);
            routed.max(self.own * 3 * l.shared_inner.unwrap_or(0))
        };
        let experts = shape.layers.iter().enumerate().map(of_experts).max();
        // Where sequences are split, the whole rows exist before they are cut and after they are gathered.
        let whole = step_rows * self.row.0 * hidden;
        let ends = if self.mesh.size_of(AxisSet::SEQUENCE) > 1 || self.plan.pp > 1 {
            whole
        } else {
            0
        };
        let stem = 4 * self.row.0 * hidden;
        let inside = stream + attention.max(experts.unwrap_or(0));
        (inside.max(stem) + ends) as u64 * ACTIVATION_BYTES
    }
}
