//! What the router told, as it is printed.
use std::collections::BTreeMap;

use proto::v1::{
    ClusterEvent, ListMembersResponse, Member, Priority, RequestRecord, get_response::State,
};
use serde_json::{Value, json};

use super::kinds::{MEMBERS, PLANS, POOLS};
use crate::{
    explain,
    resource::{Listing, plain},
};

/// "ROLE_DIT_WORKER" as "dit-worker".
pub(crate) fn word(name: &str, prefix: &str) -> String {
    let name = name.strip_prefix(prefix).unwrap_or(name);
    name.to_ascii_lowercase().replace('_', "-")
}

pub(crate) fn event_json(event: &ClusterEvent) -> Value {
    json!({
        "number": event.number, "unix_ms": event.unix_ms,
        "kind": if event.warning { "warning" } else { "normal" }, "reason": event.reason,
        "object": event.object, "message": event.message, "count": event.count,
    })
}

pub(super) fn member_list(answer: ListMembersResponse) -> Listing {
    let mut items: Vec<Value> = answer.members.iter().map(member).collect();
    items.sort_by_key(|item| (plain(&item["role"]), plain(&item["id"])));
    Listing {
        kind: &MEMBERS,
        about: vec![("epoch", json!(answer.epoch))],
        items,
    }
}

/// A member as it is printed.
fn member(member: &Member) -> Value {
    let load = member.load.unwrap_or_default();
    let mut state = word(member.state().as_str_name(), "MEMBER_STATE_");
    if member.cordoned {
        state += ",cordoned";
    }
    let model = member.model.as_ref();
    json!({
        "id": member.id,
        "role": word(member.role().as_str_name(), "ROLE_"),
        "pool": member.pool,
        "state": state,
        "endpoint": member.endpoint,
        "load": format!("{}+{}/{}", load.running, load.queued, load.capacity),
        "running": load.running,
        "queued": load.queued,
        "capacity": load.capacity,
        "epoch": member.epoch,
        "cordoned": member.cordoned,
        "model": model.map(|model| &model.name),
        "weights_id": model.map(|model| &model.weights_id),
    })
}

pub(super) fn pool_list(answer: ListMembersResponse) -> Listing {
    let mut pools = BTreeMap::<String, Value>::new();
    for (item, member) in answer.members.iter().map(|m| (self::member(m), m)) {
        // Routers belong to no pool.
        if member.pool.is_empty() {
            continue;
        }
        let plan = answer.plans.iter().find(|plan| plan.pool == member.pool);
        let name = format!("{}/{}", member.pool, plain(&item["role"]));
        let pool = pools.entry(name.clone()).or_insert_with(|| {
            json!({
                "name": name, "pool": member.pool, "role": item["role"], "members": 0, "ready": 0,
                "starting": 0, "draining": 0, "cordoned": 0, "running": 0, "queued": 0,
                "capacity": 0, "models": [], "plan_generation": plan.map(|plan| plan.generation),
            })
        });
        let add = |pool: &mut Value, key: &str, more: u64| {
            pool[key] = json!(pool[key].as_u64().unwrap_or(0) + more);
        };
        let load = member.load.unwrap_or_default();
        let state = word(member.state().as_str_name(), "MEMBER_STATE_");
        add(pool, "members", 1);
        // What counts as ready takes work.
        let counted = if member.cordoned {
            "cordoned"
        } else {
            state.as_str()
        };
        add(pool, counted, 1);
        add(pool, "running", u64::from(load.running));
        add(pool, "queued", u64::from(load.queued));
        add(pool, "capacity", u64::from(load.capacity));
        if let (Some(model), Some(models)) = (&member.model, pool["models"].as_array_mut()) {
            let name = json!(model.name);
            if !models.contains(&name) {
                models.push(name);
            }
        }
    }
    Listing {
        kind: &POOLS,
        about: vec![("epoch", json!(answer.epoch))],
        items: pools.into_values().collect(),
    }
}

pub(super) fn plan_list(answer: ListMembersResponse) -> Listing {
    let plan = |plan: &proto::v1::Plan| {
        let body = std::str::from_utf8(&plan.body);
        json!({
            "pool": plan.pool, "generation": plan.generation, "epoch": plan.epoch,
            "body": body.map_or_else(|_| format!("{} bytes", plan.body.len()), str::to_owned),
        })
    };
    Listing {
        kind: &PLANS,
        about: vec![("epoch", json!(answer.epoch))],
        items: answer.plans.iter().map(plan).collect(),
    }
}

