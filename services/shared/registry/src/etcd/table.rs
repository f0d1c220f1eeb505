//! The pure core of a watch: folds keys and values into members, and says what a watcher must see.
//! Values come from a store that others write too, so each is checked before it counts.
use std::collections::{BTreeMap, BTreeSet};

use base::limits::{MAX_LEASE_TTL, MAX_MEMBERS};
use prost::Message as _;

use crate::{
    Event, Load, Member, MemberState, Picture, Plan, Update,
    etcd::keys::{Keys, Kind},
    state::{MAX_PLANS, check, check_plan},
};

/// Largest value that is looked at, in bytes.
const MAX_VALUE_BYTES: usize = 128 * 1024;

/// One key as it is after one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) key: Vec<u8>,
    /// `None`: deleted.
    pub(crate) value: Option<Vec<u8>>,
    /// Of the write or the deletion.
    pub(crate) revision: u64,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    member: Option<Member>,
    load: Load,
    drain: bool,
    cordoned: bool,
}

impl Slot {
    fn visible(&self) -> Option<Member> {
        let mut member = self.member.clone()?;
        member.load = Some(self.load);
        member.cordoned = self.cordoned;
        if self.drain {
            member.set_state(MemberState::Draining);
        }
        Some(member)
    }

    fn is_empty(&self) -> bool {
        self.member.is_none() && !self.drain && !self.cordoned && self.load == Load::default()
    }
}

/// What the keys of a cluster say.
#[derive(Debug)]
pub(crate) struct Table {
    keys: Keys,
    slots: BTreeMap<String, Slot>,
    plans: BTreeMap<String, Plan>,
    epoch: u64,
}

impl Table {
    /// From every key of the cluster at one revision.
    pub(crate) fn new(keys: Keys, all: impl IntoIterator<Item = Change>) -> Self {
        let mut table = Self {
            keys,
            slots: BTreeMap::new(),
            plans: BTreeMap::new(),
            epoch: 0,
        };
        for change in all {
            table.set(&change);
        }
        table
    }

    /// Everything, as the first event of a watch.
    pub(crate) fn snapshot(&self) -> Update {
        let members = self.slots.values().filter_map(Slot::visible).collect();
        let plans = self.plans.values().cloned().collect();
        self.update(Event::Snapshot(Picture { members, plans }))
    }

    /// Applies changes that etcd reported together. Those of one revision count as one change: a
    /// member that is drained and renewed at once is seen once.
    pub(crate) fn apply(&mut self, changes: &[Change]) -> Vec<Update> {
        changes
            .chunk_by(|a, b| a.revision == b.revision)
            .flat_map(|group| self.apply_revision(group))
            .collect()
    }

    fn apply_revision(&mut self, group: &[Change]) -> Vec<Update> {
        let mut before = BTreeMap::new();
        let mut pools = BTreeSet::new();
        for change in group {
            match self.keys.parse(&change.key) {
                Some(Kind::Member(id) | Kind::Load(id) | Kind::Drain(id) | Kind::Cordon(id)) => {
                    let was = || self.visible(id);
                    before.entry(id.to_owned()).or_insert_with(was);
                }
                Some(Kind::Plan(pool)) => {
                    pools.insert(pool.to_owned());
                }
                _ => {}
            }
            self.set(change);
        }
        let members = before
            .into_iter()
            .filter_map(|(id, was)| match (was, self.visible(&id)) {
                (was, Some(is)) => (was.as_ref() != Some(&is)).then(|| Event::Put(Box::new(is))),
                (Some(_), None) => Some(Event::Removed(id)),
                (None, None) => None,
            });
        let plans = pools.iter().filter_map(|pool| self.plans.get(pool));
        let plans = plans.map(|plan| Event::Plan(Box::new(plan.clone())));
        let events: Vec<_> = members.chain(plans).collect();
        events.into_iter().map(|event| self.update(event)).collect()
    }

    fn visible(&self, id: &str) -> Option<Member> {
        self.slots.get(id).and_then(Slot::visible)
    }

    fn update(&self, event: Event) -> Update {
        Update {
            epoch: self.epoch,
            event,
        }
    }

    fn set(&mut self, change: &Change) {
        let Some(kind) = self.keys.parse(&change.key) else {
            return;
        };
        let value = change.value.as_deref();
        match kind {
            Kind::Load(id) => {
                let load = value.and_then(|value| Load::decode(value).ok());
                self.slot(id, |slot| slot.load = load.unwrap_or_default());
                return;
            }
            Kind::Epoch => {}
            Kind::Drain(id) => self.slot(id, |slot| slot.drain = value.is_some()),
            Kind::Cordon(id) => self.slot(id, |slot| slot.cordoned = value.is_some()),
            Kind::Member(id) => {
                let member = value.and_then(|value| member(id, value, change.revision));
                self.slot(id, |slot| slot.member = member);
            }
            Kind::Plan(pool) => match value.and_then(|value| plan(pool, value, change.revision)) {
                Some(plan) if self.plans.len() < MAX_PLANS || self.plans.contains_key(pool) => {
                    self.plans.insert(pool.to_owned(), plan);
                }
                Some(_) => tracing::warn!(pool, "more plans than are held, ignored"),
                None => {
                    self.plans.remove(pool);
                }
            },
        }
        self.epoch = self.epoch.max(change.revision);
    }

    fn slot(&mut self, id: &str, change: impl FnOnce(&mut Slot)) {
        if !self.slots.contains_key(id) && self.slots.len() >= MAX_MEMBERS {
            tracing::warn!(id, "more members than are held, ignored");
            return;
        }
        let slot = self.slots.entry(id.to_owned()).or_default();
        change(slot);
        if slot.is_empty() {
            self.slots.remove(id);
        }
    }
}

/// Reads a record; `None` and a warning for one that breaks the contract. A record of epoch 0 is
/// as it was at registration: it joined at its own revision.
pub(crate) fn member(id: &str, value: &[u8], revision: u64) -> Option<Member> {
    if value.len() > MAX_VALUE_BYTES {
        tracing::warn!(id, bytes = value.len(), "record of a member is too large");
        return None;
    }
    let mut member = match Member::decode(value) {
        Ok(member) => member,
        Err(error) => {
            tracing::warn!(id, %error, "record of a member cannot be read");
            return None;
        }
    };
    if member.id != id {
        tracing::warn!(id, named = %member.id, "record of a member lies under another id");
        return None;
    }
    if let Err(error) = check(&member, MAX_LEASE_TTL) {
        tracing::warn!(id, %error, "record of a member breaks a bound");
        return None;
    }
    if member.epoch == 0 {
        member.epoch = revision;
    }
    Some(member)
}

/// Reads a plan; `None` and a warning for one that breaks the contract.
pub(crate) fn plan(pool: &str, value: &[u8], revision: u64) -> Option<Plan> {
    if value.len() > MAX_VALUE_BYTES {
        tracing::warn!(pool, bytes = value.len(), "plan is too large");
        return None;
    }
    let read = Plan::decode(value).map_err(|error| error.to_string());
    let checked = read.and_then(|plan| match check_plan(&plan) {
        Ok(()) if plan.pool == pool => Ok(plan),
        Ok(()) => Err(format!("it names pool {:?}", plan.pool)),
        Err(error) => Err(error.to_string()),
    });
    match checked {
        Ok(plan) => Some(Plan {
            epoch: revision,
            ..plan
        }),
        Err(error) => {
            tracing::warn!(pool, %error, "plan cannot be used");
            None
        }
    }
}
