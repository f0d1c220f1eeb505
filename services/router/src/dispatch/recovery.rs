//! What follows when a prefix does not come to its worker: what the request's policy says, a bounded number of
//! times, and what came of it for the answer.
use std::{
    sync::{
        Arc, Mutex as Cell, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use base::{Code, Failure, Fault as _};
use proto::v1::{LossPolicy, PrefillDone, PrefixReport};
use registry::Role;
use tokio::sync::{Mutex, watch};

use super::{Prefix, Tries, Walk};
use crate::{RouterError, validate};

/// Times that the prefixes of one request are computed again.
const MAX_RECOMPUTES: u32 = 2;
/// Times that transfers of one request are begun again. Pauses make the deadline come first.
const MAX_WAITS: u32 = 1_024;
/// Pause before a transfer is begun again for the first time; each next one is twice as long.
const WAIT_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause before a transfer is begun again.
const MAX_WAIT_PAUSE: Duration = Duration::from_millis(6_400);

/// How a prefix is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// It will not come back.
    Gone,
    /// It did not come this time.
    Away,
}

impl Missing {
    /// What a refusal of the pool's service says about the prefix, if anything.
    pub(super) fn of(failure: &Failure) -> Option<Self> {
        match failure.code {
            // The view of the cluster was too old: the prefix is there.
            Code::Aborted if failure.field.as_deref() == Some("epoch") => None,
            Code::NotFound | Code::Aborted => Some(Self::Gone),
            Code::Unavailable | Code::DeadlineExceeded => Some(Self::Away),
            _ => None,
        }
    }
}

/// Where the stage stands that computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// They are offered, and being computed.
    Computing,
    /// They were there, whole.
    Whole,
}

/// The prefixes of a request as they stand, and what became of them.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// Held while they are computed again, so that all images of a request wait for one pass.
    pub(super) current: Mutex<Arc<Prefix>>,
    stage: watch::Sender<Stage>,
    /// The last word of a stage that had offered them before.
    done: Cell<Option<PrefillDone>>,
    recomputed: AtomicU32,
    waits: AtomicU32,
    reason: Cell<String>,
}

impl Prefixes {
    pub(super) fn new(prefix: Prefix) -> Self {
        Self {
            current: Mutex::new(Arc::new(prefix)),
            stage: watch::channel(Stage::Whole).0,
            done: Cell::default(),
            recomputed: AtomicU32::new(0),
            waits: AtomicU32::new(0),
            reason: Cell::default(),
        }
    }

    pub(super) async fn current(&self) -> Arc<Prefix> {
        Arc::clone(&*self.current.lock().await)
    }

    pub(super) fn report(&self, policy: LossPolicy) -> PrefixReport {
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        PrefixReport {
            on_loss: policy.into(),
            recomputed: self.recomputed.load(Ordering::Relaxed),
            waits: self.waits.load(Ordering::Relaxed),
            reason: reason.clone(),
            cached_rows: 0,
        }
    }

    pub(super) fn tell(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// The stage has said its last word.
    pub(super) fn whole(&self, done: PrefillDone) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        self.tell(Stage::Whole);
    }

    /// What the stage has told of `prefix` in the end.
    pub(super) fn done(&self, prefix: &Prefix) -> PrefillDone {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.clone().unwrap_or_else(|| prefix.done.clone())
    }

    /// Waits for the end of their stage. Where that end is a loss, it ends whoever waits here.
    async fn computed(&self) {
        let mut stage = self.stage.subscribe();
        let whole = |stage: &Stage| *stage == Stage::Whole;
        if stage.wait_for(whole).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn note(&self, error: &RouterError) {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        *reason = error.message();
    }
}

impl Walk {
    /// Follows the policy after `used` did not come to a worker. True: denoising may be tried again, at once;
    /// false: the policy says nothing more than what holds for any lost stage.
    pub(super) async fn recover(
        &self,
        prefixes: &Prefixes,
        used: &Arc<Prefix>,
        (error, missing): (&RouterError, Missing),
    ) -> Result<bool, RouterError> {
        // What a worker misses of a prefix that is still computed, its stage explains.
        prefixes.computed().await;
        prefixes.note(error);
        let policy = self.request.loss.policy;
        tracing::warn!(
            request_id = %self.request.request_id, policy = validate::policy_name(policy), ?missing, %error,
            "a prefix did not come to its worker"
        );
        match (policy, missing) {
            (LossPolicy::Unspecified | LossPolicy::Fail, _) => Ok(false),
            (LossPolicy::Wait, Missing::Gone) => Err(error.clone()),
            (LossPolicy::Wait, Missing::Away) => {
                let before = prefixes.waits.fetch_add(1, Ordering::Relaxed);
                if before >= MAX_WAITS {
                    return Err(error.clone());
                }
                let pause = WAIT_PAUSE.saturating_mul(1 << before.min(8));
                // The walk as a whole is under the request's deadline.
                tokio::time::sleep(pause.min(MAX_WAIT_PAUSE)).await;
                Ok(true)
            }
            (LossPolicy::Recompute, _) => {
                let mut current = prefixes.current.lock().await;
                if !Arc::ptr_eq(&current, used) {
                    // Another image of this request has seen to it.
                    return Ok(true);
                }
                if prefixes.recomputed.load(Ordering::Relaxed) >= MAX_RECOMPUTES {
                    return Err(error.clone());
                }
                prefixes.recomputed.fetch_add(1, Ordering::Relaxed);
                *prefixes.done.lock().unwrap_or_else(PoisonError::into_inner) = None;
                let mut tries = Tries::new(Role::ArStage, 0);
                let (mut again, rest) = self.prefill(&mut tries, false).await?;
                if let Some(mut rest) = rest {
                    let done = self.computed(&mut rest).await;
                    again.done = PrefillDone {
                        rows: again.done.rows,
                        ..done.map_err(|lost| lost.error)?
                    };
                }
                if !again.is_like(&current) {
                    return Err(RouterError::PrefixChanged);
                }
                *current = Arc::new(again);
                Ok(true)
            }
        }
    }
}

impl Prefix {
    /// The same prefixes of the same picture: steps that were made on one may go on on the other.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let identities = |prefix: &Self| -> Vec<Vec<u8>> {
            let handles = prefix
                .done
                .rows
                .iter()
                .filter_map(|row| row.prefix.as_ref());
            handles.map(|handle| handle.identity.clone()).collect()
        };
        identities(self) == identities(other)
            && self.done.text == other.done.text
            && self.size == other.size
            && self.output == other.output
    }
}
