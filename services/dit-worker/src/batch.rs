//! Step-level continuous batching, without threads and without a model: at each step boundary
//! finished and cancelled jobs leave, waiting jobs join in order of arrival, and everything alive
//! runs one step together. One failing job never fails the others.
use std::{collections::VecDeque, fmt, time::Instant};

use stage::{StageError, engine::guard};
use tokio::sync::{mpsc, oneshot};

/// What the batch asks of a model.
pub trait Denoiser: Send + 'static {
    /// One image in the making.
    type Job: Send + 'static;

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

/// A job that has done all its steps.
#[derive(Debug)]
pub struct Finished<J> {
    /// The job with its final latents.
    pub job: J,
    /// From joining the batch to the last step, in milliseconds.
    pub denoise_ms: f64,
}

/// A job with the two ends that its caller listens to. The caller cancels by dropping them.
pub(crate) struct Entry<J> {
    pub(crate) job: J,
    pub(crate) weight: Weight,
    pub(crate) progress: mpsc::Sender<usize>,
    pub(crate) result: oneshot::Sender<Result<Finished<J>, StageError>>,
}

struct Live<J> {
    entry: Entry<J>,
    joined: Instant,
    outcome: Option<Result<(), StageError>>,
}

/// The jobs of one worker.
pub(crate) struct Batch<D: Denoiser> {
    denoiser: D,
    limits: StepLimits,
    waiting: VecDeque<Entry<D::Job>>,
    live: Vec<Live<D::Job>>,
}

impl<D: Denoiser> fmt::Debug for Batch<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("waiting", &self.waiting.len())
            .field("live", &self.live.len())
            .finish_non_exhaustive()
    }
}

impl<D: Denoiser> Batch<D> {
    pub(crate) fn new(denoiser: D, limits: StepLimits) -> Self {
        Self {
            denoiser,
            limits,
            waiting: VecDeque::new(),
            live: Vec::new(),
        }
    }

