//! What one rank knows of one group: who has entered which operation with which buffers.
//!
//! Pure: events go in, effects come out. Ranks are indices within the group here.

mod slot;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{Arc, mpsc::Sender},
    time::Duration,
};

use super::{
    limits,
    message::{Cause, Header, Kind},
};
use parallel::{AxisSet, Op, ParallelError};
use slot::{Slot, chunk};

/// A piece of a result.
#[derive(Debug)]
pub(super) enum Part {
    /// Elements of this rank's own buffer.
    Own(Arc<Vec<f32>>, Range<usize>),
    /// A buffer that came from another rank.
    Got(Vec<f32>),
}

/// What an operation comes to.
pub(super) type Outcome = Result<Vec<Part>, ParallelError>;

/// Body of a message: elements of a shared buffer.
pub(super) type Shared = Option<(Arc<Vec<f32>>, Range<usize>)>;

/// A message for another rank of the group.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) to: usize,
    pub(super) header: Header,
    pub(super) body: Shared,
}

/// What an event leads to.
pub(super) type Effects = Result<Vec<Outgoing>, Cause>;

/// The caller of an operation.
#[derive(Debug)]
pub(super) struct Waiter {
    /// Names the call towards this world.
    pub(super) ticket: u64,
    /// Taken when the caller is answered, or gives up.
    pub(super) reply: Option<Sender<Outcome>>,
}

impl Waiter {
    pub(super) fn answer(&mut self, outcome: Outcome) {
        if let Some(reply) = self.reply.take() {
            // The caller may have given up.
            let _ = reply.send(outcome);
        }
    }
}

/// This rank's side of an operation.
#[derive(Debug)]
struct Mine {
    op: Op,
    elements: usize,
    input: Vec<Arc<Vec<f32>>>,
    waiter: Waiter,
}

/// Another rank's side of an operation.
#[derive(Debug)]
struct Heard {
    op: Op,
    elements: usize,
    /// Absent while it is on its way.
    body: Option<Vec<f32>>,
}

/// Buffers of `send` from one rank.
#[derive(Debug, Default)]
struct Lane {
    claimed: u64,
    claims: VecDeque<(u64, Waiter)>,
    waiting: BTreeMap<u64, Vec<f32>>,
    sent: u64,
}

/// What a rank gave before it left the group.
#[derive(Debug, Clone, Copy)]
struct Given {
    operations: u64,
    buffers: u64,
}

#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) id: u32,
    pub(super) axes: AxisSet,
    /// Numbers of the ranks in the mesh.
    pub(super) ranks: Vec<usize>,
    pub(super) index: usize,
    next: u64,
    slots: BTreeMap<u64, Slot>,
    lanes: Vec<Lane>,
    given: Vec<Option<Given>>,
}

