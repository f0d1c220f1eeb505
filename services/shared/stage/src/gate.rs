//! The door of a stage: who may come in, and who is still inside.
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use base::task::Tracker;
use registry::Standing;
use tokio::sync::watch;

use crate::StageError;

/// Decides whether a request may start. Closed until the stage has joined and warmed up, and again
/// once it drains.
#[derive(Debug, Default)]
pub struct Gate {
    open: AtomicBool,
    draining: AtomicBool,
    weights_id: OnceLock<String>,
    standing: OnceLock<watch::Receiver<Standing>>,
    tasks: Tracker,
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tasks of requests that came in; drain waits for them.
    pub fn tasks(&self) -> &Tracker {
        &self.tasks
    }

    /// Opens the gate for requests that name `weights_id`. `standing` follows the registration.
    pub fn open(&self, weights_id: &str, standing: watch::Receiver<Standing>) {
        // A stage joins once; a second opening changes nothing.
        let _ = self.weights_id.set(weights_id.to_owned());
        let _ = self.standing.set(standing);
        self.open.store(true, Ordering::Release);
    }

    /// Lets nobody in any more.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Checks one request.
    ///
    /// # Errors
    /// `Draining`; not ready or without a live lease (`UNAVAILABLE`); `StaleEpoch` when it was
    /// decided on a view from before this member joined; `WrongWeights`.
    pub fn enter(&self, epoch: u64, weights_id: &str) -> Result<(), StageError> {
        if self.draining.load(Ordering::Acquire) {
            return Err(StageError::Draining);
        }
        let (true, Some(loaded), Some(standing)) = (
            self.open.load(Ordering::Acquire),
            self.weights_id.get(),
            self.standing.get(),
        ) else {
            return Err(StageError::NotReady {
                why: "the model is still loading",
            });
        };
        let standing = *standing.borrow();
        if !standing.leased {
            return Err(StageError::NotReady {
                why: "the registry lease is lost",
            });
        }
        if epoch < standing.epoch {
            return Err(StageError::StaleEpoch {
                got: epoch,
                joined: standing.epoch,
            });
        }
        if weights_id != loaded {
            return Err(StageError::WrongWeights {
                got: weights_id.to_owned(),
                loaded: loaded.clone(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};

    use super::*;

    fn standing(epoch: u64, leased: bool) -> watch::Receiver<Standing> {
        watch::channel(Standing {
            epoch,
            drain: false,
            leased,
        })
        .1
    }

    #[test]
    fn nothing_enters_before_the_stage_is_ready() {
        let error = Gate::new().enter(9, "w").unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
    }

    #[test]
    fn an_older_epoch_and_other_weights_are_refused_typed() {
        let gate = Gate::new();
        gate.open("w", standing(5, true));
        assert!(gate.enter(5, "w").is_ok());
        assert!(gate.enter(6, "w").is_ok());
        assert_eq!(gate.enter(4, "w").unwrap_err().code(), Code::Aborted);
        assert_eq!(
            gate.enter(5, "v").unwrap_err().code(),
            Code::FailedPrecondition
        );
    }

    #[test]
    fn a_lost_lease_and_a_drain_close_the_gate() {
        let gate = Gate::new();
        gate.open("w", standing(1, false));
        assert_eq!(gate.enter(1, "w").unwrap_err().code(), Code::Unavailable);
        let gate = Gate::new();
        gate.open("w", standing(1, true));
        gate.drain();
        assert!(matches!(gate.enter(1, "w"), Err(StageError::Draining)));
    }
}
