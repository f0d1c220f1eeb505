//! What a prefix transfer promises, on every transport, between processes.
#![allow(clippy::unwrap_used)]

mod contents;
mod failures;
mod parts;
mod pool;
mod support;
