//! The pure core: members, leases and the epoch. Time comes in as an argument; what watchers must
//! see comes out as events.
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use base::{
    MemberId,
    limits::{MAX_LEASE_TTL, MAX_MEMBERS, MIN_LEASE_TTL},
};

use crate::{Event, Load, Member, MemberState, Picture, Plan, RegistryError, Role, Update};

/// Most sizes one model may publish.
const MAX_BUCKETS: usize = 1_024;
/// Longest name or address in a record, in bytes.
const MAX_TEXT: usize = 256;
/// Most pools that may have a plan.
pub(crate) const MAX_PLANS: usize = 1_024;
/// Largest plan, in bytes.
const MAX_PLAN_BYTES: usize = 64 * 1024;

/// What a registration gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Names the lease in later calls.
    pub lease: u64,
    /// Epoch of this membership: a dispatch decided on an older one does not know this member.
    pub epoch: u64,
}

/// What a member reports when it prolongs its lease.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    /// Who.
    pub member_id: String,
    /// Its lease.
    pub lease: u64,
    /// Its load now.
    pub load: Load,
    /// What it says it is.
    pub state: MemberState,
}

/// What a renewal answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewal {
    /// Epoch now.
    pub epoch: u64,
    /// An operator asked this member to drain.
    pub drain: bool,
}

#[derive(Debug, Clone)]
struct Record {
    member: Member,
    lease: u64,
    ttl: Duration,
    expires: Instant,
    drain: bool,
}

/// All members of a cluster.
///
/// The epoch grows with every change of membership, state or plan, never with load alone.
#[derive(Debug)]
pub struct State {
    records: BTreeMap<String, Record>,
    plans: BTreeMap<String, Plan>,
    epoch: u64,
    next_lease: u64,
}

impl State {
    /// An empty cluster. `first_epoch` must exceed every epoch of earlier lives of this registry
    /// (milliseconds of wall time do), `first_lease` should differ from life to life.
    pub fn new(first_epoch: u64, first_lease: u64) -> Self {
        Self {
            records: BTreeMap::new(),
            plans: BTreeMap::new(),
            epoch: first_epoch,
            next_lease: first_lease.max(1),
        }
    }

    /// Epoch now.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Every member, by id.
    pub fn members(&self) -> Vec<Member> {
        self.records
            .values()
            .map(|record| record.member.clone())
            .collect()
    }

    /// Every plan, by pool.
    pub fn plans(&self) -> Vec<Plan> {
        self.plans.values().cloned().collect()
    }

