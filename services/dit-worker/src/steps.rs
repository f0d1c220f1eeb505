//! The step loop: the one thread that runs denoising steps, fed over a bounded queue.
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use base::limits::EVENT_QUEUE;
use stage::StageError;
use tokio::sync::{mpsc, oneshot};

use crate::{
    batch::{Batch, Denoiser, Ended, Entry, Terms, Told, Weight},
    former::{Forming, Outlook},
};

/// Sends jobs to the loop. When the last clone is gone, the loop ends after its last job.
pub struct StepLoop<D: Denoiser> {
    queue: mpsc::Sender<Entry<D>>,
    load: Arc<Counts>,
    max_queue: usize,
}

#[derive(Debug, Default)]
struct Counts {
    live: AtomicUsize,
    waiting: AtomicUsize,
    outlook: Mutex<Outlook>,
}

/// What a caller holds while its job runs. Dropping it cancels the job at the next step boundary.
pub struct Ticket<D: Denoiser> {
    /// Jobs in the loop before this one.
    pub ahead: usize,
    /// Steps done so far; may skip some when read slowly.
    pub progress: mpsc::Receiver<Told<D::News>>,
    /// How the job ended.
    pub result: oneshot::Receiver<Result<Ended<D::Job>, StageError>>,
    park: Arc<AtomicBool>,
}

impl<D: Denoiser> Ticket<D> {
    /// Asks for the job back, as it stands at the next step boundary.
    pub fn park(&self) {
        self.park.store(true, Ordering::Release);
    }
}

impl<D: Denoiser> fmt::Debug for Ticket<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("ahead", &self.ahead)
            .finish_non_exhaustive()
    }
}

impl<D: Denoiser> Clone for StepLoop<D> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            load: Arc::clone(&self.load),
            max_queue: self.max_queue,
        }
    }
}

impl<D: Denoiser> fmt::Debug for StepLoop<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepLoop")
            .field("live", &self.live())
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

impl<D: Denoiser> StepLoop<D> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The operating system gives no thread, or a limit is 0.
    pub fn start(
        denoiser: D,
        forming: impl Into<Forming>,
        max_queue: usize,
    ) -> Result<Self, StageError> {
        let forming = forming.into();
        let limits = forming.limits;
        for (field, value) in [
            ("max_rows", limits.max_rows),
            ("max_tokens", limits.max_tokens),
            ("max_queue", max_queue),
        ] {
            if value == 0 {
                return Err(StageError::config(field, "must be at least 1"));
            }
        }
        let (queue, entries) = mpsc::channel(max_queue);
        let load = Arc::new(Counts::default());
        let counts = Arc::clone(&load);
        let batch = Batch::new(denoiser, forming);
        std::thread::Builder::new()
            .name("denoise".to_owned())
            .spawn(move || drive(batch, entries, &counts))
            .map_err(|source| StageError::Io {
                what: "start thread denoise".to_owned(),
                source,
            })?;
        Ok(Self {
            queue,
            load,
            max_queue,
        })
    }

    /// Jobs in the running batch.
    pub fn live(&self) -> usize {
        self.load.live.load(Ordering::SeqCst)
    }

    /// Jobs waiting to join it, parked ones included.
    pub fn waiting(&self) -> usize {
        self.load.waiting.load(Ordering::SeqCst)
    }

    /// What is left to do, as of the last boundary.
    pub fn outlook(&self) -> Outlook {
        let outlook = self.load.outlook.lock();
        *outlook.unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a job in line.
    ///
    /// # Errors
    /// `QueueFull` at the bound, `EngineStopped` when the loop is gone.
    pub fn submit(
        &self,
        job: D::Job,
        weight: Weight,
        terms: impl Into<Terms>,
    ) -> Result<Ticket<D>, StageError> {
        let full = || StageError::QueueFull {
            queue: "denoise",
            bound: self.max_queue,
        };
        let waiting = self
            .load
            .waiting
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waiting| {
                (waiting < self.max_queue).then_some(waiting + 1)
            })
            .map_err(|_| full())?;
        let (progress, seen) = mpsc::channel(EVENT_QUEUE);
        let (result, answered) = oneshot::channel();
        let park = Arc::<AtomicBool>::default();
        let entry = Entry {
            job,
            weight,
            terms: terms.into(),
            progress,
            result,
            park: Arc::clone(&park),
        };
        self.queue.try_send(entry).map_err(|error| {
            self.load.waiting.fetch_sub(1, Ordering::SeqCst);
            match error {
                mpsc::error::TrySendError::Full(_) => full(),
                mpsc::error::TrySendError::Closed(_) => {
                    StageError::EngineStopped { engine: "denoise" }
                }
            }
        })?;
        Ok(Ticket {
            ahead: waiting + self.live(),
            progress: seen,
            result: answered,
            park,
        })
    }
}

