//! Who does what in a pass.
use super::Job;
use crate::row::Row;

/// What one row is to do in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) job: usize,
    /// Among the job's rows.
    pub(super) row: usize,
    /// Where its tokens end.
    pub(super) to: usize,
    pub(super) logits: bool,
}

/// The same, with the row.
pub(super) struct Part<'a> {
    pub(super) job: usize,
    pub(super) row: &'a mut Row,
    pub(super) to: usize,
    pub(super) logits: bool,
}

/// Who does what in a pass: a token of every text, then pieces in the order in which requests came.
pub(super) fn planned(jobs: &mut [Job], tokens: usize, whole: bool) -> Vec<Step> {
    let mut left = tokens;
    let mut steps = Vec::new();
    let mut parts = Vec::new();
    for (job, of) in jobs.iter_mut().enumerate().filter(|(_, of)| !of.waits) {
        for (row, (of, logits)) in of.run.rows().into_iter().enumerate() {
            let to = of.held();
            steps.push(Step {
                job,
                row,
                to,
                logits,
            });
            parts.push(of);
        }
    }
    for (step, row) in steps.iter_mut().zip(&parts) {
        if row.left() == 1 {
            step.to += 1;
            left = left.saturating_sub(1);
        }
    }
    let mut pieces = 0;
    for (step, row) in steps.iter_mut().zip(&parts) {
        let start = row.held();
        if step.to > start || (left == 0 && pieces > 0) {
            continue;
        }
        let budget = if whole { usize::MAX } else { left.max(1) };
        let to = row.grow.piece_end(start, budget);
        // A span that is longer than what is left goes first in a pass of its own.
        if to - start > left && pieces > 0 {
            continue;
        }
        step.to = to;
        pieces += 1;
        left = left.saturating_sub(to - start);
    }
    for (step, row) in steps.iter_mut().zip(&parts) {
        step.logits &= step.to == row.grow.ids().len();
    }
    let computes = steps
        .iter()
        .zip(&parts)
        .map(|(step, row)| step.to > row.held());
    let computes: Vec<bool> = computes.collect();
    let mut computes = computes.into_iter();
    steps.retain(|_| computes.next().unwrap_or(false));
    steps
}

/// The rows of steps, which are in the order of jobs and of their rows.
pub(super) fn parts<'a>(jobs: &'a mut [Job], steps: &[Step]) -> Vec<Part<'a>> {
    let mut parts = Vec::with_capacity(steps.len());
    for (job, of) in jobs.iter_mut().enumerate() {
        if !steps.iter().any(|step| step.job == job) {
            continue;
        }
        for (index, (row, _)) in of.run.rows().into_iter().enumerate() {
            let mut own = steps.iter();
            if let Some(step) = own.find(|step| (step.job, step.row) == (job, index)) {
                parts.push(Part {
                    job,
                    row,
                    to: step.to,
                    logits: step.logits,
                });
            }
        }
    }
    parts
}
