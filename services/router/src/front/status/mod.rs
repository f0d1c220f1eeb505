//! The status page, on the admin port: members, pools, the queue, running requests with their previews, and, where
//! it was allowed, a box to draw from. One page without a build step; whatever changes comes as JSON.
//!
//! Where connections are TLS, the page shows everything to holders of a certificate of a monitor or an admin, and to an API key
//! the requests of its tenant. Whoever draws proves who they are as at the other doors, and is held to the same quotas.
//!
//! The page trusts nobody: no script but its own runs (its nonce is new in every answer), nothing is loaded from
//! elsewhere, and what the server tells becomes text, never markup. Pages of other sites may neither read an answer
//! nor make it draw.
use std::{collections::BTreeMap, convert::Infallible, sync::Arc};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{
            AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
            X_CONTENT_TYPE_OPTIONS,
        },
    },
    response::{IntoResponse, Response},
    routing::{get, post},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::stream;
use proto::{
    access::{Peer, Role as Holder},
    status::failure,
    v1::{
        GenerateRequest, PreviewKind, RequestRecord, generate_response::Event,
        get_response::State as Phase,
    },
};
use registry::{Member, MemberState, Role};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Caller, Context};
use crate::{RouterError, dispatch::Answer, events::state_name, placement::role_name};

const PAGE: &str = include_str!("page.html");
/// Requests and events that the page shows.
const MAX_REQUESTS: usize = 50;
const MAX_EVENTS: usize = 20;
/// Largest body of a wish, in bytes: above the longest prompt.
const MAX_BODY: usize = 256 * 1024;
/// Previews of a picture that the page asks for.
const PREVIEWS: u32 = 3;
/// Says, in requests of a browser, whose page it acts for.
const FETCH_SITE: &str = "sec-fetch-site";

/// What the admin port shows besides probes and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StatusPage {
    /// Nothing.
    Off,
    /// The page, without a box to draw from.
    #[default]
    View,
    /// The page, and who may ask for images may draw.
    Prompt,
}

impl StatusPage {
    /// Its word among the settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::View => "view",
            Self::Prompt => "prompt",
        }
    }
}

#[derive(Debug)]
struct Desk {
    context: Arc<Context>,
    version: String,
    prompt: bool,
}

type Shared = State<Arc<Desk>>;
/// Who the connection is with, where it is TLS.
type With = Option<Extension<Peer>>;

impl Desk {
    /// Whose requests are shown. In clear nobody can be told from anybody else.
    fn viewer(&self, headers: &HeaderMap, with: &With) -> Result<Caller, RouterError> {
        let all = match with {
            None => true,
            Some(Extension(peer)) => peer.is(Holder::Monitor) || peer.is(Holder::Admin),
        };
        if all {
            return Ok(Caller {
                operator: true,
                ..Caller::default()
            });
        }
        self.caller(headers, with)
    }

    /// Who draws.
    fn caller(&self, headers: &HeaderMap, with: &With) -> Result<Caller, RouterError> {
        let key = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let peer = with.as_ref().map(|Extension(peer)| peer);
        self.context.caller(key, peer)
    }
}

/// A refusal that the page reads, as one line of JSON.
fn refuse(status: StatusCode, message: &str) -> Response {
    let line = format!("{}\n", json!({"event": "error", "message": message}));
    guarded((status, [(CONTENT_TYPE, "application/x-ndjson")], line).into_response())
}

/// That of somebody who has not said who they are.
fn unknown(error: &RouterError) -> Response {
    refuse(StatusCode::UNAUTHORIZED, &error.to_string())
}

/// Every path of the page.
pub(crate) fn routes(context: Arc<Context>, version: String, page: StatusPage) -> Router {
    let desk = Arc::new(Desk {
        context,
        version,
        prompt: page == StatusPage::Prompt,
    });
    let routes = match page {
        StatusPage::Off => Router::new(),
        StatusPage::View | StatusPage::Prompt => Router::new()
            .route("/", get(self::page))
            .route("/status/cluster.json", get(cluster))
            .route("/status/preview/{id}", get(preview)),
    };
    let routes = match page {
        StatusPage::Prompt => routes.route("/status/generate", post(generate)),
        _ => routes,
    };
    routes
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(desk)
}

