//! Step-level continuous batching, without threads and without a model: at each step boundary
//! finished, cancelled and parked jobs leave, and who of the others is in the next step is chosen anew:
//! by what steps cost ([`Former`]), or by class and then in order of arrival. Who has begun and is not in it stays,
//! with its latents, and goes on later. One failing job never fails the others.
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use stage::{StageError, engine::guard};
use tokio::sync::{mpsc, oneshot};

use crate::former::{Candidate, Former, Forming, Outlook};

/// What the batch asks of a model.
pub trait Denoiser: Send + 'static {
    /// One image in the making.
    type Job: Send + 'static;
    /// What a caller is told after a step beside its number.
    type News: Send + 'static;

    /// Runs one step of every job, packed. On an error a job has either not moved at all or has
    /// done this step whole.
    ///
    /// # Errors
    /// Whatever the model says; the batch then finds the culprit.
    fn step(&self, jobs: &mut [&mut Self::Job]) -> Result<(), StageError>;

    /// Steps done.
    fn steps_done(&self, job: &Self::Job) -> usize;

    /// All steps are done.
    fn is_done(&self, job: &Self::Job) -> bool;

    /// Whether the job's state is still made of numbers.
    ///
    /// # Errors
    /// [`StageError::NotFinite`] otherwise.
    fn check(&self, job: &Self::Job) -> Result<(), StageError>;

    /// What there is to tell after the step just done.
    ///
    /// # Errors
    /// Whatever the model says; the job ends with it.
    fn news(&self, job: &Self::Job) -> Result<Option<Self::News>, StageError>;
}

/// What a job weighs in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight {
    /// Rows: two under guidance, otherwise one.
    pub rows: usize,
    /// Query tokens of all rows.
    pub tokens: usize,
}

/// Bounds of one packed step. A job beyond them still runs, alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Most rows in one step.
    pub max_rows: usize,
    /// Most query tokens in one step.
    pub max_tokens: usize,
}

/// Who goes first at a step boundary; within a class the order of arrival decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Takes the place of all others.
    Interactive,
    /// The rule.
    #[default]
    Standard,
    /// When nobody else wants the place.
    Background,
}

/// What a job asks for besides the room it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How urgent it is.
    pub class: Class,
    /// When its request came to the system.
    pub arrived: Instant,
    /// When it is of no use any more, if its caller has said so.
    pub due: Option<Instant>,
    /// Tokens of a row's prefix.
    pub prefix: usize,
    /// All its steps.
    pub steps: usize,
}

impl Terms {
    /// Of a job that came `ago`, as far as is known.
    #[must_use]
    pub fn new(class: Class, ago: Duration) -> Self {
        let now = base::clock::now();
        Self {
            class,
            arrived: now.checked_sub(ago).unwrap_or(now),
            due: None,
            prefix: 0,
            steps: 0,
        }
    }
}

impl From<Class> for Terms {
    fn from(class: Class) -> Self {
        Self::new(class, Duration::ZERO)
    }
}

/// A step that was done.
#[derive(Debug)]
pub struct Told<N> {
    /// Steps done.
    pub step: usize,
    /// What there is to tell of it.
    pub news: Option<N>,
}

/// A job that left the batch well.
#[derive(Debug)]
pub struct Ended<J> {
    /// The job, with its latents.
    pub job: J,
    /// From first joining the batch to its last step, in milliseconds.
    pub denoise_ms: f64,
    /// It was asked to leave before its last step.
    pub parked: bool,
}

/// A job with the ends that its caller listens to. The caller cancels by dropping them.
pub(crate) struct Entry<D: Denoiser> {
    pub(crate) job: D::Job,
    pub(crate) weight: Weight,
    pub(crate) terms: Terms,
    pub(crate) progress: mpsc::Sender<Told<D::News>>,
    pub(crate) result: oneshot::Sender<Result<Ended<D::Job>, StageError>>,
    /// The caller wants the job back as it stands.
    pub(crate) park: Arc<AtomicBool>,
}

struct Member<D: Denoiser> {
    /// Counts arrivals.
    id: u64,
    entry: Entry<D>,
    /// Takes part in the next step.
    running: bool,
    joined: Option<Instant>,
    outcome: Option<Result<(), StageError>>,
}

impl<D: Denoiser> Member<D> {
    fn leaves(&self) -> bool {
        self.outcome.is_some()
    }
}

/// The jobs of one worker.
pub(crate) struct Batch<D: Denoiser> {
    denoiser: D,
    limits: StepLimits,
    /// Chooses by cost, if anybody does.
    former: Option<Former>,
    /// In order of arrival.
    members: Vec<Member<D>>,
    /// Jobs that ever came.
    came: u64,
}

impl<D: Denoiser> fmt::Debug for Batch<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("waiting", &self.waiting())
            .field("live", &self.live())
            .finish_non_exhaustive()
    }
}

impl<D: Denoiser> Batch<D> {
    pub(crate) fn new(denoiser: D, forming: impl Into<Forming>) -> Self {
        let Forming { limits, costs } = forming.into();
        Self {
            denoiser,
            limits,
            former: costs.map(|constants| Former::new(limits, constants)),
            members: Vec::new(),
            came: 0,
        }
    }

    /// What is left to do, where that is predicted.
    pub(crate) fn outlook(&self) -> Outlook {
        let told = self.former.as_ref().map(Former::outlook);
        told.unwrap_or_default()
    }

