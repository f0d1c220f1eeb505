//! The body of a rank's thread: turns, sleep, and an orderly end.

use std::{
    sync::{
        atomic::Ordering,
        mpsc::{Receiver, SyncSender},
    },
    time::{Duration, Instant},
};

use fabric::Armed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    JoinOptions, limits,
    message::Cause,
    state::{Command, State},
    world::Shared,
};
use parallel::ParallelError;

/// Runs until the last handle of the rank is dropped. Reports to `ready` what other ranks need to
/// connect, or why there is nothing.
pub(super) fn run(
    rank: usize,
    ranks: usize,
    options: &JoinOptions,
    shared: &Shared,
    queue: &Receiver<Command>,
    ready: &SyncSender<Result<Vec<u8>, ParallelError>>,
) {
    let opened = State::open(rank, ranks, options, shared);
    let mut state = match opened.and_then(|state| Ok((state.address()?, state))) {
        Ok((address, state)) => {
            let _ = ready.send(Ok(address));
            state
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let mut idle = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if state.turn(queue) {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle <= limits::SPIN_TURNS {
            continue;
        }
        if let Err(error) = sleep(&state, shared, state.next_look()) {
            state.fail(Cause::Error(error));
            break;
        }
    }
    close(state, shared, queue, options.now);
}

/// Sleeps until UCX or a command needs attention, or until `end`.
fn sleep(state: &State<'_>, shared: &Shared, end: Instant) -> Result<(), ParallelError> {
    let armed = state.control.arm()? == Armed::Yes && state.data.arm()? == Armed::Yes;
    let wake = PollFd::new(&shared.wake, PollFlags::IN);
    let left = end.saturating_duration_since(state.now());
    let polled = if armed {
        let mut fds = [
            PollFd::from_borrowed_fd(state.control.event_fd()?, PollFlags::IN),
            PollFd::from_borrowed_fd(state.data.event_fd()?, PollFlags::IN),
            wake,
        ];
        poll(&mut fds, Some(&timespec(left)))
    } else {
        // A peer's queue is full and UCX wants to look again: leave the processor to the peer.
        poll(&mut [wake], Some(&timespec(left.min(limits::BUSY_PAUSE))))
    };
    match polled {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => {
            return Err(ParallelError::Transport {
                what: "poll for events",
                message: error.to_string().into(),
            });
        }
    }
    // Empty already when nobody woke us.
    let _ = rustix::io::read(&shared.wake, &mut [0_u8; 8]);
    Ok(())
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

/// Finishes what was begun with the others, says goodbye, lets UCX go.
fn close(mut state: State<'_>, shared: &Shared, queue: &Receiver<Command>, now: fn() -> Instant) {
    let until = |state: &mut State<'_>, bound: Duration, done: &dyn Fn(&State<'_>) -> bool| {
        let end = now() + bound;
        loop {
            let moved = state.turn(queue);
            if done(state) || now() >= end {
                return;
            }
            if !moved && sleep(state, shared, state.next_look().min(end)).is_err() {
                return;
            }
        }
    };
    until(&mut state, limits::LINGER, &|s| s.failed() || !s.at_work());
    if !state.failed() {
        state.say_bye();
        until(&mut state, limits::FAREWELL, &|s| {
            s.failed() || s.all_said()
        });
    }
    state.control.flush();
    until(&mut state, limits::FLUSH, &|s| s.control.outstanding() == 0);
    state.fail_quietly();
    state.data.cut_all();
    state.control.cut_all();
    // What UCX still holds after that is leaked with its messages.
    until(&mut state, limits::CLOSE, &|s| s.outstanding() == 0);
}
