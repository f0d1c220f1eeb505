//! Tokens on their way to experts and back.

use super::pass::PassRow;
use super::{Predictor, Routes};
use crate::eplb::Placement;
use crate::wire::{ELEMENT_BYTES, all_to_all_v};
use crate::{
    Axis, ExpertDispatch, ModelShape, Moved, ParallelError, SequenceShards, near_even_range,
};

/// The tokens that the ranks of one expert group dispatch in one pass.
#[derive(Debug)]
pub(super) struct Dispatch<'a> {
    shape: &'a ModelShape,
    routes: &'a Routes<'a>,
    /// This rank's place in the group.
    index: usize,
    /// What each rank of the group dispatches.
    senders: Vec<Tokens>,
}

/// Tokens that one rank dispatches.
#[derive(Debug)]
struct Tokens {
    count: usize,
    /// Row number and token, in the order the rank packs them; empty where only the count matters.
    named: Vec<(usize, usize)>,
}

impl<'a> Dispatch<'a> {
    /// `packs` has the rows of a pass for every guidance rank.
    pub(super) fn new(
        plan: &'a Predictor<'a>,
        routes: &'a Routes<'a>,
        rank: usize,
        packs: &[Vec<PassRow>],
    ) -> Result<Self, ParallelError> {
        let mut senders = Vec::new();
        if plan.mesh.size_of(plan.plan.ep) > 1 {
            let dealt: Vec<_> = packs
                .iter()
                .map(|p| plan.deal(p))
                .collect::<Result<_, _>>()?;
            for member in plan.group(rank, plan.plan.ep)? {
                senders.push(tokens(plan, routes, member, (packs, &dealt))?);
            }
        }
        Ok(Self {
            shape: plan.shape,
            routes,
            index: plan.mesh.index_in(rank, plan.plan.ep)?,
            senders,
        })
    }

    /// Bytes of this rank on the way out and on the way back; nothing where experts are not spread.
    pub(super) fn moved(&self, layer: usize) -> Result<Vec<Moved>, ParallelError> {
        if self.senders.is_empty() {
            return Ok(Vec::new());
        }
        let top_k = self.routes.top_k()[layer];
        let Routes::Known { experts, .. } = self.routes else {
            return Ok(self.expected(layer, top_k).to_vec());
        };
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for sender in &self.senders {
            let (sent, answered) = self.known(layer, sender, &experts[layer], top_k)?;
            out.push(sent);
            back.push(answered);
        }
        // What rank `s` sends to `d` to compute comes back from `d` to `s`.
        let ranks = back.len();
        let back: Vec<Vec<usize>> = (0..ranks)
            .map(|d| (0..ranks).map(|s| back[s][d]).collect())
            .collect();
        let moved = |counts: &Vec<Vec<usize>>| all_to_all_v(counts, self.index);
        Ok(vec![moved(&out), moved(&back)])
    }

    /// Elements to and from each rank for known choices.
    fn known(
        &self,
        layer: usize,
        sender: &Tokens,
        rows: &[Vec<u32>],
        top_k: usize,
    ) -> Result<(Vec<usize>, Vec<usize>), ParallelError> {
        let mut choices = Vec::with_capacity(sender.count * top_k);
        for &(row, token) in &sender.named {
            let found = rows
                .get(row)
                .and_then(|row| row.get(token * top_k..(token + 1) * top_k));
            choices.extend_from_slice(found.ok_or(ParallelError::Mismatch {
                field: "experts of a token",
                expected: top_k,
                got: 0,
            })?);
        }
        let placement =
            Placement::contiguous(self.shape.layers[layer].experts, self.senders.len())?;
        let dispatch = ExpertDispatch::new(&placement, &choices, top_k, self.shape.hidden, 0)?;
        Ok((dispatch.sent_elements(), dispatch.answered_elements()))
    }

    /// Expected bytes on the way out and on the way back, rounded up for each pair of ranks.
    fn expected(&self, layer: usize, top_k: usize) -> [Moved; 2] {
        let (ranks, experts) = (self.senders.len(), self.shape.layers[layer].experts);
        let elsewhere = experts - experts / ranks;
        // A token misses a rank when all its choices, without repetition, fall elsewhere.
        let missed: f64 = (0..top_k)
            .map(|i| elsewhere.saturating_sub(i) as f64 / (experts - i) as f64)
            .product();
        let hidden = self.shape.hidden;
        let choices = |tokens: usize| (tokens * top_k).div_ceil(ranks);
        let reached = |tokens: usize| (tokens as f64 * (1.0 - missed)).ceil() as usize;
        let out = |tokens| 2 + 2 * choices(tokens) + reached(tokens) * hidden;
        let back = |tokens| choices(tokens) * hidden;
        let to_all = |each: &dyn Fn(usize) -> usize| {
            (ranks - 1) as u64 * each(self.senders[self.index].count) as u64 * ELEMENT_BYTES
        };
        let from_all = |each: &dyn Fn(usize) -> usize| {
            let others = (0..ranks).filter(|&rank| rank != self.index);
            let elements = others.map(|rank| each(self.senders[rank].count) as u64);
            elements.sum::<u64>() * ELEMENT_BYTES
        };
        [
            Moved {
                sent: to_all(&out),
                received: from_all(&out),
            },
            Moved {
                sent: from_all(&back),
                received: to_all(&back),
            },
        ]
    }
}

/// The tokens `rank` dispatches.
fn tokens(
    plan: &Predictor<'_>,
    routes: &Routes<'_>,
    rank: usize,
    (packs, dealt): (&[Vec<PassRow>], &[Vec<SequenceShards>]),
) -> Result<Tokens, ParallelError> {
    let at = plan.mesh.coordinates(rank)?;
    let index = |axis: Axis| at[axis as usize];
    let (ring, ulysses) = (index(Axis::Ring), index(Axis::Ulysses));
    let (rows, shards) = (&packs[index(Axis::Cfg)], &dealt[index(Axis::Cfg)]);
    let all = shards.iter().map(|s| s.own_tokens(ring, ulysses)).sum();
    let share = if plan.plan.ep.contains(Axis::Tp) {
        // Tensor ranks have the same tokens, so each dispatches only its share of them.
        near_even_range(all, plan.plan.tp, index(Axis::Tp))?
    } else {
        0..all
    };
    let count = share.len();
    let mut named = Vec::new();
    if matches!(routes, Routes::Known { .. }) {
        for (row, shards) in rows.iter().zip(shards) {
            for range in shards.own_ranges(ring, ulysses) {
                named.extend(range.map(|token| (row.number, token)));
            }
        }
        named = named[share].to_vec();
    }
    Ok(Tokens { count, named })
}
