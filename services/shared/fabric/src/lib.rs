//! The border to UCX: the only `unsafe` code around it, for one-sided copies and for messages, and to memory
//! that several processes map.
//!
//! Everything here is safe to call. Handles of a worker ([`Worker`], [`Endpoint`], [`RemoteKey`],
//! [`Transfer`], [`Sending`], [`Receiving`]) hold each other by `Rc`, so they stay on the thread
//! that made them and are released in the order UCX needs. A running operation owns its memory until
//! UCX is done with it; giving up early leaks that memory rather than free it under a running copy.
#![allow(unsafe_code)]

mod context;
mod counters;
mod digest;
mod endpoint;
mod memory;
mod message;
mod settings;
mod shared;
mod status;
mod transfer;
mod worker;

pub use context::{Context, Use};
pub use counters::{Count, Operation, counters};
pub use digest::Store;
pub use endpoint::{Endpoint, Flushing, RemoteKey};
pub use memory::PoolMemory;
pub use message::{Announced, Arrived, Body, MAX_HEADER_BYTES, Receiving, Sending};
pub use settings::{SettingError, Settings, Transport, settings};
pub use shared::{Access, SharedMemory};
pub use status::UcxError;
pub use transfer::{Payload, Transfer};
pub use worker::{Armed, Worker};
