//! The seam for tasks: the one place that spawns. A task belongs to a [`Tracker`], which waits for
//! it at shutdown, or to its [`Owned`] handle, which aborts it when dropped.
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::task::{JoinError, JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Some tasks outlived the grace they were given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{left} tasks did not stop within {grace:?}")]
pub struct StillRunning {
    /// Tasks left.
    pub left: usize,
    /// What they were given.
    pub grace: Duration,
}

/// Spawns tasks, tells them to stop and waits for them.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Tracker {
    /// A tracker without tasks.
    pub fn new() -> Self {
        Self::default()
    }

    /// A tracker whose tasks stop when `stop` is cancelled.
    pub fn with_token(stop: CancellationToken) -> Self {
        Self {
            tasks: TaskTracker::new(),
            stop,
        }
    }

    /// Runs `future` until it ends; `stop` asks it to, through [`Tracker::token`].
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        spawn_raw(self.tasks.track_future(future))
    }

    /// Runs `future` until it ends or the tracker stops, whichever is first.
    pub fn spawn_until_stopped<F>(&self, future: F) -> JoinHandle<Option<F::Output>>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let stop = self.stop.clone();
        self.spawn(async move { stop.run_until_cancelled(future).await })
    }

    /// Runs blocking work on the blocking pool, tracked.
    pub fn spawn_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        self.tasks.spawn_blocking(work)
    }

    /// Cancelled when the tasks should end.
    pub fn token(&self) -> &CancellationToken {
        &self.stop
    }

    /// Tasks alive.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// No task is alive.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Asks every task to stop and waits for them, `grace` at most.
    pub async fn stop(&self, grace: Duration) -> Result<(), StillRunning> {
        self.stop.cancel();
        self.tasks.close();
        tokio::time::timeout(grace, self.tasks.wait())
            .await
            .map_err(|_| StillRunning {
                left: self.tasks.len(),
                grace,
            })
    }
}

/// A task that lives no longer than its handle.
#[derive(Debug)]
pub struct Owned<T>(JoinHandle<T>);

impl<T> Owned<T> {
    /// The task has ended.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Ends the task at its next await.
    pub fn abort(&self) {
        self.0.abort();
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<T> Future for Owned<T> {
    type Output = Result<T, JoinError>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx)
    }
}

/// Runs `future` as a task that its handle owns: dropping the handle aborts it.
pub fn spawn<F>(future: F) -> Owned<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    Owned(spawn_raw(future))
}

#[allow(clippy::disallowed_methods)] // the one place that spawns
fn spawn_raw<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stop_waits_for_tasks_that_listen() {
        let tracker = Tracker::new();
        let token = tracker.token().clone();
        let task = tracker.spawn(async move {
            token.cancelled().await;
            7
        });
        tracker.stop(Duration::from_secs(5)).await.unwrap();
        assert_eq!(task.await.unwrap(), 7);
        assert!(tracker.is_empty());
    }

    #[tokio::test]
    async fn stop_names_how_many_tasks_are_left() {
        let tracker = Tracker::new();
        let task = tracker.spawn(std::future::pending::<()>());
        let error = tracker.stop(Duration::from_millis(5)).await.unwrap_err();
        assert_eq!(error.left, 1);
        task.abort();
    }

    #[tokio::test]
    async fn dropping_an_owned_task_ends_it() {
        let (tx, rx) = tokio::sync::oneshot::channel::<()>();
        let task = spawn(async move {
            let _held = tx;
            std::future::pending::<()>().await;
        });
        drop(task);
        assert!(rx.await.is_err());
    }
}
