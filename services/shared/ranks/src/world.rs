//! One rank's membership in a world: joining it, its failure, its end.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};

use super::{
    Rendezvous, Transport, UcxGroup, limits, lock,
    message::Cause,
    progress,
    state::{Command, Member},
    traffic::HeaderCount,
};
use parallel::{AxisSet, Mesh, ParallelError};

/// How a rank joins its world. Every rank gives the same, but for `interface`.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// Longest wait of an operation for another rank.
    pub timeout: Duration,
    /// How long all ranks may take to join.
    pub join_timeout: Duration,
    /// How often a rank says that it lives, from its own thread: long computations do not matter.
    pub heartbeat: Duration,
    /// How long a rank may be silent before it counts as dead; at least
    /// [`limits::MIN_LOST_BEATS`] heartbeats.
    pub dead_after: Duration,
    /// Transports of payload; UCX takes the fastest that reaches a peer.
    pub transports: Vec<Transport>,
    /// Network devices in UCX notation ("lo", "eth0,eth1"). When absent: every device, or only the
    /// loopback device when shared memory is the one transport, which ends at the host anyway.
    pub interface: Option<String>,
    /// Monotonic time.
    pub now: fn() -> Instant,
}

impl JoinOptions {
    /// One transport, the default bounds.
    #[must_use]
    pub fn new(transport: Transport, timeout: Duration, now: fn() -> Instant) -> Self {
        Self {
            timeout,
            join_timeout: limits::JOIN_TIMEOUT,
            heartbeat: limits::HEARTBEAT,
            dead_after: limits::DEAD_AFTER,
            transports: vec![transport],
            interface: None,
            now,
        }
    }

    fn check(&self) -> Result<(), ParallelError> {
        let millis = |d: Duration| usize::try_from(d.as_millis()).unwrap_or(usize::MAX);
        let at_least = |field, got: Duration, min: Duration| {
            if got >= min {
                return Ok(());
            }
            Err(ParallelError::OutOfRange {
                field,
                min: millis(min),
                max: usize::MAX,
                got: millis(got),
            })
        };
        at_least("heartbeat (ms)", self.heartbeat, limits::MIN_HEARTBEAT)?;
        let beats = self.heartbeat.saturating_mul(limits::MIN_LOST_BEATS);
        at_least("dead_after (ms)", self.dead_after, beats)
    }
}

/// What a rank's callers and its thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) wake: OwnedFd,
    failure: Mutex<Option<Cause>>,
    pub(super) headers: HeaderCount,
}

impl Shared {
    fn new() -> Result<Self, ParallelError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(|error| ParallelError::Transport {
            what: "make an event descriptor",
            message: error.to_string().into(),
        })?;
        Ok(Self {
            stop: AtomicBool::new(false),
            wake,
            failure: Mutex::default(),
            headers: HeaderCount::default(),
        })
    }

    /// Interrupts the sleep of the thread. A counter that is full wakes it as well.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Records a failure; the first one counts.
    pub(super) fn fail(&self, cause: Cause) -> Cause {
        lock(&self.failure).get_or_insert(cause).clone()
    }

    pub(super) fn failure(&self) -> Option<Cause> {
        lock(&self.failure).clone()
    }
}

/// What this rank's world and all its groups hold together.
#[derive(Debug)]
pub(super) struct Inner {
    mesh: Mesh,
    rank: usize,
    pub(super) timeout: Duration,
    pub(super) shared: Arc<Shared>,
    commands: Sender<Command>,
    next_ticket: AtomicU64,
    next_group: Mutex<u32>,
    thread: Option<JoinHandle<()>>,
}

