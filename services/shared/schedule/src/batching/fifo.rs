//! First come, first served, with jobs of the same shape: the batching that [`super::cost`] is compared with.
//!
//! The oldest job begins, and with it every waiting one of the same size, guidance, steps and kind, as far as the
//! limits allow; nobody joins until all of them are done. Classes and targets are not looked at, deadlines are.
use std::time::Duration;

use super::{Decision, Entry, Job, Place, Room, State, has_expired};

/// What to do at the boundary before the next step.
pub fn step(now: Duration, state: &State) -> Vec<Decision> {
    let mut decisions = state.expired(now);
    if state.live().any(|entry| !has_expired(entry, now)) {
        return decisions;
    }
    let mut waiting: Vec<&Entry> = state
        .entries()
        .filter(|entry| entry.place == Place::Waiting && !has_expired(entry, now))
        .collect();
    waiting.sort_by_key(|entry| (entry.job.arrived, entry.job.id));
    let Some(first) = waiting.first() else {
        return decisions;
    };
    let mut room = Room::new(0);
    for entry in waiting
        .iter()
        .filter(|e| shape(&e.job) == shape(&first.job))
    {
        let Some(more) = room.with(entry, &state.limits) else {
            break;
        };
        room = more;
        decisions.push(Decision::Join(entry.job.id));
    }
    decisions
}

/// What jobs of one batch have in common.
fn shape(job: &Job) -> (u32, u32, u32, bool) {
    (job.rows.rows, job.rows.tokens, job.steps, job.edit)
}
