//! Ranks as processes: the collective suite over UCX, and what happens when a rank dies.
//!
//! Each test starts this binary again, once a rank, with the name of what the ranks do; see
//! `child`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod child;
mod failures;
mod processes;
mod suite;
