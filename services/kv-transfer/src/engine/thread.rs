use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::handle::{Command, Shared};
use super::job::{Job, Turn};
use super::peers::Peers;
use crate::{TransferError, limits};
use fabric::{Armed, Context, Worker};

/// Body of the UCX thread. Reports the worker's address, or why there is none, to `ready`.
pub(super) fn run(
    context: &Arc<Context>,
    shared: &Shared,
    queue: &Receiver<Command>,
    ready: &SyncSender<Result<Vec<u8>, TransferError>>,
) {
    let started = Worker::new(context).and_then(|worker| Ok((worker.address()?, worker)));
    let worker = match started {
        Ok((address, worker)) => {
            let _ = ready.send(Ok(address));
            worker
        }
        Err(error) => {
            let _ = ready.send(Err(error.into()));
            return;
        }
    };
    let mut state = State {
        peers: Peers::new(&worker),
        worker,
        jobs: VecDeque::new(),
    };
    let mut idle_turns = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if state.turn(queue) {
            idle_turns = 0;
            continue;
        }
        idle_turns += 1;
        if idle_turns >= limits::SPIN_TURNS {
            idle_turns = 0;
            if let Err(error) = state.sleep(shared) {
                tracing::error!(%error, "the transfer engine cannot sleep and stops");
                break;
            }
        }
    }
    state.stop();
}

struct State {
    peers: Peers,
    worker: Rc<Worker>,
    jobs: VecDeque<Job>,
}

impl State {
    /// Takes new commands, lets UCX work, gives each job a turn. True when something moved.
    fn turn(&mut self, queue: &Receiver<Command>) -> bool {
        let mut moved = self.accept(queue);
        moved |= self.worker.progress();
        for _ in 0..self.jobs.len() {
            let Some(mut job) = self.jobs.pop_front() else {
                break;
            };
            match job.turn(base::clock::now()) {
                Turn::Idle => {}
                Turn::Moved => moved = true,
                Turn::Broken(endpoint) => {
                    self.peers.cut(&endpoint);
                    moved = true;
                }
                Turn::Over => {
                    moved = true;
                    continue;
                }
            }
            self.jobs.push_back(job);
        }
        moved
    }

    fn accept(&mut self, queue: &Receiver<Command>) -> bool {
        let mut moved = false;
        while self.jobs.len() < limits::MAX_ACTIVE_TRANSFERS {
            match queue.try_recv() {
                Ok(command) => {
                    moved = true;
                    self.begin(command);
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
        moved
    }

    fn begin(&mut self, command: Command) {
        if command.reply.is_closed() {
            return;
        }
        match self
            .peers
            .key(&command.target.worker_address, &command.target.key)
        {
            Ok(key) => self.jobs.extend(Job::new(&key, command)),
            Err(error) => {
                let _ = command.reply.send(Err(TransferError::PeerLost(error)));
            }
        }
    }

    /// Sleeps until UCX, a command or the next deadline needs attention.
    fn sleep(&self, shared: &Shared) -> Result<(), TransferError> {
        if self.worker.arm()? == Armed::Busy {
            return Ok(());
        }
        let longest = if self.jobs.is_empty() {
            limits::IDLE_SLEEP
        } else {
            limits::BUSY_SLEEP
        };
        let timeout = timespec(longest.min(self.until_next_look()));
        let worker = self.worker.event_fd()?;
        let mut fds = [
            PollFd::from_borrowed_fd(worker, PollFlags::IN),
            PollFd::new(&shared.wake, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(TransferError::Io {
                    what: "poll for events",
                    source: error.into(),
                });
            }
        }
        // Empty already when nobody woke us.
        let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        Ok(())
    }

    fn until_next_look(&self) -> Duration {
        let next: Option<Instant> = self.jobs.iter().map(Job::next_look).min();
        next.map_or(limits::IDLE_SLEEP, |next| {
            next.saturating_duration_since(base::clock::now())
        })
    }

    /// Cuts every connection and waits, within bounds, for UCX to let go of the memory. What is
    /// still held after that is leaked with its transfer.
    fn stop(mut self) {
        for job in &mut self.jobs {
            job.answer(Err(TransferError::Stopped));
        }
        self.peers.cut_all();
        let end = base::clock::now() + limits::STOP_GRACE;
        loop {
            let now = base::clock::now();
            while self.worker.progress() {}
            self.jobs.retain_mut(|job| {
                // Errors are expected here: the connections were cut.
                let _ = job.turn(now);
                !job.is_over()
            });
            if self.jobs.is_empty() || now >= end {
                break;
            }
            std::thread::yield_now();
        }
        if !self.jobs.is_empty() {
            tracing::warn!(
                transfers = self.jobs.len(),
                "leaked the memory of running transfers"
            );
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
