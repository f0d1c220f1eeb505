//! One rank's end of a group: what each operation does with everybody's buffers.

use std::sync::Arc;

use super::super::{check_member, check_parts};
use super::state::{Ready, Shared, Ticket};
use crate::{Collective, Op, ParallelError, Pending, Traffic, ownership::chunk};

/// One rank's end of a group of threads. Dropping it tells the others that the rank has left.
#[derive(Debug)]
pub struct ThreadGroup {
    shared: Arc<Shared>,
    index: usize,
}

impl ThreadGroup {
    /// All ends of a group.
    pub(super) fn ends(shared: &Arc<Shared>) -> impl Iterator<Item = Self> {
        (0..shared.size()).map(|index| Self {
            shared: Arc::clone(shared),
            index,
        })
    }

    /// Number of this rank in the mesh.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.ranks[self.index]
    }

    /// Starts an operation; `finish` turns everybody's buffers into this rank's result.
    fn start<T>(
        &self,
        op: Op,
        input: Vec<Vec<f32>>,
        finish: impl FnOnce(&View, Ready) -> T + Send + 'static,
    ) -> Result<Pending<T>, ParallelError> {
        let ticket = self.shared.enter(self.index, op, input)?;
        let view = View {
            shared: Arc::clone(&self.shared),
            index: self.index,
            op,
        };
        Ok(Pending::new(move || {
            // The ticket is dropped after the result is made: it frees the buffers.
            let ticket: Ticket = ticket;
            ticket.all().map(|ready| finish(&view, ready))
        }))
    }
}

/// What a finishing operation needs to know.
struct View {
    shared: Arc<Shared>,
    index: usize,
    op: Op,
}

impl View {
    /// Copies elements of rank `from`'s buffer to this rank's result.
    fn take(&self, out: &mut Vec<f32>, from: usize, data: &[f32]) {
        self.shared.count(self.op, from, self.index, data.len());
        out.extend_from_slice(data);
    }

    /// Part `owner` of the sum of all buffers, in rank order, on behalf of its owner.
    fn sum(&self, ready: &Ready, owner: usize) -> Vec<f32> {
        let size = self.shared.size();
        let range = chunk(ready.inputs[0][0].len(), size, owner);
        let part = |from: usize| {
            self.shared.count(self.op, from, owner, range.len());
            &ready.inputs[from][0][range.clone()]
        };
        let mut sum = part(0).to_vec();
        for from in 1..size {
            for (s, x) in sum.iter_mut().zip(part(from)) {
                *s += x;
            }
        }
        sum
    }

    fn all_reduce(&self, ready: &Ready) -> Vec<f32> {
        let size = self.shared.size();
        // The own part first, so that ranks that wait together share the work.
        for owner in (self.index..size).chain(0..self.index) {
            ready.sums[owner].get_or_init(|| self.sum(ready, owner));
        }
        let mut out = Vec::with_capacity(ready.inputs[0][0].len());
        for owner in 0..size {
            let part = ready.sums[owner].get_or_init(|| self.sum(ready, owner));
            self.take(&mut out, owner, part);
        }
        out
    }

    fn all_to_all(&self, ready: &Ready) -> Vec<f32> {
        let elements = ready.inputs[0][0].len();
        let range = chunk(elements, self.shared.size(), self.index);
        let mut out = Vec::with_capacity(elements);
        for (from, input) in ready.inputs.iter().enumerate() {
            self.take(&mut out, from, &input[0][range.clone()]);
        }
        out
    }

    /// A copy of one buffer of rank `from`.
    fn copy(&self, ready: &Ready, from: usize, part: usize) -> Vec<f32> {
        let data = &ready.inputs[from][part];
        let mut out = Vec::with_capacity(data.len());
        self.take(&mut out, from, data);
        out
    }
}

impl Collective for ThreadGroup {
    fn index(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        self.shared.size()
    }

    fn all_reduce(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        self.start(Op::AllReduce, vec![data], |view, ready| {
            view.all_reduce(&ready)
        })
    }

    fn reduce_scatter(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_parts(data.len(), self.size())?;
        self.start(Op::ReduceScatter, vec![data], |view, ready| {
            view.sum(&ready, view.index)
        })
    }

    fn all_gather(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        self.start(Op::AllGather, vec![data], |view, ready| {
            let mut out = Vec::with_capacity(ready.inputs.len() * ready.inputs[0][0].len());
            for (from, input) in ready.inputs.iter().enumerate() {
                view.take(&mut out, from, &input[0]);
            }
            out
        })
    }

    fn all_to_all(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_parts(data.len(), self.size())?;
        self.start(Op::AllToAll, vec![data], |view, ready| {
            view.all_to_all(&ready)
        })
    }

    fn all_to_all_v(&self, parts: Vec<Vec<f32>>) -> Result<Pending<Vec<Vec<f32>>>, ParallelError> {
        if parts.len() != self.size() {
            return Err(ParallelError::Mismatch {
                field: "parts",
                expected: self.size(),
                got: parts.len(),
            });
        }
        self.start(Op::AllToAllV, parts, |view, ready| {
            let own = view.index;
            (0..ready.inputs.len())
                .map(|from| view.copy(&ready, from, own))
                .collect()
        })
    }

    fn broadcast(&self, root: usize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_member(root, self.size())?;
        self.start(Op::Broadcast { root }, vec![data], move |view, ready| {
            view.copy(&ready, root, 0)
        })
    }

    fn ring_shift(&self, hop: isize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        let size = self.size();
        // A group has at most MAX_RANKS ranks, so its size is an isize.
        let hop = hop.rem_euclid(size as isize) as usize;
        let from = (self.index + size - hop) % size;
        self.start(Op::RingShift { hop }, vec![data], move |view, ready| {
            view.copy(&ready, from, 0)
        })
    }

    fn barrier(&self) -> Result<Pending<()>, ParallelError> {
        self.start(Op::Barrier, Vec::new(), |_, _| ())
    }

    fn send(&self, to: usize, data: Vec<f32>) -> Result<(), ParallelError> {
        check_member(to, self.size())?;
        self.shared.post(self.index, to, data)
    }

    fn recv(&self, from: usize) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_member(from, self.size())?;
        let ticket = self.shared.claim(from, self.index)?;
        Ok(Pending::new(move || ticket.mail(from)))
    }

    fn abort(&self, reason: &str) {
        self.shared.world.fail(ParallelError::Aborted {
            rank: self.rank(),
            reason: reason.into(),
        });
    }

    fn traffic(&self) -> Traffic {
        self.shared.traffic(self.index)
    }
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        self.shared.leave(self.index);
    }
}
