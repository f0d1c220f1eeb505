//! Ranks that die, stall, give up or go home.

use std::{thread, time::Duration};

use ranks::Transport;
use rustix::process::Signal;

use crate::processes::{GUARD, Ranks};

const SIZE: usize = 4;
/// Who is struck.
const VICTIM: usize = 2;

/// Strikes one rank of a stream of collectives; the others end with an error that names it.
fn strike(what: &str, transport: Transport, signal: Signal, expected: &str) {
    let mut ranks = Ranks::start(what, SIZE, transport);
    ranks.all_say("under way");
    thread::sleep(Duration::from_millis(100));
    let struck = ranks.signal(VICTIM, signal);
    let mut slowest = Duration::ZERO;
    for rank in (0..SIZE).filter(|&rank| rank != VICTIM) {
        let (when, error) = ranks.hear(rank);
        assert!(error.starts_with(expected), "rank {rank}: {error}");
        slowest = slowest.max(when.saturating_duration_since(struck));
        let (_, later) = ranks.hear(rank);
        assert!(later.starts_with(expected), "rank {rank}, later: {later}");
    }
    println!("{what} over {transport}, {signal:?}: all others told after {slowest:?}");
    assert!(slowest < GUARD);
    for rank in (0..SIZE).filter(|&rank| rank != VICTIM) {
        assert!(ranks.ended(rank), "rank {rank}");
    }
    if signal == Signal::STOP {
        // Once it goes on it finds out by itself, and ends.
        ranks.signal(VICTIM, Signal::CONT);
        let (_, error) = ranks.hear(VICTIM);
        assert!(error.starts_with("rank "), "{error}");
    }
    let ended_well = ranks.ended(VICTIM);
    assert_eq!(ended_well, signal == Signal::STOP);
}

#[test]
fn a_killed_rank_ends_the_collectives_of_all_others_over_shared_memory() {
    strike("short", Transport::Shm, Signal::KILL, "rank 2 left before ");
}

#[test]
fn a_killed_rank_ends_the_collectives_of_all_others_over_tcp() {
    strike("short", Transport::Tcp, Signal::KILL, "rank 2 left before ");
}

#[test]
fn a_killed_rank_ends_long_transfers_over_shared_memory() {
    strike("long", Transport::Shm, Signal::KILL, "rank 2 left before ");
}

#[test]
fn a_killed_rank_ends_long_transfers_over_tcp() {
    strike("long", Transport::Tcp, Signal::KILL, "rank 2 left before ");
}

#[test]
fn a_stopped_rank_ends_the_collectives_of_all_others_over_shared_memory() {
    strike(
        "short",
        Transport::Shm,
        Signal::STOP,
        "rank 2 did not reach ",
    );
}

#[test]
fn a_stopped_rank_ends_the_collectives_of_all_others_over_tcp() {
    strike(
        "short",
        Transport::Tcp,
        Signal::STOP,
        "rank 2 did not reach ",
    );
}

#[test]
fn a_stopped_rank_ends_long_transfers_over_shared_memory() {
    strike(
        "long",
        Transport::Shm,
        Signal::STOP,
        "rank 2 did not reach ",
    );
}

#[test]
fn a_stopped_rank_ends_long_transfers_over_tcp() {
    strike(
        "long",
        Transport::Tcp,
        Signal::STOP,
        "rank 2 did not reach ",
    );
}

#[test]
fn an_abort_reaches_every_process_with_rank_and_reason() {
    let mut ranks = Ranks::start("abort", SIZE, Transport::Shm);
    let (aborted, word) = ranks.hear(SIZE - 1);
    assert_eq!(word, "aborting");
    let mut slowest = Duration::ZERO;
    for rank in 0..SIZE {
        let (when, error) = ranks.hear(rank);
        assert_eq!(error, "rank 3 aborted the group: out of memory");
        slowest = slowest.max(when.saturating_duration_since(aborted));
        assert!(ranks.ended(rank), "rank {rank}");
    }
    println!("abort: all told after {slowest:?}");
    assert!(slowest < GUARD);
}

#[test]
fn a_process_that_goes_home_has_given_what_it_began() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let mut ranks = Ranks::start("leave", 3, transport);
        for rank in 0..2 {
            assert_eq!(ranks.hear(rank).1, "3", "buffers gathered");
            assert_eq!(ranks.hear(rank).1, "rank 2 left before barrier");
        }
        for rank in 0..3 {
            assert!(ranks.ended(rank), "rank {rank}");
        }
    }
}
