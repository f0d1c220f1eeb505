//! The thread that computes: takes requests from a bounded queue into the batch, pass after pass.
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use stage::{Ranks, StageError, engine::guard};
use telemetry::Metrics;
use tokio::sync::mpsc;

use crate::{
    batch::{Batch, Desk, Job, MAX_RUNNING, Ticket, ticket},
    order::Order,
    pictures::Pictures,
    pools::Pools,
    run::Run,
};

/// Name of the thread and of its queue.
const NAME: &str = "prefill";

/// A request on its way to the thread.
#[derive(Debug)]
struct Asked {
    order: Order,
    pictures: Pictures,
    desk: Desk,
}

/// The thread's door. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Decoder {
    queue: mpsc::Sender<Asked>,
    bound: usize,
    /// Requests that the thread has taken.
    running: Arc<AtomicUsize>,
    pools: Pools,
}

impl Decoder {
    /// Starts the thread. At most `bound` requests wait.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub(crate) fn start(
        ranks: Arc<Ranks>,
        bound: usize,
        metrics: Metrics,
    ) -> Result<Self, StageError> {
        let batch = Batch::new(ranks, metrics)?;
        let pools = batch.pools().clone();
        let (queue, asked) = mpsc::channel(bound.max(1));
        let running = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&running);
        std::thread::Builder::new()
            .name(NAME.to_owned())
            .spawn(move || serve(batch, asked, &counted))
            .map_err(|source| StageError::Io {
                what: format!("start thread {NAME}"),
                source,
            })?;
        Ok(Self {
            queue,
            bound,
            running,
            pools,
        })
    }

    /// Where its rows are.
    pub(crate) fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Hands a request over. Dropping its ticket cancels it at the next token.
    ///
    /// # Errors
    /// `QueueFull`; `EngineStopped` when the thread is gone.
    pub(crate) fn submit(&self, order: Order, pictures: Pictures) -> Result<Ticket, StageError> {
        let (ticket, desk) = ticket();
        let asked = Asked {
            order,
            pictures,
            desk,
        };
        self.queue.try_send(asked).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StageError::QueueFull {
                queue: NAME,
                bound: self.bound,
            },
            mpsc::error::TrySendError::Closed(_) => StageError::EngineStopped { engine: NAME },
        })?;
        Ok(ticket)
    }

    /// Requests that are computed, and that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        let waiting = self.queue.max_capacity() - self.queue.capacity();
        (self.running.load(Ordering::Relaxed), waiting)
    }
}

/// Passes until nobody asks any more.
fn serve(mut batch: Batch, mut asked: mpsc::Receiver<Asked>, running: &AtomicUsize) {
    // Laid out, but without a place in the batch.
    let mut ready: VecDeque<Job> = VecDeque::new();
    loop {
        if batch.is_empty() && ready.is_empty() {
            match asked.blocking_recv() {
                Some(first) => ready.extend(begun(&batch, first)),
                None => return,
            }
        }
        while batch.len() + ready.len() < MAX_RUNNING {
            match asked.try_recv() {
                Ok(next) => ready.extend(begun(&batch, next)),
                Err(_) => break,
            }
        }
        while let Some(job) = ready.pop_front() {
            if batch.has_room_for(&job.run) {
                batch.add(job);
            } else {
                ready.push_front(job);
                break;
            }
        }
        running.store(batch.len() + ready.len(), Ordering::Relaxed);
        if let Err(error) = guard(NAME, || batch.pass()) {
            // A defect: nobody can say whose.
            tracing::error!(%error, "a pass panicked");
            batch.abandon();
        }
        running.store(batch.len() + ready.len(), Ordering::Relaxed);
    }
}

/// Lays a request out, unless nobody waits for it any more; a refusal is answered at once.
fn begun(batch: &Batch, asked: Asked) -> Option<Job> {
    let Asked {
        order,
        pictures,
        desk,
    } = asked;
    if desk.is_deserted() {
        return None;
    }
    let pools = (batch.ranks(), batch.pools());
    match guard(NAME, || Run::new(pools, order, pictures)).and_then(|run| run) {
        Ok(run) => Some(Job::new(run, desk)),
        Err(error) => {
            desk.refuse(error);
            None
        }
    }
}
