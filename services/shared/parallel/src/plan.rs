//! The parallel plan of a pool, as an operator writes it.

use serde::{Deserialize, Serialize};

use crate::{Axis, Mesh, ParallelError};

/// Sizes of every axis of a pool's mesh, and whether experts are spread over it.
///
/// Only the single-rank plan runs today; [`Plan::validate`] names the first axis that does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// Pipeline stages.
    pub pp: usize,
    /// Ranks over guidance rows.
    pub cfg: usize,
    /// Ranks of a ring over the sequence.
    pub ring: usize,
    /// Ranks of the all-to-all over the sequence.
    pub ulysses: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Spread experts over `tp x ulysses x ring x cfg`.
    pub expert_parallel: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            pp: 1,
            cfg: 1,
            ring: 1,
            ulysses: 1,
            tp: 1,
            expert_parallel: false,
        }
    }
}

impl Plan {
    /// Checks the plan and turns it into a mesh.
    ///
    /// # Errors
    /// [`ParallelError::InvalidAxis`] for a size no plan can have, [`ParallelError::Unimplemented`]
    /// naming the first axis larger than one, [`ParallelError::ExpertParallelUnimplemented`].
    pub fn validate(&self) -> Result<Mesh, ParallelError> {
        let sizes = [self.pp, self.cfg, self.ring, self.ulysses, self.tp];
        let mesh = Mesh::new(sizes)?;
        for (axis, got) in Axis::ALL.into_iter().zip(sizes) {
            if got != 1 {
                return Err(ParallelError::Unimplemented { axis, got });
            }
        }
        if self.expert_parallel {
            return Err(ParallelError::ExpertParallelUnimplemented);
        }
        Ok(mesh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_single_rank_plan_is_accepted() {
        assert_eq!(Plan::default().validate().unwrap(), Mesh::single());
    }

    #[test]
    fn every_larger_axis_is_refused_by_name() {
        for axis in Axis::ALL {
            let mut plan = Plan::default();
            match axis {
                Axis::Pp => plan.pp = 2,
                Axis::Cfg => plan.cfg = 2,
                Axis::Ring => plan.ring = 2,
                Axis::Ulysses => plan.ulysses = 2,
                Axis::Tp => plan.tp = 2,
            }
            let error = plan.validate().unwrap_err();
            assert_eq!(error, ParallelError::Unimplemented { axis, got: 2 });
            assert!(error.is_unimplemented() && error.to_string().contains(axis.name()));
        }
    }

    #[test]
    fn expert_parallelism_is_refused_by_name() {
        let plan = Plan {
            expert_parallel: true,
            ..Plan::default()
        };
        assert!(
            plan.validate()
                .unwrap_err()
                .to_string()
                .contains("expert_parallel")
        );
    }
}
