//! Ranks as processes, on one host or several: the collectives of `parallel` as messages over UCX.
//!
//! One thread per rank owns every UCX handle and sleeps on their descriptors; callers hand it their
//! buffers and wait for its answers, so starting an operation never blocks, and operations go on
//! while their callers compute. Sums are formed by that thread, in rank order: they have the bits of
//! the `threads` backend.
//!
//! Every rank sends every other rank of the group one message for each operation, even where there is
//! no payload for it. It carries group, number, operation and length, so that ranks that disagree
//! find out instead of mixing up their buffers.
//!
//! Payload goes over the transports asked for. Signs of life, failures and goodbyes go over a second
//! connection, always TCP: they never wait behind payload, and a process that is killed while it
//! writes to another's queue in shared memory, which blocks that queue for everybody, is still
//! noticed.
#![forbid(unsafe_code)]

mod group;
mod group_state;
pub mod limits;
mod link;
mod message;
mod progress;
mod rendezvous;
mod state;
mod traffic;
mod world;

pub use fabric::Transport;
pub use group::UcxGroup;
pub use rendezvous::{FileRendezvous, Rendezvous, TcpRendezvous};
pub use traffic::Headers;
pub use world::{JoinOptions, UcxWorld};

#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks whatever a panicking caller left behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
