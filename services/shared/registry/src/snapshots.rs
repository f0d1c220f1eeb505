//! A picture of the cluster that is kept up to date. With the registry away, the last one stays.
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{backoff::Backoff, clock, task};
use tokio::sync::watch;

use crate::{Event, Member, MemberState, Plan, Registry, Role, Update};

/// First and longest wait before a broken watch is started again.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(2);

/// Members and plans at one epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Epoch of the picture.
    pub epoch: u64,
    /// By id.
    pub members: BTreeMap<String, Member>,
    /// By pool.
    pub plans: BTreeMap<String, Plan>,
}

impl Snapshot {
    /// From a list of members, without plans.
    pub fn new(epoch: u64, members: Vec<Member>) -> Self {
        let by_id = members
            .into_iter()
            .map(|member| (member.id.clone(), member));
        Self {
            epoch,
            members: by_id.collect(),
            plans: BTreeMap::new(),
        }
    }

    /// The same members with these plans.
    #[must_use]
    pub fn with_plans(mut self, plans: Vec<Plan>) -> Self {
        let by_pool = plans.into_iter().map(|plan| (plan.pool.clone(), plan));
        self.plans = by_pool.collect();
        self
    }

    /// Members of a role that take work.
    pub fn ready(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.values().filter(move |member| {
            member.role() == role && member.state() == MemberState::Ready && !member.cordoned
        })
    }

    /// Applies an update. Updates that are older than the picture change nothing.
    pub fn apply(&mut self, update: Update) {
        match update.event {
            // A registry that started anew may count from a lower epoch: its word stands.
            Event::Snapshot(picture) => {
                *self = Self::new(update.epoch, picture.members).with_plans(picture.plans);
            }
            _ if update.epoch < self.epoch => {}
            Event::Put(member) => {
                self.epoch = update.epoch;
                self.members.insert(member.id.clone(), *member);
            }
            Event::Removed(id) => {
                self.epoch = update.epoch;
                self.members.remove(&id);
            }
            Event::Plan(plan) => {
                self.epoch = update.epoch;
                self.plans.insert(plan.pool.clone(), *plan);
            }
        }
    }
}

/// How the picture stands to the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contact {
    /// The registry is being followed. False: the picture is the last one that was seen.
    pub following: bool,
    /// Since when that is so.
    pub since: Instant,
    /// Full pictures that came after the first one: after a break, a lag or a compaction.
    pub resyncs: u64,
}

impl Contact {
    /// Age of a picture that is no longer kept up to date; zero while the registry is followed.
    pub fn stale_for(&self) -> Duration {
        if self.following {
            return Duration::ZERO;
        }
        clock::now().saturating_duration_since(self.since)
    }
}

/// Follows a registry. Clones share the picture; the task ends with the last of them.
#[derive(Debug, Clone)]
pub struct Snapshots {
    current: watch::Receiver<Arc<Snapshot>>,
    contact: watch::Receiver<Contact>,
    _follower: Arc<task::Owned<()>>,
}

impl Snapshots {
    /// Starts to follow. The first picture is empty until the registry answers.
    pub fn follow(registry: Arc<dyn Registry>) -> Self {
        let (tx, current) = watch::channel(Arc::default());
        let (contact_tx, contact) = watch::channel(Contact {
            following: false,
            since: clock::now(),
            resyncs: 0,
        });
        let follower = task::spawn(follow(registry, tx, contact_tx));
        Self {
            current,
            contact,
            _follower: Arc::new(follower),
        }
    }

    /// The picture now.
    pub fn current(&self) -> Arc<Snapshot> {
        self.current.borrow().clone()
    }

    /// Whether the picture is kept up to date now.
    pub fn contact(&self) -> Contact {
        *self.contact.borrow()
    }

    /// A receiver that wakes when contact is lost or made, and at every resync.
    pub fn contacts(&self) -> watch::Receiver<Contact> {
        self.contact.clone()
    }

    /// A receiver that wakes at every change.
    pub fn changes(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.current.clone()
    }

    /// Waits until the picture satisfies `wanted`, `most` at longest.
    pub async fn wait(
        &self,
        most: Duration,
        mut wanted: impl FnMut(&Snapshot) -> bool,
    ) -> Option<Arc<Snapshot>> {
        let mut changes = self.changes();
        let found = tokio::time::timeout(most, changes.wait_for(|now| wanted(now))).await;
        found.ok()?.ok().map(|now| now.clone())
    }
}

async fn follow(
    registry: Arc<dyn Registry>,
    into: watch::Sender<Arc<Snapshot>>,
    contact: watch::Sender<Contact>,
) {
    let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST);
    let mut seen_any = false;
    loop {
        match registry.watch().await {
            Ok(mut updates) => {
                while let Some(update) = updates.next().await {
                    let update = match update {
                        Ok(update) => update,
                        Err(error) => {
                            tracing::warn!(%error, "registry watch broke");
                            break;
                        }
                    };
                    backoff.reset();
                    let full = matches!(update.event, Event::Snapshot(_));
                    into.send_modify(|now| Arc::make_mut(now).apply(update));
                    note(&contact, true, full && seen_any);
                    seen_any = true;
                }
            }
            Err(error) => tracing::warn!(%error, "registry cannot be watched"),
        }
        note(&contact, false, false);
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Wakes those who look at the contact only when there is something new to see.
fn note(contact: &watch::Sender<Contact>, following: bool, resync: bool) {
    contact.send_if_modified(|now| {
        let turned = now.following != following;
        if turned {
            now.following = following;
            now.since = clock::now();
            tracing::info!(following, "contact with the registry changed");
        }
        now.resyncs += u64::from(resync);
        turned || resync
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: &str, role: Role, state: MemberState) -> Member {
        Member {
            id: id.into(),
            role: role.into(),
            state: state.into(),
            ..Member::default()
        }
    }

    #[test]
    fn only_ready_members_of_the_role_are_offered() {
        let snapshot = Snapshot::new(
            3,
            vec![
                member("a", Role::ArStage, MemberState::Ready),
                member("b", Role::ArStage, MemberState::Starting),
                member("c", Role::DitWorker, MemberState::Ready),
                member("d", Role::ArStage, MemberState::Draining),
            ],
        );
        let ids = |snapshot: &Snapshot| -> Vec<String> {
            let ready = snapshot.ready(Role::ArStage);
            ready.map(|member| member.id.clone()).collect()
        };
        assert_eq!(ids(&snapshot), ["a"]);
        let mut cordoned = snapshot;
        cordoned.members.get_mut("a").unwrap().cordoned = true;
        assert!(ids(&cordoned).is_empty());
    }

    #[test]
    fn late_updates_of_an_older_epoch_change_nothing() {
        let mut snapshot = Snapshot::new(5, vec![member("a", Role::ArStage, MemberState::Ready)]);
        snapshot.apply(Update {
            epoch: 4,
            event: Event::Removed("a".into()),
        });
        assert_eq!((snapshot.epoch, snapshot.members.len()), (5, 1));
        snapshot.apply(Update {
            epoch: 6,
            event: Event::Removed("a".into()),
        });
        assert_eq!((snapshot.epoch, snapshot.members.len()), (6, 0));
    }
}
