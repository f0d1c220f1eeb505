//! Placement on simulated workers, by [`crate::placement`].
use std::collections::{HashMap, HashSet};

use proto::v1::ModelInfo;
use registry::{Load, Member, MemberState, Role, Snapshot};

use crate::placement::{Wish, pick};

/// All workers hold the same weights.
const WEIGHTS: &str = "simulated";

/// The workers as the router sees them.
#[derive(Debug)]
pub(super) struct Places {
    snapshot: Snapshot,
    index: HashMap<String, usize>,
    names: Vec<String>,
    under_way: HashMap<String, u32>,
    turn: u64,
}

impl Places {
    pub(super) fn new(workers: usize) -> Self {
        let names: Vec<String> = (0..workers).map(|n| format!("worker-{n:04}")).collect();
        let member = |id: &String| Member {
            id: id.clone(),
            role: Role::DitWorker.into(),
            state: MemberState::Ready.into(),
            model: Some(ModelInfo {
                weights_id: WEIGHTS.to_owned(),
                ..ModelInfo::default()
            }),
            load: Some(Load {
                running: 0,
                queued: 0,
                capacity: 1,
                ..Load::default()
            }),
            ..Member::default()
        };
        Self {
            snapshot: Snapshot::new(1, names.iter().map(member).collect()),
            index: names.iter().cloned().zip(0..).collect(),
            under_way: HashMap::new(),
            names,
            turn: 0,
        }
    }

    /// The worker that takes the next job, which is then under way there.
    pub(super) fn pick(&mut self) -> usize {
        let wish = Wish {
            role: Role::DitWorker,
            weights_id: WEIGHTS,
            tried: &HashSet::new(),
            turn: self.turn,
        };
        self.turn += 1;
        let member = pick(&self.snapshot, wish, &self.under_way);
        // There is always a worker, all are ready, and each has a number.
        let worker = member.and_then(|member| self.index.get(&member.id));
        let worker = worker.copied().unwrap_or(0);
        *self
            .under_way
            .entry(self.names[worker].clone())
            .or_default() += 1;
        worker
    }

    /// A job has left `worker`.
    pub(super) fn left(&mut self, worker: usize) {
        if let Some(jobs) = self.under_way.get_mut(&self.names[worker]) {
            *jobs = jobs.saturating_sub(1);
        }
    }
}
