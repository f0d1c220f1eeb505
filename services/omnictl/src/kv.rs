//! Commands on the pools of prefixes: what is in them, pins, evictions, how quick their leases are.
use base::{Code, Failure, RequestId, clock, limits::CONTROL_DEADLINE};
use clap::{Args, Subcommand};
use comfy_table::{Table, presets::NOTHING};
use proto::v1::{
    EvictRequest, ListMembersRequest, ListSlotsRequest, ListSlotsResponse, PinRequest,
    ReleaseRequest, ReserveRequest, Role, admin_service_client::AdminServiceClient,
    kv_transfer_service_client::KvTransferServiceClient, list_slots_response::Slot,
};
use serde::Serialize;
use serde_json::json;
use tonic::transport::Channel;

use crate::{args::Output, error::CliError, text::Console};

/// Most leases that a measurement takes.
const MAX_ROUNDS: u32 = 100_000;
/// Bytes of the slot of one measured lease.
const BENCH_BYTES: u64 = 4096;
/// Time to live of a measured lease, should its release be lost.
const BENCH_TTL_MS: u32 = 1000;
/// Characters of an identity in a table.
const SHORT_IDENTITY: usize = 12;

#[derive(Debug, Subcommand)]
pub(crate) enum Kv {
    /// Show the pools and what is in them.
    Ls {
        /// Address of one service; all that the router knows when absent.
        #[arg(long, value_name = "URL")]
        service: Option<String>,
        #[arg(short, long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Show one slot in full.
    Describe {
        #[command(flatten)]
        slot: SlotArgs,
        #[arg(short, long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Keep a cached prefix from being evicted.
    Pin(SlotArgs),
    /// Let a pinned prefix be evicted again.
    Unpin(SlotArgs),
    /// Take a prefix out of the cache.
    Evict(SlotArgs),
    /// Measure how quick leases are; payloads are measured by `omni bench transfer`.
    Bench {
        /// Address of the service; may be left out when there is one.
        #[arg(long, value_name = "URL")]
        service: Option<String>,
        /// Leases to take and give back.
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ROUNDS)))]
        rounds: u32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct SlotArgs {
    /// Number of the slot, as `omnictl kv ls` shows it.
    slot: u64,
    /// Address of the service; may be left out when there is one.
    #[arg(long, value_name = "URL")]
    service: Option<String>,
}

type Stub = KvTransferServiceClient<Channel>;

pub(crate) async fn run(endpoint: &str, kv: Kv, console: &Console) -> Result<(), CliError> {
    match kv {
        Kv::Ls { service, output } => list(endpoint, service, output, console).await,
        Kv::Describe { slot, output } => describe(endpoint, slot, output, console).await,
        Kv::Pin(slot) => pin(endpoint, slot, true, console).await,
        Kv::Unpin(slot) => pin(endpoint, slot, false, console).await,
        Kv::Evict(slot) => evict(endpoint, slot, console).await,
        Kv::Bench { service, rounds } => bench(endpoint, service, rounds, console).await,
    }
}

fn control<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CONTROL_DEADLINE);
    request
}

/// Addresses of the services: the one that was named, or all that the router knows.
async fn services(endpoint: &str, named: Option<String>) -> Result<Vec<String>, CliError> {
    if let Some(named) = named {
        return Ok(vec![named]);
    }
    let mut admin = AdminServiceClient::new(proto::channel::connect(endpoint).await?);
    let answer = admin.list_members(control(ListMembersRequest {})).await?;
    let members = answer.into_inner().members.into_iter();
    let mut found: Vec<String> = members
        .filter(|member| member.role() == Role::KvTransfer)
        .map(|member| member.endpoint)
        .collect();
    found.sort();
    Ok(found)
}

/// The one service that a command is for.
async fn one(endpoint: &str, named: Option<String>) -> Result<(String, Stub), CliError> {
    let mut found = services(endpoint, named).await?;
    let service = match (found.pop(), found.len()) {
        (Some(service), 0) => service,
        (None, _) => {
            let none = "no KV-transfer service has joined this router";
            return Err(Failure::new(Code::Unavailable, none).into());
        }
        (Some(_), others) => {
            let message = format!("must be given, there are {}", others + 1);
            return Err(Failure::invalid("service", message).into());
        }
    };
    let stub = Stub::new(proto::channel::connect(&service).await?);
    Ok((service, stub))
}

async fn listed(stub: &mut Stub) -> Result<ListSlotsResponse, CliError> {
    Ok(stub.list(control(ListSlotsRequest {})).await?.into_inner())
}

