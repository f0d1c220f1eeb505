//! How one model is spread over ranks: the mesh, the plan and the context a rank runs in.
//!
//! This crate is pure: it knows no runtime, no transport and no kernel. Today one rank runs the
//! whole model; every axis larger than one is refused by name, so that a plan is never half obeyed.
#![forbid(unsafe_code)]

mod context;
mod error;
mod mesh;
mod plan;

pub use context::{Device, RankContext};
pub use error::ParallelError;
pub use mesh::{Axis, MAX_AXIS, Mesh};
pub use plan::Plan;
