//! What happens in a cluster, as one router sees it, for people: a bounded list, newest last. The same event
//! again and again in a row is one event with a count.
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use base::{
    clock::{self, Clock as _},
    limits::MAX_EVENTS,
};
use proto::v1::ClusterEvent;
use registry::{Member, MemberState, Snapshot, Snapshots};
use tokio::sync::watch;

use crate::placement::role_name;

/// The list. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    kept: Arc<Mutex<VecDeque<ClusterEvent>>>,
    /// Number of the newest.
    newest: Arc<watch::Sender<u64>>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            kept: Arc::default(),
            newest: Arc::new(watch::channel(0).0),
        }
    }
}

/// An event before it has its number.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    warning: bool,
    reason: &'static str,
    object: String,
    message: String,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, VecDeque<ClusterEvent>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something went as it should.
    pub(crate) fn tell(&self, reason: &'static str, object: String, message: String) {
        self.add(Told {
            warning: false,
            reason,
            object,
            message,
        });
    }

    /// Somebody may have to act.
    pub(crate) fn warn(&self, reason: &'static str, object: String, message: String) {
        self.add(Told {
            warning: true,
            reason,
            object,
            message,
        });
    }

    fn add(&self, told: Told) {
        let mut kept = self.lock();
        let number = *self.newest.borrow() + 1;
        let again =
            |last: &&mut ClusterEvent| last.reason == told.reason && last.object == told.object;
        let unix_ms = clock::SystemClock.unix_millis();
        if let Some(last) = kept.back_mut().filter(|last| again(last)) {
            last.count = last.count.saturating_add(1);
            (last.number, last.unix_ms, last.message) = (number, unix_ms, told.message);
        } else {
            if kept.len() >= MAX_EVENTS {
                kept.pop_front();
            }
            kept.push_back(ClusterEvent {
                number,
                unix_ms,
                warning: told.warning,
                reason: told.reason.to_owned(),
                object: told.object,
                message: told.message,
                count: 1,
            });
        }
        // Under the lock, so that numbers are as many as changes.
        self.newest.send_replace(number);
    }

    /// Events with a higher number, oldest first.
    pub(crate) fn after(&self, number: u64) -> Vec<ClusterEvent> {
        let kept = self.lock();
        let newer = kept.iter().filter(|event| event.number > number);
        newer.cloned().collect()
    }

    /// Wakes at every event.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

/// Tells what changes among the members and in the contact with the registry, until the registry's followers
/// end.
pub(crate) async fn follow(snapshots: Snapshots, events: Events) {
    let (mut changes, mut contacts) = (snapshots.changes(), snapshots.contacts());
    let mut before = Arc::new(Snapshot::default());
    // That it is not followed yet is no loss.
    let mut following = true;
    loop {
        let now = changes.borrow_and_update().clone();
        for told in differences(&before, &now) {
            events.add(told);
        }
        before = now;
        let contact = contacts.borrow_and_update().following;
        if contact != following && before.epoch > 0 {
            following = contact;
            let registry = || "registry".to_owned();
            if following {
                let message = "the registry is followed again".to_owned();
                events.tell("RegistryFound", registry(), message);
            } else {
                let message = "the registry is away, the last picture of it stands".to_owned();
                events.warn("RegistryLost", registry(), message);
            }
        }
        let ended = tokio::select! {
            changed = changes.changed() => changed.is_err(),
            changed = contacts.changed() => changed.is_err(),
        };
        if ended {
            return;
        }
    }
}