    /// Puts a job at the end of the line.
    pub(crate) fn push(&mut self, entry: Entry<D>) {
        self.came += 1;
        self.members.push(Member {
            id: self.came,
            entry,
            running: false,
            joined: None,
            outcome: None,
        });
    }

    /// Jobs that are not in the running step.
    pub(crate) fn waiting(&self) -> usize {
        self.members.len() - self.live()
    }

    pub(crate) fn live(&self) -> usize {
        self.members.iter().filter(|member| member.running).count()
    }

    /// Jobs that have run and now wait for others.
    #[cfg(test)]
    pub(crate) fn overtaken(&self) -> usize {
        let begun = |member: &&Member<D>| !member.running && member.joined.is_some();
        self.members.iter().filter(begun).count()
    }

    /// A step boundary: jobs whose caller left or wants them back go, the others are chosen anew.
    pub(crate) fn boundary(&mut self) {
        self.members
            .retain(|member| !member.entry.result.is_closed());
        for member in &mut self.members {
            // A job may arrive with all its steps done: only its picture was missing.
            let done = self.denoiser.is_done(&member.entry.job);
            if done || member.entry.park.load(Ordering::Acquire) {
                member.outcome = Some(Ok(()));
            }
        }
        self.answer_ended();
        self.choose();
        for member in self.members.iter_mut().filter(|member| member.running) {
            member.joined.get_or_insert_with(base::clock::now);
        }
    }

    /// Who is in the next step.
    fn choose(&mut self) {
        let Some(former) = &mut self.former else {
            self.choose_by_arrival();
            return;
        };
        let candidate = |member: &Member<D>| Candidate {
            id: member.id,
            weight: member.entry.weight,
            terms: member.entry.terms,
            done: self.denoiser.steps_done(&member.entry.job),
        };
        let candidates: Vec<Candidate> = self.members.iter().map(candidate).collect();
        let chosen = former.choose(&candidates);
        for member in &mut self.members {
            member.running = chosen.contains(&member.id);
        }
    }

    fn choose_by_arrival(&mut self) {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        order.sort_by_key(|&index| self.members[index].entry.terms.class);
        let (mut rows, mut tokens, mut full) = (0, 0, false);
        for (place, index) in order.into_iter().enumerate() {
            let member = &mut self.members[index];
            let weight = member.entry.weight;
            rows += weight.rows;
            tokens += weight.tokens;
            // Who comes later does not overtake: nobody waits for ever.
            full |= rows > self.limits.max_rows || tokens > self.limits.max_tokens;
            member.running = place == 0 || !full;
        }
    }

    /// Runs one packed step, reports progress, answers jobs that ended.
    pub(crate) fn step(&mut self) {
        let start = base::clock::now();
        self.step_packed();
        if let Some(former) = &mut self.former {
            former.stepped(base::clock::now().saturating_duration_since(start));
        }
        let denoiser = &self.denoiser;
        for member in self.members.iter_mut().filter(|member| member.running) {
            if member.outcome.is_none() {
                member.outcome = told(denoiser, &member.entry).err().map(Err);
            }
            if member.outcome.is_none() && denoiser.is_done(&member.entry.job) {
                member.outcome = Some(Ok(()));
            }
        }
        self.answer_ended();
    }

    fn answer_ended(&mut self) {
        let ended = self.members.extract_if(.., |member| member.leaves());
        for member in ended {
            answer(&self.denoiser, member);
        }
    }

    fn step_packed(&mut self) {
        let denoiser = &self.denoiser;
        let mut running: Vec<&mut Member<D>> = self
            .members
            .iter_mut()
            .filter(|member| member.running)
            .collect();
        let before: Vec<usize> = running
            .iter()
            .map(|member| denoiser.steps_done(&member.entry.job))
            .collect();
        let mut jobs: Vec<&mut D::Job> = running
            .iter_mut()
            .map(|member| &mut member.entry.job)
            .collect();
        let Err(error) = run(denoiser, &mut jobs) else {
            return;
        };
        if let [only] = running.as_mut_slice() {
            only.outcome = Some(Err(error));
            return;
        }
        tracing::warn!(jobs = before.len(), %error, "a packed step failed, its jobs run alone");
        for (member, before) in running.into_iter().zip(before) {
            // A panic may have come after some jobs had moved; those must not move twice.
            if denoiser.steps_done(&member.entry.job) == before {
                let solo = run(denoiser, &mut [&mut member.entry.job]);
                member.outcome = solo.err().map(Err);
            }
        }
    }
}

/// Tells the caller of a step.
fn told<D: Denoiser>(denoiser: &D, entry: &Entry<D>) -> Result<(), StageError> {
    denoiser.check(&entry.job)?;
    let told = Told {
        step: denoiser.steps_done(&entry.job),
        news: denoiser.news(&entry.job)?,
    };
    // Progress is advice: a reader that does not keep up misses some of it.
    let _ = entry.progress.try_send(told);
    Ok(())
}

fn run<D: Denoiser>(denoiser: &D, jobs: &mut [&mut D::Job]) -> Result<(), StageError> {
    guard("denoise", || denoiser.step(jobs))?
}

fn answer<D: Denoiser>(denoiser: &D, member: Member<D>) {
    let Entry { job, result, .. } = member.entry;
    let message = match member.outcome {
        Some(Err(error)) => Err(error),
        _ => Ok(Ended {
            denoise_ms: member.joined.map_or(0.0, base::clock::millis_since),
            parked: !denoiser.is_done(&job),
            job,
        }),
    };
    // A caller that left meanwhile is no error.
    let _ = result.send(message);
}

#[cfg(test)]
pub(crate) mod tests;
