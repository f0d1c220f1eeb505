//! The router's pure cores under a clock of discrete events: admission, placement, batching and cost decide, as they
//! would for real, about requests of a trace on workers whose steps only take (simulated) time. For planning
//! capacity and for comparing policies.
//!
//! What is not simulated: the AR stage is only a delay, of the time that prefill takes, and is never
//! the bottleneck; nothing fails; transfers take no time. Decoding occupies the worker.
mod cluster;
mod engine;
mod generate;
mod place;
mod report;
mod trace;

pub use cluster::{AdmissionBounds, Cluster, StepBounds, Truth};
pub use engine::{Policy, offered_load, run};
pub use generate::{Kind, generate};
pub use report::{Group, Refusals, Report};
pub use trace::{Request, Trace};

#[cfg(test)]
mod tests;