    /// Puts a job at the end of the line.
    pub(crate) fn push(&mut self, entry: Entry<D::Job>) {
        self.waiting.push_back(entry);
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn live(&self) -> usize {
        self.live.len()
    }

    /// A step boundary: jobs whose caller left go, waiting jobs join while they fit, in order.
    pub(crate) fn boundary(&mut self) {
        self.live.retain(|live| !live.entry.result.is_closed());
        self.waiting.retain(|entry| !entry.result.is_closed());
        while let Some(next) = self.waiting.front() {
            if !self.fits(next.weight) {
                break;
            }
            if let Some(entry) = self.waiting.pop_front() {
                self.live.push(Live {
                    entry,
                    joined: base::clock::now(),
                    outcome: None,
                });
            }
        }
    }

    fn fits(&self, weight: Weight) -> bool {
        let rows: usize = self.live.iter().map(|live| live.entry.weight.rows).sum();
        let tokens: usize = self.live.iter().map(|live| live.entry.weight.tokens).sum();
        self.live.is_empty()
            || (rows + weight.rows <= self.limits.max_rows
                && tokens + weight.tokens <= self.limits.max_tokens)
    }

    /// Runs one packed step, reports progress, answers jobs that ended.
    pub(crate) fn step(&mut self) {
        self.step_packed();
        for live in &mut self.live {
            if live.outcome.is_none() {
                live.outcome = self.denoiser.check(&live.entry.job).err().map(Err);
            }
            if live.outcome.is_none() {
                let done = self.denoiser.steps_done(&live.entry.job);
                // Progress is advice: a reader that does not keep up misses some of it.
                let _ = live.entry.progress.try_send(done);
                if self.denoiser.is_done(&live.entry.job) {
                    live.outcome = Some(Ok(()));
                }
            }
        }
        let (ended, live) = std::mem::take(&mut self.live)
            .into_iter()
            .partition(|live| live.outcome.is_some());
        self.live = live;
        ended.into_iter().for_each(answer);
    }

    fn step_packed(&mut self) {
        let before: Vec<usize> = self
            .live
            .iter()
            .map(|live| self.denoiser.steps_done(&live.entry.job))
            .collect();
        let mut jobs: Vec<&mut D::Job> = self
            .live
            .iter_mut()
            .map(|live| &mut live.entry.job)
            .collect();
        let Err(error) = run(&self.denoiser, &mut jobs) else {
            return;
        };
        if let [only] = self.live.as_mut_slice() {
            only.outcome = Some(Err(error));
            return;
        }
        tracing::warn!(jobs = before.len(), %error, "a packed step failed, its jobs run alone");
        for (live, before) in self.live.iter_mut().zip(before) {
            // A panic may have come after some jobs had moved; those must not move twice.
            if self.denoiser.steps_done(&live.entry.job) == before {
                let solo = run(&self.denoiser, &mut [&mut live.entry.job]);
                live.outcome = solo.err().map(Err);
            }
        }
    }
}

fn run<D: Denoiser>(denoiser: &D, jobs: &mut [&mut D::Job]) -> Result<(), StageError> {
    guard("denoise", || denoiser.step(jobs))?
}

fn answer<J>(live: Live<J>) {
    let denoise_ms = base::clock::millis_since(live.joined);
    let Entry { job, result, .. } = live.entry;
    let message = match live.outcome {
        Some(Err(error)) => Err(error),
        _ => Ok(Finished { job, denoise_ms }),
    };
    // A caller that left meanwhile is no error.
    let _ = result.send(message);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Debug, Clone)]
    pub(crate) struct FakeJob {
        pub(crate) id: u32,
        pub(crate) done: usize,
        pub(crate) steps: usize,
        /// Fails, panics or turns to NaN in the step with this number.
        pub(crate) trouble: Option<(usize, Trouble)>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Trouble {
        Error,
        Panic,
        NotFinite,
    }

    impl FakeJob {
        pub(crate) fn new(id: u32, steps: usize) -> Self {
            Self {
                id,
                done: 0,
                steps,
                trouble: None,
            }
        }

        fn meets(&self, trouble: Trouble, step: usize) -> bool {
            self.trouble == Some((step, trouble))
        }
    }

    /// Records which jobs each call packed.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Fake(pub(crate) Arc<Mutex<Vec<Vec<u32>>>>);

    impl Denoiser for Fake {
        type Job = FakeJob;

        fn step(&self, jobs: &mut [&mut FakeJob]) -> Result<(), StageError> {
            self.0
                .lock()
                .unwrap()
                .push(jobs.iter().map(|job| job.id).collect());
            if jobs
                .iter()
                .any(|job| job.meets(Trouble::Error, job.done + 1))
            {
                return Err(StageError::Cancelled);
            }
            for job in jobs.iter_mut() {
                assert!(!job.meets(Trouble::Panic, job.done + 1), "told to panic");
                job.done += 1;
            }
            Ok(())
        }

        fn steps_done(&self, job: &FakeJob) -> usize {
            job.done
        }

        fn is_done(&self, job: &FakeJob) -> bool {
            job.done == job.steps
        }

        fn check(&self, job: &FakeJob) -> Result<(), StageError> {
            if job.meets(Trouble::NotFinite, job.done) {
                return Err(StageError::NotFinite { what: "latents" });
            }
            Ok(())
        }
    }

    struct Caller {
        progress: mpsc::Receiver<usize>,
        result: oneshot::Receiver<Result<Finished<FakeJob>, StageError>>,
    }

    const ROOMY: StepLimits = StepLimits {
        max_rows: 100,
        max_tokens: 10_000,
    };

    fn push(batch: &mut Batch<Fake>, job: FakeJob, weight: Weight) -> Caller {
        let (progress, seen) = mpsc::channel(64);
        let (result, answered) = oneshot::channel();
        batch.push(Entry {
            job,
            weight,
            progress,
            result,
        });
        Caller {
            progress: seen,
            result: answered,
        }
    }

    fn light() -> Weight {
        Weight {
            rows: 2,
            tokens: 10,
        }
    }

    fn steps(batch: &mut Batch<Fake>, count: usize) {
        for _ in 0..count {
            batch.boundary();
            batch.step();
        }
    }

    fn progress(caller: &mut Caller) -> Vec<usize> {
        std::iter::from_fn(|| caller.progress.try_recv().ok()).collect()
    }

    #[test]
    fn jobs_join_and_leave_at_step_boundaries() {
        let fake = Fake::default();
        let mut batch = Batch::new(fake.clone(), ROOMY);
        let mut first = push(&mut batch, FakeJob::new(1, 3), light());
        steps(&mut batch, 1);
        let mut second = push(&mut batch, FakeJob::new(2, 1), light());
        steps(&mut batch, 2);
        assert_eq!(*fake.0.lock().unwrap(), [vec![1], vec![1, 2], vec![1]]);
        assert_eq!(progress(&mut first), [1, 2, 3]);
        assert_eq!(progress(&mut second), [1]);
        assert_eq!(first.result.try_recv().unwrap().unwrap().job.done, 3);
        assert_eq!(second.result.try_recv().unwrap().unwrap().job.done, 1);
        assert_eq!((batch.live(), batch.waiting()), (0, 0));
    }

    #[test]
    fn a_caller_that_left_frees_its_place_at_the_next_boundary() {
        let fake = Fake::default();
        let mut batch = Batch::new(fake.clone(), ROOMY);
        let gone = push(&mut batch, FakeJob::new(1, 9), light());
        let _stays = push(&mut batch, FakeJob::new(2, 9), light());
        steps(&mut batch, 1);
        drop(gone);
        steps(&mut batch, 1);
        assert_eq!(*fake.0.lock().unwrap(), [vec![1, 2], vec![2]]);
    }

    #[test]
    fn a_failing_job_fails_alone() {
        for trouble in [Trouble::Error, Trouble::Panic, Trouble::NotFinite] {
            let mut batch = Batch::new(Fake::default(), ROOMY);
            let mut bad = FakeJob::new(2, 4);
            bad.trouble = Some((2, trouble));
            let mut callers: Vec<_> = [FakeJob::new(1, 4), bad, FakeJob::new(3, 4)]
                .into_iter()
                .map(|job| push(&mut batch, job, light()))
                .collect();
            steps(&mut batch, 4);
            let results: Vec<_> = callers
                .iter_mut()
                .map(|caller| caller.result.try_recv().unwrap())
                .collect();
            assert!(results[1].is_err(), "{trouble:?}");
            for good in [&results[0], &results[2]] {
                assert_eq!(good.as_ref().unwrap().job.done, 4, "{trouble:?}");
            }
        }
    }

    #[test]
    fn the_row_and_token_limits_hold_and_arrival_order_is_kept() {
        let fake = Fake::default();
        let limits = StepLimits {
            max_rows: 4,
            max_tokens: 25,
        };
        let mut batch = Batch::new(fake.clone(), limits);
        let heavy = Weight {
            rows: 1,
            tokens: 20,
        };
        let _callers = [
            push(&mut batch, FakeJob::new(1, 1), light()),
            push(&mut batch, FakeJob::new(2, 1), heavy),
            push(&mut batch, FakeJob::new(3, 1), light()),
        ];
        steps(&mut batch, 3);
        // 1 + 2 is too many tokens, and 3 does not overtake 2.
        assert_eq!(*fake.0.lock().unwrap(), [vec![1], vec![2], vec![3]]);
    }

    #[test]
    fn a_job_beyond_the_limits_runs_alone_instead_of_never() {
        let fake = Fake::default();
        let limits = StepLimits {
            max_rows: 1,
            max_tokens: 1,
        };
        let mut batch = Batch::new(fake.clone(), limits);
        let mut caller = push(&mut batch, FakeJob::new(1, 1), light());
        steps(&mut batch, 1);
        assert!(caller.result.try_recv().unwrap().is_ok());
    }

    #[test]
    fn a_slow_reader_of_progress_still_gets_its_result() {
        let mut batch = Batch::new(Fake::default(), ROOMY);
        let (progress, _unread) = mpsc::channel(1);
        let (result, mut answered) = oneshot::channel();
        batch.push(Entry {
            job: FakeJob::new(1, 50),
            weight: light(),
            progress,
            result,
        });
        steps(&mut batch, 50);
        assert_eq!(answered.try_recv().unwrap().unwrap().job.done, 50);
    }
}