/// What has changed between two pictures, apart from load.
fn differences(before: &Snapshot, now: &Snapshot) -> Vec<Told> {
    let mut all = Vec::new();
    let mut tell = |reason, object, message| {
        all.push(Told {
            warning: false,
            reason,
            object,
            message,
        });
    };
    for (id, member) in &now.members {
        let object = format!("member/{id}");
        let Some(was) = before.members.get(id) else {
            let message = format!("{}, {}", describe(member), state_name(member));
            tell("MemberJoined", object, message);
            continue;
        };
        if was.state != member.state {
            let (from, to) = (state_name(was), state_name(member));
            let message = format!("{}: {from} to {to}", describe(member));
            tell("MemberState", object.clone(), message);
        }
        if was.cordoned != member.cordoned {
            let word = if member.cordoned {
                "takes no new work"
            } else {
                "takes work again"
            };
            tell(
                "MemberCordoned",
                object,
                format!("{} {word}", describe(member)),
            );
        }
    }
    for (id, member) in &before.members {
        if !now.members.contains_key(id) {
            let message = format!("{}, last {}", describe(member), state_name(member));
            tell("MemberLeft", format!("member/{id}"), message);
        }
    }
    for (pool, plan) in &now.plans {
        let was = before.plans.get(pool).map(|plan| plan.generation);
        if was != Some(plan.generation) {
            let message = format!("generation {}", plan.generation);
            tell("PlanPublished", format!("pool/{pool}"), message);
        }
    }
    all
}

fn describe(member: &Member) -> String {
    let role = role_name(member.role());
    match member.pool.as_str() {
        "" => format!("{role} at {}", member.endpoint),
        pool => format!("{role} of pool {pool} at {}", member.endpoint),
    }
}

/// As operators read it.
pub(crate) fn state_name(member: &Member) -> &'static str {
    match member.state() {
        MemberState::Starting => "starting",
        MemberState::Ready => "ready",
        MemberState::Draining => "draining",
        MemberState::Unspecified => "unspecified",
    }
}

#[cfg(test)]
mod tests {
    use registry::Role;

    use super::*;

    fn member(id: &str, state: MemberState) -> Member {
        Member {
            id: id.to_owned(),
            role: Role::DitWorker.into(),
            state: state.into(),
            pool: "p".to_owned(),
            ..Member::default()
        }
    }

    #[test]
    fn what_repeats_in_a_row_is_one_event_with_a_count_and_old_ones_go() {
        let events = Events::default();
        for _ in 0..3 {
            events.warn("RequestRefused", "code/X".to_owned(), "full".to_owned());
        }
        events.tell("MemberLeft", "member/a".to_owned(), String::new());
        let all = events.after(0);
        let seen: Vec<_> = all.iter().map(|e| (e.number, e.count)).collect();
        assert_eq!(seen, [(3, 3), (4, 1)]);
        assert_eq!(events.after(3).len(), 1);
        for index in 0..2 * MAX_EVENTS {
            events.tell("MemberLeft", format!("member/{index}"), String::new());
        }
        assert_eq!(events.after(0).len(), MAX_EVENTS);
        assert_eq!(*events.changes().borrow(), 4 + 2 * MAX_EVENTS as u64);
    }

    #[test]
    fn a_change_of_the_members_is_told_once_and_load_alone_is_not() {
        let reasons = |before: &Snapshot, now: &Snapshot| -> Vec<(&str, String)> {
            let all = differences(before, now).into_iter();
            all.map(|told| (told.reason, told.object)).collect()
        };
        let object = || "member/a".to_owned();
        let none = Snapshot::default();
        let starting = Snapshot::new(1, vec![member("a", MemberState::Starting)]);
        let ready = Snapshot::new(2, vec![member("a", MemberState::Ready)]);
        assert_eq!(reasons(&none, &starting), [("MemberJoined", object())]);
        assert_eq!(reasons(&starting, &ready), [("MemberState", object())]);
        let mut cordoned = ready.clone();
        let at = cordoned.members.get_mut("a").unwrap();
        at.cordoned = true;
        at.load = Some(registry::Load {
            running: 1,
            ..Default::default()
        });
        assert_eq!(reasons(&ready, &cordoned), [("MemberCordoned", object())]);
        assert_eq!(reasons(&cordoned, &none), [("MemberLeft", object())]);
        let mut busy = cordoned.clone();
        busy.members.get_mut("a").unwrap().load = None;
        assert!(reasons(&cordoned, &busy).is_empty());
    }
}