/// Every pool that the router knows, as `omnictl kv ls` prints it.
pub(crate) async fn pools(endpoint: &str) -> Result<Vec<serde_json::Value>, CliError> {
    let mut pools = vec![];
    for service in services(endpoint, None).await? {
        let mut stub = Stub::new(proto::channel::connect(&service).await?);
        let mut pool = json!(PoolView::new(service, listed(&mut stub).await?));
        for slot in pool["slots"].as_array_mut().into_iter().flatten() {
            let is = |key: &str| slot[key].as_bool().unwrap_or_default();
            slot["cache"] = json!(cache(is("cached"), is("pinned")));
        }
        pools.push(pool);
    }
    Ok(pools)
}

async fn list(
    endpoint: &str,
    named: Option<String>,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let mut pools = vec![];
    for service in services(endpoint, named).await? {
        let mut stub = Stub::new(proto::channel::connect(&service).await?);
        pools.push(PoolView::new(service, listed(&mut stub).await?));
    }
    match output {
        Output::Json => console.json(&pools),
        Output::Table => console.line(text(&pools)),
    }
}

async fn find(endpoint: &str, args: SlotArgs) -> Result<(Stub, SlotView), CliError> {
    let (_, mut stub) = one(endpoint, args.service).await?;
    let slots = listed(&mut stub).await?.slots;
    let found = slots.into_iter().find(|slot| slot.slot == args.slot);
    let Some(slot) = found else {
        let message = format!("{} is not in use", args.slot);
        let failure = Failure::new(Code::NotFound, message).with_field("slot");
        return Err(failure.into());
    };
    Ok((stub, SlotView::new(slot)))
}

async fn describe(
    endpoint: &str,
    args: SlotArgs,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let (_, slot) = find(endpoint, args).await?;
    match output {
        Output::Json => console.json(&slot),
        Output::Table => console.line(slot.text()),
    }
}

async fn pin(
    endpoint: &str,
    args: SlotArgs,
    pinned: bool,
    console: &Console,
) -> Result<(), CliError> {
    let (mut stub, slot) = find(endpoint, args).await?;
    let request = PinRequest {
        slot: slot.slot,
        generation: slot.generation,
        pinned,
    };
    stub.pin(control(request)).await?;
    let word = if pinned { "pinned" } else { "no longer pinned" };
    console.line(format!("slot {} is {word}", slot.slot))
}

async fn evict(endpoint: &str, args: SlotArgs, console: &Console) -> Result<(), CliError> {
    let (mut stub, slot) = find(endpoint, args).await?;
    let request = EvictRequest {
        slot: slot.slot,
        generation: slot.generation,
    };
    stub.evict(control(request)).await?;
    let when = match slot.leases {
        0 => "",
        _ => ", its memory is free when its last lease ends",
    };
    console.line(format!("slot {} is out of the cache{when}", slot.slot))
}

/// Takes a lease and gives it back, again and again.
async fn bench(
    endpoint: &str,
    named: Option<String>,
    rounds: u32,
    console: &Console,
) -> Result<(), CliError> {
    let (service, mut stub) = one(endpoint, named).await?;
    let id = RequestId::generate().to_string();
    let mut times = vec![];
    for _ in 0..rounds {
        let start = clock::now();
        let request = ReserveRequest {
            request_id: id.clone(),
            bytes: BENCH_BYTES,
            ttl_ms: BENCH_TTL_MS,
            ..Default::default()
        };
        let reserved = stub.reserve(control(request)).await?.into_inner();
        let release = ReleaseRequest {
            slot: reserved.slot,
            generation: reserved.generation,
            lease: reserved.lease,
        };
        stub.release(control(release)).await?;
        times.push(clock::millis_since(start));
    }
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times.get((times.len() - 1) * part / 100).copied();
    console.json(&BenchView {
        service,
        rounds,
        median_ms: at(50).unwrap_or_default(),
        p99_ms: at(99).unwrap_or_default(),
    })
}

#[derive(Debug, Serialize)]
struct BenchView {
    service: String,
    rounds: u32,
    /// Of a lease taken and given back: two calls.
    median_ms: f64,
    p99_ms: f64,
}

/// A pool as it is printed.
#[derive(Debug, Serialize)]
struct PoolView {
    service: String,
    pool_bytes: u64,
    used_bytes: u64,
    cached_bytes: u64,
    cache_budget_bytes: u64,
    cache_hits: u64,
    cache_misses: u64,
    cache_evictions: u64,
    cache_hit_bytes: u64,
    waiting: u32,
    slots: Vec<SlotView>,
}

impl PoolView {
    fn new(service: String, listed: ListSlotsResponse) -> Self {
        Self {
            service,
            pool_bytes: listed.pool_bytes,
            used_bytes: listed.used_bytes,
            cached_bytes: listed.cached_bytes,
            cache_budget_bytes: listed.cache_budget_bytes,
            cache_hits: listed.cache_hits,
            cache_misses: listed.cache_misses,
            cache_evictions: listed.cache_evictions,
            cache_hit_bytes: listed.cache_hit_bytes,
            waiting: listed.waiting,
            slots: listed.slots.into_iter().map(SlotView::new).collect(),
        }
    }
}