    /// When the next lease runs out.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.records.values().map(|record| record.expires).min()
    }

    /// Adds a member, or replaces the record of the same id with a new lease.
    ///
    /// # Errors
    /// A record that breaks a bound; a full table.
    pub fn register(
        &mut self,
        now: Instant,
        mut member: Member,
        ttl: Duration,
    ) -> Result<(Grant, Update), RegistryError> {
        check(&member, ttl)?;
        let before = self.records.get(&member.id);
        if before.is_none() && self.records.len() >= MAX_MEMBERS {
            return Err(RegistryError::Full(MAX_MEMBERS));
        }
        let drain = before.is_some_and(|record| record.drain);
        member.cordoned = before.is_some_and(|record| record.member.cordoned);
        if drain {
            member.set_state(MemberState::Draining);
        }
        let lease = self.next_lease;
        self.next_lease = self.next_lease.wrapping_add(1).max(1);
        self.epoch += 1;
        member.epoch = self.epoch;
        let record = Record {
            member: member.clone(),
            lease,
            ttl,
            expires: now + ttl,
            drain,
        };
        self.records.insert(member.id.clone(), record);
        Ok((
            Grant {
                lease,
                epoch: self.epoch,
            },
            self.update(Event::Put(Box::new(member))),
        ))
    }

    /// Prolongs a lease. The update is `None` when nothing a watcher sees has changed.
    ///
    /// # Errors
    /// [`RegistryError::LeaseGone`] when the lease has expired or was replaced.
    pub fn keep_alive(
        &mut self,
        now: Instant,
        beat: &Beat,
    ) -> Result<(Renewal, Option<Update>), RegistryError> {
        let gone = || RegistryError::LeaseGone {
            member_id: beat.member_id.clone(),
            lease: beat.lease,
        };
        let record = self.records.get_mut(&beat.member_id).ok_or_else(gone)?;
        if record.lease != beat.lease || record.expires <= now {
            return Err(gone());
        }
        record.expires = now + record.ttl;
        let state = match beat.state {
            _ if record.drain => MemberState::Draining,
            MemberState::Unspecified => record.member.state(),
            state => state,
        };
        let moved = state != record.member.state();
        let changed = moved || record.member.load.as_ref() != Some(&beat.load);
        record.member.set_state(state);
        record.member.load = Some(beat.load);
        let (member, drain) = (record.member.clone(), record.drain);
        self.epoch += u64::from(moved);
        let update = changed.then(|| self.update(Event::Put(Box::new(member))));
        Ok((
            Renewal {
                epoch: self.epoch,
                drain,
            },
            update,
        ))
    }

    /// Ends a lease. `None`: it had ended before.
    pub fn deregister(&mut self, member_id: &str, lease: u64) -> Option<Update> {
        if self.records.get(member_id)?.lease != lease {
            return None;
        }
        self.remove(member_id)
    }

    /// Removes every member whose lease has run out.
    pub fn expire(&mut self, now: Instant) -> Vec<Update> {
        let gone: Vec<_> = self
            .records
            .iter()
            .filter(|(_, record)| record.expires <= now)
            .map(|(id, _)| id.clone())
            .collect();
        gone.iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Asks a member to drain: it gets no new work from now on and hears of it at its next beat.
    ///
    /// # Errors
    /// [`RegistryError::NoMember`].
    pub fn drain(&mut self, member_id: &str) -> Result<Option<Update>, RegistryError> {
        let Some(record) = self.records.get_mut(member_id) else {
            return Err(RegistryError::NoMember(member_id.to_owned()));
        };
        if record.drain {
            return Ok(None);
        }
        record.drain = true;
        record.member.set_state(MemberState::Draining);
        let member = record.member.clone();
        self.epoch += 1;
        Ok(Some(self.update(Event::Put(Box::new(member)))))
    }

    /// Keeps new work from a member, or lets it have work again. `None`: it stood so before.
    ///
    /// # Errors
    /// [`RegistryError::NoMember`].
    pub fn cordon(
        &mut self,
        member_id: &str,
        cordoned: bool,
    ) -> Result<Option<Update>, RegistryError> {
        let Some(record) = self.records.get_mut(member_id) else {
            return Err(RegistryError::NoMember(member_id.to_owned()));
        };
        if record.member.cordoned == cordoned {
            return Ok(None);
        }
        record.member.cordoned = cordoned;
        let member = record.member.clone();
        self.epoch += 1;
        Ok(Some(self.update(Event::Put(Box::new(member)))))
    }

    /// Replaces the plan of a pool by the next generation.
    ///
    /// # Errors
    /// A plan that breaks a bound; [`RegistryError::StalePlan`]; too many pools with a plan.
    pub fn publish_plan(&mut self, mut plan: Plan) -> Result<Update, RegistryError> {
        check_plan(&plan)?;
        let current = self.plans.get(&plan.pool).map_or(0, |plan| plan.generation);
        next_generation(&plan, current)?;
        if current == 0 && self.plans.len() >= MAX_PLANS {
            return Err(RegistryError::FullOfPlans(MAX_PLANS));
        }
        self.epoch += 1;
        plan.epoch = self.epoch;
        self.plans.insert(plan.pool.clone(), plan.clone());
        Ok(self.update(Event::Plan(Box::new(plan))))
    }

    /// The full picture, as the first event of a watch.
    pub fn snapshot(&self) -> Update {
        self.update(Event::Snapshot(Picture {
            members: self.members(),
            plans: self.plans(),
        }))
    }

    fn remove(&mut self, member_id: &str) -> Option<Update> {
        self.records.remove(member_id)?;
        self.epoch += 1;
        Some(self.update(Event::Removed(member_id.to_owned())))
    }

    fn update(&self, event: Event) -> Update {
        Update {
            epoch: self.epoch,
            event,
        }
    }
}

