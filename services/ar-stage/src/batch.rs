//! Continuous batching: requests join and leave between passes, and each pass computes the next token of
//! every text and pieces of what is still to be read, all packed.
//!
//! Nobody waits for another's prompt: tokens of texts come first in a pass, and pieces of prompts fill the
//! rest of [`PASS_TOKENS`]. A result depends on neither the pieces nor the others.
//!
//! Rows take pages as they grow. When none are left, those that rows have left behind go first; then the request
//! that came last gives its pages up and waits, to be computed again when there is room. Who came first always
//! goes on, so nobody waits for ever.
mod plan;

use std::sync::Arc;

use base::{Code, Failure};
use model::{Advance, PAGE_TOKENS, pages_for};
use stage::{Ranks, StageError};
use telemetry::Metrics;
use tokio::sync::{mpsc, oneshot};

use crate::{
    pools::Pools,
    row::{Row, is_ring},
    run::{Begun, Outcome, Run},
};
use plan::{Part, Step, parts, planned};

/// Most requests under way at once; more wait in the queue.
pub(crate) const MAX_RUNNING: usize = 32;
/// Tokens of one pass; a span that must not be cut may make it longer.
pub(crate) const PASS_TOKENS: usize = 2_048;
/// Most tokens, over all requests, for which there is room in caches. One request alone may have more.
pub(crate) const MAX_HELD_TOKENS: usize = 1 << 17;
/// Pieces of text that may wait for a slow reader; more are joined.
pub(crate) const MAX_DELTAS: usize = 64;

/// A request in the batch, and who waits for it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) run: Run,
    /// Where its text goes.
    deltas: mpsc::Sender<String>,
    /// What found no place there yet.
    untold: String,
    /// Where its rows go once they are begun.
    begun: Option<oneshot::Sender<Begun>>,
    answer: oneshot::Sender<Result<Ended, StageError>>,
    /// It has given its pages up and waits for others.
    waits: bool,
}

/// The end of a request.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    /// The end of the text, as far as it was not told.
    pub(crate) untold: String,
}

/// Who waits for a request.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) deltas: mpsc::Receiver<String>,
    /// Comes before the answer, if there is a picture.
    pub(crate) begun: oneshot::Receiver<Begun>,
    pub(crate) answer: oneshot::Receiver<Result<Ended, StageError>>,
}

/// Both ends of a request's answers.
pub(crate) fn ticket() -> (Ticket, Desk) {
    let (tell, deltas) = mpsc::channel(MAX_DELTAS);
    let (reply, answer) = oneshot::channel();
    let (begin, begun) = oneshot::channel();
    (
        Ticket {
            deltas,
            begun,
            answer,
        },
        Desk {
            deltas: tell,
            begun: begin,
            answer: reply,
        },
    )
}

/// Where answers go.
#[derive(Debug)]
pub(crate) struct Desk {
    deltas: mpsc::Sender<String>,
    begun: oneshot::Sender<Begun>,
    answer: oneshot::Sender<Result<Ended, StageError>>,
}

impl Desk {
    /// Nobody waits any more.
    pub(crate) fn is_deserted(&self) -> bool {
        self.answer.is_closed()
    }

    /// Ends a request before it began.
    pub(crate) fn refuse(self, error: StageError) {
        // Whoever has gone away needs no answer.
        let _ = self.answer.send(Err(error));
    }
}

impl Job {
    pub(crate) fn new(run: Run, desk: Desk) -> Self {
        Self {
            run,
            deltas: desk.deltas,
            untold: String::new(),
            begun: Some(desk.begun),
            answer: desk.answer,
            waits: false,
        }
    }

    fn tell(&mut self, text: &str) {
        self.untold.push_str(text);
        if !self.untold.is_empty()
            && let Ok(place) = self.deltas.try_reserve()
        {
            place.send(std::mem::take(&mut self.untold));
        }
    }

    /// Hands the rows of its picture over, once.
    fn begin(&mut self) {
        if let Some(begun) = self.run.begun()
            && let Some(begin) = self.begun.take()
        {
            // Whoever has gone away publishes nothing.
            let _ = begin.send(begun);
        }
    }

    fn end(self, ranks: &Ranks, error: Option<StageError>) {
        let ended = match error {
            Some(error) => Err(error),
            None => self.run.finish(ranks).map(|outcome| Ended {
                outcome,
                untold: self.untold,
            }),
        };
        // Whoever has gone away needs no answer.
        let _ = self.answer.send(ended);
    }
}

