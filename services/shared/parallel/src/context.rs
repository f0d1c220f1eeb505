//! What model code knows about the rank it runs on.

use crate::{Mesh, ParallelError, Plan};

/// Where a rank computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host processor.
    Cpu,
}

/// The view of one rank: its mesh, its place in it and its device.
///
/// Model code takes this and never asks which backend runs.
#[derive(Debug, Clone)]
pub struct RankContext {
    mesh: Mesh,
    rank: usize,
    device: Device,
}

impl RankContext {
    /// The only rank of a single-rank group, on the host processor.
    #[must_use]
    pub fn single() -> Self {
        Self {
            mesh: Mesh::single(),
            rank: 0,
            device: Device::Cpu,
        }
    }

    /// The context of `rank` under `plan`.
    ///
    /// # Errors
    /// Those of [`Plan::runnable`], and [`ParallelError::RankOutOfRange`].
    pub fn new(plan: &Plan, rank: usize, device: Device) -> Result<Self, ParallelError> {
        let mesh = plan.runnable()?;
        mesh.coordinates(rank)?;
        Ok(Self { mesh, rank, device })
    }

    /// The mesh this rank belongs to.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// This rank's number, `0..mesh.ranks()`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The device this rank computes on.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_outside_the_mesh_is_refused() {
        assert!(RankContext::new(&Plan::default(), 0, Device::Cpu).is_ok());
        let e = RankContext::new(&Plan::default(), 1, Device::Cpu).unwrap_err();
        assert_eq!(e, ParallelError::RankOutOfRange { rank: 1, ranks: 1 });
    }
}
