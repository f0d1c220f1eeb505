//! Continuous batching: requests join and leave between passes, and each pass computes the next token of
//! every text and pieces of what is still to be read, all packed.
//!
//! Nobody waits for another's prompt: tokens of texts come first in a pass, and pieces of prompts fill the
//! rest of [`PASS_TOKENS`]. A result depends on neither the pieces nor the others.
use std::sync::Arc;

use model::Advance;
use stage::{Ranks, StageError};
use tokio::sync::{mpsc, oneshot};

use crate::{
    row::{Row, is_ring},
    run::{Begun, Outcome, Run},
};

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
    jobs: Vec<Job>,
    pass_tokens: usize,
    /// Tokens for which there is room in caches.
    held_tokens: usize,
}

/// What one row does in a pass.
struct Part<'a> {
    job: usize,
    row: &'a mut Row,
    to: usize,
    logits: bool,
}

/// What a pass did for a job.
type Passed = (usize, Result<Option<Vec<f32>>, StageError>);

impl Batch {
    pub(crate) fn new(ranks: Arc<Ranks>) -> Self {
        #[cfg(feature = "cuda")]
        let room = ranks.gpus().map(stage::GpuRanks::tokens);
        #[cfg(not(feature = "cuda"))]
        let room: Option<usize> = None;
        Self {
            ranks,
            jobs: Vec::new(),
            pass_tokens: PASS_TOKENS,
            held_tokens: room.map_or(MAX_HELD_TOKENS, |room| room.min(MAX_HELD_TOKENS)),
        }
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

    /// Whether a request may join.
    pub(crate) fn has_room_for(&self, run: &Run) -> bool {
        let held: usize = self.jobs.iter().map(|job| job.run.capacity()).sum();
        self.is_empty()
            || (self.jobs.len() < MAX_RUNNING && held + run.capacity() <= self.held_tokens)
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

    /// Computes a part of every row that finds a place. When the pass fails, each part runs alone once, so
    /// that only the guilty one fails.
    fn compute(&mut self) -> Vec<Passed> {
        let ranks = Arc::clone(&self.ranks);
        let mut parts = planned(&mut self.jobs, self.pass_tokens, is_ring(&ranks));
        let starts: Vec<usize> = parts.iter().map(|part| part.row.held()).collect();
        let error = match run(&ranks, &mut parts) {
            Ok(logits) => {
                let jobs = parts.iter().map(|part| part.job);
                return jobs.zip(logits.into_iter().map(Ok)).collect();
            }
            Err(error) => error,
        };
        if let [part] = &parts[..] {
            return vec![(part.job, Err(error))];
        }
        let mut passed = Vec::with_capacity(parts.len());
        for (part, start) in parts.iter_mut().zip(starts) {
            let rewound = part.row.rewind(start).map_err(StageError::from);
            let alone = rewound.and_then(|()| run(&ranks, std::slice::from_mut(part)));
            let logits = alone.map(|logits| logits.into_iter().next().flatten());
            passed.push((part.job, logits));
        }
        passed
    }
}

/// Who does what in a pass: a token of every text, then pieces in the order in which requests came.
fn planned(jobs: &mut [Job], tokens: usize, whole: bool) -> Vec<Part<'_>> {
    let mut parts: Vec<Part<'_>> = Vec::new();
    for (job, of) in jobs.iter_mut().enumerate() {
        for (row, logits) in of.run.rows() {
            parts.push(Part {
                job,
                to: row.held(),
                row,
                logits,
            });
        }
    }
    let mut left = tokens;
    for part in &mut parts {
        if part.row.left() == 1 {
            part.to += 1;
            left = left.saturating_sub(1);
        }
    }
    let mut pieces = 0;
    for part in &mut parts {
        let start = part.row.held();
        if part.to > start || (left == 0 && pieces > 0) {
            continue;
        }
        let budget = if whole { usize::MAX } else { left.max(1) };
        let to = part.row.grow.piece_end(start, budget);
        // A span that is longer than what is left goes first in a pass of its own.
        if to - start > left && pieces > 0 {
            continue;
        }
        part.to = to;
        pieces += 1;
        left = left.saturating_sub(to - start);
    }
    parts.retain(|part| part.to > part.row.held());
    for part in &mut parts {
        part.logits &= part.to == part.row.grow.ids().len();
    }
    parts
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
        let Row { grow, caches } = &mut *part.row;
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

/// The same on the one GPU that has the rows.
#[cfg(feature = "cuda")]
fn run_on_gpu(
    gpus: &stage::GpuRanks,
    parts: &mut [Part<'_>],
) -> Result<Vec<Option<Vec<f32>>>, StageError> {
    let advances = parts.iter_mut().filter_map(|part| {
        let Row { grow, caches } = &mut *part.row;
        match caches {
            crate::row::Caches::Device(cache) => Some(model::gpu::GpuAdvance {
                row: grow,
                to: part.to,
                logits: part.logits,
                cache,
            }),
            crate::row::Caches::Host(_) => None,
        }
    });
    let rows = vec![advances.collect::<Vec<_>>()];
    let mut logits = gpus.run(rows, |model, mut rows| model.advance_rows(&mut rows))?;
    Ok(logits.swap_remove(0))
}

#[cfg(test)]
mod tests;
