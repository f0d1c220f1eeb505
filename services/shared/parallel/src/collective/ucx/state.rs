//! What a rank's thread knows: the others, the groups, and what is under way.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError},
    },
    time::{Duration, Instant},
};

use fabric::{Body, Receiving, Transport};

use super::{
    JoinOptions,
    group_state::{Effects, GroupState, Outgoing, Waiter},
    limits,
    link::Link,
    message::{Cause, Header, Kind},
    traffic::Payloads,
    world::Shared,
};
use crate::{AxisSet, Group, Op, ParallelError};

/// This rank's membership in one group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) state: GroupState,
    pub(super) payloads: Arc<Payloads>,
    /// Buffers given to each rank and not taken by it yet.
    pub(super) behind: Arc<[AtomicUsize]>,
    /// The caller's end still exists.
    open: bool,
}

impl Member {
    pub(super) fn new(id: u32, axes: AxisSet, group: Group) -> Self {
        let size = group.ranks.len();
        Self {
            state: GroupState::new(id, axes, group.ranks, group.index),
            payloads: Arc::default(),
            behind: (0..size).map(|_| AtomicUsize::new(0)).collect(),
            open: true,
        }
    }
}

/// What callers ask of the thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Connect to everybody; reply when all have said hello.
    Connect {
        addresses: Vec<Vec<u8>>,
        digest: u64,
        deadline: Instant,
        reply: SyncSender<Result<(), ParallelError>>,
    },
    Group(Member),
    Enter {
        group: u32,
        op: Op,
        input: Vec<Vec<f32>>,
        waiter: Waiter,
    },
    Post {
        group: u32,
        to: usize,
        data: Vec<f32>,
    },
    Claim {
        group: u32,
        from: usize,
        waiter: Waiter,
    },
    /// The caller does not want its result any more.
    Forget {
        group: u32,
        ticket: u64,
    },
    /// The caller has waited long enough.
    Expired {
        group: u32,
        ticket: u64,
    },
    /// The failure stands in [`Shared`] already; tell the others.
    Abort,
    Leave {
        group: u32,
    },
    Transports {
        rank: usize,
        reply: SyncSender<Vec<String>>,
    },
}

/// What is known of another rank.
#[derive(Debug, Clone)]
struct Peer {
    /// When it was last heard of.
    heard: Instant,
    hello: Option<u64>,
    /// It has said that nothing else comes.
    bye: bool,
    /// It has read this rank's goodbye.
    farewell: bool,
    /// When the connection broke.
    broken: Option<Instant>,
}

#[derive(Debug)]
struct Joining {
    deadline: Instant,
    after: Duration,
    reply: SyncSender<Result<(), ParallelError>>,
}

#[derive(Debug)]
pub(super) struct State<'a> {
    rank: usize,
    options: &'a JoinOptions,
    shared: &'a Shared,
    pub(super) data: Link,
    pub(super) control: Link,
    peers: Vec<Peer>,
    connected: bool,
    digest: u64,
    joining: Option<Joining>,
    groups: BTreeMap<u32, Member>,
    /// Groups made so far.
    made: u32,
    /// Messages for groups that are not made yet.
    early: Vec<(Header, Body)>,
    receives: Vec<(Header, Receiving)>,
    broken: Vec<usize>,
    /// Somebody has left a group, or the world.
    departures: bool,
    failed: bool,
    next_beat: Instant,
    last_turn: Instant,
}

impl<'a> State<'a> {
    pub(super) fn open(
        rank: usize,
        ranks: usize,
        options: &'a JoinOptions,
        shared: &'a Shared,
    ) -> Result<Self, ParallelError> {
        let near = options.transports == [Transport::Shm];
        let interface = options.interface.as_deref();
        let control = interface.or(near.then_some("lo"));
        let now = (options.now)();
        let peer = Peer {
            heard: now,
            hello: None,
            bye: false,
            farewell: false,
            broken: None,
        };
        Ok(Self {
            rank,
            options,
            shared,
            data: Link::open(&options.transports, interface, ranks)?,
            control: Link::open(&[Transport::Tcp], control, ranks)?,
            peers: vec![peer; ranks],
            connected: false,
            digest: 0,
            joining: None,
            groups: BTreeMap::new(),
            made: 0,
            early: Vec::new(),
            receives: Vec::new(),
            broken: Vec::new(),
            departures: false,
            failed: false,
            next_beat: now,
            last_turn: now,
        })
    }

