//! The border to UCX: the only `unsafe` code of this crate.
//!
//! Everything here is safe to call. Handles of a worker (`Worker`, `Endpoint`, `RemoteKey`,
//! `Transfer`) hold each other by `Rc`, so they stay on the thread that made them and are released
//! in the order UCX needs. A `Transfer` owns the memory of its operations until UCX is done with
//! it; giving up early leaks that memory rather than free it under a running copy.
#![allow(unsafe_code)]

mod context;
mod endpoint;
mod memory;
mod status;
mod transfer;
mod worker;

pub(crate) use context::Context;
pub(crate) use endpoint::{Endpoint, RemoteKey};
pub use memory::PoolMemory;
pub use status::UcxError;
pub(crate) use transfer::{Payload, Transfer};
pub(crate) use worker::{Armed, Worker};
