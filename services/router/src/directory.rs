//! Placement that does not look at everybody. Pure: members are sorted by role and weights once for each change of
//! membership; a decision then looks at few of them, however many there are.
//!
//! Of up to `SCANNED` members the best is taken. Of more, the best of `CHOICES` that chance names and of those
//! that are where the prefix is: two choices already keep loads within a constant of each other, and more cost little.
//! Best is whoever is expected to be done first: what is left to do there, bringing the prefix there, and the picture
//! itself at what steps cost there.
use std::collections::{HashMap, HashSet};

use proto::v1::StepCosts;
use registry::{Member, MemberState, Role, Snapshot};
use schedule::cost::{Constants, Correction, Load as StepLoad, Rows};

use crate::placement::{Wish, weights_of};

/// Members among which the best is found by looking at all.
const SCANNED: usize = 32;
/// Members that chance names among more.
const CHOICES: usize = 8;
/// Members at the place of the prefix that are looked at.
const NEAR: usize = 4;
/// Bytes a second of a prefix on its way to another node. Measured over TCP on one host: 1 to 5 GB/s.
const REMOTE_RATE: f64 = 1e9;
/// Seconds of a job that nobody has predicted.
const TYPICAL_S: f64 = 1.0;
/// Seconds that a member without room counts as behind: it is taken when nobody has room.
const FULL_S: f64 = 1e6;

/// What a call needs besides a member with its weights.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Need {
    /// Host of the service that holds the prefixes; empty: there are none yet.
    pub host: String,
    /// Bytes of the prefixes.
    pub bytes: u64,
    /// Seconds that it is predicted to take where nothing better is known; 0: not predicted.
    pub seconds: f64,
    /// The picture that is to be made, if it is one.
    pub picture: Option<Drawing>,
}

/// A picture, as far as its time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drawing {
    /// What it adds to a step.
    pub rows: Rows,
    /// Its steps.
    pub steps: u32,
    /// What is decoded.
    pub image_tokens: u32,
}

impl Drawing {
    /// Seconds by itself where steps cost this, lately `ratio` thousandths of it.
    fn seconds(&self, costs: &Constants, ratio: u32) -> f64 {
        let step = costs.step(StepLoad::from(self.rows));
        let whole = f64::from(self.steps) * step + costs.decode(self.image_tokens);
        Correction::thousandths(ratio).apply(whole)
    }
}

/// Members of one role with the same weights that take work.
#[derive(Debug, Default)]
struct Group {
    ids: Vec<String>,
    /// Places in `ids`, by host.
    hosts: HashMap<String, Vec<usize>>,
    /// What a step costs at the quickest member that told.
    costs: Option<(Constants, String)>,
}

/// Who could take work at one epoch.
#[derive(Debug, Default)]
pub struct Directory {
    epoch: u64,
    members: usize,
    groups: HashMap<(i32, String), Group>,
}

impl Directory {
    /// The members of `snapshot`.
    pub fn new(snapshot: &Snapshot) -> Self {
        let mut directory = Self {
            epoch: snapshot.epoch,
            members: snapshot.members.len(),
            groups: HashMap::new(),
        };
        for member in snapshot.members.values() {
            if let (true, Some(weights)) = (open(member), weights_of(member)) {
                let key = (member.role, weights.to_owned());
                directory.groups.entry(key).or_default().add(member);
            }
        }
        directory
    }

    /// Members that take work of this kind.
    pub fn count(&self, role: Role, weights: &str) -> usize {
        self.group(role, weights).map_or(0, |group| group.ids.len())
    }

    /// It is still that of `snapshot`; loads do not matter.
    pub fn fits(&self, snapshot: &Snapshot) -> bool {
        (self.epoch, self.members) == (snapshot.epoch, snapshot.members.len())
    }

    /// The member that takes a call. `under_way` is what this router has sent to each member and not seen end:
    /// reports lag behind it.
    pub fn pick<'a>(
        &self,
        snapshot: &'a Snapshot,
        wish: Wish<'_>,
        need: &Need,
        under_way: &HashMap<String, u32>,
    ) -> Option<&'a Member> {
        let group = self.group(wish.role, wish.weights_id)?;
        let look = |at: usize| group.candidate(at, snapshot, wish, need, under_way);
        if group.ids.len() <= SCANNED {
            return best((0..group.ids.len()).filter_map(look), wish.turn);
        }
        let near = group.hosts.get(&need.host).into_iter().flatten().copied();
        let near = near.take(NEAR);
        let few = chosen(wish.turn, group.ids.len()).chain(near);
        let found = best(few.filter_map(look), wish.turn);
        // All of them have left, are full of it, or were tried: then everybody is looked at.
        found.or_else(|| best((0..group.ids.len()).filter_map(look), wish.turn))
    }

    /// Seconds of one image by itself at the quickest worker that has told what its steps cost.
    pub fn seconds(&self, snapshot: &Snapshot, weights: &str, picture: &Drawing) -> Option<f64> {
        let (costs, id) = self.group(Role::DitWorker, weights)?.costs.as_ref()?;
        let load = snapshot.members.get(id).and_then(|member| member.load);
        Some(picture.seconds(costs, load.map_or(0, |load| load.step_ratio)))
    }

    fn group(&self, role: Role, weights: &str) -> Option<&Group> {
        self.groups.get(&(role.into(), weights.to_owned()))
    }
}