    pub(super) fn now(&self) -> Instant {
        (self.options.now)()
    }

    /// Both worker addresses, the payload's first, behind its length.
    pub(super) fn address(&self) -> Result<Vec<u8>, ParallelError> {
        let (data, control) = (self.data.address()?, self.control.address()?);
        let mut blob = (data.len() as u32).to_le_bytes().to_vec();
        blob.extend(data);
        blob.extend(control);
        Ok(blob)
    }

    pub(super) fn failed(&self) -> bool {
        self.failed
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.peers.len()).filter(move |&rank| rank != own)
    }

    /// Something was begun with the others and is not finished.
    pub(super) fn at_work(&self) -> bool {
        self.outstanding() > 0 || self.groups.values().any(|m| m.state.at_work())
    }

    /// Messages under way.
    pub(super) fn outstanding(&self) -> usize {
        self.data.outstanding() + self.control.outstanding() + self.receives.len()
    }

    /// When this rank must look around, whatever else happens.
    pub(super) fn next_look(&self) -> Instant {
        let busy = self.outstanding() > 0 || self.peers.iter().any(|p| p.broken.is_some());
        let now = self.now();
        let longest = if busy && !self.failed {
            limits::BUSY_SLEEP
        } else {
            self.options.heartbeat
        };
        (now + longest).min(self.next_beat.max(now))
    }

    /// Takes commands, lets UCX work, handles what came, looks after the others. True when something
    /// moved.
    pub(super) fn turn(&mut self, queue: &Receiver<Command>) -> bool {
        let mut moved = false;
        loop {
            match queue.try_recv() {
                Ok(command) => {
                    self.command(command);
                    moved = true;
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
        moved |= self.control.progress();
        while let Some(arrived) = self.control.next_message() {
            self.control_message(&arrived.header);
            moved = true;
        }
        moved |= self.data.progress();
        while let Some(arrived) = self.data.next_message() {
            self.data_message(&arrived.header, arrived.body);
            moved = true;
        }
        moved |= self.reap();
        self.look_after();
        moved
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connect {
                addresses,
                digest,
                deadline,
                reply,
            } => self.connect(&addresses, digest, deadline, reply),
            Command::Group(member) => self.make(member),
            Command::Enter {
                group,
                op,
                input,
                mut waiter,
            } => match self.shared.failure() {
                Some(cause) => waiter.answer(Err(cause.error(op))),
                None => self.with(group, |state| state.enter(op, input, waiter)),
            },
            Command::Post { group, to, data } => self.post(group, to, data),
            Command::Claim {
                group,
                from,
                mut waiter,
            } => match self.shared.failure() {
                Some(cause) => waiter.answer(Err(cause.error(Op::Recv { from }))),
                None => self.with(group, |state| Ok(state.claim(from, waiter))),
            },
            Command::Forget { group, ticket } => {
                if let Some(member) = self.groups.get_mut(&group) {
                    member.state.forget(ticket);
                }
            }
            Command::Expired { group, ticket } => {
                let member = self.groups.get(&group);
                let after = self.options.timeout;
                if let Some(cause) = member.and_then(|m| m.state.expired(ticket, after)) {
                    self.fail(cause);
                }
            }
            Command::Abort => {
                if let Some(cause) = self.shared.failure() {
                    self.fail(cause);
                }
            }
            Command::Leave { group } => self.leave(group),
            Command::Transports { rank, reply } => {
                // The caller may have given up.
                let _ = reply.send(self.data.transports(rank));
            }
        }
    }

    /// Lets an event happen in a group, and does what it leads to.
    fn with(&mut self, group: u32, event: impl FnOnce(&mut GroupState) -> Effects) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        match event(&mut member.state) {
            Ok(out) => {
                for outgoing in out {
                    self.send(group, outgoing);
                }
            }
            Err(cause) => self.fail(cause),
        }
    }

    fn send(&mut self, group: u32, outgoing: Outgoing) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        let Outgoing { to, header, body } = outgoing;
        if to == member.state.index {
            // A buffer for this rank itself was taken.
            if header.kind == Kind::Taken {
                member.behind[to].fetch_sub(1, Ordering::AcqRel);
            }
            return;
        }
        let rank = member.state.ranks[to];
        if self.peers[rank].bye {
            return;
        }
        if let Some((_, range)) = &body {
            member.payloads.sent(header.op, range.len());
        }
        let bytes = header.encode();
        self.shared.headers.sent(bytes.len());
        if !self.data.send(rank, &bytes, body) {
            self.broken.push(rank);
        }
    }

    fn post(&mut self, group: u32, to: usize, data: Vec<f32>) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        let own = member.state.index;
        if to == own {
            self.with(group, |state| Ok(state.keep(data)));
            return;
        }
        let outgoing = member.state.post(to, data);
        self.send(group, outgoing);
    }

    fn leave(&mut self, group: u32) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        member.open = false;
        if self.failed {
            return;
        }
        for outgoing in member.state.leave() {
            self.send(group, outgoing);
        }
    }

    fn make(&mut self, member: Member) {
        let id = member.state.id;
        self.made = id + 1;
        self.groups.insert(id, member);
        // Groups nobody can use any more.
        self.groups.retain(|_, m| m.open || m.state.at_work());
        for (header, body) in std::mem::take(&mut self.early) {
            self.route(header, body);
        }
    }

    fn connect(
        &mut self,
        addresses: &[Vec<u8>],
        digest: u64,
        deadline: Instant,
        reply: SyncSender<Result<(), ParallelError>>,
    ) {
        self.digest = digest;
        for rank in self.others() {
            let connected = split(&addresses[rank]).and_then(|(data, control)| {
                self.data.connect(rank, data)?;
                self.control.connect(rank, control)
            });
            if let Err(error) = connected {
                let _ = reply.send(Err(error));
                return;
            }
        }
        self.connected = true;
        let hello = Header {
            number: digest,
            ..Header::control(Kind::Hello, self.rank)
        };
        self.tell_all(&hello.encode());
        self.joining = Some(Joining {
            deadline,
            after: self.options.join_timeout,
            reply,
        });
        self.check_joined();
    }

    fn check_joined(&mut self) {
        let Some(joining) = &self.joining else {
            return;
        };
        let hello = |rank: usize| self.peers[rank].hello;
        let other = |&rank: &usize| hello(rank).is_some_and(|digest| digest != self.digest);
        let outcome = if let Some(rank) = self.others().find(other) {
            Err(ParallelError::OtherWorld { rank })
        } else if let Some(rank) = self.others().find(|&rank| hello(rank).is_none()) {
            match self.shared.failure() {
                // A rank is dead.
                Some(cause @ (Cause::Gone { .. } | Cause::Silent { .. })) => {
                    Err(cause.error(Op::Barrier))
                }
                // Whoever reports anything else has joined, so the other greetings are on their way;
                // the failure comes out of the first operation.
                _ if self.now() < joining.deadline => return,
                _ => Err(ParallelError::NotJoined {
                    rank,
                    after: joining.after,
                }),
            }
        } else {
            Ok(())
        };
        // The caller may have given up.
        let _ = joining.reply.send(outcome);
        self.joining = None;
    }

    /// Sends a message to every rank that is still there, beside the payload.
    fn tell_all(&mut self, message: &[u8]) {
        for rank in self.others() {
            self.tell(rank, message);
        }
    }

    fn tell(&mut self, rank: usize, message: &[u8]) {
        let peer = &self.peers[rank];
        if peer.bye || peer.broken.is_some() {
            return;
        }
        self.shared.headers.sent(message.len());
        if !self.control.send(rank, message, None) {
            self.broken.push(rank);
        }
    }

    /// The header of a message, from a rank that exists.
    fn read<'b>(&mut self, bytes: &'b [u8]) -> Option<(Header, &'b [u8])> {
        self.shared.headers.received(bytes.len());
        let sound =
            |(header, _): &(Header, _)| header.from < self.peers.len() && header.from != self.rank;
        let Some((header, rest)) = Header::decode(bytes).filter(sound) else {
            self.fail(Cause::transport("read a message", "it makes no sense"));
            return None;
        };
        self.peers[header.from].heard = self.now();
        Some((header, rest))
    }

    fn control_message(&mut self, bytes: &[u8]) {
        let Some((header, rest)) = self.read(bytes) else {
            return;
        };
        let peer = &mut self.peers[header.from];
        match header.kind {
            Kind::Hello => {
                peer.hello = Some(header.number);
                self.check_joined();
            }
            Kind::Farewell => peer.farewell = true,
            Kind::Fail => {
                let cause = Cause::decode(rest);
                let unreadable = || Cause::Gone { rank: header.from };
                self.adopt(cause.unwrap_or_else(unreadable));
            }
            _ => {}
        }
    }

    fn data_message(&mut self, bytes: &[u8], body: Body) {
        let Some((header, _)) = self.read(bytes) else {
            return;
        };
        if header.kind == Kind::Bye {
            let farewell = Header::control(Kind::Farewell, self.rank).encode();
            self.tell(header.from, &farewell);
            self.peers[header.from].bye = true;
            self.departures = true;
            return;
        }
        self.route(header, body);
    }

    /// Takes a message to its group.
    fn route(&mut self, header: Header, body: Body) {
        if self.failed {
            return;
        }
        let Some(member) = self.groups.get_mut(&header.group) else {
            if header.group >= self.made {
                self.early.push((header, body));
            }
            if self.early.len() > limits::MAX_EARLY_MESSAGES {
                let bound = limits::MAX_EARLY_MESSAGES;
                let message = format!("more than {bound} for groups that this rank has not made");
                self.fail(Cause::transport("keep messages", message));
            }
            return;
        };
        let expected = member.state.axes;
        let place = member.state.place(header.from);
        let (true, Some(from)) = (header.axes == expected, place) else {
            return self.fail(Cause::Error(ParallelError::GroupsDiffer {
                rank: header.from,
                number: header.group,
                expected,
                got: header.axes,
            }));
        };
        if header.kind == Kind::Taken {
            let less = |n: usize| n.checked_sub(1);
            // A count that is zero already is a peer's mistake, and harmless.
            let _ = member.behind[from].fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
            return;
        }
        self.departures |= header.kind == Kind::Leave;
        let elements = body.elements();
        if matches!(body, Body::Malformed) || elements > limits::MAX_BODY_ELEMENTS {
            let message = format!("a body of rank {} has no legal length", header.from);
            return self.fail(Cause::transport("read a message", message));
        }
        self.with(header.group, |state| state.hear(from, &header, elements));
        if self.failed {
            return;
        }
        match body {
            Body::Here(data) => self.arrived(&header, data),
            Body::Announced(announced) => match announced.receive() {
                Ok(receiving) => self.receives.push((header, receiving)),
                Err(_) => self.broken.push(header.from),
            },
            Body::Malformed => {}
        }
    }

    /// A whole body is here.
    fn arrived(&mut self, header: &Header, data: Vec<f32>) {
        if self.failed {
            return;
        }
        let Some(member) = self.groups.get_mut(&header.group) else {
            return;
        };
        let Some(from) = member.state.place(header.from) else {
            return;
        };
        let op = match header.kind {
            Kind::Mail => Op::Recv { from },
            _ => header.op,
        };
        member.payloads.received(op, data.len());
        self.with(header.group, |state| state.arrive(from, header, data));
    }

    /// Ends what UCX has finished.
    fn reap(&mut self) -> bool {
        let mut moved = self.data.reap(&mut self.broken);
        moved |= self.control.reap(&mut self.broken);
        let mut at = 0;
        while at < self.receives.len() {
            let Some(result) = self.receives[at].1.poll() else {
                at += 1;
                continue;
            };
            let (header, _) = self.receives.swap_remove(at);
            match result {
                Ok(data) => self.arrived(&header, data),
                Err(_) => self.broken.push(header.from),
            }
            moved = true;
        }
        moved
    }

    /// Says that this rank lives, and looks whether the others do.
    fn look_after(&mut self) {
        let now = self.now();
        let pause = now.saturating_duration_since(self.last_turn);
        self.last_turn = now;
        if pause > self.options.heartbeat {
            // This rank itself was held up; what the others said meanwhile is still to be read.
            self.peers.iter_mut().for_each(|peer| peer.heard += pause);
        }
        for rank in std::mem::take(&mut self.broken) {
            self.peers[rank].broken.get_or_insert(now);
        }
        if self.connected && now >= self.next_beat {
            self.next_beat = now + self.options.heartbeat;
            let beat = Header::control(Kind::Beat, self.rank).encode();
            self.tell_all(&beat);
        }
        self.check_joined();
        if self.failed {
            return;
        }
        for rank in self.others() {
            let peer = &self.peers[rank];
            if peer.bye {
                continue;
            }
            let after = self.options.dead_after;
            let silent = now.saturating_duration_since(peer.heard) > after;
            if peer.broken.is_some_and(|at| now >= at + limits::LAST_WORDS) {
                self.fail(Cause::Gone { rank });
            } else if silent && peer.hello.is_some() {
                self.fail(Cause::Silent { rank, after });
            }
        }
        self.judge();
    }

    /// Fails when somebody waits for a rank that has left.
    fn judge(&mut self) {
        if self.failed || !self.departures {
            return;
        }
        let gone = |rank: usize| {
            // What it sent before it left may still be on its way into its buffer.
            let coming = self.receives.iter().any(|(header, _)| header.from == rank);
            self.peers[rank].bye && !coming
        };
        let bereft = self.groups.values().find_map(|m| m.state.bereft(gone));
        if let Some(cause) = bereft {
            self.fail(cause);
        }
    }

    /// Ends the world for this rank, and tells the others.
    pub(super) fn fail(&mut self, cause: Cause) {
        if self.failed {
            return;
        }
        let first = self.adopt(cause);
        let mut message = Header::control(Kind::Fail, self.rank).encode();
        message.extend(first.encode());
        self.tell_all(&message);
    }

    /// Ends the world for this rank.
    fn adopt(&mut self, cause: Cause) -> Cause {
        let first = self.shared.fail(cause);
        self.failed = true;
        for member in self.groups.values_mut() {
            member.state.fail(&first);
        }
        self.early.clear();
        self.check_joined();
        first
    }

    /// Ends this rank's part without a word to the others.
    pub(super) fn fail_quietly(&mut self) {
        self.adopt(Cause::transport("the rank's thread", "has stopped"));
    }

    /// Tells everybody that nothing else comes.
    pub(super) fn say_bye(&mut self) {
        let bye = Header::control(Kind::Bye, self.rank).encode();
        for rank in self.others() {
            if self.connected && !self.peers[rank].bye {
                self.shared.headers.sent(bye.len());
                if !self.data.send(rank, &bye, None) {
                    self.broken.push(rank);
                }
            }
        }
    }

    /// Everybody has read this rank's goodbye, or needs none.
    pub(super) fn all_said(&self) -> bool {
        let done = |peer: &Peer| peer.farewell || peer.bye || peer.broken.is_some();
        !self.connected || self.others().all(|rank| done(&self.peers[rank]))
    }
}

/// The two worker addresses of a rank.
fn split(blob: &[u8]) -> Result<(&[u8], &[u8]), ParallelError> {
    let parts = blob.split_first_chunk().and_then(|(length, rest)| {
        let length = u32::from_le_bytes(*length) as usize;
        rest.split_at_checked(length)
    });
    let sound = parts.filter(|(data, control)| !data.is_empty() && !control.is_empty());
    sound.ok_or_else(|| ParallelError::Transport {
        what: "read a rank's address",
        message: "it is cut short".into(),
    })
}
