//! The GPU engine on the golden cases and on the demo model.
//!
//! Needs an H100 or H200:
//! `cargo test -p integration-tests --features cuda --test gpu -- --ignored --test-threads 1 --nocapture`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs)]

mod golden;
mod pictures;
mod served;
