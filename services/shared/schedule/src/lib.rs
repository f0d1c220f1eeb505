//! What shares a step, decided by what steps cost. Pure: no clock, no tasks, no wire. The router places and admits
//! by [`cost`], a worker forms its batches with [`batching`], and the router's simulation runs both.
#![forbid(unsafe_code)]

pub mod batching;
pub mod cost;

/// Error of every part of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct ScheduleError {
    /// What is wrong.
    pub field: &'static str,
    /// What it must be.
    pub reason: String,
}

impl ScheduleError {
    fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self {
            field,
            reason: reason.into(),
        }
    }
}
