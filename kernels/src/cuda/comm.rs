//! Groups of GPUs that work together, through NCCL.
//!
//! Ranks may be threads of one process, processes, or both; each has one GPU. The shared object is looked up
//! when the first group is made, as `libnccl.so.2`, then `libnccl.so`, on the loader's path (`LD_LIBRARY_PATH`);
//! version 2.18 or later. Its environment variables are left as they are.
//!
//! **Nobody waits for ever.** Joining and every call have a deadline, and a thread of each group watches what
//! runs on the device: an error, or operations that do not end within the deadline, abort the group, which
//! releases every kernel and every thread that waits for it. What they wrote is then worthless, so results
//! count only once [`Comm::wait`] or [`Comm::check`] has said so. A group that ended cannot be used again.

use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, result};

use super::comm_library::{Config, Handle, ID_BYTES, IN_PROGRESS, Nccl, SUCCESS, Stream, UniqueId};
use super::device::Gpu;
use super::error::{CudaError, Result, argument};
use super::tensor::{GpuTensor, GpuType};
use super::transfer::Mark;

/// Longest time between two looks at the device.
const WATCH_EVERY: Duration = Duration::from_millis(20);
/// Looks at a call without a pause; most are through by then.
const EAGER_LOOKS: u32 = 2_000;
/// First pause between two later looks, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
/// Longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
const OP: &str = "comm";

/// The token that makes ranks one group: one rank makes it, the others get it by any road. Whoever has it can
/// join.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CommId([u8; ID_BYTES]);

impl std::fmt::Debug for CommId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommId").finish_non_exhaustive()
    }
}

impl CommId {
    /// Size of a token.
    pub const BYTES: usize = ID_BYTES;

    /// A token for a new group. The process must live until all ranks have joined: they meet in it.
    ///
    /// # Errors
    /// `NoLibrary`, or what the library says.
    pub fn new() -> Result<Self> {
        let nccl = Nccl::get()?;
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes one token.
        nccl.check("ncclGetUniqueId", unsafe { (nccl.unique_id)(&raw mut id) })?;
        Ok(Self(id.0))
    }

    /// A token that another rank made.
    #[must_use]
    pub fn from_bytes(bytes: [u8; ID_BYTES]) -> Self {
        Self(bytes)
    }

    /// The token, to be sent to other ranks.
    #[must_use]
    pub fn bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

/// Choices for a group; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct CommOptions {
    /// How long the others may let one wait: in joining, in a call, and with operations that were enqueued. A
    /// little more may pass. It includes the kernels that were enqueued before an operation.
    pub deadline: Duration,
    /// At most so many thread blocks an operation. Each keeps a multiprocessor from the kernels beside it.
    pub blocks: Option<u32>,
}

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            blocks: None,
        }
    }
}

/// Which stream an operation runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// That of the kernels, in order with them.
    Compute,
    /// The group's own, beside the kernels; order is made by marks.
    Beside,
}

/// What is behind a group's handle. The library locks nothing: every call holds the lock.
struct State {
    handle: Option<Handle>,
    /// Why there is no handle any more.
    reason: String,
    /// Operations enqueued, ever.
    enqueued: u64,
    /// Whether the watching thread should end.
    closing: bool,
}

// SAFETY: the handle may be used from any thread, one at a time, which the lock around it sees to.
unsafe impl Send for State {}

pub(super) struct Shared {
    nccl: &'static Nccl,
    gpu: Arc<Gpu>,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// The last operation of each lane.
    last: [CudaEvent; 2],
}

/// One rank's end of a group. Calls of one rank come one after the other, in the same order on all ranks.
pub struct Comm {
    shared: Arc<Shared>,
    rank: usize,
    ranks: usize,
    stream: Arc<CudaStream>,
    /// What a barrier sums.
    token: GpuTensor,
    /// Held during a call.
    turn: Mutex<()>,
    watch: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comm")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

/// Ends a group from any thread, for one that learns otherwise that a rank is gone.
#[derive(Clone)]
pub struct CommAborter(Arc<Shared>);

impl std::fmt::Debug for CommAborter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommAborter").finish_non_exhaustive()
    }
}