/// The requests that are computed together.
#[derive(Debug)]
pub(crate) struct Batch {
    ranks: Arc<Ranks>,
    pools: Pools,
    /// In the order in which they came.
    jobs: Vec<Job>,
    pass_tokens: usize,
    /// Tokens for which there is room on a GPU.
    held_tokens: usize,
}

/// What a pass did for a job.
type Passed = (usize, Result<Option<Vec<f32>>, StageError>);

impl Batch {
    /// An empty batch, with pools for its rows.
    ///
    /// # Errors
    /// The pools cannot be addressed.
    pub(crate) fn new(ranks: Arc<Ranks>, metrics: Metrics) -> Result<Self, StageError> {
        #[cfg(feature = "cuda")]
        let room = ranks.gpus().map(stage::GpuRanks::tokens);
        #[cfg(not(feature = "cuda"))]
        let room: Option<usize> = None;
        let held_tokens = room.map_or(MAX_HELD_TOKENS, |room| room.min(MAX_HELD_TOKENS));
        Ok(Self {
            pools: Pools::new(&ranks, held_tokens, metrics)?,
            ranks,
            jobs: Vec::new(),
            pass_tokens: PASS_TOKENS,
            held_tokens,
        })
    }

    /// Other pools.
    #[cfg(test)]
    pub(crate) fn with_pools(self, pools: Pools) -> Self {
        Self { pools, ..self }
    }