fn cache(cached: bool, pinned: bool) -> &'static str {
    match (cached, pinned) {
        (_, true) => "pinned",
        (true, false) => "cached",
        (false, false) => "-",
    }
}

/// A slot as it is printed.
#[derive(Debug, Serialize)]
struct SlotView {
    slot: u64,
    generation: u64,
    state: &'static str,
    bytes: u64,
    tokens: u32,
    sealed_chunks: u32,
    chunks: u32,
    leases: u32,
    expires_ms: u64,
    cached: bool,
    pinned: bool,
    scope: String,
    hits: u64,
    pulls: u64,
    cost_us: u64,
    identity: String,
    request_id: String,
}

impl SlotView {
    fn new(slot: Slot) -> Self {
        let state = match (slot.sealed, slot.identity.is_empty(), slot.leases) {
            (true, _, 0) => "idle",
            (true, _, _) => "sealed",
            (false, true, _) => "reserved",
            (false, false, _) => "offered",
        };
        Self {
            slot: slot.slot,
            generation: slot.generation,
            state,
            bytes: slot.bytes,
            tokens: slot.tokens,
            sealed_chunks: slot.sealed_chunks,
            chunks: slot.chunks,
            leases: slot.leases,
            expires_ms: slot.expires_ms,
            cached: slot.cached,
            pinned: slot.pinned,
            scope: slot.scope,
            hits: slot.hits,
            pulls: slot.pulls,
            cost_us: slot.cost_us,
            identity: slot.identity.iter().map(|b| format!("{b:02x}")).collect(),
            request_id: slot.request_id,
        }
    }

    fn cache(&self) -> &'static str {
        cache(self.cached, self.pinned)
    }

    fn text(&self) -> String {
        let Self {
            slot,
            generation,
            state,
            bytes,
            tokens,
            ..
        } = self;
        format!(
            "slot       {slot}, generation {generation}\n\
             state      {state}, {} of {} chunks sealed\n\
             payload    {bytes} bytes, {tokens} tokens\n\
             identity   {}\n\
             request    {}\n\
             leases     {}, the last ends in {} ms; pulled {} times\n\
             cache      {}, scope {:?}, {} hits, cost {} us",
            self.sealed_chunks,
            self.chunks,
            self.identity,
            self.request_id,
            self.leases,
            self.expires_ms,
            self.pulls,
            self.cache(),
            self.scope,
            self.hits,
            self.cost_us,
        )
    }
}

fn text(pools: &[PoolView]) -> String {
    let mut lines = vec![];
    for pool in pools {
        lines.push(format!(
            "{}: {} of {} bytes used, {} of {} cached, {} hits of {} bytes, {} misses, {} evicted, {} waiting",
            pool.service,
            pool.used_bytes,
            pool.pool_bytes,
            pool.cached_bytes,
            pool.cache_budget_bytes,
            pool.cache_hits,
            pool.cache_hit_bytes,
            pool.cache_misses,
            pool.cache_evictions,
            pool.waiting,
        ));
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header([
            "SLOT", "STATE", "BYTES", "TOKENS", "LEASES", "CACHE", "IDENTITY", "REQUEST",
        ]);
        for slot in &pool.slots {
            let short: String = slot.identity.chars().take(SHORT_IDENTITY).collect();
            table.add_row([
                slot.slot.to_string(),
                slot.state.to_owned(),
                slot.bytes.to_string(),
                slot.tokens.to_string(),
                slot.leases.to_string(),
                slot.cache().to_owned(),
                short,
                slot.request_id.clone(),
            ]);
        }
        if !pool.slots.is_empty() {
            lines.push(table.trim_fmt());
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_shown_with_its_state_and_its_place_in_the_cache() {
        let slot = Slot {
            slot: 3,
            identity: vec![0xab; 32],
            sealed: true,
            cached: true,
            ..Default::default()
        };
        let states = [
            (slot.clone(), "idle", "cached"),
            (
                Slot {
                    leases: 1,
                    pinned: true,
                    ..slot.clone()
                },
                "sealed",
                "pinned",
            ),
            (
                Slot {
                    sealed: false,
                    cached: false,
                    ..slot.clone()
                },
                "offered",
                "-",
            ),
            (
                Slot {
                    sealed: false,
                    identity: vec![],
                    ..slot
                },
                "reserved",
                "cached",
            ),
        ];
        for (slot, state, cache) in states {
            let view = SlotView::new(slot);
            assert_eq!((view.state, view.cache()), (state, cache));
        }
    }
}
