//! One rank's end of a group: turns calls into commands for the thread, and pieces into results.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
};

use super::{
    Headers,
    group_state::{Outcome, Part, Waiter},
    limits,
    message::{Cause, shortened},
    state::{Command, Member},
    traffic::Payloads,
    world::{Inner, stopped},
};
use parallel::collective::{check_member, check_parts};
use parallel::{Collective, MAX_IN_FLIGHT, Op, ParallelError, Pending, Traffic};

/// One rank's end of a group of processes. Dropping it tells the others that the rank has left.
#[derive(Debug)]
pub struct UcxGroup {
    inner: Arc<Inner>,
    id: u32,
    ranks: Vec<usize>,
    index: usize,
    in_flight: Arc<AtomicUsize>,
    behind: Arc<[AtomicUsize]>,
    payloads: Arc<Payloads>,
}

/// Counts one more, unless the bound is reached.
fn count_in(counter: &AtomicUsize, op: Op) -> Result<(), ParallelError> {
    let more = |now: usize| (now < MAX_IN_FLIGHT).then_some(now + 1);
    let counted = counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
    counted
        .map(drop)
        .map_err(|now| ParallelError::TooManyInFlight {
            op,
            max: MAX_IN_FLIGHT,
            got: now + 1,
        })
}

impl UcxGroup {
    pub(super) fn new(inner: Arc<Inner>, member: &Member) -> Self {
        Self {
            inner,
            id: member.state.id,
            ranks: member.state.ranks.clone(),
            index: member.state.index,
            in_flight: Arc::default(),
            behind: Arc::clone(&member.behind),
            payloads: Arc::clone(&member.payloads),
        }
    }

    /// Number of this rank in the mesh.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.ranks[self.index]
    }

    /// Messages of this rank so far, in all its groups, and the bytes of their headers.
    #[must_use]
    pub fn headers(&self) -> Headers {
        self.inner.shared.headers.read()
    }

    /// Opens a call; `command` is what the thread gets with the waiter.
    fn call(&self, op: Op, command: impl FnOnce(Waiter) -> Command) -> Result<Call, ParallelError> {
        count_in(&self.in_flight, op)?;
        let ticket = self.inner.ticket();
        let (reply, answer) = channel();
        let call = Call {
            inner: Arc::clone(&self.inner),
            in_flight: Arc::clone(&self.in_flight),
            group: self.id,
            ticket,
            op,
            answer,
            answered: false,
        };
        let reply = Some(reply);
        self.inner.command(command(Waiter { ticket, reply }))?;
        Ok(call)
    }

    /// Starts a collective whose result is one buffer.
    fn flat(&self, op: Op, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        let call = self.enter(op, vec![data])?;
        Ok(Pending::new(move || call.wait().map(joined)))
    }

    fn enter(&self, op: Op, input: Vec<Vec<f32>>) -> Result<Call, ParallelError> {
        let group = self.id;
        self.call(op, |waiter| Command::Enter {
            group,
            op,
            input,
            waiter,
        })
    }
}

/// A call that the thread will answer.
struct Call {
    inner: Arc<Inner>,
    in_flight: Arc<AtomicUsize>,
    group: u32,
    ticket: u64,
    op: Op,
    answer: Receiver<Outcome>,
    answered: bool,
}

