//! What a placement is about, and who can serve which model. Pure; who takes a request is decided in
//! [`crate::directory`].
use std::collections::{BTreeMap, HashMap, HashSet};

use base::limits::MAX_NOTED_CANDIDATES;
use proto::v1::{Candidate, ModelInfo, PassedOver, Placement};
use registry::{Member, MemberState, Role, Snapshot};

use crate::directory::{Need, behind};

/// What to look for.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// Kind of stage.
    pub role: Role,
    /// Weights it must hold.
    pub weights_id: &'a str,
    /// Members that were tried already.
    pub tried: &'a HashSet<String>,
    /// Chooses among equals.
    pub turn: u64,
}

/// The members that a placement was about: those that could have taken the request, the one expected to be done
/// first first, and how many of the role could not, by reason. `under_way` is what this router has sent
/// to each member and not seen end: reports lag behind it.
pub(crate) fn considered(
    snapshot: &Snapshot,
    wish: Wish<'_>,
    need: &Need,
    under_way: &HashMap<String, u32>,
) -> Placement {
    let sent = |member: &Member| under_way.get(&member.id).copied().unwrap_or_default();
    let mut passed = BTreeMap::<&str, u32>::new();
    let mut eligible = Vec::new();
    let alike = |member: &&Member| member.role() == wish.role;
    for member in snapshot.members.values().filter(alike) {
        let reason = if weights_of(member) != Some(wish.weights_id) {
            "other weights"
        } else if wish.tried.contains(&member.id) {
            "already tried"
        } else if member.cordoned {
            "cordoned"
        } else if member.state() != MemberState::Ready {
            "not ready"
        } else {
            eligible.push((behind(member, need, sent(member)), member));
            continue;
        };
        *passed.entry(reason).or_default() += 1;
    }
    eligible.sort_by(|(a, one), (b, other)| a.total_cmp(b).then_with(|| one.id.cmp(&other.id)));
    let candidate = |(_, member): &(f64, &Member)| Candidate {
        member: member.id.clone(),
        load: member.load,
        under_way: sent(member),
    };
    let best = eligible.iter().take(MAX_NOTED_CANDIDATES);
    let passed = passed.into_iter().map(|(reason, members)| PassedOver {
        reason: reason.to_owned(),
        members,
    });
    Placement {
        stage: role_name(wish.role).to_owned(),
        epoch: snapshot.epoch,
        eligible: u32::try_from(eligible.len()).unwrap_or(u32::MAX),
        candidates: best.map(candidate).collect(),
        passed_over: passed.collect(),
        ..Placement::default()
    }
}

/// Models that can make an image now: some READY AR stage and some READY DiT worker hold the same
/// weights. In the order of their names.
pub fn servable(snapshot: &Snapshot) -> Vec<&ModelInfo> {
    let denoised: HashSet<_> = snapshot
        .ready(Role::DitWorker)
        .filter_map(weights_of)
        .collect();
    let mut models: Vec<_> = snapshot
        .ready(Role::ArStage)
        .filter_map(|member| member.model.as_ref())
        .filter(|model| denoised.contains(model.weights_id.as_str()))
        .collect();
    models.sort_by(|a, b| (&a.name, &a.weights_id).cmp(&(&b.name, &b.weights_id)));
    models.dedup_by(|a, b| a.weights_id == b.weights_id);
    models
}

/// The first role that keeps every model from being served.
pub fn missing_role(snapshot: &Snapshot) -> &'static str {
    if snapshot.ready(Role::ArStage).next().is_none() {
        return role_name(Role::ArStage);
    }
    role_name(Role::DitWorker)
}

/// Name of a role in messages and metrics.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Router => "router",
        Role::ArStage => "ar-stage",
        Role::KvTransfer => "kv-transfer",
        Role::DitWorker => "dit-worker",
        Role::Unspecified => "unspecified",
    }
}

pub(crate) fn weights_of(member: &Member) -> Option<&str> {
    member.model.as_ref().map(|model| model.weights_id.as_str())
}

#[cfg(test)]
mod tests {
    use registry::Load;

    use super::*;
    use crate::directory::Directory;

    fn member(id: &str, role: Role, state: MemberState, weights: &str, running: u32) -> Member {
        Member {
            id: id.into(),
            role: role.into(),
            state: state.into(),
            model: Some(ModelInfo {
                name: format!("model-{weights}"),
                weights_id: weights.into(),
                ..ModelInfo::default()
            }),
            load: Some(Load {
                running,
                queued: 0,
                capacity: 4,
                ..Load::default()
            }),
            ..Member::default()
        }
    }

    fn dit(id: &str, running: u32) -> Member {
        member(id, Role::DitWorker, MemberState::Ready, "w", running)
    }

    fn wish(tried: &HashSet<String>, turn: u64) -> Wish<'_> {
        Wish {
            role: Role::DitWorker,
            weights_id: "w",
            tried,
            turn,
        }
    }

    #[test]
    fn what_was_considered_has_the_best_first_and_a_reason_for_each_of_the_others() {
        let mut cordoned = dit("c", 0);
        cordoned.cordoned = true;
        let starting = member("s", Role::DitWorker, MemberState::Starting, "w", 0);
        let other = member("o", Role::DitWorker, MemberState::Ready, "v", 0);
        let all = vec![
            dit("a", 3),
            dit("b", 1),
            dit("t", 0),
            cordoned,
            starting,
            other,
        ];
        let tried = HashSet::from(["t".to_owned()]);
        let under_way = HashMap::from([("b".to_owned(), 2)]);
        let snapshot = Snapshot::new(7, all);
        let need = Need::default();
        let got = considered(&snapshot, wish(&tried, 0), &need, &under_way);
        assert_eq!(
            (got.stage.as_str(), got.epoch, got.eligible),
            ("dit-worker", 7, 2)
        );
        let best: Vec<_> = got
            .candidates
            .iter()
            .map(|c| (c.member.as_str(), c.under_way))
            .collect();
        assert_eq!(best, [("b", 2), ("a", 0)]);
        let passed: Vec<_> = got
            .passed_over
            .iter()
            .map(|p| (p.reason.as_str(), p.members))
            .collect();
        assert_eq!(
            passed,
            [
                ("already tried", 1),
                ("cordoned", 1),
                ("not ready", 1),
                ("other weights", 1)
            ]
        );
        let directory = Directory::new(&snapshot);
        let picked = directory.pick(&snapshot, wish(&tried, 0), &need, &under_way);
        assert_eq!(picked.unwrap().id, "b", "the first of them is who gets it");
    }

    #[test]
    fn a_model_is_servable_only_with_both_stages_of_the_same_weights() {
        let ar = |weights: &str, state| member(weights, Role::ArStage, state, weights, 0);
        let mut members = vec![ar("w", MemberState::Ready), ar("v", MemberState::Ready)];
        assert!(servable(&Snapshot::new(1, members.clone())).is_empty());
        assert_eq!(
            missing_role(&Snapshot::new(1, members.clone())),
            "dit-worker"
        );
        members.push(dit("d", 0));
        let snapshot = Snapshot::new(1, members);
        let names: Vec<_> = servable(&snapshot)
            .iter()
            .map(|m| m.weights_id.as_str())
            .collect();
        assert_eq!(names, ["w"]);
        assert_eq!(missing_role(&Snapshot::default()), "ar-stage");
    }
}
