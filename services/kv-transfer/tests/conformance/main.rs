//! What a prefix transfer promises, on every transport, between processes.
#![allow(clippy::unwrap_used)]

mod contents;
mod damage;
mod failures;
mod killed;
mod parts;
mod pool;
mod support;
mod tokens;
