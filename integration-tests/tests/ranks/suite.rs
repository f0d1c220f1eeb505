//! Ranks that live.

use ranks::Transport;

use crate::processes::Ranks;

fn conforms(size: usize, transport: Transport) {
    let mut ranks = Ranks::start("suite", size, transport);
    ranks.all_say(transport.ucx_name());
    ranks.all_say("done");
    for rank in 0..size {
        assert!(ranks.ended(rank), "rank {rank}");
    }
}

#[test]
fn two_processes_conform_over_shared_memory() {
    conforms(2, Transport::Shm);
}

#[test]
fn four_processes_conform_over_shared_memory() {
    conforms(4, Transport::Shm);
}

#[test]
fn two_processes_conform_over_tcp() {
    conforms(2, Transport::Tcp);
}

#[test]
fn four_processes_conform_over_tcp() {
    conforms(4, Transport::Tcp);
}

#[test]
fn a_long_computation_is_no_death() {
    let mut ranks = Ranks::start("compute", 2, Transport::Shm);
    ranks.all_say("2");
    assert!(ranks.ended(0) && ranks.ended(1));
}
