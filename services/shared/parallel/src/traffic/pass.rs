//! One packed pass through the layers of one rank.

use super::dispatch::Dispatch;
use super::{Predictor, Routes, Tally};
use crate::wire::ELEMENT_BYTES;
use crate::{
    Axis, AxisSet, HeadShard, LayerShape, Moved, Op, ParallelError, RingPrefix, SequenceShards,
    SharedExpert, TokenOrder, near_even_range,
};

/// One row of a pass.
#[derive(Debug, Clone)]
pub(super) struct PassRow {
    /// Among the rows of all jobs, over all ranks.
    pub(super) number: usize,
    /// Fresh tokens, over all ranks.
    pub(super) tokens: usize,
    /// Tokens before the fresh ones.
    pub(super) past: usize,
    pub(super) order: TokenOrder,
}

/// What the operations of a pass carry, in elements, and who takes part.
struct Buffers {
    rank: usize,
    hidden: usize,
    /// Packed tokens of the rank.
    own: usize,
    /// Padded tokens of all rows that a rank's part of an exchange has room for.
    piece: usize,
    /// Elements of queries, and of keys, that one Ulysses rank attends with.
    columns: (usize, usize),
    /// Elements of the keys and values of each rank of the ring.
    keys: Vec<usize>,
}

/// What makes a layer move what another moves; nothing where each token's choices count.
type LayerKind = Option<(LayerShape, usize, bool)>;

