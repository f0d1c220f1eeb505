//! What can be wrong with a mesh, a plan, a shard or a collective.

use std::{sync::Arc, time::Duration};

use crate::{Axis, AxisSet, Op, Rule};

/// Every error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
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
    /// The product of all axes is absurd.
    #[error("a plan has at most {max} ranks, got {got}")]
    TooManyRanks {
        /// Most ranks accepted.
        max: usize,
        /// The product of the axes.
        got: usize,
    },
    /// The plan does not fit the model or the request.
    #[error("plan axis {axes} = {size}: {rule}, got {got}")]
    Violates {
        /// The axes, or their product.
        axes: AxisSet,
        /// Ranks along them.
        size: usize,
        /// What the plan demands.
        rule: Rule,
        /// The number of the model or request that does not fit.
        got: usize,
    },
    /// A plan written as text cannot be read.
    #[error("plan entry {entry:?} {problem}")]
    PlanText {
        /// The entry.
        entry: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Experts cannot be spread over that many ranks of this mesh.
    #[error("ep = {got} is no product of the axes cfg, ring, ulysses, tp of {sizes:?}")]
    EpNotAProduct {
        /// Ranks asked for.
        got: usize,
        /// Sizes of all axes, outermost first.
        sizes: [usize; 5],
    },
    /// The rank is not part of the mesh.
    #[error("rank {rank} is outside a mesh of {ranks} ranks")]
    RankOutOfRange {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks of the mesh.
        ranks: usize,
    },
    /// The coordinate lies outside its axis.
    #[error("coordinate {axis} = {got} is outside an axis of {size} ranks")]
    CoordinateOutOfRange {
        /// Name of the axis.
        axis: Axis,
        /// Ranks along it.
        size: usize,
        /// The coordinate asked for.
        got: usize,
    },
    /// A number does not fit the others.
    #[error("{field} must be {expected}, got {got}")]
    Mismatch {
        /// Name of the number.
        field: &'static str,
        /// What the others imply.
        expected: usize,
        /// What was given.
        got: usize,
    },
    /// A number lies outside its bounds.
    #[error("{field} must lie in [{min}, {max}], got {got}")]
    OutOfRange {
        /// Name of the number.
        field: &'static str,
        /// Smallest legal value.
        min: usize,
        /// Largest legal value.
        max: usize,
        /// What was given.
        got: usize,
    },
    /// A rank ended its group on purpose.
    #[error("rank {rank} aborted the group: {reason}")]
    Aborted {
        /// The rank, numbered as in the mesh.
        rank: usize,
        /// Its own words.
        reason: Arc<str>,
    },
    /// A rank did not take part in time.
    #[error("rank {missing} did not reach {op} within {after:?}")]
    Timeout {
        /// The operation waited for.
        op: Op,
        /// The first rank missing, numbered as in the mesh.
        missing: usize,
        /// The bound.
        after: Duration,
    },
    /// A rank left its group while others still need it.
    #[error("rank {rank} left before {op}")]
    Left {
        /// The operation waited for.
        op: Op,
        /// The rank, numbered as in the mesh.
        rank: usize,
    },
    /// Ranks of one group called different operations, or the same with different arguments.
    #[error("rank {rank} called {got} where its group is in {expected}")]
    Disagree {
        /// The rank that differs from the first to arrive.
        rank: usize,
        /// The call of the first to arrive.
        expected: Op,
        /// The call that differs.
        got: Op,
    },
    /// Ranks of one group gave buffers of different lengths where they must agree.
    #[error("rank {rank} gave {got} elements to {op}, the others {expected}")]
    Lengths {
        /// The operation.
        op: Op,
        /// The rank that differs.
        rank: usize,
        /// Elements of the first rank.
        expected: usize,
        /// Elements of that rank.
        got: usize,
    },
    /// A rank started more operations than may be in flight.
    #[error("{op} would be operation {got} in flight, at most {max} may be")]
    TooManyInFlight {
        /// The operation.
        op: Op,
        /// The bound.
        max: usize,
        /// What it would have been.
        got: usize,
    },
    /// The transport between ranks refused something, or a peer broke its rules.
    #[error("rank transport: {what}: {message}")]
    Transport {
        /// What was tried.
        what: &'static str,
        /// What it said.
        message: Arc<str>,
    },
    /// A rank did not join its world in time.
    #[error("rank {rank} did not join within {after:?}")]
    NotJoined {
        /// The first rank missing.
        rank: usize,
        /// The bound.
        after: Duration,
    },
    /// A rank joined with another mesh, or found another set of ranks.
    #[error("rank {rank} joined another world: its mesh or its list of ranks differs")]
    OtherWorld {
        /// The rank.
        rank: usize,
    },
    /// Ranks made their groups in different orders.
    #[error("rank {rank} made group {number} along {got}, this rank along {expected}")]
    GroupsDiffer {
        /// The rank that differs.
        rank: usize,
        /// Number of the group, in the order of creation.
        number: u32,
        /// Axes of this rank's group.
        expected: AxisSet,
        /// Axes of that rank's group.
        got: AxisSet,
    },
    /// A sequence-parallel table does not fit the model it is for.
    #[error("sequence plan entry {entry}: {problem}")]
    SpPlan {
        /// Module path and tensor.
        entry: String,
        /// What does not fit.
        problem: String,
    },
}

/// Refuses `got` outside `[min, max]`.
pub(crate) fn in_range(
    field: &'static str,
    got: usize,
    min: usize,
    max: usize,
) -> Result<(), ParallelError> {
    if (min..=max).contains(&got) {
        Ok(())
    } else {
        Err(ParallelError::OutOfRange {
            field,
            min,
            max,
            got,
        })
    }
}
