//! What the ranks of one group see of each other, behind one lock.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{World, lock};
use crate::{MAX_IN_FLIGHT, Moved, Op, ParallelError, Traffic, collective::wire::ELEMENT_BYTES};

/// The buffers one rank brings to an operation: one, or one a destination.
pub(super) type Input = Arc<Vec<Vec<f32>>>;

/// Sums of an all-reduce, one cell a part, each computed by the first rank that needs it.
pub(super) type Sums = Arc<Vec<OnceLock<Vec<f32>>>>;

/// One operation of the group.
#[derive(Debug)]
struct Slot {
    op: Op,
    inputs: Vec<Option<Input>>,
    /// Index and length of the first buffer, which the others must match.
    first: (usize, usize),
    done: usize,
    sums: Sums,
}

/// Buffers on their way from one rank to another, by number.
#[derive(Debug, Default)]
struct Lane {
    sent: u64,
    claimed: u64,
    waiting: BTreeMap<u64, Vec<f32>>,
    /// Numbers whose receiver gave up.
    unwanted: HashSet<u64>,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<u64, Slot>,
    lanes: HashMap<(usize, usize), Lane>,
    next: Vec<u64>,
    in_flight: Vec<usize>,
    gone: Vec<bool>,
    failure: Option<ParallelError>,
}

/// The state of one group, shared by its ends.
#[derive(Debug)]
pub(super) struct Shared {
    /// Global numbers of the group's ranks.
    pub(super) ranks: Vec<usize>,
    pub(super) world: Arc<World>,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// `[sent, received]` bytes by rank and kind.
    counters: Vec<[[AtomicU64; 2]; Op::KINDS]>,
}

/// A rank's stake in one operation; dropping it frees what it holds.
#[derive(Debug)]
pub(super) struct Ticket {
    shared: Arc<Shared>,
    index: usize,
    number: u64,
    op: Op,
}

/// All inputs of an operation.
pub(super) struct Ready {
    pub(super) inputs: Vec<Input>,
    pub(super) sums: Sums,
}

