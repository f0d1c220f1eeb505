//! How one model is spread over ranks: mesh and plan, who owns what, what ranks say to each other,
//! and the context a rank runs in.
//!
//! Plans, ownership, sequence plans and expert placement are pure. The backend `threads` needs no
//! runtime.
#![forbid(unsafe_code)]

mod axes;
pub mod collective;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod context;
pub mod cost;
pub mod eplb;
mod error;
mod experts;
mod mesh;
mod ownership;
mod plan;
mod sequence;
mod shape;
pub mod sp_plan;
pub mod traffic;
mod ulysses;

pub use axes::{Axis, AxisSet};
pub use collective::{Collective, MAX_IN_FLIGHT, Moved, Op, Pending, Traffic, wire};
pub use context::{Device, RankContext};
pub use error::ParallelError;
pub use experts::{ExpertDispatch, ExpertWork};
pub use mesh::{Group, MAX_AXIS, MAX_RANKS, Mesh};
pub use ownership::{HeadShard, TokenShards, even_range, gate_up_rows, near_even_range};
pub use plan::{GUIDANCE_ROWS, Plan, RingPrefix, Rule, SharedExpert};
pub use sequence::{SequenceShards, TokenOrder};
pub use shape::{LayerShape, ModelShape};
pub use ulysses::{ByHead, ExchangeRow, HeadExchange};