impl Call {
    fn wait(mut self) -> Outcome {
        let first = self.answer.recv_timeout(self.inner.timeout);
        let outcome = match first {
            Err(RecvTimeoutError::Timeout) => {
                self.inner.command(Command::Expired {
                    group: self.group,
                    ticket: self.ticket,
                })?;
                self.answer.recv_timeout(limits::THREAD_GRACE)
            }
            other => other,
        };
        self.answered = true;
        outcome.unwrap_or_else(|_| {
            let failure = self.inner.shared.failure();
            Err(failure.map_or_else(stopped, |cause| cause.error(self.op)))
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        if !self.answered {
            // A thread that has stopped has nothing to forget.
            let _ = self.inner.command(Command::Forget {
                group: self.group,
                ticket: self.ticket,
            });
        }
    }
}

/// The elements of a piece, without a copy where nobody else needs the buffer.
fn alone(part: Part) -> Vec<f32> {
    let copied = |data: &[f32], range: Range<usize>| data[range].to_vec();
    match part {
        Part::Got(data) => data,
        Part::Own(data, range) if range.len() == data.len() => {
            Arc::try_unwrap(data).unwrap_or_else(|data| copied(&data, range))
        }
        Part::Own(data, range) => copied(&data, range),
    }
}

/// All pieces, one after the other.
fn joined(mut parts: Vec<Part>) -> Vec<f32> {
    if parts.len() == 1 {
        return parts.pop().map(alone).unwrap_or_default();
    }
    let length = |part: &Part| match part {
        Part::Got(data) => data.len(),
        Part::Own(_, range) => range.len(),
    };
    let mut out = Vec::with_capacity(parts.iter().map(length).sum());
    for part in parts {
        match part {
            Part::Got(data) => out.extend(data),
            Part::Own(data, range) => out.extend_from_slice(&data[range]),
        }
    }
    out
}

impl Collective for UcxGroup {
    fn index(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn all_reduce(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        self.flat(Op::AllReduce, data)
    }

    fn reduce_scatter(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_parts(data.len(), self.size())?;
        self.flat(Op::ReduceScatter, data)
    }

    fn all_gather(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        self.flat(Op::AllGather, data)
    }

    fn all_to_all(&self, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_parts(data.len(), self.size())?;
        self.flat(Op::AllToAll, data)
    }

    fn all_to_all_v(&self, parts: Vec<Vec<f32>>) -> Result<Pending<Vec<Vec<f32>>>, ParallelError> {
        if parts.len() != self.size() {
            return Err(ParallelError::Mismatch {
                field: "parts",
                expected: self.size(),
                got: parts.len(),
            });
        }
        let call = self.enter(Op::AllToAllV, parts)?;
        let each = |parts: Vec<Part>| parts.into_iter().map(alone).collect();
        Ok(Pending::new(move || call.wait().map(each)))
    }

    fn broadcast(&self, root: usize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_member(root, self.size())?;
        self.flat(Op::Broadcast { root }, data)
    }

    fn ring_shift(&self, hop: isize, data: Vec<f32>) -> Result<Pending<Vec<f32>>, ParallelError> {
        // A group has at most MAX_RANKS ranks, so its size is an isize.
        let hop = hop.rem_euclid(self.size() as isize) as usize;
        self.flat(Op::RingShift { hop }, data)
    }

    fn barrier(&self) -> Result<Pending<()>, ParallelError> {
        let call = self.enter(Op::Barrier, Vec::new())?;
        Ok(Pending::new(move || call.wait().map(drop)))
    }

    fn send(&self, to: usize, data: Vec<f32>) -> Result<(), ParallelError> {
        check_member(to, self.size())?;
        let op = Op::Send { to };
        if let Some(cause) = self.inner.shared.failure() {
            return Err(cause.error(op));
        }
        count_in(&self.behind[to], op)?;
        let group = self.id;
        self.inner.command(Command::Post { group, to, data })
    }

    fn recv(&self, from: usize) -> Result<Pending<Vec<f32>>, ParallelError> {
        check_member(from, self.size())?;
        let group = self.id;
        let call = self.call(Op::Recv { from }, |waiter| Command::Claim {
            group,
            from,
            waiter,
        })?;
        Ok(Pending::new(move || call.wait().map(joined)))
    }

    fn abort(&self, reason: &str) {
        self.inner.shared.fail(Cause::Error(ParallelError::Aborted {
            rank: self.rank(),
            reason: shortened(reason).into(),
        }));
        // A thread that has stopped has nobody to tell.
        let _ = self.inner.command(Command::Abort);
    }

    fn traffic(&self) -> Traffic {
        self.payloads.read()
    }
}

impl Drop for UcxGroup {
    fn drop(&mut self) {
        // A thread that has stopped has left already.
        let _ = self.inner.command(Command::Leave { group: self.id });
    }
}