impl Shared {
    pub(super) fn new(ranks: Vec<usize>, timeout: Duration, world: Arc<World>) -> Self {
        let size = ranks.len();
        let state = State {
            next: vec![0; size],
            in_flight: vec![0; size],
            gone: vec![false; size],
            ..State::default()
        };
        Self {
            ranks,
            world,
            timeout,
            state: Mutex::new(state),
            changed: Condvar::new(),
            counters: (0..size).map(|_| Default::default()).collect(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Ends the group: every wait returns `error`.
    pub(super) fn end(&self, error: &ParallelError) {
        lock(&self.state).failure.get_or_insert(error.clone());
        self.changed.notify_all();
    }

    /// Notes that a rank will never call again.
    pub(super) fn leave(&self, index: usize) {
        lock(&self.state).gone[index] = true;
        self.changed.notify_all();
    }

    /// Counts elements copied out of one rank's buffer for another.
    pub(super) fn count(&self, op: Op, from: usize, to: usize, elements: usize) {
        if from != to {
            self.count_side(op, from, 0, elements);
            self.count_side(op, to, 1, elements);
        }
    }

    /// Counts elements that left (`side` 0) or reached (`side` 1) one rank.
    fn count_side(&self, op: Op, rank: usize, side: usize, elements: usize) {
        let bytes = elements as u64 * ELEMENT_BYTES;
        self.counters[rank][op.kind()][side].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn traffic(&self, index: usize) -> Traffic {
        let load = |pair: &[AtomicU64; 2]| Moved {
            sent: pair[0].load(Ordering::Relaxed),
            received: pair[1].load(Ordering::Relaxed),
        };
        let mut traffic = Traffic::default();
        for (moved, pair) in traffic.by_kind.iter_mut().zip(&self.counters[index]) {
            *moved = load(pair);
        }
        traffic
    }

    /// Brings a rank's buffers to the group's next operation.
    pub(super) fn enter(
        self: &Arc<Self>,
        index: usize,
        op: Op,
        input: Vec<Vec<f32>>,
    ) -> Result<Ticket, ParallelError> {
        let mut state = lock(&self.state);
        state.start(index, op)?;
        let number = state.next[index];
        state.next[index] += 1;
        let refused = state.bring(number, index, op, Arc::new(input)).err();
        let error = refused.map(|error| self.globally(error));
        if let Some(error) = &error {
            // Before anybody can see that all buffers are there.
            state.failure.get_or_insert(error.clone());
        }
        drop(state);
        self.changed.notify_all();
        if let Some(error) = error {
            self.world.fail(error);
        }
        Ok(self.ticket(index, number, op))
    }

    fn ticket(self: &Arc<Self>, index: usize, number: u64, op: Op) -> Ticket {
        Ticket {
            shared: Arc::clone(self),
            index,
            number,
            op,
        }
    }

    /// Hands a buffer to the lane of two ranks.
    pub(super) fn post(&self, from: usize, to: usize, data: Vec<f32>) -> Result<(), ParallelError> {
        let op = Op::Send { to };
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let elements = data.len();
        let lane = state.lanes.entry((from, to)).or_default();
        in_flight(op, lane.waiting.len())?;
        let number = lane.sent;
        lane.sent += 1;
        if !lane.unwanted.remove(&number) {
            lane.waiting.insert(number, data);
        }
        drop(state);
        if from != to {
            self.count_side(op, from, 0, elements);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Claims the next buffer of a lane.
    pub(super) fn claim(self: &Arc<Self>, from: usize, to: usize) -> Result<Ticket, ParallelError> {
        let op = Op::Recv { from };
        let mut state = lock(&self.state);
        state.start(to, op)?;
        let lane = state.lanes.entry((from, to)).or_default();
        let number = lane.claimed;
        lane.claimed += 1;
        drop(state);
        Ok(self.ticket(to, number, op))
    }

    /// Replaces the group index in an error by the number of the rank in the mesh.
    fn globally(&self, error: ParallelError) -> ParallelError {
        let mut error = error;
        if let ParallelError::Disagree { rank, .. } | ParallelError::Lengths { rank, .. } =
            &mut error
        {
            *rank = self.ranks[*rank];
        }
        error
    }

    /// Waits until `take` yields, the group fails, a rank `missing` names has left, or time is up.
    fn wait<T>(
        &self,
        op: Op,
        take: impl Fn(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> Option<usize>,
    ) -> Result<T, ParallelError> {
        let left = |s: &State| missing(s).filter(|&index| s.gone[index]);
        let mut result = None;
        let state = lock(&self.state);
        let idle = |s: &mut State| {
            if s.failure.is_some() {
                return false;
            }
            result = take(s);
            result.is_none() && left(s).is_none()
        };
        let (state, _) = self
            .changed
            .wait_timeout_while(state, self.timeout, idle)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if let Some(taken) = result {
            return Ok(taken);
        }
        let missing = missing(&state).unwrap_or_default();
        let error = if state.gone[missing] {
            let rank = self.ranks[missing];
            ParallelError::Left { op, rank }
        } else {
            ParallelError::Timeout {
                op,
                missing: self.ranks[missing],
                after: self.timeout,
            }
        };
        drop(state);
        self.world.fail(error);
        // The first failure of the world counts, which may be another rank's.
        let first = lock(&self.world.failure).clone();
        first.map_or_else(|| Err(ParallelError::Left { op, rank: missing }), Err)
    }
}

/// Refuses one more operation when `now` are in flight.
fn in_flight(op: Op, now: usize) -> Result<(), ParallelError> {
    if now < MAX_IN_FLIGHT {
        return Ok(());
    }
    Err(ParallelError::TooManyInFlight {
        op,
        max: MAX_IN_FLIGHT,
        got: now + 1,
    })
}

impl State {
    /// Counts an operation of a rank in.
    fn start(&mut self, index: usize, op: Op) -> Result<(), ParallelError> {
        in_flight(op, self.in_flight[index])?;
        self.in_flight[index] += 1;
        Ok(())
    }

    /// Adds a rank's buffers to operation `number` and checks them against the others'.
    fn bring(
        &mut self,
        number: u64,
        index: usize,
        op: Op,
        input: Input,
    ) -> Result<(), ParallelError> {
        let size = self.next.len();
        let elements = input.first().map_or(0, Vec::len);
        let slot = self.slots.entry(number).or_insert_with(|| Slot {
            op,
            inputs: vec![None; size],
            first: (index, elements),
            done: 0,
            sums: Arc::new((0..size).map(|_| OnceLock::new()).collect()),
        });
        slot.inputs[index] = Some(input);
        if slot.op != op {
            return Err(ParallelError::Disagree {
                rank: index,
                expected: slot.op,
                got: op,
            });
        }
        let equal = matches!(
            op,
            Op::AllReduce | Op::ReduceScatter | Op::AllGather | Op::AllToAll
        );
        if equal && slot.first.1 != elements {
            return Err(ParallelError::Lengths {
                op,
                rank: index,
                expected: slot.first.1,
                got: elements,
            });
        }
        Ok(())
    }
}

impl Ticket {
    /// Waits for every rank's buffers.
    pub(super) fn all(&self) -> Result<Ready, ParallelError> {
        let slot = |s: &State| s.slots.get(&self.number).map(|slot| slot.inputs.clone());
        let take = |s: &mut State| {
            let slot = s.slots.get(&self.number)?;
            let inputs = slot.inputs.iter().cloned().collect::<Option<Vec<_>>>()?;
            let sums = Arc::clone(&slot.sums);
            Some(Ready { inputs, sums })
        };
        let missing = |s: &State| slot(s)?.iter().position(Option::is_none);
        self.shared.wait(self.op, take, missing)
    }

    /// Waits for the buffer this ticket claimed from rank `from`.
    pub(super) fn mail(&self, from: usize) -> Result<Vec<f32>, ParallelError> {
        let lane = (from, self.index);
        let take = |s: &mut State| s.lanes.get_mut(&lane)?.waiting.remove(&self.number);
        let data = self.shared.wait(self.op, take, |_| Some(from))?;
        if from != self.index {
            self.shared.count_side(self.op, self.index, 1, data.len());
        }
        Ok(data)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut guard = lock(&self.shared.state);
        let state = &mut *guard;
        state.in_flight[self.index] -= 1;
        if let Op::Recv { from } = self.op {
            let lane = state.lanes.entry((from, self.index)).or_default();
            // Not taken and not there yet: the sender must not leave it behind.
            if lane.waiting.remove(&self.number).is_none() && self.number >= lane.sent {
                lane.unwanted.insert(self.number);
            }
            return;
        }
        if let Some(slot) = state.slots.get_mut(&self.number) {
            slot.done += 1;
            if slot.done == slot.inputs.len() {
                state.slots.remove(&self.number);
            }
        }
    }
}