impl CommAborter {
    /// Ends the group on this rank, unless it has ended; what waits is released and fails with `reason`.
    pub fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

impl Comm {
    /// Joins the group of `ranks` ranks as `rank` and waits until all have.
    ///
    /// # Errors
    /// `Argument` for a rank that is not one of the group, `NoLibrary`, `GroupEnded` when the others did not
    /// come within the deadline or joining failed, or what the driver says.
    pub fn join(
        gpu: &Arc<Gpu>,
        id: &CommId,
        rank: usize,
        ranks: usize,
        options: &CommOptions,
    ) -> Result<Self> {
        let narrow = |n: usize| c_int::try_from(n).ok();
        let (Some(place), Some(size)) = (narrow(rank), narrow(ranks)) else {
            return Err(argument(OP, "ranks", "are too many"));
        };
        if rank >= ranks {
            return Err(argument(OP, "rank", "is not one of the group"));
        }
        let nccl = Nccl::get()?;
        let context = gpu.context()?;
        let (_, most_urgent) = result::stream::get_priority_range()?;
        // Ahead of kernels that wait for a multiprocessor: others wait for this one.
        let stream = context.new_stream_with_priority(most_urgent)?;
        let token = GpuTensor::new(gpu, &[1], GpuType::F32, "barrier")?;
        token.write_bytes(&0_f32.to_le_bytes())?;
        let last = [context.new_event(None)?, context.new_event(None)?];
        let mut handle: Handle = std::ptr::null_mut();
        let mut config = Config::nonblocking(options.blocks);
        let (out, config) = (&raw mut handle, &raw mut config);
        // SAFETY: the context is current; handle and choices live until the call returns.
        let code = unsafe { (nccl.init)(out, size, UniqueId(id.0), place, config) };
        nccl.check("ncclCommInitRankConfig", code)?;
        let shared = Arc::new(Shared {
            nccl,
            gpu: gpu.clone(),
            deadline: options.deadline,
            state: Mutex::new(State {
                handle: Some(handle),
                reason: String::new(),
                enqueued: 0,
                closing: false,
            }),
            changed: Condvar::new(),
            last,
        });
        shared.settle("join")?;
        let watched = shared.clone();
        Ok(Self {
            watch: Some(std::thread::spawn(move || watched.watch())),
            shared,
            rank,
            ranks,
            stream,
            token,
            turn: Mutex::new(()),
        })
    }

    /// Version of the library: 10000 times the major one, 100 times the minor one, and the patch level.
    ///
    /// # Errors
    /// `NoLibrary`, or `Library` when it is too old.
    pub fn library_version() -> Result<u32> {
        Ok(Nccl::get()?.number()?.unsigned_abs())
    }

    /// Place of this rank in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The GPU of this rank.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.shared.gpu
    }

    /// Something that can end the group from another thread.
    #[must_use]
    pub fn aborter(&self) -> CommAborter {
        CommAborter(self.shared.clone())
    }

    /// Whether the group lives.
    ///
    /// # Errors
    /// `GroupEnded` with the reason.
    pub fn check(&self) -> Result<()> {
        self.shared.lock().live().map(|_| ())
    }

    /// Waits until everything enqueued has run on both lanes.
    ///
    /// # Errors
    /// `GroupEnded`: the results are worthless; or a kernel that failed.
    pub fn wait(&self) -> Result<()> {
        for event in &self.shared.last {
            event.synchronize()?;
        }
        self.check()
    }

    /// Waits until all ranks have come here and everything enqueued before has run everywhere.
    ///
    /// # Errors
    /// Those of [`Comm::wait`].
    pub fn barrier(&self) -> Result<()> {
        // Work on the own stream must be through as well.
        let before = self.mark()?;
        self.shared.gpu.wait_for(&before)?;
        self.all_reduce(&self.token, &self.token, Lane::Compute)?;
        self.wait()
    }

    /// Marks this place in the group's own stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn mark(&self) -> Result<Mark> {
        self.shared.gpu.context()?;
        Mark::record(&self.stream)
    }

    /// Lets the group's own stream go on only after `mark`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.shared.gpu.context()?;
        mark.hold(&self.stream)
    }

    /// Enqueues what `enqueue` calls as one operation, and waits until the library has taken it.
    pub(super) fn run(
        &self,
        call: &'static str,
        lane: Lane,
        enqueue: impl FnOnce(&Nccl, Handle, Stream) -> c_int,
    ) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &self.shared;
        shared.gpu.context()?;
        let stream = self.stream(lane);
        let mut state = shared.lock();
        let handle = state.live()?;
        let code = enqueue(shared.nccl, handle, stream.cu_stream().cast());
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            // Ranks may disagree from here on.
            let why = shared.nccl.describe(code, handle);
            shared.end(&mut state, &format!("{call} failed: {why}"));
            return state.live().map(|_| ());
        }
        drop(state);
        shared.settle(call)?;
        shared.last[lane as usize].record(stream)?;
        shared.lock().enqueued += 1;
        Ok(())
    }

    pub(super) fn stream(&self, lane: Lane) -> &Arc<CudaStream> {
        match lane {
            Lane::Compute => self.shared.gpu.stream(),
            Lane::Beside => &self.stream,
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(watch) = self.watch.take() {
            // A panic of that thread has nowhere to go.
            let _ = watch.join();
        }
        self.shared.leave();
    }
}

