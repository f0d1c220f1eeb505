//! Admission with its waiters: who may run is decided in [`crate::admission`], here they are woken.
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base::clock;
use telemetry::{Metrics, names};
use tokio::sync::oneshot;

use crate::{
    RouterError,
    admission::{Admission, Ask, Limits, Refused, Ticket},
};

#[derive(Debug)]
struct State {
    admission: Admission,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// The one door of a router.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// What admission counts from.
    origin: Instant,
    metrics: Metrics,
}

/// A place in the queue, later a place among the running. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Seat {
    gate: Arc<Gate>,
    ticket: Ticket,
    /// Requests that were ahead on arrival.
    pub(crate) ahead: usize,
    turn: Option<oneshot::Receiver<()>>,
    arrived: Instant,
    started: Option<Instant>,
    finished: bool,
}

impl Gate {
    pub(crate) fn new(limits: Limits, metrics: Metrics) -> Arc<Self> {
        let state = State {
            admission: Admission::new(limits),
            waiting: HashMap::new(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            origin: clock::now(),
            metrics,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the gate was made.
    pub(crate) fn since_origin(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.origin)
    }

    /// Takes a place. Times of `ask` are those of [`Gate::since_origin`].
    pub(crate) fn enter(self: &Arc<Self>, ask: Ask<'_>) -> Result<Seat, RouterError> {
        let mut state = self.lock();
        let placed = state.admission.submit(ask).map_err(refused)?;
        let (ticket, ahead) = (placed.ticket, placed.ahead);
        let (tx, rx) = oneshot::channel();
        state.waiting.insert(ticket, tx);
        self.wake(&mut state);
        Ok(Seat {
            gate: self.clone(),
            ticket,
            ahead,
            turn: Some(rx),
            arrived: clock::now(),
            started: None,
            finished: false,
        })
    }

    /// Requests that run, and that wait.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.admission.running(), state.admission.waiting())
    }

    fn wake(&self, state: &mut State) {
        let now = self.since_origin(clock::now());
        for ticket in state.admission.start(now) {
            if let Some(turn) = state.waiting.remove(&ticket) {
                // A waiter that is gone frees its place when its seat drops.
                let _ = turn.send(());
            }
        }
        #[allow(clippy::cast_precision_loss)] // bounded by the limits
        let (running, waiting) = (
            state.admission.running() as f64,
            state.admission.waiting() as f64,
        );
        self.metrics.set(&names::ROUTER_RUNNING, &[], running);
        self.metrics.set(&names::ROUTER_QUEUE, &[], waiting);
    }
}

fn refused(refused: Refused) -> RouterError {
    match refused {
        Refused::Queue {
            waiting,
            retry_after,
        } => RouterError::Full {
            waiting,
            retry_after,
        },
        Refused::Tenant {
            waiting,
            retry_after,
        } => RouterError::Quota {
            waiting,
            retry_after,
        },
        Refused::Late { needs, retry_after } => RouterError::Late { needs, retry_after },
        Refused::Hopeless { needs } => RouterError::Hopeless(needs),
    }
}

impl Seat {
    /// The request may run without waiting.
    pub(crate) fn is_running(&mut self) -> bool {
        if let Some(turn) = &mut self.turn
            && turn.try_recv().is_ok()
        {
            self.start();
        }
        self.started.is_some()
    }

    /// Waits for the turn; answers how long that took, in milliseconds.
    pub(crate) async fn started(&mut self) -> f64 {
        if let Some(turn) = &mut self.turn {
            // The gate drops a sender only after having sent.
            let _ = turn.await;
            self.start();
        }
        let started = self.started.unwrap_or(self.arrived);
        started
            .saturating_duration_since(self.arrived)
            .as_secs_f64()
            * 1e3
    }

    /// The request has run to its end: its time counts for the measured speed.
    pub(crate) fn finished(&mut self) {
        self.finished = true;
    }

    fn start(&mut self) {
        self.turn = None;
        let now = clock::now();
        self.started = Some(now);
        let waited = now.saturating_duration_since(self.arrived);
        self.gate
            .metrics
            .observe(&names::ROUTER_QUEUE_WAIT, &[], waited);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let ran = self.started.filter(|_| self.finished);
        let took = ran.map(|started| clock::now().saturating_duration_since(started));
        let mut state = self.gate.lock();
        state.waiting.remove(&self.ticket);
        state.admission.leave(self.ticket, took);
        self.gate.wake(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use schedule::batching::Class;

    use super::*;

    fn ask() -> Ask<'static> {
        Ask {
            cost: 1,
            class: Class::Standard,
            tenant: "",
            quota: None,
            now: Duration::ZERO,
            deadline: None,
            alone: None,
        }
    }

    #[tokio::test]
    async fn a_seat_that_leaves_lets_the_next_one_in() {
        let limits = Limits {
            max_running: 1,
            max_queued: 2,
            max_cost: u64::MAX,
            ..Limits::default()
        };
        let gate = Gate::new(limits, Metrics::default());
        let mut first = gate.enter(ask()).unwrap();
        assert!(first.is_running());
        let abandoned = gate.enter(ask()).unwrap();
        let mut second = gate.enter(ask()).unwrap();
        assert_eq!((abandoned.ahead, second.ahead), (0, 1));
        assert!(!second.is_running());
        assert!(matches!(
            gate.enter(ask()),
            Err(RouterError::Full { waiting: 2, .. })
        ));
        drop(abandoned);
        drop(first);
        tokio::time::timeout(Duration::from_secs(5), second.started())
            .await
            .unwrap();
        drop(second);
        assert!(gate.enter(ask()).unwrap().is_running());
    }
}