impl Inner {
    pub(super) fn ticket(&self) -> u64 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands the thread something to do.
    pub(super) fn command(&self, command: Command) -> Result<(), ParallelError> {
        self.commands.send(command).map_err(|_| stopped())?;
        self.shared.wake();
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

pub(super) fn stopped() -> ParallelError {
    ParallelError::Transport {
        what: "the rank's thread",
        message: "has stopped".into(),
    }
}

/// One rank of a mesh whose ranks are processes, or threads of one.
///
/// The rank leaves when the last handle of the world and of its groups is dropped. That takes up to
/// [`limits::LINGER`], because what it has begun is finished with the others.
#[derive(Debug, Clone)]
pub struct UcxWorld {
    inner: Arc<Inner>,
}

impl UcxWorld {
    /// Joins the world of `mesh` as `rank`; returns when all ranks have joined.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`], [`ParallelError::OutOfRange`] for bad options,
    /// [`ParallelError::NotJoined`] naming a rank that did not come,
    /// [`ParallelError::OtherWorld`], [`ParallelError::Transport`].
    pub fn join(
        mesh: Mesh,
        rank: usize,
        options: &JoinOptions,
        rendezvous: &dyn Rendezvous,
    ) -> Result<Self, ParallelError> {
        mesh.coordinates(rank)?;
        options.check()?;
        let ranks = mesh.ranks();
        let start = (options.now)();
        let (inner, address) = start_thread(mesh, rank, options)?;
        let left = || {
            let gone = (options.now)().saturating_duration_since(start);
            options.join_timeout.saturating_sub(gone)
        };
        rendezvous.publish(rank, &address, left())?;
        let addresses = rendezvous.collect(ranks, left())?;
        if addresses.len() != ranks || addresses[rank] != address {
            // Somebody else is this rank.
            return Err(ParallelError::OtherWorld { rank });
        }
        let (reply, joined) = sync_channel(1);
        inner.command(Command::Connect {
            digest: digest(&mesh, &addresses),
            addresses,
            deadline: start + options.join_timeout,
            reply,
        })?;
        match joined.recv_timeout(left() + limits::THREAD_GRACE) {
            Ok(joined) => joined?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(stopped());
            }
        }
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// This rank's end of its group along `axes`. All ranks make the same groups in the same order.
    ///
    /// # Errors
    /// [`ParallelError::Transport`] when the rank's thread has stopped.
    pub fn group(&self, axes: AxisSet) -> Result<UcxGroup, ParallelError> {
        let group = self.inner.mesh.group(self.inner.rank, axes)?;
        // The thread learns of groups in the order of their numbers.
        let mut next = lock(&self.inner.next_group);
        let member = Member::new(*next, axes, group);
        let end = UcxGroup::new(Arc::clone(&self.inner), &member);
        self.inner.command(Command::Group(member))?;
        *next += 1;
        Ok(end)
    }

    /// Number of this rank in the mesh.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// UCX transports that payload to `rank` takes, as UCX names them.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`], [`ParallelError::Transport`].
    pub fn transports(&self, rank: usize) -> Result<Vec<String>, ParallelError> {
        self.inner.mesh.coordinates(rank)?;
        let (reply, answer) = sync_channel(1);
        self.inner.command(Command::Transports { rank, reply })?;
        let answer = answer.recv_timeout(limits::THREAD_GRACE);
        answer.map_err(|_| stopped())
    }
}

/// Starts the thread; gives the handle and what other ranks need to connect.
fn start_thread(
    mesh: Mesh,
    rank: usize,
    options: &JoinOptions,
) -> Result<(Inner, Vec<u8>), ParallelError> {
    let shared = Arc::new(Shared::new()?);
    let (commands, queue) = channel();
    let (ready, started): (SyncSender<_>, Receiver<Result<Vec<u8>, ParallelError>>) =
        sync_channel(1);
    let body = {
        let (shared, options) = (Arc::clone(&shared), options.clone());
        move || progress::run(rank, mesh.ranks(), &options, &shared, &queue, &ready)
    };
    let thread = std::thread::Builder::new()
        .name(format!("rank-{rank}"))
        .spawn(body)
        .map_err(|error| ParallelError::Transport {
            what: "start the rank's thread",
            message: error.to_string().into(),
        })?;
    let inner = Inner {
        mesh,
        rank,
        timeout: options.timeout,
        shared,
        commands,
        next_ticket: AtomicU64::new(0),
        next_group: Mutex::new(0),
        thread: Some(thread),
    };
    let address = started.recv_timeout(options.join_timeout);
    let address = address.map_err(|_| stopped())??;
    Ok((inner, address))
}

/// Tells worlds apart: FNV-1a over the mesh and everybody's addresses.
fn digest(mesh: &Mesh, addresses: &[Vec<u8>]) -> u64 {
    let sizes = parallel::Axis::ALL.map(|axis| mesh.size(axis) as u64);
    let bytes = sizes.iter().flat_map(|size| size.to_le_bytes());
    let bytes = bytes.chain(addresses.iter().flatten().copied());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
