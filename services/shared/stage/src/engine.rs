//! The thread that computes. The asynchronous side hands it closures over a bounded queue and never
//! computes itself, so a long forward pass delays no health check and no cancellation.
use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{mpsc, oneshot};

use crate::StageError;

type Work = Box<dyn FnOnce() + Send>;

/// One OS thread with a bounded queue of work. Dropping every clone ends the thread after the work
/// it has begun; work still queued is answered with [`StageError::EngineStopped`].
#[derive(Clone)]
pub struct Engine {
    name: &'static str,
    bound: usize,
    queue: mpsc::Sender<Work>,
    pending: Arc<AtomicUsize>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("name", &self.name)
            .field("bound", &self.bound)
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

/// Counts one piece of work from submission to its end, whatever that end is.
struct Pending(Arc<AtomicUsize>);

impl Pending {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine {
    /// Starts the thread. At most `bound` pieces of work wait behind the running one.
    ///
    /// # Errors
    /// The operating system gives no thread, or `bound` is 0.
    pub fn start(name: &'static str, bound: usize) -> Result<Self, StageError> {
        if bound == 0 {
            return Err(StageError::config("queue", "must be at least 1"));
        }
        let (queue, mut work) = mpsc::channel::<Work>(bound);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while let Some(work) = work.blocking_recv() {
                    work();
                }
            })
            .map_err(|source| StageError::Io {
                what: format!("start thread {name}"),
                source,
            })?;
        Ok(Self {
            name,
            bound,
            queue,
            pending: Arc::default(),
        })
    }

    /// Work queued or running.
    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Runs `work` on the thread. When the caller stops waiting before the work begins, it is skipped.
    ///
    /// # Errors
    /// `QueueFull` when the queue is at its bound, `Panicked` when the work panics (the thread lives
    /// on), `EngineStopped` when the thread is gone.
    pub async fn run<T, F>(&self, work: F) -> Result<T, StageError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let name = self.name;
        let (answer, answered) = oneshot::channel();
        let pending = Pending::new(&self.pending);
        let job: Work = Box::new(move || {
            if answer.is_closed() {
                return;
            }
            let result = guard(name, work);
            // Whoever has the answer no longer sees its work as pending.
            drop(pending);
            // A caller that has gone away is no error: its answer is dropped.
            let _ = answer.send(result);
        });
        self.queue.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StageError::QueueFull {
                queue: name,
                bound: self.bound,
            },
            mpsc::error::TrySendError::Closed(_) => StageError::EngineStopped { engine: name },
        })?;
        answered
            .await
            .map_err(|_| StageError::EngineStopped { engine: name })?
    }
}

/// Runs `work` and turns a panic into a typed error, so that one bad request fails alone.
///
/// # Errors
/// `Panicked` with the panic's message.
pub fn guard<T>(engine: &'static str, work: impl FnOnce() -> T) -> Result<T, StageError> {
    // The work owns what it changes and is dropped on a panic, so nothing half-changed survives.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| StageError::Panicked {
        engine,
        message: panic_message(panic.as_ref()),
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc as std_mpsc;

    use super::*;

    #[tokio::test]
    async fn work_runs_off_the_async_thread_and_answers() {
        let engine = Engine::start("engine-test", 2).unwrap();
        let name = engine
            .run(|| std::thread::current().name().map(str::to_owned))
            .await
            .unwrap();
        assert_eq!(name.as_deref(), Some("engine-test"));
        assert_eq!(engine.pending(), 0);
    }

    #[tokio::test]
    async fn a_panic_is_a_typed_error_and_the_next_work_runs() {
        let engine = Engine::start("engine-test", 2).unwrap();
        let error = engine.run(|| panic!("broken tensor")).await.unwrap_err();
        assert!(error.to_string().contains("broken tensor"), "{error}");
        assert_eq!(engine.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_full_queue_refuses_at_its_bound() {
        let engine = Engine::start("engine-test", 1).unwrap();
        let (release, held) = std_mpsc::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        let first = base::task::spawn({
            let engine = engine.clone();
            async move {
                engine
                    .run(move || {
                        begun.send(()).unwrap();
                        held.recv().unwrap();
                    })
                    .await
            }
        });
        has_begun.await.unwrap();
        let mut second = Box::pin(engine.run(|| ()));
        assert!(futures_pending(second.as_mut()).await);
        let error = engine.run(|| ()).await.unwrap_err();
        assert!(
            matches!(error, StageError::QueueFull { bound: 1, .. }),
            "{error}"
        );
        release.send(()).unwrap();
        first.await.unwrap().unwrap();
        second.await.unwrap();
    }

    #[tokio::test]
    async fn work_whose_caller_left_is_skipped() {
        let engine = Engine::start("engine-test", 4).unwrap();
        let (release, held) = std_mpsc::channel::<()>();
        let mut first = Box::pin(engine.run(move || held.recv().unwrap()));
        assert!(futures_pending(first.as_mut()).await);
        let (ran, seen) = std_mpsc::channel::<()>();
        let mut abandoned = Box::pin(engine.run(move || ran.send(()).unwrap()));
        assert!(futures_pending(abandoned.as_mut()).await);
        drop(abandoned);
        release.send(()).unwrap();
        first.await.unwrap();
        engine.run(|| ()).await.unwrap();
        assert!(seen.try_recv().is_err());
    }

    /// Polls once; true when the future is not ready.
    async fn futures_pending<F: Future + Unpin>(mut future: F) -> bool {
        std::future::poll_fn(|cx| {
            std::task::Poll::Ready(std::pin::Pin::new(&mut future).poll(cx).is_pending())
        })
        .await
    }
}