impl Predictor<'_> {
    fn kind(&self, layer: usize, short: bool) -> LayerKind {
        let Routes::Uniform { top_k } = self.routes else {
            return None;
        };
        Some((self.shape.layers[layer], top_k[layer], short))
    }

    /// How the rows of a pass are dealt to the ranks of a sequence group.
    pub(super) fn deal(&self, rows: &[PassRow]) -> Result<Vec<SequenceShards>, ParallelError> {
        let (ring, ulysses) = (self.plan.ring, self.plan.ulysses);
        rows.iter()
            .map(|row| SequenceShards::new(row.tokens, ring, ulysses, row.order))
            .collect()
    }

    fn buffers(&self, rank: usize, rows: &[PassRow]) -> Result<Buffers, ParallelError> {
        let at = self.mesh.coordinates(rank)?;
        let index = |axis: Axis| at[axis as usize];
        let shards = self.deal(rows)?;
        let (tp, ulysses) = (
            (self.plan.tp, index(Axis::Tp)),
            (self.plan.ulysses, index(Axis::Ulysses)),
        );
        let heads = HeadShard::under_ulysses(self.shape, tp, ulysses)?;
        let dim = self.shape.head_dim;
        let spread = self.plan.ring > 1 && self.plan.ring_prefix == RingPrefix::Sharded;
        let mut keys = Vec::with_capacity(self.plan.ring);
        for source in 0..self.plan.ring {
            let mut tokens = 0;
            for (row, dealt) in rows.iter().zip(&shards) {
                tokens += dealt.ring_tokens(source);
                if spread {
                    let order = TokenOrder::ZigZag;
                    let past = SequenceShards::new(row.past, self.plan.ring, 1, order)?;
                    tokens += past.ring_tokens(source);
                }
            }
            keys.push(2 * tokens * heads.kv.len() * dim);
        }
        let (ring, ulysses) = (index(Axis::Ring), index(Axis::Ulysses));
        Ok(Buffers {
            rank,
            hidden: self.shape.hidden,
            own: shards.iter().map(|s| s.own_tokens(ring, ulysses)).sum(),
            piece: shards.iter().map(SequenceShards::piece).sum(),
            columns: (heads.q.len() * dim, heads.kv.len() * dim),
            keys,
        })
    }

    /// Counts one pass of `rank`. `packs` has the rows of every guidance rank; `hidden` says whether hidden
    /// states are wanted, or caches only.
    pub(super) fn pass(
        &self,
        rank: usize,
        packs: &[Vec<PassRow>],
        dispatch: &Dispatch<'_>,
        hidden: bool,
        tally: &mut Tally,
    ) -> Result<(), ParallelError> {
        let at = self.mesh.coordinates(rank)?;
        let buffers = self.buffers(rank, &packs[at[Axis::Cfg as usize]])?;
        let (stages, stage) = (self.plan.pp, at[Axis::Pp as usize]);
        let last = stage + 1 == stages;
        let stream = buffers.own * buffers.hidden;
        if stage > 0 {
            let from = stage - 1;
            tally.add(Axis::Pp.into(), Op::Recv { from }, rank, stream)?;
        }
        let layers = near_even_range(self.shape.layers.len(), stages, stage)?;
        let mut before: Option<(LayerKind, Tally)> = None;
        for layer in layers.clone() {
            let short = last && !hidden && layer + 1 == layers.end;
            let kind = self.kind(layer, short);
            let alike = before
                .as_ref()
                .filter(|(seen, _)| kind.is_some() && *seen == kind);
            if let Some((_, one)) = alike {
                tally.add_all(one);
                continue;
            }
            let mut one = Tally::new(&self.plan)?;
            self.attention(&buffers, short, &mut one)?;
            if !short {
                self.mixture(layer, &buffers, dispatch, &mut one)?;
            }
            tally.add_all(&one);
            before = Some((kind, one));
        }
        if !last {
            let to = stage + 1;
            tally.add(Axis::Pp.into(), Op::Send { to }, rank, stream)?;
        } else if hidden {
            let padded = buffers.piece * buffers.hidden;
            tally.add(AxisSet::SEQUENCE, Op::AllGather, rank, padded)?;
        }
        Ok(())
    }

    /// Attention; in `short` only as far as keys and values.
    fn attention(
        &self,
        buffers: &Buffers,
        short: bool,
        tally: &mut Tally,
    ) -> Result<(), ParallelError> {
        let &Buffers { rank, piece, .. } = buffers;
        let (q, kv) = buffers.columns;
        let ulysses = AxisSet::from(Axis::Ulysses);
        let parts = self.plan.ulysses * piece;
        tally.add(ulysses, Op::AllToAll, rank, parts * (q + 2 * kv))?;
        if short {
            return Ok(());
        }
        let ring = self.plan.ring;
        let index = self.mesh.index_in(rank, Axis::Ring.into())?;
        let bytes = |source: usize| buffers.keys[source % ring] as u64 * ELEMENT_BYTES;
        for step in 1..ring {
            // In each step a rank passes on what it got in the one before, first its own.
            let moved = Moved {
                sent: bytes(index + ring + 1 - step),
                received: bytes(index + ring - step),
            };
            tally.add_moved(Axis::Ring.into(), Op::RingShift { hop: 1 }, moved);
        }
        tally.add(ulysses, Op::AllToAll, rank, parts * q)?;
        let stream = buffers.own * buffers.hidden;
        tally.add(Axis::Tp.into(), Op::AllReduce, rank, stream)
    }

    /// Routed and shared experts of one layer.
    fn mixture(
        &self,
        layer: usize,
        buffers: &Buffers,
        dispatch: &Dispatch<'_>,
        tally: &mut Tally,
    ) -> Result<(), ParallelError> {
        let &Buffers {
            rank, hidden, own, ..
        } = buffers;
        for moved in dispatch.moved(layer)? {
            tally.add_moved(self.plan.ep, Op::AllToAllV, moved);
        }
        let tp = AxisSet::from(Axis::Tp);
        let split = self.shape.layers[layer].shared_inner.is_some()
            && self.plan.shared_expert == SharedExpert::Split;
        if self.plan.ep.contains(Axis::Tp) && !split {
            let share = own.div_ceil(self.plan.tp);
            return tally.add(tp, Op::AllGather, rank, share * hidden);
        }
        tally.add(tp, Op::AllReduce, rank, own * hidden)
    }
}