/// Its class; that of a request that named none is the middle one.
fn priority(record: &RequestRecord) -> String {
    match record.priority() {
        Priority::Unspecified => "standard".to_owned(),
        named => word(named.as_str_name(), "PRIORITY_"),
    }
}

/// A request as it is printed.
pub(crate) fn request(record: &RequestRecord) -> Value {
    let accepted = record.accepted.clone().unwrap_or_default();
    let failed = record.state() == State::Failed;
    let code = base::Code::from_number(record.code).unwrap_or(base::Code::Unknown);
    let size = match accepted.width {
        0 => "auto".to_owned(),
        width => format!("{width}x{}", accepted.height),
    };
    let mut item = json!({
        "id": record.request_id,
        "state": word(record.state().as_str_name(), "STATE_"),
        "step": record.step,
        "steps": format!("{}/{}", record.step, accepted.steps),
        "size": size, "n": accepted.n, "seed": accepted.seed, "guidance": accepted.guidance,
        "mode": word(accepted.mode().as_str_name(), "MODE_"),
        "template": accepted.template, "model": accepted.model, "cost": accepted.cost,
        "priority": priority(record),
        "prompt_chars": record.prompt_chars,
        "accepted_unix_ms": record.accepted_unix_ms,
        "age_ms": record.age_ms,
        "code": failed.then(|| code.name()),
        "error": failed.then_some(&record.error),
        "prefixes": record.prefixes, "prefix_tokens": record.prefix_tokens,
        "image_tokens": record.image_tokens,
    });
    if let Some(t) = &record.timings {
        for (key, ms) in [
            ("queue_ms", t.queue_ms),
            ("prefill_ms", t.prefill_ms),
            ("transfer_ms", t.transfer_ms),
            ("denoise_ms", t.denoise_ms),
            ("decode_ms", t.decode_ms),
            ("total_ms", t.total_ms),
        ] {
            item[key] = json!(ms);
        }
        item["transport"] = json!(t.transport);
        item["transfer_bytes"] = json!(t.transfer_bytes);
    }
    if !record.placements.is_empty() {
        item["placements"] = record
            .placements
            .iter()
            .map(explain::placement_json)
            .collect();
        item["spans"] = record.spans.iter().map(explain::span_json).collect();
        item["cut"] = json!(record.cut);
    }
    item
}

#[cfg(test)]
mod tests {
    use proto::v1::{Load, MemberState, Role};

    use super::*;
    use crate::resource::Format;

    fn worker(id: &str, cordoned: bool) -> Member {
        Member {
            id: id.to_owned(),
            role: Role::DitWorker.into(),
            pool: "default".to_owned(),
            state: MemberState::Ready.into(),
            endpoint: "http://127.0.0.1:1".to_owned(),
            load: Some(Load {
                running: 2,
                queued: 1,
                capacity: 4,
                ..Load::default()
            }),
            cordoned,
            ..Default::default()
        }
    }

    fn answer() -> ListMembersResponse {
        ListMembersResponse {
            members: vec![worker("b", true), worker("a", false)],
            epoch: 3,
            ..ListMembersResponse::default()
        }
    }

    #[test]
    fn members_stand_in_order_with_role_state_and_load_in_words() {
        let text = member_list(answer()).text(Format::Table);
        let rows: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[1],
            [
                "dit-worker",
                "a",
                "default",
                "ready",
                "2+1/4",
                "http://127.0.0.1:1"
            ]
        );
        assert_eq!(rows[2][3], "ready,cordoned");
    }

    #[test]
    fn a_pool_adds_up_its_members_and_a_cordoned_one_is_not_ready() {
        let pools = pool_list(answer());
        let pool = &pools.items[0];
        assert_eq!(pool["name"], "default/dit-worker");
        assert_eq!(
            (&pool["members"], &pool["ready"], &pool["cordoned"]),
            (&json!(2), &json!(1), &json!(1))
        );
        assert_eq!(
            (&pool["running"], &pool["capacity"]),
            (&json!(4), &json!(8))
        );
    }

    #[test]
    fn a_failed_request_shows_its_code_and_error() {
        let record = RequestRecord {
            request_id: "r1".to_owned(),
            state: State::Failed.into(),
            error: "worker left".to_owned(),
            code: 14,
            ..RequestRecord::default()
        };
        let item = request(&record);
        assert_eq!(
            (&item["code"], &item["error"]),
            (&json!("UNAVAILABLE"), &json!("worker left"))
        );
        assert_eq!(request(&RequestRecord::default())["code"], Value::Null);
    }
}