/// A member that could take the call, and in how many seconds it would be done.
type Candidate<'a> = (&'a Member, f64);

impl Group {
    fn add(&mut self, member: &Member) {
        let at = self.ids.len();
        self.ids.push(member.id.clone());
        let host = host_of(&member.endpoint).to_owned();
        self.hosts.entry(host).or_default().push(at);
        let known = member.step_costs.as_ref().map(told);
        if let Some(costs) = known.filter(|costs| costs.check().is_ok()) {
            let quicker = |(known, _): &(Constants, String)| costs.per_token_s < known.per_token_s;
            if self.costs.as_ref().is_none_or(quicker) {
                self.costs = Some((costs, member.id.clone()));
            }
        }
    }

    fn candidate<'a>(
        &self,
        at: usize,
        snapshot: &'a Snapshot,
        wish: Wish<'_>,
        need: &Need,
        under_way: &HashMap<String, u32>,
    ) -> Option<Candidate<'a>> {
        let id = self.ids.get(at)?;
        let member = snapshot.members.get(id)?;
        let sent = under_way.get(id).copied().unwrap_or_default();
        let asked = open(member) && !tried(wish.tried, id);
        asked.then(|| (member, behind(member, need, sent)))
    }
}

/// The constants that a member has told.
fn told(costs: &StepCosts) -> Constants {
    Constants {
        fixed_s: costs.fixed_s,
        per_row_s: costs.per_row_s,
        per_token_s: costs.per_token_s,
        per_pair_s: costs.per_pair_s,
        dense_read_s: costs.dense_read_s,
        experts_read_s: costs.experts_read_s,
        untouched_share: costs.untouched_share,
        stream_s: costs.stream_s,
        decode_token_s: costs.decode_token_s,
    }
}

/// It takes work.
fn open(member: &Member) -> bool {
    member.state() == MemberState::Ready && !member.cordoned
}

/// Few are ever tried: most often none.
fn tried(tried: &HashSet<String>, id: &str) -> bool {
    !tried.is_empty() && tried.contains(id)
}

/// Seconds until a member that has been `sent` so many jobs would have done this one too.
pub(crate) fn behind(member: &Member, need: &Need, sent: u32) -> f64 {
    let load = member.load.unwrap_or_default();
    let jobs = load.running.saturating_add(load.queued).max(sent);
    let known = member.step_costs.as_ref().map(told);
    let known = known.filter(|costs| costs.check().is_ok());
    let own = match (known, need.picture) {
        (Some(costs), Some(picture)) => picture.seconds(&costs, load.step_ratio),
        _ => need.seconds,
    };
    let typical = if own > 0.0 { own } else { TYPICAL_S };
    let by_count = typical * f64::from(jobs) / f64::from(load.capacity.max(1));
    let backlog = if load.backlog_ms > 0 {
        // What was sent since the report is not in it.
        let unseen = sent.saturating_sub(load.running.saturating_add(load.queued));
        f64::from(load.backlog_ms) / 1e3 + typical * f64::from(unseen)
    } else {
        by_count
    };
    #[allow(clippy::cast_precision_loss)] // seconds need no 53 bits
    let travel = if need.host.is_empty() || host_of(&member.endpoint) == need.host {
        0.0
    } else {
        need.bytes as f64 / REMOTE_RATE
    };
    let full = load.free_bytes > 0 && load.free_bytes < need.bytes;
    backlog + own + travel + if full { FULL_S } else { 0.0 }
}

/// The least behind; among equals `turn` chooses.
fn best<'a>(candidates: impl Iterator<Item = Candidate<'a>>, turn: u64) -> Option<&'a Member> {
    let (mut equals, mut least) = (Vec::new(), f64::INFINITY);
    for (member, behind) in candidates {
        if behind < least {
            equals.clear();
            least = behind;
        }
        if behind <= least {
            equals.push(member);
        }
    }
    let count = u64::try_from(equals.len())
        .ok()
        .filter(|count| *count > 0)?;
    let at = usize::try_from(turn % count).ok()?;
    equals.get(at).copied()
}

/// [`CHOICES`] places below `count`, scattered by `turn`.
fn chosen(turn: u64, count: usize) -> impl Iterator<Item = usize> {
    let count = count.max(1) as u64;
    (0..CHOICES as u64).filter_map(move |choice| {
        let mixed = scattered(turn.wrapping_mul(CHOICES as u64).wrapping_add(choice));
        usize::try_from(mixed % count).ok()
    })
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): neighbours become unlike.
fn scattered(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Host of "http://HOST:PORT"; whatever else it is, what is compared with the same.
pub fn host_of(endpoint: &str) -> &str {
    let rest = endpoint
        .split_once("://")
        .map_or(endpoint, |(_, rest)| rest);
    rest.rsplit_once(':').map_or(rest, |(host, _)| host)
}

#[cfg(test)]
mod tests;