impl GroupState {
    pub(super) fn new(id: u32, axes: AxisSet, ranks: Vec<usize>, index: usize) -> Self {
        let size = ranks.len();
        Self {
            id,
            axes,
            ranks,
            index,
            next: 0,
            slots: BTreeMap::new(),
            lanes: (0..size).map(|_| Lane::default()).collect(),
            given: vec![None; size],
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Index of a rank of the mesh in this group.
    pub(super) fn place(&self, rank: usize) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }

    /// True while this rank owes the others something, or waits for them; not for what can no longer
    /// happen, because a rank has left. `gone` as in [`Self::bereft`].
    pub(super) fn at_work(&self, gone: impl Fn(usize) -> bool) -> bool {
        self.slots.iter().any(|(&number, slot)| {
            let op = slot.mine.as_ref().map(|mine| mine.op);
            op.is_some_and(|op| self.stuck(number, slot, op, &gone).is_none())
        })
    }

    /// A rank which has left and without which an operation cannot be completed.
    fn stuck(
        &self,
        number: u64,
        slot: &Slot,
        op: Op,
        gone: &impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let others = (0..self.size()).filter(|&index| index != self.index);
        others.into_iter().find(|&index| {
            let never = self.given[index].is_some_and(|g| number >= g.operations);
            (never && slot.heard[index].is_none())
                || (gone(self.ranks[index]) && slot.lacks(index, op))
        })
    }

    fn header(&self, kind: Kind, op: Op, number: u64, elements: usize) -> Header {
        Header {
            kind,
            from: self.ranks[self.index],
            group: self.id,
            axes: self.axes,
            op,
            number,
            elements,
        }
    }

    fn slot(&mut self, number: u64) -> &mut Slot {
        let size = self.ranks.len();
        self.slots.entry(number).or_insert_with(|| Slot {
            mine: None,
            heard: (0..size).map(|_| None).collect(),
            own_sum: None,
            sums: vec![None; size],
        })
    }

    /// This rank enters the next operation with its buffers: one, or one a destination.
    pub(super) fn enter(&mut self, op: Op, input: Vec<Vec<f32>>, waiter: Waiter) -> Effects {
        let number = self.next;
        self.next += 1;
        let input: Vec<_> = input.into_iter().map(Arc::new).collect();
        let elements = input.first().map_or(0, |data| data.len());
        let mut out = Vec::with_capacity(self.size());
        for to in (0..self.size()).filter(|&to| to != self.index) {
            let (elements, body) = self.part_for(op, &input, to);
            let header = self.header(Kind::Enter, op, number, elements);
            out.push(Outgoing { to, header, body });
        }
        let mine = Mine {
            op,
            elements,
            input,
            waiter,
        };
        self.slot(number).mine = Some(mine);
        self.agree(number)?;
        out.extend(self.advance(number)?);
        Ok(out)
    }

    /// What rank `to` gets of this rank's buffers, and the length it is told.
    fn part_for(&self, op: Op, input: &[Arc<Vec<f32>>], to: usize) -> (usize, Shared) {
        let Some(first) = input.first() else {
            return (0, None);
        };
        let elements = first.len();
        let (data, range) = match op {
            Op::AllReduce | Op::ReduceScatter | Op::AllToAll => {
                (first, chunk(elements, self.size(), to))
            }
            Op::AllGather => (first, 0..elements),
            Op::AllToAllV => (&input[to], 0..input[to].len()),
            Op::Broadcast { root } if root == self.index => (first, 0..elements),
            Op::RingShift { hop } if (self.index + hop) % self.size() == to => (first, 0..elements),
            _ => (first, 0..0),
        };
        let told = if op == Op::AllToAllV {
            range.len()
        } else {
            elements
        };
        (told, (!range.is_empty()).then(|| (Arc::clone(data), range)))
    }

    /// Elements that the body of a rank's [`Kind::Enter`] must have, given its header.
    fn body_of(&self, op: Op, elements: usize, from: usize) -> usize {
        match op {
            Op::AllReduce | Op::ReduceScatter | Op::AllToAll => {
                chunk(elements, self.size(), self.index).len()
            }
            Op::AllGather | Op::AllToAllV => elements,
            Op::Broadcast { root } if root == from => elements,
            Op::RingShift { hop } if (from + hop) % self.size() == self.index => elements,
            _ => 0,
        }
    }

    /// Another rank's header has come, and a body of `body` elements with it or after it.
    pub(super) fn hear(&mut self, from: usize, header: &Header, body: usize) -> Effects {
        let broken = |what: &'static str| {
            let rank = header.from;
            Err(Cause::transport(what, format!("from rank {rank}")))
        };
        match header.kind {
            Kind::Enter => {
                if header.number >= self.next + limits::MAX_AHEAD {
                    return broken("an operation too far ahead");
                }
                if body != self.body_of(header.op, header.elements, from) {
                    return broken("a body of another length");
                }
                let heard = Heard {
                    op: header.op,
                    elements: header.elements,
                    body: None,
                };
                let slot = self.slot(header.number);
                if slot.heard[from].replace(heard).is_some() {
                    return broken("an operation entered twice");
                }
                self.agree(header.number)?;
            }
            Kind::Sum => {
                let size = self.size();
                let expected = self.slots.get(&header.number).and_then(|s| s.mine.as_ref());
                let length = expected.map(|mine| chunk(mine.elements, size, from).len());
                if length != Some(body) {
                    return broken("a sum of another length");
                }
            }
            Kind::Mail => {
                let lane = &mut self.lanes[from];
                if header.number >= lane.claimed + limits::MAX_AHEAD {
                    return broken("a buffer too far ahead");
                }
            }
            Kind::Leave => {
                self.given[from] = Some(Given {
                    operations: header.number,
                    buffers: header.elements as u64,
                });
            }
            _ => {}
        }
        Ok(Vec::new())
    }

