//! What model code knows about the rank it runs on.

use std::sync::Arc;

use crate::{AxisSet, Collective, Mesh, ParallelError, Plan, Traffic};

/// Where a rank computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host processor.
    Cpu,
}

/// The view of one rank: its plan, its place in the mesh, its ends of the groups, and its device.
///
/// Model code takes this and never asks which backend runs.
#[derive(Debug, Clone)]
pub struct RankContext {
    plan: Plan,
    mesh: Mesh,
    rank: usize,
    device: Device,
    /// By the axes that have more than one rank; groups of one rank have no entry.
    groups: Vec<(AxisSet, Arc<dyn Collective>)>,
}

impl RankContext {
    /// The only rank of a single-rank group, on the host processor.
    #[must_use]
    pub fn single() -> Self {
        Self {
            plan: Plan::default(),
            mesh: Mesh::single(),
            rank: 0,
            device: Device::Cpu,
            groups: Vec::new(),
        }
    }

    /// The context of `rank` under `plan`. `join` gives this rank's end of the group along a product of
    /// axes; it is called for each of [`Plan::groups`], in that order, on every rank.
    ///
    /// # Errors
    /// Those of [`Mesh::new`] and of `join`, [`ParallelError::RankOutOfRange`], and
    /// [`ParallelError::Mismatch`] when an end belongs to another place in the mesh.
    pub fn connect(
        plan: &Plan,
        rank: usize,
        device: Device,
        join: &mut dyn FnMut(AxisSet) -> Result<Arc<dyn Collective>, ParallelError>,
    ) -> Result<Self, ParallelError> {
        let mesh = plan.mesh()?;
        mesh.coordinates(rank)?;
        let mut groups = Vec::new();
        for axes in plan.groups()? {
            let end = join(axes)?;
            let place = mesh.group(rank, axes)?;
            for (field, expected, got) in [
                ("group size", place.ranks.len(), end.size()),
                ("group index", place.index, end.index()),
            ] {
                if expected != got {
                    return Err(ParallelError::Mismatch {
                        field,
                        expected,
                        got,
                    });
                }
            }
            groups.push((axes, end));
        }
        Ok(Self {
            plan: *plan,
            mesh,
            rank,
            device,
            groups,
        })
    }

    /// The plan of the pool.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
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

    /// The end of this rank's group along `axes`; `None` when the rank is alone in it.
    #[must_use]
    pub fn group(&self, axes: AxisSet) -> Option<&dyn Collective> {
        let used = self.mesh.used(axes);
        let found = self.groups.iter().find(|(set, _)| *set == used);
        found.map(|(_, end)| end.as_ref())
    }

    /// Ends every operation of the whole mesh, so that no rank waits for one that gave up.
    pub fn abort(&self, reason: &str) {
        if let Some((_, end)) = self.groups.first() {
            end.abort(reason);
        }
    }

    /// Bytes this rank has moved so far in each of its groups.
    #[must_use]
    pub fn traffic(&self) -> Vec<(AxisSet, Traffic)> {
        let groups = self.groups.iter();
        groups.map(|(axes, end)| (*axes, end.traffic())).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::collective::threads;

    #[test]
    fn a_rank_outside_the_mesh_is_refused() {
        let mut nobody = |_| unreachable!("a single rank has no groups");
        let plan = Plan::default();
        assert!(RankContext::connect(&plan, 0, Device::Cpu, &mut nobody).is_ok());
        let e = RankContext::connect(&plan, 1, Device::Cpu, &mut nobody).unwrap_err();
        assert_eq!(e, ParallelError::RankOutOfRange { rank: 1, ranks: 1 });
    }

    #[test]
    fn an_end_of_another_group_is_refused() {
        let plan = Plan {
            tp: 2,
            ..Plan::default()
        };
        let mut ends = threads::group(2, Duration::from_secs(1)).unwrap();
        let mut wrong: Option<Arc<dyn Collective>> = ends.pop().map(|end| Arc::new(end) as _);
        let mut join = |_| Ok(wrong.take().unwrap());
        let e = RankContext::connect(&plan, 0, Device::Cpu, &mut join).unwrap_err();
        assert_eq!(e.to_string(), "group index must be 0, got 1");
    }

    #[test]
    fn axes_of_one_rank_do_not_change_a_group() {
        let plan = Plan {
            ulysses: 2,
            tp: 2,
            ..Plan::default()
        };
        let ranks = threads::contexts(&plan, Duration::from_secs(1)).unwrap();
        let size = |axes| ranks[3].group(axes).map(|g| (g.size(), g.index()));
        assert_eq!(size(AxisSet::SEQUENCE), Some((2, 1)));
        assert_eq!(size(crate::Axis::Ulysses.into()), Some((2, 1)));
        assert_eq!(size(crate::Axis::Ring.into()), None);
        assert_eq!(size(AxisSet::ALL), None, "nobody needs the whole mesh");
    }
}
