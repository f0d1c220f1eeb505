//! `omnictl get` and `omnictl describe`: what there is in a cluster.
use std::{collections::BTreeMap, time::Duration};

use base::limits::CONTROL_DEADLINE;
use clap::{Args, ValueEnum};
use proto::v1::{
    ClusterEvent, ListMembersRequest, ListMembersResponse, ListRequestsRequest, Member, Priority,
    RequestRecord, WatchEventsRequest, admin_service_client::AdminServiceClient,
    get_response::State,
};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::{
    error::CliError,
    explain, kv,
    resource::{Condition, Format, Kind, Listing, bytes, column, duration, plain, selector, short},
    text::Console,
    yaml,
};

/// How often a watch looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// What can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum What {
    /// Processes of the cluster.
    #[value(alias = "member")]
    Members,
    /// Members of one pool and role, together.
    #[value(alias = "pool")]
    Pools,
    /// Requests that run, and those that have lately ended.
    #[value(alias = "request")]
    Requests,
    /// Prefixes in the pools.
    #[value(aliases = ["slots", "slot", "prefixes"])]
    Kv,
    /// Plans that were published.
    #[value(alias = "plan")]
    Plans,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// What to list.
    what: What,
    /// Only these.
    names: Vec<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Keep looking, and print what changes.
    #[arg(short, long)]
    watch: bool,
    /// Sort by a column, by its title or its field.
    #[arg(long, value_name = "COLUMN")]
    sort_by: Option<String>,
    /// Only those whose columns say so: KEY=VALUE or KEY!=VALUE, several with commas.
    #[arg(
        short = 'l',
        long,
        value_name = "SELECTOR",
        default_value = "",
        hide_default_value = true
    )]
    selector: String,
}

#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    /// What it is.
    what: What,
    /// Its name, as `omnictl get` shows it.
    #[arg(required = true)]
    names: Vec<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
    output: Format,
}

static MEMBERS: Kind = Kind {
    plural: "members",
    singular: "member",
    id: "id",
    columns: &[
        column("ROLE", "role"),
        column("ID", "id"),
        column("POOL", "pool"),
        column("STATE", "state"),
        column("LOAD", "load"),
        column("ENDPOINT", "endpoint"),
        column("EPOCH", "epoch").wide(),
        column("CORDONED", "cordoned").wide(),
        column("MODEL", "model").wide(),
        column("WEIGHTS", "weights_id").wide().shown(short),
    ],
};

static POOLS: Kind = Kind {
    plural: "pools",
    singular: "pool",
    id: "name",
    columns: &[
        column("NAME", "name"),
        column("MEMBERS", "members"),
        column("READY", "ready"),
        column("RUNNING", "running"),
        column("QUEUED", "queued"),
        column("CAPACITY", "capacity"),
        column("MODELS", "models"),
        column("STARTING", "starting").wide(),
        column("DRAINING", "draining").wide(),
        column("CORDONED", "cordoned").wide(),
        column("PLAN", "plan_generation").wide(),
    ],
};

static REQUESTS: Kind = Kind {
    plural: "requests",
    singular: "request",
    id: "id",
    columns: &[
        column("ID", "id"),
        column("STATE", "state"),
        column("STEP", "steps"),
        column("SIZE", "size"),
        column("IMAGES", "n"),
        column("PRIORITY", "priority"),
        column("AGE", "age_ms").shown(duration),
        column("ERROR", "code"),
        column("MODE", "mode").wide(),
        column("SEED", "seed").wide(),
        column("GUIDANCE", "guidance").wide(),
        column("COST", "cost").wide(),
        column("QUEUE", "queue_ms").wide().shown(duration),
        column("PREFILL", "prefill_ms").wide().shown(duration),
        column("TRANSFER", "transfer_ms").wide().shown(duration),
        column("DENOISE", "denoise_ms").wide().shown(duration),
        column("DECODE", "decode_ms").wide().shown(duration),
        column("MODEL", "model").wide(),
    ],
};

