//! The router: the one process that clients and operators talk to. It checks requests, admits them
//! within bounds, places them on stages and streams what the stages answer. It never sees a tensor,
//! a token or a weight.
//!
//! Pure parts: [`validate`], [`sizes`], [`admission`], [`placement`], and [`cost`] and [`batching`] of the crate
//! `schedule`; [`simulate`] runs them under a clock of events. The walk of one request is `dispatch`.
#![forbid(unsafe_code)]

mod admin;
pub mod admission;
mod audience;
pub mod directory;
mod dispatch;
mod error;
mod events;
mod fetch;
mod front;
mod gate;
mod jobs;
mod keys;
mod members;
mod notes;
pub mod placement;
mod prefix;
mod recorder;
mod server;
pub mod simulate;
pub mod sizes;
pub mod validate;

pub use schedule::{batching, cost};

pub use crate::{
    error::RouterError,
    fetch::{FetchConfig, HostList, HostListError},
    front::{StatusPage, openapi},
    keys::{ApiKeys, KeysError, new_key},
    prefix::PREFIX_TTL,
    server::{Bound, RouterConfig, run},
};

#[cfg(test)]
mod tests;
