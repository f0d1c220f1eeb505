//! What can be wrong with a mesh or a plan.

use crate::Axis;

/// Errors of mesh and plan validation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParallelError {
    /// The axis has a size that no plan can have.
    #[error("plan axis {axis} must be between 1 and {max}, got {got}")]
    InvalidAxis {
        /// Name of the axis.
        axis: Axis,
        /// Largest size accepted.
        max: usize,
        /// The size asked for.
        got: usize,
    },
    /// The axis is understood but this build cannot run it.
    #[error("plan axis {axis} = {got} is not implemented, only {axis} = 1 is")]
    Unimplemented {
        /// Name of the axis.
        axis: Axis,
        /// The size asked for.
        got: usize,
    },
    /// Spreading experts over ranks is understood but this build cannot run it.
    #[error("plan option expert_parallel is not implemented")]
    ExpertParallelUnimplemented,
    /// The rank is not part of the mesh.
    #[error("rank {rank} is outside a mesh of {ranks} ranks")]
    RankOutOfRange {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks of the mesh.
        ranks: usize,
    },
}

impl ParallelError {
    /// True when the request is well formed and only this build lacks the feature.
    #[must_use]
    pub fn is_unimplemented(&self) -> bool {
        matches!(
            self,
            Self::Unimplemented { .. } | Self::ExpertParallelUnimplemented
        )
    }
}
