//! How the ranks of a plan reach each other, and what they exchange within a layer.

use std::fmt::Debug;
use std::sync::Arc;

use kernels::cuda::{Comm, CudaError, Gpu, GpuTensor, Lane, Mark, Transfer};

use super::deal::Deal;
use crate::error::ModelError;

/// One rank's end of a group of GPUs. All ranks call the same operations in the same order.
///
/// [`Comm`] is the one for use; tests have others.
pub trait GpuGroup: Debug + Send + Sync {
    /// Place of this rank.
    fn rank(&self) -> usize;
    /// Ranks of the group.
    fn ranks(&self) -> usize;
    /// The GPU of this rank.
    fn gpu(&self) -> &Arc<Gpu>;
    /// Any transfers at once, see [`Comm::exchange`].
    ///
    /// # Errors
    /// `GroupEnded`, `Argument`, or what the driver says.
    fn exchange(&self, transfers: &[Transfer<'_>], lane: Lane) -> Result<(), CudaError>;
    /// Makes every rank's entry of `all [ranks, ..]`, where the own one is there already.
    ///
    /// # Errors
    /// Those of [`GpuGroup::exchange`].
    fn gather(&self, all: &GpuTensor, lane: Lane) -> Result<(), CudaError> {
        let own = all.narrow0(self.rank(), 1)?;
        let others = || (0..self.ranks()).filter(|rank| *rank != self.rank());
        let places: Vec<GpuTensor> = others()
            .map(|rank| all.narrow0(rank, 1))
            .collect::<Result<_, _>>()?;
        let sent = others().map(|to| Transfer::Send { to, tensor: &own });
        let received = others().zip(&places);
        let received = received.map(|(from, tensor)| Transfer::Receive { from, tensor });
        let transfers: Vec<Transfer<'_>> = sent.chain(received).collect();
        self.exchange(&transfers, lane)
    }
    /// Marks this place of [`Lane::Beside`].
    ///
    /// # Errors
    /// What the driver says.
    fn mark(&self) -> Result<Mark, CudaError>;
    /// Lets [`Lane::Beside`] go on only after `mark`.
    ///
    /// # Errors
    /// What the driver says.
    fn wait_for(&self, mark: &Mark) -> Result<(), CudaError>;
    /// Waits until everything enqueued has run; results count only then.
    ///
    /// # Errors
    /// `GroupEnded`, or a kernel that failed.
    fn wait(&self) -> Result<(), CudaError>;
    /// Ends the group on this rank; the others fail by their deadline.
    fn abort(&self, reason: &str);
}

impl GpuGroup for Comm {
    fn rank(&self) -> usize {
        Self::rank(self)
    }

    fn ranks(&self) -> usize {
        Self::ranks(self)
    }

    fn gpu(&self) -> &Arc<Gpu> {
        Self::gpu(self)
    }

    fn exchange(&self, transfers: &[Transfer<'_>], lane: Lane) -> Result<(), CudaError> {
        Self::exchange(self, transfers, lane)
    }

    fn gather(&self, all: &GpuTensor, lane: Lane) -> Result<(), CudaError> {
        self.all_gather(&all.narrow0(Self::rank(self), 1)?, all, lane)
    }

    fn mark(&self) -> Result<Mark, CudaError> {
        Self::mark(self)
    }

    fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        Self::wait_for(self, mark)
    }

    fn wait(&self) -> Result<(), CudaError> {
        Self::wait(self)
    }

    fn abort(&self, reason: &str) {
        self.aborter().abort(reason);
    }
}

/// The group of a pass, and which tokens each rank of it has.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    pub(crate) group: Arc<dyn GpuGroup>,
    /// First token of each rank, and the end.
    starts: Vec<usize>,
    me: usize,
}

/// Tensors on their way; the list that is handed over borrows them.
#[derive(Debug, Default)]
pub(crate) struct Travel {
    sent: Vec<(usize, GpuTensor)>,
    received: Vec<(usize, GpuTensor)>,
}

impl Travel {
    pub(crate) fn send(&mut self, to: usize, tensor: GpuTensor) {
        self.sent.push((to, tensor));
    }

    pub(crate) fn receive(&mut self, from: usize, tensor: GpuTensor) {
        self.received.push((from, tensor));
    }

