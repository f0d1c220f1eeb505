//! What one request leaves behind: spans of every hop at a collector, log lines with its trace, and a
//! record with all that it takes to repeat it.
#![allow(clippy::unwrap_used)]

mod collector;
mod spans;