async fn page(State(desk): Shared) -> Response {
    let chance = [
        desk.context.chance.next_u64(),
        desk.context.chance.next_u64(),
    ];
    let nonce = format!("{:016x}{:016x}", chance[0], chance[1]);
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let mut response = PAGE.replace("{{nonce}}", &nonce).into_response();
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    if let Ok(policy) = HeaderValue::try_from(policy) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    guarded(response)
}

/// What every answer says of itself.
fn guarded(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

async fn cluster(State(desk): Shared, with: With, headers: HeaderMap) -> Response {
    let viewer = match desk.viewer(&headers, &with) {
        Ok(viewer) => viewer,
        Err(error) => return unknown(&error),
    };
    let context = &desk.context;
    let snapshots = &context.members.snapshots;
    let (snapshot, contact) = (snapshots.current(), snapshots.contact());
    let (running, waiting) = context.gate.counts();
    let looked_at = if viewer.operator {
        MAX_REQUESTS
    } else {
        usize::MAX
    };
    let requests = context.jobs.records(looked_at, false);
    let own = requests.iter().filter(|one| viewer.owns(&one.tenant));
    // What the cluster is made of is its operators' business.
    let events = context.events.after(0);
    let last = events.iter().rev().take(MAX_EVENTS);
    let last = last.filter(|_| viewer.operator);
    let members = snapshot.members.values().filter(|_| viewer.operator);
    let event = |event: &proto::v1::ClusterEvent| {
        json!({
            "unix_ms": event.unix_ms, "warning": event.warning, "reason": event.reason,
            "object": event.object, "message": event.message, "count": event.count,
        })
    };
    let body = json!({
        "version": desk.version,
        "epoch": snapshot.epoch,
        "following": contact.following,
        "stale_ms": u64::try_from(contact.stale_for().as_millis()).unwrap_or(u64::MAX),
        "prompt": desk.prompt,
        "key": desk.prompt && desk.caller(&headers, &with).is_err(),
        "running": running,
        "waiting": waiting,
        "members": members.clone().map(member).collect::<Value>(),
        "pools": pools(members),
        "requests": own.take(MAX_REQUESTS).map(request).collect::<Value>(),
        "events": last.map(event).collect::<Value>(),
    });
    guarded(Json(body).into_response())
}

fn member(member: &Member) -> Value {
    let load = member.load.unwrap_or_default();
    json!({
        "id": member.id, "role": role_name(member.role()), "pool": member.pool,
        "state": state_name(member), "cordoned": member.cordoned, "endpoint": member.endpoint,
        "running": load.running, "queued": load.queued, "capacity": load.capacity,
    })
}

/// Members of one pool and role, together. Routers belong to none.
fn pools<'a>(members: impl Iterator<Item = &'a Member>) -> Value {
    let mut pools = BTreeMap::<(&str, &str), [u64; 5]>::new();
    for member in members.filter(|member| member.role() != Role::Router) {
        let load = member.load.unwrap_or_default();
        let works = member.state() == MemberState::Ready && !member.cordoned;
        let more = [
            1,
            u64::from(works),
            u64::from(load.running),
            u64::from(load.queued),
            u64::from(load.capacity),
        ];
        let key = (member.pool.as_str(), role_name(member.role()));
        let sums = pools.entry(key).or_default();
        for (sum, more) in sums.iter_mut().zip(more) {
            *sum += more;
        }
    }
    let pool = |((pool, role), [members, ready, running, queued, capacity]): (_, [u64; 5])| {
        let (pool, role): (&str, &str) = (pool, role);
        json!({
            "pool": pool, "role": role, "members": members, "ready": ready, "running": running,
            "queued": queued, "capacity": capacity,
        })
    };
    pools.into_iter().map(pool).collect()
}

fn request(record: &RequestRecord) -> Value {
    let state = match record.state() {
        Phase::Queued => "waiting",
        Phase::Prefill => "reading",
        Phase::Denoise => "drawing",
        Phase::Done => "done",
        Phase::Failed => "failed",
        Phase::Cancelled => "cancelled",
        Phase::Unspecified => "unspecified",
    };
    let runs = matches!(
        record.state(),
        Phase::Queued | Phase::Prefill | Phase::Denoise
    );
    let accepted = record.accepted.clone().unwrap_or_default();
    json!({
        "id": record.request_id, "state": state, "runs": runs, "step": record.step,
        "steps": accepted.steps, "size": size(accepted.width, accepted.height),
        "age_ms": record.age_ms, "error": record.error, "preview": record.has_preview,
    })
}