static SLOTS: Kind = Kind {
    plural: "kv",
    singular: "slot",
    id: "slot",
    columns: &[
        column("SLOT", "slot"),
        column("STATE", "state"),
        column("BYTES", "bytes").shown(bytes),
        column("TOKENS", "tokens"),
        column("LEASES", "leases"),
        column("CACHE", "cache"),
        column("IDENTITY", "identity").shown(short),
        column("REQUEST", "request_id"),
        column("SERVICE", "service").wide(),
        column("HITS", "hits").wide(),
        column("PULLS", "pulls").wide(),
        column("GENERATION", "generation").wide(),
        column("SCOPE", "scope").wide(),
    ],
};

static PLANS: Kind = Kind {
    plural: "plans",
    singular: "plan",
    id: "pool",
    columns: &[
        column("POOL", "pool"),
        column("GENERATION", "generation"),
        column("EPOCH", "epoch"),
        column("BODY", "body"),
    ],
};

pub(crate) type Admin = AdminServiceClient<Channel>;

/// A connection to the router's administration.
pub(crate) async fn admin(endpoint: &str) -> Result<Admin, CliError> {
    Ok(Admin::new(proto::channel::connect(endpoint).await?)
        .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES))
}

/// A control call, with its deadline.
pub(crate) fn control<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CONTROL_DEADLINE);
    request
}

/// "ROLE_DIT_WORKER" as "dit-worker".
pub(crate) fn word(name: &str, prefix: &str) -> String {
    let name = name.strip_prefix(prefix).unwrap_or(name);
    name.to_ascii_lowercase().replace('_', "-")
}

/// `omnictl get`.
pub(crate) async fn get(endpoint: &str, args: GetArgs, console: &Console) -> Result<(), CliError> {
    let conditions = selector(&args.selector)?;
    let shown = list(endpoint, &args, &conditions).await?;
    shown.print(args.output, console)?;
    if args.watch {
        return watch(endpoint, &args, (&conditions, shown), console).await;
    }
    Ok(())
}

/// Prints what changes, until the command is ended.
async fn watch(
    endpoint: &str,
    args: &GetArgs,
    (conditions, mut shown): (&[Condition], Listing),
    console: &Console,
) -> Result<(), CliError> {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        // A router that is away for a moment does not end a watch.
        let now = match list(endpoint, args, conditions).await {
            Ok(now) => now,
            Err(error) => {
                console.talk(&error.to_string())?;
                continue;
            }
        };
        let (news, gone) = now.news(&shown, args.output);
        if !news.items.is_empty() {
            let text = news.text(args.output);
            // The header stands once, at the top.
            let header = usize::from(matches!(args.output, Format::Table | Format::Wide));
            let lines = text.lines().skip(header).map(|line| format!("{line}\n"));
            console.raw(lines.collect::<String>().as_bytes())?;
        }
        for name in gone {
            console.talk(&format!("{}/{name} is gone", now.kind.singular))?;
        }
        shown = now;
    }
}

async fn list(
    endpoint: &str,
    args: &GetArgs,
    conditions: &[Condition],
) -> Result<Listing, CliError> {
    // Those that are not there yet, or not any more, are no error of a watch.
    let strict = !args.watch;
    let mut listing = fetch(endpoint, args.what, &args.names).await?;
    if strict {
        listing.only(&args.names)?;
    } else if !args.names.is_empty() {
        let id = listing.kind.id;
        listing
            .items
            .retain(|item| args.names.contains(&plain(&item[id])));
    }
    listing.select(conditions)?;
    if let Some(by) = &args.sort_by {
        listing.sort(by)?;
    }
    Ok(listing)
}

