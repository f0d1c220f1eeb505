//! Placement on simulated workers, by [`crate::directory`].
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use proto::v1::ModelInfo;
use registry::{Load, Member, MemberState, Role, Snapshot};

use crate::{
    directory::{Directory, Need},
    placement::Wish,
};

/// All workers hold the same weights.
const WEIGHTS: &str = "simulated";
/// A worker tells its load no more often.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// The workers as the router sees them.
#[derive(Debug)]
pub(super) struct Places {
    snapshot: Snapshot,
    directory: Directory,
    index: HashMap<String, usize>,
    names: Vec<String>,
    /// When each has told its load.
    told: Vec<Option<Duration>>,
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
            load: Some(load(0, 0.0)),
            ..Member::default()
        };
        let snapshot = Snapshot::new(1, names.iter().map(member).collect());
        Self {
            directory: Directory::new(&snapshot),
            snapshot,
            index: names.iter().cloned().zip(0..).collect(),
            under_way: HashMap::new(),
            told: vec![None; names.len()],
            names,
            turn: 0,
        }
    }

    /// The worker that takes the next job, of `seconds` by itself, which is then under way there.
    pub(super) fn pick(&mut self, seconds: f64) -> usize {
        let wish = Wish {
            role: Role::DitWorker,
            weights_id: WEIGHTS,
            tried: &HashSet::new(),
            turn: self.turn,
        };
        self.turn += 1;
        let need = Need {
            seconds,
            ..Need::default()
        };
        let member = self
            .directory
            .pick(&self.snapshot, wish, &need, &self.under_way);
        // There is always a worker, all are ready, and each has a number.
        let worker = member.and_then(|member| self.index.get(&member.id));
        let worker = worker.copied().unwrap_or(0);
        *self
            .under_way
            .entry(self.names[worker].clone())
            .or_default() += 1;
        worker
    }

    /// `worker` has `jobs` and `backlog` seconds of work, which the router hears unless it has just heard of it.
    pub(super) fn tell(&mut self, now: Duration, worker: usize, jobs: usize, backlog: f64) {
        let recent = |told: Duration| now.saturating_sub(told) < REPORT_EVERY;
        if self.told[worker].is_some_and(recent) {
            return;
        }
        self.told[worker] = Some(now);
        if let Some(member) = self.snapshot.members.get_mut(&self.names[worker]) {
            let jobs = u32::try_from(jobs).unwrap_or(u32::MAX);
            member.load = Some(load(jobs, backlog));
        }
    }

    /// A job has left `worker`.
    pub(super) fn left(&mut self, worker: usize) {
        if let Some(jobs) = self.under_way.get_mut(&self.names[worker]) {
            *jobs = jobs.saturating_sub(1);
        }
    }
}

fn load(jobs: u32, backlog: f64) -> Load {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates
    let backlog_ms = (backlog * 1e3).ceil() as u32;
    Load {
        running: jobs,
        queued: 0,
        capacity: 1,
        backlog_ms,
        ..Load::default()
    }
}
