//! How many bytes an operation moves, as pure functions.
//!
//! These are the algorithms a plan's cost is computed with. A sum is formed by its owner: each rank
//! sends every other rank that rank's part, and for an all-reduce sends its finished part back to
//! all. That moves `2 (p - 1) / p` of the buffer per rank, as a ring does, in two steps.

use super::{Moved, Op};
use crate::ownership::chunk;

/// Bytes of one element.
pub const ELEMENT_BYTES: u64 = 4;

/// Bytes that rank `index` of `size` moves in `op`, with `elements` in its buffer (for
/// [`Op::AllGather`] its own, before gathering; for a broadcast the root's).
///
/// [`Op::AllToAllV`] depends on every rank's parts: see [`all_to_all_v`]. For [`Op::RingShift`]
/// every buffer is taken to have `elements`.
#[must_use]
pub fn moved(op: Op, size: usize, index: usize, elements: usize) -> Moved {
    let others = size as u64 - 1;
    let all = elements as u64;
    let own = chunk(elements, size, index).len() as u64;
    let (sent, received) = match op {
        // To the owners and from them; then the own part to all, and the other parts from them.
        Op::AllReduce => (all - own + others * own, others * own + all - own),
        Op::ReduceScatter | Op::AllToAll => (all - own, others * own),
        Op::AllGather => (others * all, others * all),
        Op::Broadcast { root } if root == index => (others * all, 0),
        Op::Broadcast { .. } => (0, all),
        Op::RingShift { hop } if hop % size == 0 => (0, 0),
        Op::RingShift { .. } => (all, all),
        Op::Send { to } if to != index => (all, 0),
        Op::Recv { from } if from != index => (0, all),
        Op::AllToAllV | Op::Barrier | Op::Send { .. } | Op::Recv { .. } => (0, 0),
    };
    Moved {
        sent: sent * ELEMENT_BYTES,
        received: received * ELEMENT_BYTES,
    }
}

/// Bytes that rank `index` moves in an all-to-all in which rank `s` sends `counts[s][d]` elements
/// to rank `d`.
#[must_use]
pub fn all_to_all_v(counts: &[Vec<usize>], index: usize) -> Moved {
    let others = (0..counts.len()).filter(|&rank| rank != index);
    let sum = |pick: &dyn Fn(usize) -> usize| -> u64 {
        others.clone().map(|rank| pick(rank) as u64).sum()
    };
    Moved {
        sent: sum(&|to| counts[index][to]) * ELEMENT_BYTES,
        received: sum(&|from| counts[from][index]) * ELEMENT_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What one rank sends another receives.
        #[test]
        fn nothing_is_lost_on_the_wire(size in 1_usize..9, n in 0_usize..50, root in 0_usize..9) {
            let root = root % size;
            for op in [
                Op::AllReduce, Op::ReduceScatter, Op::AllGather, Op::AllToAll,
                Op::Broadcast { root }, Op::RingShift { hop: root }, Op::Barrier,
            ] {
                let (mut sent, mut received) = (0, 0);
                for index in 0..size {
                    let m = moved(op, size, index, n);
                    (sent, received) = (sent + m.sent, received + m.received);
                }
                prop_assert_eq!(sent, received, "{}", op);
            }
        }
    }

    #[test]
    fn an_all_reduce_moves_two_buffers_less_one_part_each() {
        let m = moved(Op::AllReduce, 4, 2, 100);
        assert_eq!((m.sent, m.received), (600, 600));
        assert_eq!(moved(Op::AllReduce, 1, 0, 100), Moved::default());
    }
}