impl State {
    fn live(&self) -> Result<Handle> {
        let reason = || self.reason.clone();
        self.handle
            .ok_or_else(|| CudaError::GroupEnded { reason: reason() })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn abort(&self, reason: &str) {
        self.end(&mut self.lock(), reason);
    }

    /// Takes the handle away and releases what runs on it.
    fn end(&self, state: &mut State, reason: &str) {
        let Some(handle) = state.handle.take() else {
            return;
        };
        reason.clone_into(&mut state.reason);
        if self.gpu.context().is_ok() {
            // SAFETY: a live handle, used by nobody else under the lock and by nobody after. A failure to end
            // it cleanly has nowhere to go.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
        self.changed.notify_all();
    }

    /// What the library says about work in the background.
    fn async_code(&self, handle: Handle) -> c_int {
        let mut code = SUCCESS;
        // SAFETY: a live handle, under the lock; writes one code.
        let asked = unsafe { (self.nccl.async_error)(handle, &raw mut code) };
        if asked == SUCCESS { code } else { asked }
    }

    /// Waits until the library has taken a call, at most as long as the deadline.
    fn settle(&self, call: &str) -> Result<()> {
        let (mut looks, mut waited, mut pause) = (0, Duration::ZERO, FIRST_PAUSE);
        loop {
            let mut state = self.lock();
            let handle = state.live()?;
            match self.async_code(handle) {
                SUCCESS => return Ok(()),
                IN_PROGRESS if waited < self.deadline => {}
                IN_PROGRESS => {
                    let seconds = self.deadline.as_secs_f32();
                    let late = format!("{call}: the others did not follow within {seconds} s");
                    self.end(&mut state, &late);
                }
                code => {
                    let why = self.nccl.describe(code, handle);
                    self.end(&mut state, &format!("{call} failed: {why}"));
                }
            }
            drop(state);
            looks += 1;
            if looks < EAGER_LOOKS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                waited += pause;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
    }

    /// Whether everything enqueued has run.
    fn idle(&self) -> Result<bool> {
        let [compute, beside] = &self.last;
        Ok(compute.try_is_complete()? && beside.try_is_complete()?)
    }

    /// Runs beside the group until it closes or ends.
    fn watch(&self) {
        // Without a context nothing can be enqueued either.
        if self.gpu.context().is_err() {
            return;
        }
        let (mut seen, mut quiet) = (0, Duration::ZERO);
        let mut state = self.lock();
        loop {
            let pause = self.changed.wait_timeout(state, WATCH_EVERY);
            state = pause.unwrap_or_else(PoisonError::into_inner).0;
            let (Some(handle), false) = (state.handle, state.closing) else {
                return;
            };
            let code = self.async_code(handle);
            if !matches!(code, SUCCESS | IN_PROGRESS) {
                let why = self.nccl.describe(code, handle);
                return self.end(&mut state, &why);
            }
            match self.idle() {
                Err(error) => return self.end(&mut state, &error.to_string()),
                Ok(true) => quiet = Duration::ZERO,
                Ok(false) if state.enqueued != seen => quiet = Duration::ZERO,
                Ok(false) => quiet += WATCH_EVERY,
            }
            seen = state.enqueued;
            if quiet > self.deadline {
                let seconds = self.deadline.as_secs_f32();
                let late = format!("an operation did not end within {seconds} s");
                return self.end(&mut state, &late);
            }
        }
    }

    /// Leaves in good order if that is possible within the deadline.
    fn leave(&self) {
        if std::thread::panicking() {
            return self.abort("this rank panicked");
        }
        let mut waited = Duration::ZERO;
        while self.gpu.context().is_ok() && !matches!(self.idle(), Ok(true)) {
            if waited > self.deadline {
                return self.abort("operations did not end");
            }
            std::thread::sleep(LONGEST_PAUSE);
            waited += LONGEST_PAUSE;
        }
        let state = self.lock();
        let Ok(handle) = state.live() else {
            return;
        };
        // SAFETY: a live handle, under the lock.
        let code = unsafe { (self.nccl.finalize)(handle) };
        drop(state);
        if !matches!(code, SUCCESS | IN_PROGRESS) || self.settle("leave").is_err() {
            return self.abort("leaving failed");
        }
        let mut state = self.lock();
        if let Some(handle) = state.handle.take() {
            "this rank left".clone_into(&mut state.reason);
            // SAFETY: a live handle, used by nobody after. A failure has nowhere to go.
            let _ = unsafe { (self.nccl.destroy)(handle) };
        }
    }
}
