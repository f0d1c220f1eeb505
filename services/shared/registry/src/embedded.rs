//! The registry inside a process: the pure core behind a lock, a reaper for leases, a bounded
//! broadcast for watchers.
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use base::{clock::Clock, limits::WATCH_QUEUE, task};
use tokio::sync::{broadcast, mpsc};

use crate::{
    Member, Plan, Registry, RegistryError, Snapshot,
    state::{Beat, Grant, Renewal, State},
    watch::{Update, Watch},
};

/// How often leases are looked at: a dead member is gone at most this long after its TTL.
const REAP_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    updates: broadcast::Sender<Update>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends under the lock, so that watchers see updates in the order of their epochs. No watcher
    /// is no error.
    fn publish(&self, _held: &MutexGuard<'_, State>, update: Option<Update>) {
        if let Some(update) = update {
            let _ = self.updates.send(update);
        }
    }

    fn reap(&self) {
        let mut state = self.lock();
        for update in state.expire(self.clock.now()) {
            tracing::info!(event = ?update.event, epoch = update.epoch, "member lease expired");
            self.publish(&state, Some(update));
        }
    }
}

/// A registry in this process. Clones share it.
#[derive(Debug, Clone)]
pub struct Embedded {
    shared: Arc<Shared>,
    _reaper: Arc<task::Owned<()>>,
}

impl Embedded {
    /// An empty registry with its reaper. Call inside a tokio runtime.
    pub fn start(clock: Arc<dyn Clock>) -> Self {
        let state = State::new(
            clock.unix_millis(),
            base::rng::Source::from_os().next_u64() >> 1,
        );
        let (updates, _) = broadcast::channel(WATCH_QUEUE);
        let shared = Arc::new(Shared {
            clock,
            state: Mutex::new(state),
            updates,
        });
        let reaped = shared.clone();
        let reaper = task::spawn(async move {
            loop {
                tokio::time::sleep(REAP_INTERVAL).await;
                reaped.reap();
            }
        });
        Self {
            shared,
            _reaper: Arc::new(reaper),
        }
    }

    /// Members and plans now.
    pub fn snapshot(&self) -> Snapshot {
        let state = self.shared.lock();
        Snapshot::new(state.epoch(), state.members()).with_plans(state.plans())
    }
}

#[tonic::async_trait]
impl Registry for Embedded {
    async fn register(&self, member: Member, ttl: Duration) -> Result<Grant, RegistryError> {
        let mut state = self.shared.lock();
        let (grant, update) = state.register(self.shared.clock.now(), member, ttl)?;
        self.shared.publish(&state, Some(update));
        Ok(grant)
    }

    async fn keep_alive(&self, beat: Beat) -> Result<Renewal, RegistryError> {
        let mut state = self.shared.lock();
        let (renewal, update) = state.keep_alive(self.shared.clock.now(), &beat)?;
        self.shared.publish(&state, update);
        Ok(renewal)
    }

    async fn deregister(&self, member_id: &str, lease: u64) -> Result<(), RegistryError> {
        let mut state = self.shared.lock();
        let update = state.deregister(member_id, lease);
        self.shared.publish(&state, update);
        Ok(())
    }

    async fn drain(&self, member_id: &str) -> Result<(), RegistryError> {
        let mut state = self.shared.lock();
        let update = state.drain(member_id)?;
        self.shared.publish(&state, update);
        Ok(())
    }

    async fn cordon(&self, member_id: &str, cordoned: bool) -> Result<(), RegistryError> {
        let mut state = self.shared.lock();
        let update = state.cordon(member_id, cordoned)?;
        self.shared.publish(&state, update);
        Ok(())
    }

    async fn publish_plan(&self, plan: Plan) -> Result<u64, RegistryError> {
        let mut state = self.shared.lock();
        let update = state.publish_plan(plan)?;
        let epoch = update.epoch;
        self.shared.publish(&state, Some(update));
        Ok(epoch)
    }

    async fn watch(&self) -> Result<Watch, RegistryError> {
        let (first, mut changes) = {
            let state = self.shared.lock();
            (state.snapshot(), self.shared.updates.subscribe())
        };
        let (tx, rx) = mpsc::channel(1);
        // Weak: a forgotten watch must not keep a registry alive.
        let shared = Arc::downgrade(&self.shared);
        let feeder = task::spawn(async move {
            let mut next = Some(first);
            loop {
                let update = match next.take() {
                    Some(update) => update,
                    None => match changes.recv().await {
                        Ok(update) => update,
                        Err(broadcast::error::RecvError::Closed) => return,
                        Err(broadcast::error::RecvError::Lagged(_)) => {
                            let Some(shared) = shared.upgrade() else {
                                return;
                            };
                            let state = shared.lock();
                            changes = changes.resubscribe();
                            state.snapshot()
                        }
                    },
                };
                if tx.send(Ok(update)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Watch::new(rx, feeder))
    }
}
