//! The real binaries, as real processes, over real sockets: what a client sees of a running system.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod commands;
mod drain;
mod images;
mod lifecycle;
mod operate;
mod pool;
mod reference;
mod resume;

/// The running system that these tests talk to.
mod harness {
    pub(crate) use integration_tests::cluster::*;
}