    /// The body that belongs to a header is here.
    pub(super) fn arrive(&mut self, from: usize, header: &Header, data: Vec<f32>) -> Effects {
        match header.kind {
            Kind::Enter => {
                if let Some(heard) = &mut self.slot(header.number).heard[from] {
                    heard.body = Some(data);
                }
                self.advance(header.number)
            }
            Kind::Sum => {
                self.slot(header.number).sums[from] = Some(data);
                self.advance(header.number)
            }
            Kind::Mail => Ok(self.deliver(from, header.number, data)),
            _ => Ok(Vec::new()),
        }
    }

    /// Compares what the ranks heard of so far have called. The lower rank of two is taken to be
    /// right, so that both ends of a disagreement report the same.
    fn agree(&self, number: u64) -> Result<(), Cause> {
        let Some(slot) = self.slots.get(&number) else {
            return Ok(());
        };
        let call = |index: usize| {
            if index == self.index {
                slot.mine.as_ref().map(|mine| (mine.op, mine.elements))
            } else {
                slot.heard[index].as_ref().map(|h| (h.op, h.elements))
            }
        };
        let mut calls = (0..self.size()).filter_map(|i| call(i).map(|call| (i, call)));
        let Some((_, (op, elements))) = calls.next() else {
            return Ok(());
        };
        let equal = matches!(
            op,
            Op::AllReduce | Op::ReduceScatter | Op::AllGather | Op::AllToAll
        );
        for (index, (got, length)) in calls {
            let rank = self.ranks[index];
            if got != op {
                return Err(Cause::Error(ParallelError::Disagree {
                    rank,
                    expected: op,
                    got,
                }));
            }
            if equal && length != elements {
                return Err(Cause::Error(ParallelError::Lengths {
                    op,
                    rank,
                    expected: elements,
                    got: length,
                }));
            }
        }
        Ok(())
    }

    /// Takes an operation as far as it gets; answers its caller when it is complete.
    fn advance(&mut self, number: u64) -> Effects {
        let (size, index) = (self.size(), self.index);
        let Some(slot) = self.slots.get_mut(&number) else {
            return Ok(Vec::new());
        };
        let Some(mine) = &slot.mine else {
            return Ok(Vec::new());
        };
        if !(0..size).all(|from| from == index || slot.has_body(from)) {
            return Ok(Vec::new());
        }
        let (op, elements) = (mine.op, mine.elements);
        let mut out = Vec::new();
        if matches!(op, Op::AllReduce | Op::ReduceScatter) && slot.own_sum.is_none() {
            let sum = Arc::new(slot.sum(size, index));
            slot.own_sum = Some(Arc::clone(&sum));
            if op == Op::AllReduce {
                for to in (0..size).filter(|&to| to != index) {
                    let body = (!sum.is_empty()).then(|| (Arc::clone(&sum), 0..sum.len()));
                    let header = self.header(Kind::Sum, op, number, elements);
                    out.push(Outgoing { to, header, body });
                }
            }
        }
        let complete = self.slots.get_mut(&number).is_some_and(|slot| {
            op != Op::AllReduce || (0..size).all(|i| i == index || slot.sums[i].is_some())
        });
        if complete && let Some(mut slot) = self.slots.remove(&number) {
            let parts = slot.result(size, index);
            if let Some(mine) = &mut slot.mine {
                mine.waiter.answer(Ok(parts));
            }
        }
        Ok(out)
    }

    /// Claims the next buffer of a rank.
    pub(super) fn claim(&mut self, from: usize, mut waiter: Waiter) -> Vec<Outgoing> {
        let lane = &mut self.lanes[from];
        let number = lane.claimed;
        lane.claimed += 1;
        if let Some(data) = lane.waiting.remove(&number) {
            waiter.answer(Ok(vec![Part::Got(data)]));
            return self.taken(from);
        }
        lane.claims.push_back((number, waiter));
        Vec::new()
    }

    fn deliver(&mut self, from: usize, number: u64, data: Vec<f32>) -> Vec<Outgoing> {
        let lane = &mut self.lanes[from];
        let Some(at) = lane.claims.iter().position(|(claim, _)| *claim == number) else {
            lane.waiting.insert(number, data);
            return Vec::new();
        };
        if let Some((_, mut waiter)) = lane.claims.remove(at) {
            waiter.answer(Ok(vec![Part::Got(data)]));
        }
        self.taken(from)
    }

    /// Tells the sender of a buffer that there is room for one more.
    fn taken(&self, from: usize) -> Vec<Outgoing> {
        let header = self.header(Kind::Taken, Op::Send { to: self.index }, 0, 0);
        vec![Outgoing {
            to: from,
            header,
            body: None,
        }]
    }