fn size(width: u32, height: u32) -> String {
    match width {
        0 => "auto".to_owned(),
        _ => format!("{width}x{height}"),
    }
}

async fn preview(
    State(desk): Shared,
    with: With,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Response {
    let viewer = match desk.viewer(&headers, &with) {
        Ok(viewer) => viewer,
        Err(error) => return unknown(&error),
    };
    let jobs = &desk.context.jobs;
    // A request of another tenant is one that is not known.
    let own = jobs.tenant(&id).is_ok_and(|tenant| viewer.owns(&tenant));
    let png = if own { jobs.preview(&id) } else { vec![] };
    if png.is_empty() {
        return guarded((StatusCode::NOT_FOUND, "no preview\n").into_response());
    }
    guarded(([(CONTENT_TYPE, "image/png")], png).into_response())
}

/// What the box asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wish {
    prompt: String,
    #[serde(default)]
    size: String,
    steps: Option<i32>,
    /// In digits: it may be larger than numbers of JavaScript are exact.
    seed: Option<String>,
    /// 0 for a model that has none.
    previews: Option<u32>,
}

/// Draws. The answer is a line of JSON for each event; a client that goes away cancels the request.
async fn generate(State(desk): Shared, with: With, headers: HeaderMap, body: Bytes) -> Response {
    // A form of another site can send neither.
    let own = headers
        .get(FETCH_SITE)
        .is_none_or(|site| site == "same-origin" || site == "none");
    let is_json = headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind == "application/json");
    if !own || !is_json {
        return refuse(StatusCode::FORBIDDEN, "only the status page may draw here");
    }
    let caller = match desk.caller(&headers, &with) {
        Ok(caller) => caller,
        Err(error) => return unknown(&error),
    };
    let wish: Wish = match serde_json::from_slice(&body) {
        Ok(wish) => wish,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let seed = match wish.seed.map(|seed| seed.parse::<u64>()).transpose() {
        Ok(seed) => seed,
        Err(_) => return refuse(StatusCode::BAD_REQUEST, "seed must be 0 to 2^63-1"),
    };
    let request = GenerateRequest {
        prompt: wish.prompt,
        size: wish.size,
        steps: wish.steps,
        seed,
        n: 1,
        previews: wish.previews.unwrap_or(PREVIEWS),
        preview_kind: PreviewKind::Linear.into(),
        ..GenerateRequest::default()
    };
    match Box::pin(desk.context.accept(caller, request, None)).await {
        Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        Ok(answers) => {
            let lines = stream::unfold(answers, |mut answers| async move {
                let answer = answers.recv().await?;
                Some((Ok::<_, Infallible>(line(answer)), answers))
            });
            let body = Body::from_stream(lines);
            guarded(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
        }
    }
}

/// One event as one line; empty for those that the page has no use for.
fn line(answer: Answer) -> String {
    let told = match answer {
        Err(status) => {
            let failure = failure(&status);
            json!({"event": "error", "message": failure.message, "field": failure.field})
        }
        Ok(message) => match message.event {
            Some(Event::Accepted(a)) => {
                json!({
                    "event": "accepted", "id": a.request_id, "size": size(a.width, a.height),
                    // In digits, as it came.
                    "seed": a.seed.to_string(), "steps": a.steps,
                })
            }
            Some(Event::Queued(q)) => {
                json!({"event": "queued", "ahead": q.ahead, "stage": q.stage})
            }
            Some(Event::Step(s)) => json!({"event": "step", "step": s.step, "steps": s.steps}),
            Some(Event::Preview(p)) => {
                json!({"event": "preview", "png": BASE64_STANDARD.encode(p.png)})
            }
            Some(Event::Image(i)) => {
                json!({"event": "image", "png": BASE64_STANDARD.encode(i.png)})
            }
            Some(Event::Done(d)) => {
                let total = d.timings.map_or(0.0, |timings| timings.total_ms);
                json!({"event": "done", "total_ms": total})
            }
            Some(Event::Text(_) | Event::Written(_)) | None => return String::new(),
        },
    };
    format!("{told}\n")
}
