//! One operation of a group, as this rank knows it.

use std::{ops::Range, sync::Arc};

use super::{Heard, Mine, Part};
use parallel::{Op, near_even_range};

/// Rank `index`'s part of a buffer that `parts` ranks share.
pub(super) fn chunk(total: usize, parts: usize, index: usize) -> Range<usize> {
    // Every index here is that of a rank of the group, so there is always a part.
    near_even_range(total, parts, index).unwrap_or_default()
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) mine: Option<Mine>,
    pub(super) heard: Vec<Option<Heard>>,
    /// This rank's part of a sum, once it is formed.
    pub(super) own_sum: Option<Arc<Vec<f32>>>,
    pub(super) sums: Vec<Option<Vec<f32>>>,
}

impl Slot {
    /// The body of rank `index` is here, or has gone into the sum.
    pub(super) fn has_body(&self, index: usize) -> bool {
        let here = |h: &Heard| h.body.is_some();
        self.own_sum.is_some() || self.heard[index].as_ref().is_some_and(here)
    }

    /// Something of rank `index` has not come yet.
    pub(super) fn lacks(&self, index: usize, op: Op) -> bool {
        !self.has_body(index) || (op == Op::AllReduce && self.sums[index].is_none())
    }

    /// The first rank that keeps the operation from completing.
    pub(super) fn missing(&self, own: usize) -> Option<usize> {
        let op = self.mine.as_ref()?.op;
        let others = || (0..self.heard.len()).filter(|&index| index != own);
        let silent = others().find(|&index| self.heard[index].is_none());
        silent.or_else(|| others().find(|&index| self.lacks(index, op)))
    }

    pub(super) fn body(&mut self, from: usize) -> Vec<f32> {
        let heard = self.heard[from].as_mut();
        heard.and_then(|h| h.body.take()).unwrap_or_default()
    }

    /// This rank's part of the sum of all buffers, in rank order.
    pub(super) fn sum(&mut self, size: usize, index: usize) -> Vec<f32> {
        let own = self.mine.as_ref().and_then(|mine| {
            let data = mine.input.first()?;
            Some((Arc::clone(data), chunk(data.len(), size, index)))
        });
        let own = own
            .as_ref()
            .map_or(&[][..], |(data, part)| &data[part.clone()]);
        let mut sum = Vec::new();
        for from in 0..size {
            let body;
            let part = if from == index {
                own
            } else {
                body = self.body(from);
                if from == 0 {
                    sum = body;
                    continue;
                }
                &body
            };
            if from == 0 {
                sum = part.to_vec();
                continue;
            }
            for (s, x) in sum.iter_mut().zip(part) {
                *s += x;
            }
        }
        sum
    }

    /// The pieces of a complete operation's result.
    pub(super) fn result(&mut self, size: usize, index: usize) -> Vec<Part> {
        let Some(mine) = &self.mine else {
            return Vec::new();
        };
        let (op, input) = (mine.op, mine.input.clone());
        let whole = |data: &Arc<Vec<f32>>| Part::Own(Arc::clone(data), 0..data.len());
        match op {
            Op::AllReduce | Op::ReduceScatter => {
                let own = self.own_sum.take().unwrap_or_default();
                if op == Op::ReduceScatter {
                    return vec![whole(&own)];
                }
                let sum = |from: usize| self.sums[from].take().unwrap_or_default();
                let mut sum = sum;
                (0..size)
                    .map(|from| {
                        if from == index {
                            whole(&own)
                        } else {
                            Part::Got(sum(from))
                        }
                    })
                    .collect()
            }
            Op::AllGather | Op::AllToAll | Op::AllToAllV => (0..size)
                .map(|from| {
                    if from != index {
                        return Part::Got(self.body(from));
                    }
                    match op {
                        Op::AllGather => whole(&input[0]),
                        Op::AllToAllV => whole(&input[index]),
                        _ => {
                            let part = chunk(input[0].len(), size, index);
                            Part::Own(Arc::clone(&input[0]), part)
                        }
                    }
                })
                .collect(),
            Op::Broadcast { root: from } => vec![self.one(from, index, &input)],
            Op::RingShift { hop } => vec![self.one((index + size - hop) % size, index, &input)],
            Op::Barrier | Op::Send { .. } | Op::Recv { .. } => Vec::new(),
        }
    }

    /// The buffer of one rank.
    pub(super) fn one(&mut self, from: usize, index: usize, input: &[Arc<Vec<f32>>]) -> Part {
        if from == index {
            Part::Own(Arc::clone(&input[0]), 0..input[0].len())
        } else {
            Part::Got(self.body(from))
        }
    }
}
