//! What every service shares and no service owns: error codes, ids, limits, and the seams for
//! time, randomness, tasks and shutdown. It knows nothing of gRPC, HTTP servers or models.
#![forbid(unsafe_code)]

pub mod backoff;
pub mod build;
pub mod clock;
pub mod code;
pub mod deadline;
pub mod fault;
mod follow;
pub mod ids;
pub mod limits;
pub mod rng;
pub mod shutdown;
pub mod task;

pub use build::BuildInfo;
pub use code::Code;
pub use deadline::Deadline;
pub use fault::{Failure, Fault};
pub use follow::follow;
pub use ids::{MemberId, RequestId};
pub use shutdown::Shutdown;