    /// All of it as one operation.
    pub(crate) fn go(&self, group: &dyn GpuGroup, lane: Lane) -> Result<(), ModelError> {
        let sent = self.sent.iter();
        let sent = sent.map(|(to, tensor)| Transfer::Send { to: *to, tensor });
        let received = self.received.iter();
        let received = received.map(|(from, tensor)| Transfer::Receive {
            from: *from,
            tensor,
        });
        let all: Vec<Transfer<'_>> = sent.chain(received).collect();
        Ok(group.exchange(&all, lane)?)
    }
}

impl Ranks {
    pub(crate) fn new(group: &Arc<dyn GpuGroup>, deal: &Deal) -> Self {
        Self {
            group: group.clone(),
            starts: deal.starts.clone(),
            me: deal.me,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (me, ranks) = (self.me, self.starts.len() - 1);
        (0..ranks).filter(move |rank| *rank != me)
    }

    /// The rows of `rank` of a tensor `[all tokens, ..]`.
    fn part(&self, all: &GpuTensor, rank: usize) -> Result<GpuTensor, ModelError> {
        let (start, end) = (self.starts[rank], self.starts[rank + 1]);
        Ok(all.narrow0(start, end - start)?)
    }

    /// Every rank's rows of each tensor `[all tokens, ..]` to all ranks.
    pub(crate) fn gather(&self, tensors: &[&GpuTensor]) -> Result<(), ModelError> {
        let mut travel = Travel::default();
        for tensor in tensors {
            for rank in self.others() {
                travel.send(rank, self.part(tensor, self.me)?);
                travel.receive(rank, self.part(tensor, rank)?);
            }
        }
        travel.go(&*self.group, Lane::Compute)
    }

    /// Parts of sums to the ranks that have the tokens: `sums [all tokens + (ranks - 1) own tokens, ..]` has
    /// this rank's parts for all tokens first, and gets those of the other ranks for its own behind them.
    pub(crate) fn scatter(&self, sums: &GpuTensor) -> Result<(), ModelError> {
        let mut travel = Travel::default();
        let own = self.starts[self.me + 1] - self.starts[self.me];
        let mut at = self.starts[self.starts.len() - 1];
        for rank in self.others() {
            travel.send(rank, self.part(sums, rank)?);
            travel.receive(rank, sums.narrow0(at, own)?);
            at += own;
        }
        travel.go(&*self.group, Lane::Compute)
    }

    /// Lets what goes beside begin only after what has been enqueued.
    pub(crate) fn begin_beside(&self) -> Result<(), ModelError> {
        let written = self.group.gpu().mark()?;
        Ok(self.group.wait_for(&written)?)
    }

    /// Where the parts of each own token's sum are in such a tensor, by rank: `[own tokens * ranks]`.
    pub(crate) fn places(&self) -> Vec<i32> {
        let ranks = self.starts.len() - 1;
        let (start, end) = (self.starts[self.me], self.starts[self.me + 1]);
        let (all, own) = (self.starts[ranks], end - start);
        let place = |token: usize, rank: usize| match rank.cmp(&self.me) {
            std::cmp::Ordering::Equal => start + token,
            std::cmp::Ordering::Less => all + rank * own + token,
            std::cmp::Ordering::Greater => all + (rank - 1) * own + token,
        };
        let narrow = |row: usize| i32::try_from(row).unwrap_or(i32::MAX);
        (0..own)
            .flat_map(|token| (0..ranks).map(move |rank| narrow(place(token, rank))))
            .collect()
    }

    /// Own tokens with the heads of every rank, `[ranks, own tokens, width]`, become all tokens with own heads,
    /// `[all tokens, width]`.
    pub(crate) fn to_heads(&self, from: &GpuTensor, to: &GpuTensor) -> Result<(), ModelError> {
        self.turn(from, to, true)
    }

    /// The way back: `[all tokens, width]` becomes `[ranks, own tokens, width]`.
    pub(crate) fn to_tokens(&self, from: &GpuTensor, to: &GpuTensor) -> Result<(), ModelError> {
        self.turn(from, to, false)
    }

    fn turn(&self, from: &GpuTensor, to: &GpuTensor, heads: bool) -> Result<(), ModelError> {
        let own = self.starts[self.me + 1] - self.starts[self.me];
        let slot = |tensor: &GpuTensor, rank: usize| tensor.narrow0(rank * own, own);
        let mut travel = Travel::default();
        for rank in 0..self.starts.len() - 1 {
            if heads {
                travel.send(rank, slot(from, rank)?);
                travel.receive(rank, self.part(to, rank)?);
            } else {
                travel.send(rank, self.part(from, rank)?);
                travel.receive(rank, slot(to, rank)?);
            }
        }
        travel.go(&*self.group, Lane::Compute)
    }
}
