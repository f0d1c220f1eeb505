//! What ranks say to each other: one trait, several backends, one conformance suite.

pub mod threads;
pub mod wire;

use std::fmt;

use crate::ParallelError;

/// Most operations one rank may have in flight in one group.
pub const MAX_IN_FLIGHT: usize = 1024;

/// One operation, as named in errors and counters. Ranks are indices within the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Element-wise sum of all ranks' buffers, on every rank.
    AllReduce,
    /// Element-wise sum, one part for each rank.
    ReduceScatter,
    /// All ranks' buffers in rank order, on every rank.
    AllGather,
    /// Part `d` of every rank's buffer goes to rank `d`; equal parts.
    AllToAll,
    /// As above with parts of any length.
    AllToAllV,
    /// One rank's buffer, on every rank.
    Broadcast {
        /// The rank that gives it.
        root: usize,
    },
    /// Every rank's buffer goes `hop` ranks further around the ring.
    RingShift {
        /// How far, `0..size`.
        hop: usize,
    },
    /// Nobody passes before all have come.
    Barrier,
    /// One buffer from one rank to another.
    Send {
        /// The receiver.
        to: usize,
    },
    /// The other end of [`Op::Send`].
    Recv {
        /// The sender.
        from: usize,
    },
}

impl Op {
    /// Kinds of operations, for tables indexed by [`Op::kind`].
    pub const KINDS: usize = 10;

    /// Number of the operation, whatever its arguments; `0..Op::KINDS`.
    #[must_use]
    pub fn kind(self) -> usize {
        match self {
            Self::AllReduce => 0,
            Self::ReduceScatter => 1,
            Self::AllGather => 2,
            Self::AllToAll => 3,
            Self::AllToAllV => 4,
            Self::Broadcast { .. } => 5,
            Self::RingShift { .. } => 6,
            Self::Barrier => 7,
            Self::Send { .. } => 8,
            Self::Recv { .. } => 9,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce => f.write_str("all_reduce"),
            Self::ReduceScatter => f.write_str("reduce_scatter"),
            Self::AllGather => f.write_str("all_gather"),
            Self::AllToAll => f.write_str("all_to_all"),
            Self::AllToAllV => f.write_str("all_to_all_v"),
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            Self::RingShift { hop } => write!(f, "ring_shift by {hop}"),
            Self::Barrier => f.write_str("barrier"),
            Self::Send { to } => write!(f, "send to {to}"),
            Self::Recv { from } => write!(f, "recv from {from}"),
        }
    }
}

/// Refuses a buffer that does not divide into one part for each of `size` ranks; for backends.
///
/// # Errors
/// [`ParallelError::Mismatch`].
pub fn check_parts(elements: usize, size: usize) -> Result<(), ParallelError> {
    let rest = elements % size;
    if rest == 0 {
        return Ok(());
    }
    Err(ParallelError::Mismatch {
        field: "buffer length",
        expected: elements - rest,
        got: elements,
    })
}

/// Refuses a rank outside a group of `ranks`; for backends.
///
/// # Errors
/// [`ParallelError::RankOutOfRange`].
pub fn check_member(rank: usize, ranks: usize) -> Result<(), ParallelError> {
    if rank < ranks {
        return Ok(());
    }
    Err(ParallelError::RankOutOfRange { rank, ranks })
}

/// An operation in flight. It owns its buffers; the result comes out of [`Pending::wait`].
///
/// Starting an operation never blocks, so work put between the start and the wait overlaps it.
#[must_use = "an operation that is never waited for has no result"]
pub struct Pending<T> {
    finish: Box<dyn FnOnce() -> Result<T, ParallelError> + Send>,
}

impl<T> Pending<T> {
    /// A handle that runs `finish` when waited for; for backends.
    pub fn new(finish: impl FnOnce() -> Result<T, ParallelError> + Send + 'static) -> Self {
        Self {
            finish: Box::new(finish),
        }
    }

    /// A handle whose result goes through `then` when waited for.
    pub fn and_then<U>(
        self,
        then: impl FnOnce(T) -> Result<U, ParallelError> + Send + 'static,
    ) -> Pending<U>
    where
        T: 'static,
    {
        Pending::new(move || self.wait().and_then(then))
    }

    /// Waits for the result, at most as long as the group's timeout.
    ///
    /// # Errors
    /// [`ParallelError::Timeout`], [`ParallelError::Left`], [`ParallelError::Aborted`],
    /// [`ParallelError::Disagree`], [`ParallelError::Lengths`]. After one of them every later
    /// operation of the group fails the same way on every rank.
    pub fn wait(self) -> Result<T, ParallelError> {
        (self.finish)()
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

/// Bytes moved by one rank, for one kind of operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes that left this rank.
    pub sent: u64,
    /// Bytes that came to this rank.
    pub received: u64,
}

/// Bytes moved by one rank so far, by [`Op::kind`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// One entry a kind.
    pub by_kind: [Moved; Op::KINDS],
}

impl Traffic {
    /// Bytes over all kinds.
    #[must_use]
    pub fn total(&self) -> Moved {
        self.by_kind.iter().fold(Moved::default(), |sum, m| Moved {
            sent: sum.sent + m.sent,
            received: sum.received + m.received,
        })
    }
}

/// One rank's end of a group of ranks.
///
/// All ranks of a group call the same operations in the same order; only [`Self::send`] and
/// [`Self::recv`] concern two of them. Sums are formed in rank order, so they have the same bits on
/// every rank, in every run and on every backend that promises it.
pub trait Collective: Send + Sync + fmt::Debug {
    /// This rank's index within the group.
    fn index(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// Sum of all ranks' buffers, which have one length.
    ///
    /// # Errors
    /// [`ParallelError::TooManyInFlight`], for this and every other operation; the group's own
    /// failures come out of [`Pending::wait`].
    fn all_reduce(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Part `index` of the sum of all ranks' buffers, which have one length.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the length is no multiple of the group size.
    fn reduce_scatter(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// All ranks' buffers, which have one length, one after the other.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Sends part `d` of the buffer to rank `d`; returns the parts received, in rank order.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the length is no multiple of the group size.
    fn all_to_all(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Sends `parts[d]` to rank `d`; returns what each rank sent here, in rank order.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when there is not one part a rank.
    fn all_to_all_v(&self, parts: Vec<Vec<f32>>) -> Result<Pending<Vec<Vec<f32>>>, ParallelError>;

    /// The buffer of `root`; the others' buffers are ignored and should be empty.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`].
    fn broadcast(&self, root: usize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Gives the buffer to the rank `hop` further and returns the one from `hop` before, of any
    /// length. A negative hop goes the other way.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn ring_shift(&self, hop: isize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn barrier(&self) -> Result<Pending<()>, ParallelError>;

    /// Gives a buffer to one rank, which receives buffers of one sender in the order sent.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`], [`ParallelError::TooManyInFlight`] when the receiver is
    /// [`MAX_IN_FLIGHT`] buffers behind, and the group's own failure.
    fn send(&self, to: usize, data: Vec<f32>) -> Result<(), ParallelError>;

    /// Receives the next buffer of one rank.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`].
    fn recv(&self, from: usize) -> Result<Pending<Vec<f32>>, ParallelError>;

    /// Ends every operation of every group of this world, now and later, on every rank.
    fn abort(&self, reason: &str);

    /// Bytes this rank has moved so far.
    fn traffic(&self) -> Traffic;
}
