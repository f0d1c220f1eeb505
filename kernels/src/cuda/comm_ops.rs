//! What groups of GPUs do together. Every operation is enqueued on a lane and returns at once.
//!
//! Tensors must live until the operation has run, and must lie on the rank's GPU. All ranks call the same
//! operations in the same order, with the same sizes unless said otherwise; ranks that disagree end by the
//! deadline. Sums are formed in an order that depends on the number of ranks and the size, not on time.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::sys::CUdeviceptr;

use super::comm::{Comm, Lane};
use super::comm_library::{BYTES, Handle, IN_PROGRESS, Nccl, SUCCESS, SUM, Stream};
use super::error::{CudaError, Result, argument, shape};
use super::tensor::{GpuTensor, GpuType};
use crate::error::KernelError;

/// One tensor to or from another rank, or this one.
#[derive(Clone, Copy, Debug)]
pub enum Transfer<'a> {
    /// Elements that go.
    Send {
        /// To this rank.
        to: usize,
        /// From here.
        tensor: &'a GpuTensor,
    },
    /// Elements that come.
    Receive {
        /// From this rank.
        from: usize,
        /// To here.
        tensor: &'a GpuTensor,
    },
}

/// Memory to or from a rank.
#[derive(Clone, Copy)]
struct Piece {
    peer: usize,
    address: CUdeviceptr,
    bytes: usize,
}

/// Everything one operation moves between ranks.
#[derive(Default)]
struct Pieces {
    sent: Vec<Piece>,
    received: Vec<Piece>,
}

fn source(address: CUdeviceptr) -> *const c_void {
    address as *const c_void
}

fn target(address: CUdeviceptr) -> *mut c_void {
    address as *mut c_void
}

/// Numbers that can be summed, as the library counts types.
fn summed(op: &'static str, tensor: &GpuTensor) -> Result<c_int> {
    match tensor.dtype() {
        GpuType::I32 => Ok(2),
        GpuType::F16 => Ok(6),
        GpuType::F32 => Ok(7),
        GpuType::Bf16 => Ok(9),
        GpuType::E4m3 | GpuType::U8 => Err(shape(
            op,
            "input",
            "elements that can be summed",
            tensor.shape(),
        )),
    }
}

impl Comm {
    /// The sum over all ranks, on every rank; `out` may be `input`. Same type, equally many elements.
    ///
    /// # Errors
    /// `Argument`, `GroupEnded`, or what the driver says.
    pub fn all_reduce(&self, input: &GpuTensor, out: &GpuTensor, lane: Lane) -> Result<()> {
        const OP: &str = "all_reduce";
        let dtype = summed(OP, input)?;
        self.sized(OP, input, out, input.numel())?;
        let (from, to, count) = (input.address(), out.address(), input.numel());
        self.nonempty(OP, lane, count, |nccl, handle, stream| {
            // SAFETY: both tensors have `count` elements of the type and live until the operation has run.
            unsafe {
                (nccl.all_reduce)(source(from), target(to), count, dtype, SUM, handle, stream)
            }
        })
    }

