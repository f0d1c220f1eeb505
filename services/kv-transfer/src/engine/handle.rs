use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use base::Deadline;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

use super::config::EngineConfig;
use super::remote::{Remote, Target};
use super::thread;
use crate::{TransferError, limits};
use fabric::{Context, Payload, PoolMemory, SharedMemory, Use};

/// What a finished transfer tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landed {
    /// UCX transports of the connection as UCX names them, joined by commas.
    pub transport: String,
}

/// A run of bytes in a region and in the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// First byte, counted from the start of the region.
    pub remote: u64,
    /// Place in the payload.
    pub local: Range<usize>,
}

impl Part {
    /// The same bytes on both sides.
    #[must_use]
    pub fn aligned(local: Range<usize>) -> Self {
        Self {
            remote: local.start as u64,
            local,
        }
    }

    /// End in the region; `None` when there is none.
    fn remote_end(&self) -> Option<u64> {
        self.remote.checked_add(self.local.len() as u64)
    }
}

pub(super) struct Command {
    pub(super) target: Target,
    pub(super) payload: Payload,
    /// What of the payload to move.
    pub(super) parts: Vec<Part>,
    pub(super) deadline: Deadline,
    pub(super) reply: oneshot::Sender<Result<(Payload, Landed), TransferError>>,
}

/// What the thread and its handles share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) wake: OwnedFd,
}