    /// A buffer for this rank itself.
    pub(super) fn keep(&mut self, data: Vec<f32>) -> Vec<Outgoing> {
        let number = self.lanes[self.index].sent;
        self.lanes[self.index].sent += 1;
        self.deliver(self.index, number, data)
    }

    /// A buffer for another rank.
    pub(super) fn post(&mut self, to: usize, data: Vec<f32>) -> Outgoing {
        let lane = &mut self.lanes[to];
        let number = lane.sent;
        lane.sent += 1;
        let elements = data.len();
        let body = (elements > 0).then(|| (Arc::new(data), 0..elements));
        let header = self.header(Kind::Mail, Op::Send { to }, number, elements);
        Outgoing { to, header, body }
    }

    /// This rank's last word to every other rank of the group.
    pub(super) fn leave(&self) -> Vec<Outgoing> {
        let others = (0..self.size()).filter(|&to| to != self.index);
        let word = |to: usize| {
            let buffers = usize::try_from(self.lanes[to].sent).unwrap_or(usize::MAX);
            Outgoing {
                to,
                header: self.header(Kind::Leave, Op::Barrier, self.next, buffers),
                body: None,
            }
        };
        others.map(word).collect()
    }

    /// The caller with this ticket no longer wants its result.
    pub(super) fn forget(&mut self, ticket: u64) {
        if let Some(waiter) = self.waiters().find(|w| w.ticket == ticket) {
            waiter.reply = None;
        }
    }

    fn waiters(&mut self) -> impl Iterator<Item = &mut Waiter> {
        let slots = self.slots.values_mut().filter_map(|s| s.mine.as_mut());
        let claims = self.lanes.iter_mut().flat_map(|lane| &mut lane.claims);
        slots
            .map(|mine| &mut mine.waiter)
            .chain(claims.map(|(_, waiter)| waiter))
    }

    /// Answers every caller with a failure.
    pub(super) fn fail(&mut self, cause: &Cause) {
        for slot in self.slots.values_mut() {
            if let Some(mine) = &mut slot.mine {
                mine.waiter.answer(Err(cause.error(mine.op)));
            }
        }
        for (from, lane) in self.lanes.iter_mut().enumerate() {
            for (_, waiter) in &mut lane.claims {
                waiter.answer(Err(cause.error(Op::Recv { from })));
            }
        }
        self.slots.clear();
        self.lanes.iter_mut().for_each(|lane| lane.claims.clear());
    }

    /// What a caller still waits for when its time is up; `None` when it has its answer.
    pub(super) fn expired(&self, ticket: u64, after: Duration) -> Option<Cause> {
        let timeout = |op, missing: usize| {
            let missing = self.ranks[missing];
            Cause::Error(ParallelError::Timeout { op, missing, after })
        };
        for slot in self.slots.values() {
            if let Some(mine) = slot.mine.as_ref().filter(|m| m.waiter.ticket == ticket) {
                return Some(timeout(mine.op, slot.missing(self.index)?));
            }
        }
        let waits = |lane: &Lane| lane.claims.iter().any(|(_, w)| w.ticket == ticket);
        let from = self.lanes.iter().position(waits)?;
        Some(timeout(Op::Recv { from }, from))
    }

    /// An operation that somebody waits for and that a rank which left can no longer complete.
    /// `gone` tells which ranks (of the mesh) will never say anything again.
    pub(super) fn bereft(&self, gone: impl Fn(usize) -> bool) -> Option<Cause> {
        let left = |op, index: usize| {
            let rank = self.ranks[index];
            Some(Cause::Error(ParallelError::Left { op, rank }))
        };
        for (&number, slot) in &self.slots {
            let Some(mine) = slot.mine.as_ref().filter(|m| m.waiter.reply.is_some()) else {
                continue;
            };
            if let Some(index) = self.stuck(number, slot, mine.op, &gone) {
                return left(mine.op, index);
            }
        }
        for (from, lane) in self.lanes.iter().enumerate() {
            let never = |number: u64| {
                self.given[from].is_some_and(|g| number >= g.buffers) || gone(self.ranks[from])
            };
            let waits = |(number, w): &(u64, Waiter)| w.reply.is_some() && never(*number);
            if lane.claims.iter().any(waits) {
                return left(Op::Recv { from }, from);
            }
        }
        None
    }
}