/// A plan must be the successor of the one in force.
pub(crate) fn next_generation(plan: &Plan, current: u64) -> Result<(), RegistryError> {
    if current.checked_add(1) == Some(plan.generation) {
        return Ok(());
    }
    Err(RegistryError::StalePlan {
        pool: plan.pool.clone(),
        got: plan.generation,
        current,
    })
}

/// The bounds of a plan.
pub(crate) fn check_plan(plan: &Plan) -> Result<(), RegistryError> {
    let invalid = |field, reason: String| Err(RegistryError::Invalid { field, reason });
    if plan.pool.is_empty() || plan.pool.len() > MAX_TEXT {
        return invalid("pool", format!("must be 1 to {MAX_TEXT} bytes"));
    }
    if plan.body.len() > MAX_PLAN_BYTES {
        let got = plan.body.len();
        return invalid(
            "body",
            format!("must be at most {MAX_PLAN_BYTES} bytes, got {got}"),
        );
    }
    if plan.generation == 0 {
        return invalid("generation", "must be at least 1".to_owned());
    }
    Ok(())
}

/// The bounds of a record and of its lease.
pub(crate) fn check(member: &Member, ttl: Duration) -> Result<(), RegistryError> {
    let invalid = |field, reason: String| Err(RegistryError::Invalid { field, reason });
    if let Err(error) = member.id.parse::<MemberId>() {
        return invalid("member_id", format!("is not usable: {error}"));
    }
    if !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&ttl) {
        let reason = format!("must be {MIN_LEASE_TTL:?} to {MAX_LEASE_TTL:?}, got {ttl:?}");
        return invalid("ttl_ms", reason);
    }
    if matches!(member.role(), Role::Unspecified) {
        return invalid("role", "must be one of the known roles".to_owned());
    }
    if matches!(member.state(), MemberState::Unspecified) {
        return invalid("state", "must be one of the known states".to_owned());
    }
    if member.pool.len() > MAX_TEXT {
        return invalid("pool", format!("must be at most {MAX_TEXT} bytes"));
    }
    if member.endpoint.len() > MAX_TEXT {
        return invalid("endpoint", format!("must be at most {MAX_TEXT} bytes"));
    }
    if let Err(error) = proto::channel::endpoint(&member.endpoint, "endpoint") {
        return invalid("endpoint", format!("is not usable: {error}"));
    }
    let serves = matches!(member.role(), Role::ArStage | Role::DitWorker);
    match &member.model {
        None if serves => invalid("model", "is required of this role".to_owned()),
        Some(model) if model.buckets.len() > MAX_BUCKETS => {
            invalid("model", format!("has more than {MAX_BUCKETS} buckets"))
        }
        Some(model) if model.name.len() > MAX_TEXT || model.weights_id.len() > MAX_TEXT => invalid(
            "model",
            format!("has a name or weights_id beyond {MAX_TEXT} bytes"),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(id: u8) -> Member {
        Member {
            id: format!("m{id}"),
            role: Role::Router.into(),
            endpoint: "http://127.0.0.1:1".to_owned(),
            state: MemberState::Ready.into(),
            ..Member::default()
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Register(u8),
        Beat(u8, bool),
        Deregister(u8),
        Drain(u8),
        Cordon(u8, bool),
        Publish(u8, u64),
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..4_u8).prop_map(Step::Register),
            (0..4_u8, any::<bool>()).prop_map(|(id, ready)| Step::Beat(id, ready)),
            (0..4_u8).prop_map(Step::Deregister),
            (0..4_u8).prop_map(Step::Drain),
            (0..4_u8, any::<bool>()).prop_map(|(id, cordoned)| Step::Cordon(id, cordoned)),
            (0..2_u8, 1..4_u64).prop_map(|(pool, generation)| Step::Publish(pool, generation)),
            (1..900_u64).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 1..60)
    }

    proptest! {
        /// Replaying the updates gives the table, epochs never fall, and nobody outlives a lease.
        #[test]
        fn watchers_see_exactly_what_the_table_holds(steps in steps()) {
            let mut now = base::clock::now();
            let mut state = State::new(10, 1);
            let mut seen = crate::Snapshot::new(state.epoch(), state.members())
                    .with_plans(state.plans());
            let mut leases = BTreeMap::<String, (u64, Instant)>::new();
            let mut plans = BTreeMap::<String, u64>::new();
            for step in steps {
                let ttl = Duration::from_secs(1);
                let updates: Vec<Update> = match step {
                    Step::Register(id) => {
                        let (grant, update) = state.register(now, member(id), ttl).unwrap();
                        leases.insert(format!("m{id}"), (grant.lease, now + ttl));
                        vec![update]
                    }
                    Step::Beat(id, ready) => {
                        let member_id = format!("m{id}");
                        let held = leases.get(&member_id).copied();
                        let lease = held.map_or(0, |(lease, _)| lease);
                        let wish = if ready { MemberState::Ready } else { MemberState::Starting };
                        let load = Load::default();
                        let beat = Beat { member_id: member_id.clone(), lease, load, state: wish };
                        let answer = state.keep_alive(now, &beat);
                        let alive = held.is_some_and(|(_, expires)| expires > now);
                        prop_assert_eq!(answer.is_ok(), alive);
                        if alive {
                            leases.insert(member_id, (lease, now + ttl));
                        }
                        answer.ok().and_then(|(_, update)| update).into_iter().collect()
                    }
                    Step::Deregister(id) => {
                        let member_id = format!("m{id}");
                        let lease = leases.remove(&member_id).map_or(0, |(lease, _)| lease);
                        state.deregister(&member_id, lease).into_iter().collect()
                    }
                    Step::Drain(id) => {
                        state.drain(&format!("m{id}")).ok().flatten().into_iter().collect()
                    }
                    Step::Cordon(id, cordoned) => {
                        let answer = state.cordon(&format!("m{id}"), cordoned);
                        answer.ok().flatten().into_iter().collect()
                    }
                    Step::Publish(pool, generation) => {
                        let pool = format!("p{pool}");
                        let before = plans.get(&pool).copied().unwrap_or(0);
                        let offer = Plan { pool: pool.clone(), generation, ..Plan::default() };
                        let answer = state.publish_plan(offer);
                        prop_assert_eq!(answer.is_ok(), generation == before + 1);
                        if answer.is_ok() {
                            plans.insert(pool, generation);
                        }
                        answer.ok().into_iter().collect()
                    }
                    Step::Wait(ms) => {
                        now += Duration::from_millis(ms);
                        let updates = state.expire(now);
                        leases.retain(|_, (_, expires)| *expires > now);
                        updates
                    }
                };
                for update in updates {
                    prop_assert!(update.epoch >= seen.epoch);
                    seen.apply(update);
                }
                let table = crate::Snapshot::new(state.epoch(), state.members())
                    .with_plans(state.plans());
                prop_assert_eq!(&seen, &table);
                let alive: Vec<_> = leases.keys().cloned().collect();
                let held: Vec<_> = table.members.keys().cloned().collect();
                prop_assert_eq!(alive, held);
            }
        }
    }

    #[test]
    fn the_table_is_bounded() {
        let now = base::clock::now();
        let mut state = State::new(0, 1);
        for index in 0..MAX_MEMBERS {
            let mut record = member(0);
            record.id = format!("m{index}");
            state.register(now, record, MAX_LEASE_TTL).unwrap();
        }
        let mut one_more = member(0);
        one_more.id = "one-more".to_owned();
        let error = state.register(now, one_more, MAX_LEASE_TTL).unwrap_err();
        assert_eq!(error, RegistryError::Full(MAX_MEMBERS));
        // A member that is in may still renew its record.
        assert!(state.register(now, member(0), MAX_LEASE_TTL).is_ok());
    }
}