impl Shared {
    /// Interrupts the sleep of the thread. The counter saturating is as good as a wake.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Handle of the UCX thread. The thread stops with the last clone, which waits for it
/// ([`limits::STOP_GRACE`] at most).
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    config: EngineConfig,
    commands: SyncSender<Command>,
    shared: Arc<Shared>,
    context: Arc<Context>,
    worker_address: Vec<u8>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl Engine {
    /// Opens the transports and starts the thread.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for a bad configuration, [`TransferError::Ucx`] when UCX cannot
    /// open what it names.
    pub fn start(config: &EngineConfig) -> Result<Self, TransferError> {
        let context = Arc::new(Context::open(&config.settings()?, Use::Copies)?);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| io("create an event descriptor", error.into()))?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            wake,
        });
        let (commands, queue) = sync_channel(limits::MAX_QUEUED_TRANSFERS);
        let (ready, started) = sync_channel(1);
        let body = {
            let (context, shared) = (Arc::clone(&context), Arc::clone(&shared));
            move || thread::run(&context, &shared, &queue, &ready)
        };
        let thread = std::thread::Builder::new()
            .name("kv-ucx".into())
            .spawn(body)
            .map_err(|error| io("start the ucx thread", error))?;
        let worker_address = wait_for(&started)?;
        let thread = Mutex::new(Some(thread));
        Ok(Self {
            inner: Arc::new(Inner {
                config: config.clone(),
                commands,
                shared,
                context,
                worker_address,
                thread,
            }),
        })
    }

    /// Allocates a region that peers can reach.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] naming `pool_bytes` when the system has not enough memory.
    pub fn allocate(&self, bytes: usize) -> Result<PoolMemory, TransferError> {
        self.inner.config.check_room(bytes as u64)?;
        PoolMemory::allocate(&self.inner.context, bytes).map_err(|error| {
            if error.is_out_of_memory() {
                let message = format!("the system cannot give {bytes} bytes of shared memory");
                TransferError::invalid("pool_bytes", message)
            } else {
                error.into()
            }
        })
    }

    /// Makes memory that processes of this node map reachable for the others.
    ///
    /// # Errors
    /// [`TransferError::Ucx`] when UCX cannot register it.
    pub fn register(&self, shared: &Arc<SharedMemory>) -> Result<PoolMemory, TransferError> {
        Ok(PoolMemory::of_shared(&self.inner.context, shared)?)
    }

    /// Describes `memory` to peers; [`Remote::part`] narrows it.
    ///
    /// # Errors
    /// [`TransferError::Ucx`] when UCX cannot pack a key.
    pub fn export(&self, memory: &PoolMemory) -> Result<Remote, TransferError> {
        let key = memory.remote_key()?;
        let bytes = memory.bytes() as u64;
        Ok(Remote::of_region(
            &self.inner.worker_address,
            &key,
            memory.address(),
            bytes,
        ))
    }

    /// Writes all of `payload` to the start of `remote`. When this returns, the bytes are there.
    ///
    /// Dropping the future stops the transfer; the payload lives on until UCX is done with it.
    ///
    /// # Errors
    /// [`TransferError::Deadline`], [`TransferError::PeerLost`], [`TransferError::TooMany`] when
    /// the queue is full, [`TransferError::Stopped`].
    pub async fn put(
        &self,
        remote: &Remote,
        payload: Arc<Vec<u8>>,
        deadline: Deadline,
    ) -> Result<Landed, TransferError> {
        let whole = Part::aligned(0..payload.len());
        let payload = Payload::Source(payload);
        let (_, landed) = self
            .transfer(remote, payload, vec![whole], deadline)
            .await?;
        Ok(landed)
    }

    /// Fills `buffer` from the start of `remote` and gives it back.
    ///
    /// Dropping the future stops the transfer; the buffer lives on until UCX is done with it.
    ///
    /// # Errors
    /// As [`Self::put`]; the buffer is lost then.
    pub async fn get(
        &self,
        remote: &Remote,
        buffer: Vec<u8>,
        deadline: Deadline,
    ) -> Result<(Vec<u8>, Landed), TransferError> {
        let whole = Part::aligned(0..buffer.len());
        self.get_parts(remote, buffer, vec![whole], deadline).await
    }

    /// Reads parts of `remote` into `buffer`, and gives the buffer back.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn get_parts(
        &self,
        remote: &Remote,
        buffer: Vec<u8>,
        parts: Vec<Part>,
        deadline: Deadline,
    ) -> Result<(Vec<u8>, Landed), TransferError> {
        let payload = Payload::Target(buffer);
        match self.transfer(remote, payload, parts, deadline).await? {
            (Payload::Target(buffer), landed) => Ok((buffer, landed)),
            (Payload::Source(_), _) => Err(TransferError::Stopped),
        }
    }

    async fn transfer(
        &self,
        remote: &Remote,
        payload: Payload,
        parts: Vec<Part>,
        deadline: Deadline,
    ) -> Result<(Payload, Landed), TransferError> {
        let outside = |part: &Part| {
            part.local.start >= part.local.end
                || part.local.end > payload.len()
                || part.remote_end().is_none()
        };
        if parts.is_empty() || parts.iter().any(outside) {
            return Err(TransferError::invalid(
                "ranges",
                "must be non-empty parts of the payload",
            ));
        }
        let end = parts.iter().filter_map(Part::remote_end).max();
        let target = remote.open(end.unwrap_or(0))?;
        let (reply, answer) = oneshot::channel();
        let command = Command {
            target,
            payload,
            parts,
            deadline,
            reply,
        };
        self.inner
            .commands
            .try_send(command)
            .map_err(|error| match error {
                TrySendError::Full(_) => TransferError::TooMany {
                    what: "queued transfers",
                    limit: limits::MAX_QUEUED_TRANSFERS,
                },
                TrySendError::Disconnected(_) => TransferError::Stopped,
            })?;
        self.inner.shared.wake();
        // The thread watches the deadline; this one is for a thread that hangs inside UCX.
        let outer = Deadline::at(deadline.instant() + limits::DRAIN_GRACE);
        outer
            .bound("the ucx thread", answer)
            .await
            .map_err(|_| TransferError::Deadline {
                what: "waiting for the ucx thread",
            })?
            .map_err(|_| TransferError::Stopped)?
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn wait_for(started: &Receiver<Result<Vec<u8>, TransferError>>) -> Result<Vec<u8>, TransferError> {
    started.recv().map_err(|_| TransferError::Stopped)?
}

fn io(what: &'static str, source: std::io::Error) -> TransferError {
    TransferError::Io { what, source }
}