/// The loop itself: sleeps while there is nothing to do, otherwise steps without a pause.
fn drive<D: Denoiser>(mut batch: Batch<D>, mut entries: mpsc::Receiver<Entry<D>>, counts: &Counts) {
    loop {
        if batch.live() + batch.waiting() == 0 {
            match entries.blocking_recv() {
                Some(entry) => batch.push(entry),
                None => return,
            }
        }
        while let Ok(entry) = entries.try_recv() {
            batch.push(entry);
        }
        let queued = batch.waiting();
        batch.boundary();
        // In this order a job is for a moment counted twice, never not at all.
        counts.live.store(batch.live(), Ordering::SeqCst);
        let now = batch.waiting();
        counts
            .waiting
            .fetch_add(now.saturating_sub(queued), Ordering::SeqCst);
        counts
            .waiting
            .fetch_sub(queued.saturating_sub(now), Ordering::SeqCst);
        if batch.live() > 0 {
            batch.step();
            counts.live.store(batch.live(), Ordering::SeqCst);
        }
        let mut outlook = counts
            .outlook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *outlook = batch.outlook();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::tests::{Fake, FakeJob};
    use crate::batch::{Class, StepLimits};

    const LIMITS: StepLimits = StepLimits {
        max_rows: 8,
        max_tokens: 100,
    };
    const LIGHT: Weight = Weight { rows: 2, tokens: 8 };

    #[tokio::test]
    async fn a_job_runs_through_and_reports_every_step() {
        let steps = StepLoop::start(Fake::default(), LIMITS, 4).unwrap();
        let mut ticket = steps
            .submit(FakeJob::new(1, 5), LIGHT, Class::Standard)
            .unwrap();
        assert_eq!(ticket.ahead, 0);
        let mut seen = Vec::new();
        while let Some(step) = ticket.progress.recv().await {
            seen.push(step.step);
        }
        assert_eq!(seen, [1, 2, 3, 4, 5]);
        assert_eq!(ticket.result.await.unwrap().unwrap().job.done, 5);
        assert_eq!(steps.waiting(), 0);
    }

    #[tokio::test]
    async fn the_queue_bound_is_an_error_the_caller_reads() {
        let (hold, held) = std::sync::mpsc::channel();
        let steps = StepLoop::start(Held(held.into()), LIMITS, 1).unwrap();
        let first = steps.submit(false, LIGHT, Class::Standard).unwrap();
        while steps.waiting() > 0 {
            tokio::task::yield_now().await;
        }
        let second = steps.submit(false, LIGHT, Class::Standard).unwrap();
        assert_eq!(second.ahead, 1);
        let error = steps.submit(false, LIGHT, Class::Standard).unwrap_err();
        assert!(
            matches!(error, StageError::QueueFull { bound: 1, .. }),
            "{error}"
        );
        drop(hold);
        assert!(first.result.await.unwrap().is_ok());
        assert!(second.result.await.unwrap().is_ok());
    }

    /// One-step jobs that finish when the test lets go.
    struct Held(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

    impl Denoiser for Held {
        type Job = bool;
        type News = ();
        fn step(&self, jobs: &mut [&mut bool]) -> Result<(), StageError> {
            let _ = self.0.lock().unwrap().recv();
            jobs.iter_mut().for_each(|job| **job = true);
            Ok(())
        }
        fn steps_done(&self, job: &bool) -> usize {
            usize::from(*job)
        }
        fn is_done(&self, job: &bool) -> bool {
            *job
        }
        fn check(&self, _: &bool) -> Result<(), StageError> {
            Ok(())
        }
        fn news(&self, _: &bool) -> Result<Option<()>, StageError> {
            Ok(None)
        }
    }

    #[test]
    fn limits_of_zero_are_refused_by_name() {
        let limits = StepLimits {
            max_rows: 0,
            max_tokens: 1,
        };
        let error = StepLoop::start(Fake::default(), limits, 1).unwrap_err();
        assert!(error.to_string().contains("max_rows"));
    }
}
