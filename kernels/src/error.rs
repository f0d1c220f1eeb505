//! The one error type of the crate.

use crate::tensor::DType;

/// Result of every operation in this crate.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

/// Why an operation refused its input. Nothing large has been allocated when one is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A tensor has the wrong shape.
    #[error("{op}: {what} has shape {got}, expected {expected}")]
    Shape {
        /// Operation.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A tensor has the wrong element type.
    #[error("{op}: {what} is {got:?}, expected {expected:?}")]
    DType {
        /// Operation.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// What would have been accepted.
        expected: DType,
        /// What was given.
        got: DType,
    },
    /// An index or a length lies outside what it points into.
    #[error("{op}: {what} is {value}, the limit is {limit}")]
    Bounds {
        /// Operation.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// The offending value.
        value: usize,
        /// The first value that is too large, or the exact length required.
        limit: usize,
    },
    /// An argument that is neither a shape nor an index is not acceptable.
    #[error("{op}: {what} {reason}")]
    Argument {
        /// Operation.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl KernelError {
    pub(crate) fn shape(
        op: &'static str,
        what: &'static str,
        expected: impl Into<String>,
        got: &[usize],
    ) -> Self {
        Self::Shape {
            op,
            what,
            expected: expected.into(),
            got: format!("{got:?}"),
        }
    }
}