    /// The sum over all ranks, of which rank i gets part i: `input` has `ranks` times the elements of `out`,
    /// which may be the own part of `input`.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn reduce_scatter(&self, input: &GpuTensor, out: &GpuTensor, lane: Lane) -> Result<()> {
        const OP: &str = "reduce_scatter";
        let dtype = summed(OP, input)?;
        let count = self.part(OP, "input", input)?;
        self.sized(OP, input, out, count)?;
        let (from, to) = (input.address(), out.address());
        self.nonempty(OP, lane, count, |nccl, handle, stream| {
            // SAFETY: `out` has `count` elements of the type and `input` that for each rank; both live until
            // the operation has run.
            unsafe {
                (nccl.reduce_scatter)(source(from), target(to), count, dtype, SUM, handle, stream)
            }
        })
    }

    /// The tensors of all ranks one after the other: `out` has `ranks` times the elements of `input`, which
    /// may be the own part of `out`.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn all_gather(&self, input: &GpuTensor, out: &GpuTensor, lane: Lane) -> Result<()> {
        const OP: &str = "all_gather";
        let count = self.part(OP, "out", out)?;
        self.sized(OP, out, input, count)?;
        let (from, to, bytes) = (input.address(), out.address(), input.bytes());
        self.nonempty(OP, lane, bytes, |nccl, handle, stream| {
            // SAFETY: `input` has so many bytes and `out` that for each rank; both live until the operation
            // has run.
            unsafe { (nccl.all_gather)(source(from), target(to), bytes, BYTES, handle, stream) }
        })
    }

    /// The tensor of rank `root` on every rank, in place.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn broadcast(&self, tensor: &GpuTensor, root: usize, lane: Lane) -> Result<()> {
        const OP: &str = "broadcast";
        self.here(OP, "tensor", tensor)?;
        let root = self.peer(OP, root)?;
        let (at, bytes) = (tensor.address(), tensor.bytes());
        self.nonempty(OP, lane, bytes, |nccl, handle, stream| {
            // SAFETY: the tensor has so many bytes and lives until the operation has run.
            unsafe { (nccl.broadcast)(source(at), target(at), bytes, BYTES, root, handle, stream) }
        })
    }

    /// Part i of `input` goes to rank i, and what rank i sends becomes part i of `out`. Parts are equal, and
    /// the tensors must not overlap.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn all_to_all(&self, input: &GpuTensor, out: &GpuTensor, lane: Lane) -> Result<()> {
        const OP: &str = "all_to_all";
        self.part(OP, "input", input)?;
        self.sized(OP, input, out, input.numel())?;
        let bytes = input.bytes() / self.ranks();
        let parts = |tensor: &GpuTensor| {
            let start = tensor.address();
            let part = |peer: usize| Piece {
                peer,
                address: start + (peer * bytes) as CUdeviceptr,
                bytes,
            };
            (0..self.ranks()).map(part).collect()
        };
        let pieces = Pieces {
            sent: parts(input),
            received: parts(out),
        };
        self.move_pieces(OP, &pieces, lane)
    }

    /// Like [`Comm::all_to_all`] with parts of given lengths, in entries along dimension 0 of `[n, ...]`:
    /// the first `sent[0]` of `input` go to rank 0, the first `received[0]` of `out` come from it, and so on.
    /// What is sent to a rank must be what that rank expects. Entries beyond the sums stay as they are.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn all_to_all_v(
        &self,
        input: &GpuTensor,
        sent: &[usize],
        out: &GpuTensor,
        received: &[usize],
        lane: Lane,
    ) -> Result<()> {
        const OP: &str = "all_to_all_v";
        if input.dtype() != out.dtype() || input.shape().get(1..) != out.shape().get(1..) {
            let expected = format!("{:?} entries like those of input", input.dtype());
            return Err(shape(OP, "out", expected, out.shape()));
        }
        let pieces = Pieces {
            sent: self.entries(OP, "sent", input, sent)?,
            received: self.entries(OP, "received", out, received)?,
        };
        self.move_pieces(OP, &pieces, lane)
    }

    /// Sends a tensor to `to`, which receives one of that size.
    ///
    /// # Errors
    /// Those of [`Comm::exchange`].
    pub fn send(&self, tensor: &GpuTensor, to: usize, lane: Lane) -> Result<()> {
        self.exchange(&[Transfer::Send { to, tensor }], lane)
    }

    /// Receives a tensor from `from`, which sends one of that size.
    ///
    /// # Errors
    /// Those of [`Comm::exchange`].
    pub fn receive(&self, tensor: &GpuTensor, from: usize, lane: Lane) -> Result<()> {
        self.exchange(&[Transfer::Receive { from, tensor }], lane)
    }

    /// Any transfers, all at once: none waits for another. Between two ranks, the first that is sent is the
    /// first that is received. Other ranks need not take part.
    ///
    /// # Errors
    /// Those of [`Comm::all_reduce`].
    pub fn exchange(&self, transfers: &[Transfer<'_>], lane: Lane) -> Result<()> {
        const OP: &str = "exchange";
        let mut pieces = Pieces::default();
        for transfer in transfers {
            let (list, peer, tensor) = match *transfer {
                Transfer::Send { to, tensor } => (&mut pieces.sent, to, tensor),
                Transfer::Receive { from, tensor } => (&mut pieces.received, from, tensor),
            };
            self.peer(OP, peer)?;
            self.here(OP, "tensor", tensor)?;
            list.push(Piece {
                peer,
                address: tensor.address(),
                bytes: tensor.bytes(),
            });
        }
        self.move_pieces(OP, &pieces, lane)
    }

    /// Own pieces are copied, all others are one operation.
    fn move_pieces(&self, op: &'static str, pieces: &Pieces, lane: Lane) -> Result<()> {
        let own = |piece: &&Piece| piece.peer == self.rank();
        let sizes = |list: &[Piece]| -> Vec<usize> {
            list.iter().filter(own).map(|piece| piece.bytes).collect()
        };
        if sizes(&pieces.sent) != sizes(&pieces.received) {
            let reason = "of a rank to itself differ in what is sent and what is received";
            return Err(argument(op, "transfers", reason));
        }
        self.check()?;
        self.gpu().context()?;
        let (sent, received) = (pieces.sent.iter(), pieces.received.iter());
        for (from, to) in sent.filter(own).zip(received.filter(own)) {
            let stream = self.stream(lane).cu_stream();
            // SAFETY: both pieces lie within tensors that live until the copy has run.
            unsafe { memcpy_dtod_async(to.address, from.address, from.bytes, stream) }?;
        }
        let foreign = |piece: &&Piece| piece.peer != self.rank() && piece.bytes > 0;
        let sent: Vec<Piece> = pieces.sent.iter().filter(foreign).copied().collect();
        let received: Vec<Piece> = pieces.received.iter().filter(foreign).copied().collect();
        let count = sent.len() + received.len();
        self.nonempty(op, lane, count, |nccl, handle, stream| {
            grouped(nccl, handle, stream, &sent, &received)
        })
    }

    /// Runs an operation unless it moves nothing; the size is alike on all ranks that take part.
    fn nonempty(
        &self,
        op: &'static str,
        lane: Lane,
        size: usize,
        enqueue: impl FnOnce(&Nccl, Handle, Stream) -> c_int,
    ) -> Result<()> {
        if size == 0 {
            return self.check();
        }
        self.run(op, lane, enqueue)
    }

    /// A rank of the group, for the library.
    fn peer(&self, op: &'static str, rank: usize) -> Result<c_int> {
        match c_int::try_from(rank) {
            Ok(peer) if rank < self.ranks() => Ok(peer),
            _ => Err(CudaError::Argument(KernelError::Bounds {
                op,
                what: "rank",
                value: rank,
                limit: self.ranks(),
            })),
        }
    }

    /// Refuses a tensor of another GPU.
    fn here(&self, op: &'static str, what: &'static str, tensor: &GpuTensor) -> Result<()> {
        if Arc::ptr_eq(tensor.gpu(), self.gpu()) {
            return Ok(());
        }
        Err(argument(op, what, "is not on the gpu of this rank"))
    }

    /// Refuses other places, another type, or another number of elements of `out` than `count`.
    fn sized(
        &self,
        op: &'static str,
        input: &GpuTensor,
        out: &GpuTensor,
        count: usize,
    ) -> Result<()> {
        self.here(op, "input", input)?;
        self.here(op, "out", out)?;
        if out.dtype() == input.dtype() && out.numel() == count {
            return Ok(());
        }
        let expected = format!("{count} elements of {:?}", input.dtype());
        Err(shape(op, "input and out", expected, out.shape()))
    }

    /// Elements of one rank's part.
    fn part(&self, op: &'static str, what: &'static str, tensor: &GpuTensor) -> Result<usize> {
        if tensor.numel().is_multiple_of(self.ranks()) {
            return Ok(tensor.numel() / self.ranks());
        }
        let expected = format!("an equal part for each of {} ranks", self.ranks());
        Err(shape(op, what, expected, tensor.shape()))
    }

    /// The parts of a tensor along dimension 0, one a rank.
    fn entries(
        &self,
        op: &'static str,
        what: &'static str,
        tensor: &GpuTensor,
        counts: &[usize],
    ) -> Result<Vec<Piece>> {
        self.here(op, what, tensor)?;
        let total = counts
            .iter()
            .try_fold(0_usize, |sum, n| sum.checked_add(*n));
        if counts.len() != self.ranks() || total.is_none_or(|sum| sum > tensor.dim(0)) {
            let (ranks, rows) = (self.ranks(), tensor.dim(0));
            let expected = format!("counts of {ranks} ranks that sum to at most {rows}");
            return Err(shape(op, what, expected, counts));
        }
        let entry = tensor.shape().iter().skip(1).product::<usize>() * tensor.dtype().bytes();
        let mut at = tensor.address();
        let piece = |(peer, count): (usize, &usize)| {
            let (address, bytes) = (at, count * entry);
            at += bytes as CUdeviceptr;
            Piece {
                peer,
                address,
                bytes,
            }
        };
        Ok(counts.iter().enumerate().map(piece).collect())
    }
}

/// All transfers as one operation; the first error, or the answer of the end.
fn grouped(
    nccl: &Nccl,
    handle: Handle,
    stream: Stream,
    sent: &[Piece],
    received: &[Piece],
) -> c_int {
    let going = |code: c_int| matches!(code, SUCCESS | IN_PROGRESS);
    // SAFETY: takes nothing.
    let mut code = unsafe { (nccl.group_start)() };
    for piece in sent {
        if going(code) {
            let (at, bytes, peer) = (source(piece.address), piece.bytes, piece.peer as c_int);
            // SAFETY: the piece lies within a tensor that lives until the operation has run.
            code = unsafe { (nccl.send)(at, bytes, BYTES, peer, handle, stream) };
        }
    }
    for piece in received {
        if going(code) {
            let (at, bytes, peer) = (target(piece.address), piece.bytes, piece.peer as c_int);
            // SAFETY: as above; nobody else writes the piece meanwhile.
            code = unsafe { (nccl.receive)(at, bytes, BYTES, peer, handle, stream) };
        }
    }
    // SAFETY: takes nothing; ends the group even after an error, or later calls would join it.
    let end = unsafe { (nccl.group_end)() };
    if going(code) { end } else { code }
}
