//! What a rank's thread knows: the others, the groups, and what is under way.

mod commands;
mod intake;
mod others;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::AtomicUsize,
        mpsc::{Receiver, SyncSender},
    },
    time::{Duration, Instant},
};

use fabric::{Body, Receiving, Transport};

use super::{
    JoinOptions,
    group_state::{GroupState, Waiter},
    limits,
    link::Link,
    message::{Cause, Header, Kind},
    traffic::Payloads,
    world::Shared,
};
use parallel::{AxisSet, Group, Op, ParallelError};

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
        // A rank that has left reads nothing more.
        let reads = |rank: usize| !self.peers[rank].bye;
        self.data.is_sending(reads)
            || !self.receives.is_empty()
            || self.groups.values().any(|m| self.busy(m))
    }

    /// Operations of a group are not finished, and can be.
    fn busy(&self, member: &Member) -> bool {
        member.state.at_work(|rank| self.gone(rank))
    }

    /// A rank will never say anything again, and everything it said is here.
    fn gone(&self, rank: usize) -> bool {
        // What it sent before it left may still be on its way into its buffer.
        let coming = self.receives.iter().any(|(header, _)| header.from == rank);
        self.peers[rank].bye && !coming
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
        let alive = |peer: &Peer| peer.hello.is_some() && !peer.bye;
        let silence = |peer: &Peer| alive(peer).then(|| peer.heard + self.options.dead_after);
        let others = self.others().filter_map(|rank| silence(&self.peers[rank]));
        let watched = others.min().filter(|_| self.connected && !self.failed);
        let next = watched.map_or(self.next_beat, |dead| dead.min(self.next_beat));
        (now + longest).min(next.max(now))
    }

    /// Takes commands, lets UCX work, handles what came, looks after the others. True when something
    /// moved.
    pub(super) fn turn(&mut self, queue: &Receiver<Command>) -> bool {
        let mut moved = false;
        while let Ok(command) = queue.try_recv() {
            self.command(command);
            moved = true;
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
}
