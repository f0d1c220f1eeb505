//! The backend of one process: one thread per rank, buffers handed over by reference.
//!
//! It is the definition the other backends are checked against. Every wait is bounded by the
//! timeout of the world; the first failure of any group ends every group.

mod group;
mod state;

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

pub use group::ThreadGroup;

use crate::{AxisSet, Collective, Device, Mesh, ParallelError, Plan, RankContext};
use state::Shared;

/// Locks whatever a panicking rank left behind: its group fails by its absence instead.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all groups of a world share: its first failure.
#[derive(Debug, Default)]
struct World {
    groups: Mutex<Vec<Weak<Shared>>>,
    failure: Mutex<Option<ParallelError>>,
}

impl World {
    /// Records the first failure and ends every group with it.
    fn fail(&self, error: ParallelError) {
        let groups = lock(&self.groups);
        let first = lock(&self.failure).get_or_insert(error).clone();
        for group in groups.iter().filter_map(Weak::upgrade) {
            group.end(&first);
        }
    }
}

/// The ranks of a mesh as threads of this process, and the groups between them.
#[derive(Debug, Clone)]
pub struct ThreadWorld {
    mesh: Mesh,
    timeout: Duration,
    world: Arc<World>,
}

impl ThreadWorld {
    /// A world for `mesh` in which no rank waits longer than `timeout` for another.
    #[must_use]
    pub fn new(mesh: Mesh, timeout: Duration) -> Self {
        Self {
            mesh,
            timeout,
            world: Arc::default(),
        }
    }

    /// The groups along `axes`: one end for each rank of the mesh, in rank order.
    ///
    /// # Errors
    /// Those of [`Mesh::group`]; none for a valid mesh.
    pub fn groups(&self, axes: AxisSet) -> Result<Vec<ThreadGroup>, ParallelError> {
        let mut ends = Vec::with_capacity(self.mesh.ranks());
        for ranks in self.mesh.groups(axes) {
            let shared = Arc::new(Shared::new(ranks, self.timeout, Arc::clone(&self.world)));
            let mut groups = lock(&self.world.groups);
            groups.retain(|group| group.strong_count() > 0);
            groups.push(Arc::downgrade(&shared));
            if let Some(error) = lock(&self.world.failure).as_ref() {
                shared.end(error);
            }
            drop(groups);
            ends.extend(ThreadGroup::ends(&shared));
        }
        ends.sort_by_key(ThreadGroup::rank);
        Ok(ends)
    }
}

/// A lone group of `size` ranks; for tests and tools that need no mesh.
///
/// # Errors
/// Those of [`Mesh::new`] for a mesh with `tp = size`.
pub fn group(size: usize, timeout: Duration) -> Result<Vec<ThreadGroup>, ParallelError> {
    let mesh = Mesh::new([1, 1, 1, 1, size])?;
    ThreadWorld::new(mesh, timeout).groups(AxisSet::ALL)
}

/// Every rank of a plan as a thread of this process, in rank order.
///
/// # Errors
/// Those of [`Mesh::new`] for the plan's sizes.
pub fn contexts(plan: &Plan, timeout: Duration) -> Result<Vec<RankContext>, ParallelError> {
    let mesh = plan.mesh()?;
    let world = ThreadWorld::new(mesh, timeout);
    let mut ends = Vec::new();
    for axes in plan.groups()? {
        let group = world.groups(axes)?.into_iter();
        ends.push(
            group
                .map(|end| Some(Arc::new(end) as Arc<dyn Collective>))
                .collect::<Vec<_>>(),
        );
    }
    let context = |rank: usize| {
        let mut of_rank = ends.iter_mut().map(|group| group.get_mut(rank)?.take());
        RankContext::connect(plan, rank, Device::Cpu, &mut |_| {
            let end = of_rank.next().flatten();
            end.ok_or(ParallelError::RankOutOfRange {
                rank,
                ranks: mesh.ranks(),
            })
        })
    };
    (0..mesh.ranks()).map(context).collect()
}

/// Runs `work` on every rank of a plan, each on its own thread; results in rank order.
///
/// # Errors
/// Those of [`contexts`].
///
/// # Panics
/// When `work` does on a rank, after the others have ended.
pub fn on_ranks<T: Send>(
    plan: &Plan,
    timeout: Duration,
    work: impl Fn(RankContext) -> T + Sync,
) -> Result<Vec<T>, ParallelError> {
    let contexts = contexts(plan, timeout)?;
    Ok(std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = contexts
            .into_iter()
            .map(|ctx| scope.spawn(move || work(ctx)))
            .collect();
        let ended = ranks.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended
            .map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    }))
}

#[cfg(test)]
mod tests;
