//! Tokens on their way to experts and back.

use super::pass::PassRow;
use super::{Predictor, Routes};
use crate::eplb::Placement;
use crate::wire::all_to_all_v;
use crate::{Axis, ExpertDispatch, ModelShape, Moved, ParallelError, near_even_range};

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
enum Tokens {
    /// Row number and token, in the order the rank packs them.
    Named(Vec<(usize, usize)>),
    /// How many.
    Counted(usize),
}

impl<'a> Dispatch<'a> {
    /// `packs` has the rows of a pass for every guidance rank.
    pub(super) fn new(
        plan: &'a Predictor<'a>,
        routes: &'a Routes<'a>,
        rank: usize,
        packs: &[Vec<PassRow>],
    ) -> Result<Self, ParallelError> {
        let ranks = plan.group(rank, plan.plan.ep)?;
        let mut senders = Vec::with_capacity(ranks.len());
        for &member in &ranks {
            if ranks.len() > 1 {
                senders.push(tokens(plan, routes, member, packs)?);
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
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for tokens in &self.senders {
            let top_k = self.routes.top_k()[layer];
            let (sent, answered) = match (tokens, self.routes) {
                (Tokens::Named(tokens), Routes::Known { experts, .. }) => {
                    self.known(layer, tokens, &experts[layer], top_k)?
                }
                (Tokens::Named(tokens), _) => self.expected(layer, tokens.len(), top_k),
                (Tokens::Counted(tokens), _) => self.expected(layer, *tokens, top_k),
            };
            out.push(sent);
            back.push(answered);
        }
        // What rank `s` sends to `d` to compute comes back from `d` to `s`.
        let ranks = back.len();
        let back: Vec<Vec<usize>> = (0..ranks)
            .map(|d| (0..ranks).map(|s| back[s][d]).collect())
            .collect();
        Ok([out, back]
            .iter()
            .map(|counts| all_to_all_v(counts, self.index))
            .collect())
    }

    /// Elements to and from each rank for known choices.
    fn known(
        &self,
        layer: usize,
        tokens: &[(usize, usize)],
        rows: &[Vec<u32>],
        top_k: usize,
    ) -> Result<(Vec<usize>, Vec<usize>), ParallelError> {
        let mut choices = Vec::with_capacity(tokens.len() * top_k);
        for &(row, token) in tokens {
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

    /// Expected elements to and from each rank, rounded up.
    fn expected(&self, layer: usize, tokens: usize, top_k: usize) -> (Vec<usize>, Vec<usize>) {
        let (ranks, experts) = (self.senders.len(), self.shape.layers[layer].experts);
        let elsewhere = experts - experts / ranks;
        // A token misses a rank when all its choices, without repetition, fall elsewhere.
        let missed: f64 = (0..top_k)
            .map(|i| elsewhere.saturating_sub(i) as f64 / (experts - i) as f64)
            .product();
        let reached = (tokens as f64 * (1.0 - missed)).ceil() as usize;
        let choices = (tokens * top_k).div_ceil(ranks);
        let hidden = self.shape.hidden;
        (
            vec![2 + 2 * choices + reached * hidden; ranks],
            vec![choices * hidden; ranks],
        )
    }
}

/// The tokens `rank` dispatches.
fn tokens(
    plan: &Predictor<'_>,
    routes: &Routes<'_>,
    rank: usize,
    packs: &[Vec<PassRow>],
) -> Result<Tokens, ParallelError> {
    let at = plan.mesh.coordinates(rank)?;
    let index = |axis: Axis| at[axis as usize];
    let (ring, ulysses) = (index(Axis::Ring), index(Axis::Ulysses));
    let rows = &packs[index(Axis::Cfg)];
    let shards = plan.deal(rows)?;
    let all = shards.iter().map(|s| s.own_tokens(ring, ulysses)).sum();
    let share = if plan.plan.ep.contains(Axis::Tp) {
        // Tensor ranks have the same tokens, so each dispatches only its share of them.
        near_even_range(all, plan.plan.tp, index(Axis::Tp))?
    } else {
        0..all
    };
    if matches!(routes, Routes::Uniform { .. }) {
        return Ok(Tokens::Counted(share.len()));
    }
    let mut own = Vec::with_capacity(all);
    for (row, shards) in rows.iter().zip(&shards) {
        for range in shards.own_ranges(ring, ulysses) {
            own.extend(range.map(|token| (row.number, token)));
        }
    }
    Ok(Tokens::Named(own[share].to_vec()))
}
