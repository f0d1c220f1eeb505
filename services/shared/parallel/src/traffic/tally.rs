//! What has been counted so far, group by group.

use crate::wire::moved;
use crate::{AxisSet, Mesh, Moved, Op, ParallelError, Plan, Traffic};

/// What one rank moves in one of its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTraffic {
    /// The axes of the group, each of more than one rank.
    pub axes: AxisSet,
    /// Bytes, by kind of operation.
    pub traffic: Traffic,
    /// Operations, by [`Op::kind`].
    pub operations: [u64; Op::KINDS],
}

/// What one rank moves, by group.
#[derive(Debug, Clone)]
pub struct Tally {
    mesh: Mesh,
    groups: Vec<GroupTraffic>,
}

impl Tally {
    pub(super) fn new(plan: &Plan) -> Result<Self, ParallelError> {
        let groups = plan.groups()?.into_iter().map(|axes| GroupTraffic {
            axes,
            traffic: Traffic::default(),
            operations: [0; Op::KINDS],
        });
        Ok(Self {
            mesh: plan.mesh()?,
            groups: groups.collect(),
        })
    }

    /// The groups of the plan, in the order of [`Plan::groups`].
    #[must_use]
    pub fn groups(&self) -> &[GroupTraffic] {
        &self.groups
    }

    /// The bytes alone, as [`crate::RankContext::traffic`] gives them.
    #[must_use]
    pub fn traffic(&self) -> Vec<(AxisSet, Traffic)> {
        self.groups.iter().map(|g| (g.axes, g.traffic)).collect()
    }

    /// Bytes over all groups and kinds.
    #[must_use]
    pub fn total(&self) -> Moved {
        self.groups.iter().fold(Moved::default(), |sum, g| {
            let own = g.traffic.total();
            Moved {
                sent: sum.sent + own.sent,
                received: sum.received + own.received,
            }
        })
    }

    /// Counts an operation of `rank` with `elements` in its buffer; nothing where the rank is alone.
    pub(super) fn add(
        &mut self,
        axes: AxisSet,
        op: Op,
        rank: usize,
        elements: usize,
    ) -> Result<(), ParallelError> {
        let size = self.mesh.size_of(axes);
        if size > 1 {
            let index = self.mesh.index_in(rank, axes)?;
            self.add_moved(axes, op, moved(op, size, index, elements));
        }
        Ok(())
    }

    /// Counts an operation that moves `bytes`.
    pub(super) fn add_moved(&mut self, axes: AxisSet, op: Op, bytes: Moved) {
        let used = self.mesh.used(axes);
        let found = self.groups.iter_mut().find(|g| g.axes == used);
        if let Some(group) = found {
            let sum = &mut group.traffic.by_kind[op.kind()];
            sum.sent += bytes.sent;
            sum.received += bytes.received;
            group.operations[op.kind()] += 1;
        }
    }

    /// Counts all of `other` once more.
    pub(super) fn add_all(&mut self, other: &Self) {
        for (sum, more) in self.groups.iter_mut().zip(&other.groups) {
            let kinds = sum.traffic.by_kind.iter_mut().zip(more.traffic.by_kind);
            for (sum, more) in kinds {
                sum.sent += more.sent;
                sum.received += more.received;
            }
            for (sum, more) in sum.operations.iter_mut().zip(more.operations) {
                *sum += more;
            }
        }
    }
}