    /// Passes of other lengths, which change no result.
    #[cfg(test)]
    pub(crate) fn with_pass_tokens(self, pass_tokens: usize) -> Self {
        Self {
            pass_tokens,
            ..self
        }
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Where its rows are.
    pub(crate) fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Whether a request may join: there are pages for all that it begins with, and nobody waits for some. On a GPU
    /// there must be room for all that it may have.
    pub(crate) fn has_room_for(&self, run: &Run) -> bool {
        if self.is_empty() {
            return true;
        }
        let room = if self.pools.pages() == 0 {
            let held: usize = self.jobs.iter().map(|job| job.run.capacity()).sum();
            held + run.capacity() <= self.held_tokens
        } else {
            let needed = pages_for(run.tokens()) + self.jobs.len();
            !self.jobs.iter().any(|job| job.waits) && needed <= self.pools.available()
        };
        room && self.jobs.len() < MAX_RUNNING
    }

    pub(crate) fn add(&mut self, job: Job) {
        self.jobs.push(job);
    }

    /// Drops every request; who waits for one learns that the engine has failed.
    pub(crate) fn abandon(&mut self) {
        self.jobs.clear();
    }

    /// One pass over everybody who is still waited for; who is done or failed leaves.
    pub(crate) fn pass(&mut self) {
        self.jobs.retain(|job| !job.answer.is_closed());
        self.jobs.iter_mut().for_each(Job::begin);
        self.go_on();
        let passed = self.compute();
        let mut errors: Vec<Option<StageError>> = self.jobs.iter().map(|_| None).collect();
        let mut logits: Vec<Option<Vec<f32>>> = self.jobs.iter().map(|_| None).collect();
        let mut moved = vec![false; self.jobs.len()];
        for (index, result) in passed {
            moved[index] = true;
            match result {
                Ok(of_row) => logits[index] = logits[index].take().or(of_row),
                Err(error) => errors[index] = Some(error),
            }
        }
        for (index, job) in self.jobs.iter_mut().enumerate() {
            if !moved[index] || errors[index].is_some() {
                continue;
            }
            match job.run.passed(&self.ranks, logits[index].as_deref()) {
                Ok(told) => job.tell(&told),
                Err(error) => errors[index] = Some(error),
            }
        }
        let jobs = std::mem::take(&mut self.jobs);
        for (job, error) in jobs.into_iter().zip(errors) {
            if error.is_some() || job.run.is_done() {
                job.end(&self.ranks, error);
            } else {
                self.jobs.push(job);
            }
        }
    }

    /// Requests that gave their pages up go on, in the order in which they came, as far as there are pages. The
    /// first request of all never waits.
    fn go_on(&mut self) {
        let others = self.jobs.iter().filter(|job| !job.waits).count();
        let mut available = self.pools.available();
        for (index, job) in self.jobs.iter_mut().enumerate() {
            if !job.waits {
                continue;
            }
            let needed = pages_for(job.run.tokens()) + others;
            if index > 0 && needed > available {
                return;
            }
            available = available.saturating_sub(needed);
            job.waits = false;
        }
    }

    /// Gets pages for every step. Who comes last makes room for who came first; a request that finds none even
    /// alone fails.
    fn make_room(&mut self, steps: &mut Vec<Step>) -> Vec<Passed> {
        let mut failed = Vec::new();
        let mut next = 0;
        while let Some(step) = steps.get(next).copied() {
            let rows = self.jobs[step.job].run.rows().into_iter();
            let Some(missing) = rows.map(|(row, _)| row).nth(step.row).and_then(|row| {
                let there = row.reserve(step.to);
                (!there).then(|| pages_for(step.to).saturating_sub(row.pages()) + 1)
            }) else {
                next += 1;
                continue;
            };
            if self.pools.evict(missing) {
                continue;
            }
            let last = self.jobs.iter().rposition(|job| job.run.pages() > 0);
            let last = last.map_or(step.job, |index| index.max(step.job));
            self.jobs[last].run.forget();
            if last == 0 {
                let pool = self.pools.pages();
                failed.push((last, Err(StageError::of(&too_long(step.to, pool)))));
            } else {
                self.jobs[last].waits = true;
                self.pools.preempted();
            }
            steps.retain(|step| step.job != last);
            next = 0;
        }
        failed
    }

    /// Computes a part of every row that finds a place. When the pass fails, each part runs alone once, so
    /// that only the guilty one fails.
    fn compute(&mut self) -> Vec<Passed> {
        let ranks = Arc::clone(&self.ranks);
        let mut steps = planned(&mut self.jobs, self.pass_tokens, is_ring(&ranks));
        let mut passed = self.make_room(&mut steps);
        let mut parts = parts(&mut self.jobs, &steps);
        let starts: Vec<usize> = parts.iter().map(|part| part.row.held()).collect();
        let error = match run(&ranks, &mut parts) {
            Ok(logits) => {
                parts.iter_mut().for_each(|part| part.row.keep(&self.pools));
                let jobs = parts.iter().map(|part| part.job);
                passed.extend(jobs.zip(logits.into_iter().map(Ok)));
                return passed;
            }
            Err(error) => error,
        };
        if let [part] = &parts[..] {
            passed.push((part.job, Err(error)));
            return passed;
        }
        for (part, start) in parts.iter_mut().zip(starts) {
            let rewound = part.row.rewind(start).map_err(StageError::from);
            let alone = rewound.and_then(|()| run(&ranks, std::slice::from_mut(part)));
            let logits = alone.map(|logits| logits.into_iter().next().flatten());
            passed.push((part.job, logits));
        }
        passed
    }
}

/// A row for which the whole pool is too small.
fn too_long(tokens: usize, pages: usize) -> Failure {
    let message = format!(
        "{tokens} tokens of a row find no place among {pages} pages of {PAGE_TOKENS} tokens"
    );
    Failure::new(Code::ResourceExhausted, message)
}

/// One packed pass over all ranks; the logits of each part that wanted them.
fn run(ranks: &Ranks, parts: &mut [Part<'_>]) -> Result<Vec<Option<Vec<f32>>>, StageError> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    #[cfg(feature = "cuda")]
    if let Some(gpus) = ranks.gpus() {
        return run_on_gpu(gpus, parts);
    }
    let count = ranks.models().len();
    let mut by_rank: Vec<Vec<Advance<'_>>> = (0..count).map(|_| Vec::new()).collect();
    for part in parts {
        let Row { grow, caches, .. } = &mut *part.row;
        for (rows, cache) in by_rank.iter_mut().zip(caches.on_host()) {
            rows.push(Advance {
                row: grow,
                to: part.to,
                logits: part.logits,
                cache,
            });
        }
    }
    let advance =
        |model: &model::Model, ctx: &parallel::RankContext, mut rows: Vec<Advance<'_>>| {
            model.advance_rows(ctx, &mut rows)
        };
    let mut logits = ranks.run(by_rank, advance)?;
    Ok(logits.swap_remove(0))
}

/// The same on GPUs.
#[cfg(feature = "cuda")]
fn run_on_gpu(
    gpus: &stage::GpuRanks,
    parts: &mut [Part<'_>],
) -> Result<Vec<Option<Vec<f32>>>, StageError> {
    use model::gpu::GpuAdvance;

    let mut by_rank: Vec<Vec<GpuAdvance<'_>>> = (0..gpus.count()).map(|_| Vec::new()).collect();
    for part in parts {
        let Row { grow, caches, .. } = &mut *part.row;
        for (rows, cache) in by_rank.iter_mut().zip(caches.on_device()) {
            rows.push(GpuAdvance {
                row: grow,
                to: part.to,
                logits: part.logits,
                cache,
            });
        }
    }
    let mut logits = gpus.run(by_rank, |model, mut rows| model.advance_rows(&mut rows))?;
    Ok(logits.swap_remove(0))
}

#[cfg(feature = "cuda")]
#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod paging;
#[cfg(test)]
pub(crate) mod tests;