/// `omnictl describe`: every field, and what has happened to it.
pub(crate) async fn describe(
    endpoint: &str,
    args: DescribeArgs,
    console: &Console,
) -> Result<(), CliError> {
    let mut listing = match args.what {
        What::Requests => requests(endpoint, &args.names, true).await?,
        what => fetch(endpoint, what, &args.names).await?,
    };
    listing.only(&args.names)?;
    let told = events(endpoint, 0).await?;
    let kind = listing.kind;
    for item in &mut listing.items {
        let object = format!("{}/{}", kind.singular, plain(&item[kind.id]));
        let about = told.iter().filter(|event| event.object == object);
        item["events"] = about.map(event_json).collect();
    }
    match args.output {
        // One document each.
        Format::Yaml => {
            let documents: Vec<_> = listing.items.iter().map(yaml::text).collect();
            console.raw(documents.join("---\n").as_bytes())
        }
        other => listing.print(other, console),
    }
}

async fn fetch(endpoint: &str, what: What, names: &[String]) -> Result<Listing, CliError> {
    match what {
        What::Members => {
            let answer = members(endpoint).await?;
            Ok(member_list(answer))
        }
        What::Pools => Ok(pool_list(members(endpoint).await?)),
        What::Requests => requests(endpoint, names, false).await,
        What::Kv => slots(endpoint).await,
        What::Plans => Ok(plan_list(members(endpoint).await?)),
    }
}

/// Who is alive.
pub(crate) async fn members(endpoint: &str) -> Result<ListMembersResponse, CliError> {
    let ask = control(ListMembersRequest {});
    Ok(admin(endpoint).await?.list_members(ask).await?.into_inner())
}

/// What has happened after this number.
pub(crate) async fn events(endpoint: &str, after: u64) -> Result<Vec<ClusterEvent>, CliError> {
    let ask = control(WatchEventsRequest {
        after,
        follow: false,
    });
    let mut stream = admin(endpoint).await?.watch_events(ask).await?.into_inner();
    let mut all = vec![];
    while let Some(told) = stream.message().await? {
        all.extend(told.event);
    }
    Ok(all)
}

pub(crate) fn event_json(event: &ClusterEvent) -> Value {
    json!({
        "number": event.number, "unix_ms": event.unix_ms,
        "kind": if event.warning { "warning" } else { "normal" }, "reason": event.reason,
        "object": event.object, "message": event.message, "count": event.count,
    })
}

fn member_list(answer: ListMembersResponse) -> Listing {
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

fn pool_list(answer: ListMembersResponse) -> Listing {
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

fn plan_list(answer: ListMembersResponse) -> Listing {
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

/// Records of requests.
pub(crate) async fn records(
    endpoint: &str,
    ids: &[String],
    full: bool,
) -> Result<Vec<RequestRecord>, CliError> {
    let ask = control(ListRequestsRequest {
        request_ids: ids.to_vec(),
        limit: 0,
        full,
    });
    let answer = admin(endpoint).await?.list_requests(ask).await?;
    Ok(answer.into_inner().requests)
}

async fn requests(endpoint: &str, ids: &[String], full: bool) -> Result<Listing, CliError> {
    let records = records(endpoint, ids, full).await?;
    Ok(Listing {
        kind: &REQUESTS,
        about: vec![],
        items: records.iter().map(request).collect(),
    })
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

async fn slots(endpoint: &str) -> Result<Listing, CliError> {
    let mut items = vec![];
    let mut about = vec![];
    for mut pool in kv::pools(endpoint).await? {
        let service = pool["service"].clone();
        let slots = pool["slots"].take();
        for mut slot in slots.as_array().cloned().unwrap_or_default() {
            slot["service"] = service.clone();
            items.push(slot);
        }
        if let Some(pool) = pool.as_object_mut() {
            pool.remove("slots");
        }
        about.push(pool);
    }
    Ok(Listing {
        kind: &SLOTS,
        about: vec![("pools", Value::Array(about))],
        items,
    })
}

#[cfg(test)]
mod tests {
    use proto::v1::{Load, MemberState, Role};

    use super::*;

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
