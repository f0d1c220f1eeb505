//! The HTTP API of a whole router over loopback.
use std::{net::SocketAddr, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::{Request, Response, StatusCode, header::CONTENT_TYPE},
};
use base::{Code, Failure, task};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use proto::{v1::get_response::State, web::HttpBounds};
use registry::Role;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{
    Cluster, SOON, bounded,
    fake::{self, Act, Script, Stage},
};
use crate::admission::Limits;

pub(super) const IMAGES: &str = "/v1/images/generations";
const CHAT: &str = "/v1/chat/completions";
/// Bound of a test that waits for one.
const SHORT: Duration = Duration::from_millis(100);

struct Site {
    cluster: Cluster,
    ar: Script,
    dit: Script,
    _stages: [Stage; 2],
}

async fn site_with(ar: Script, dit: Script, limits: Limits, bounds: HttpBounds) -> Site {
    let change = |config: &mut crate::RouterConfig| {
        (config.limits, config.http_bounds) = (limits, bounds);
    };
    let cluster = Cluster::configured(change).await;
    let stages = [
        fake::join(&cluster, Role::ArStage, "ar", &ar).await,
        fake::join(&cluster, Role::DitWorker, "dit", &dit).await,
    ];
    cluster.members(2).await;
    Site {
        cluster,
        ar,
        dit,
        _stages: stages,
    }
}

async fn site(dit: Script) -> Site {
    let (limits, bounds) = (Limits::default(), HttpBounds::default());
    site_with(Script::new([]), dit, limits, bounds).await
}

pub(super) async fn send(address: SocketAddr, request: Request<Body>) -> Response<Incoming> {
    let stream = bounded(TcpStream::connect(address)).await.unwrap();
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = bounded(handshake).await.unwrap();
    task::Tracker::new().spawn(connection);
    bounded(sender.send_request(request)).await.unwrap()
}

pub(super) fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post(path).header("host", "test");
    let request = request.header(CONTENT_TYPE, "application/json");
    request.body(body.into()).unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    let body = bounded(to_bytes(Body::new(response.into_body()), 1 << 24)).await;
    String::from_utf8(body.unwrap().to_vec()).unwrap()
}

pub(super) async fn answer(response: Response<Incoming>) -> Value {
    serde_json::from_str(&text(response).await).unwrap()
}

impl Site {
    fn address(&self) -> SocketAddr {
        self.cluster.http
    }

    async fn post(&self, path: &str, body: Value) -> Response<Incoming> {
        send(self.address(), post(path, body.to_string())).await
    }

    async fn refused(&self, path: &str, body: Value) -> (StatusCode, Value) {
        let response = self.post(path, body).await;
        let status = response.status();
        (status, answer(response).await["error"].clone())
    }
}

pub(super) fn wish() -> Value {
    json!({ "model": "tiny", "prompt": "a red fox", "steps": 3, "seed": 7 })
}

fn wish_with(more: &Value) -> Value {
    let mut wish = wish();
    for (name, value) in more.as_object().unwrap() {
        wish[name] = value.clone();
    }
    wish
}

/// Events by name ("" without one) and data.
fn events(text: &str) -> Vec<(String, Value)> {
    let mut events = vec![];
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let (mut name, mut data) = (String::new(), Value::Null);
        for line in block.lines() {
            match line.split_once(": ").unwrap() {
                ("event", text) => name = text.to_owned(),
                ("data", "[DONE]") => data = json!("[DONE]"),
                ("data", text) => data = serde_json::from_str(text).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        events.push((name, data));
    }
    events
}

fn seed_bytes(seed: u64) -> String {
    STANDARD.encode(seed.to_le_bytes())
}

#[tokio::test]
async fn images_come_in_order_on_one_prefix_with_all_that_was_run() {
    let site = site(Script::new([])).await;
    let response = site
        .post(IMAGES, wish_with(&json!({ "n": 3, "user": "ann" })))
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    let id = response.headers()["x-request-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let answer = answer(response).await;
    let expected: Vec<_> = (7..10)
        .map(|seed| json!({ "b64_json": seed_bytes(seed) }))
        .collect();
    assert_eq!(answer["data"], Value::from(expected));
    assert_eq!(
        (answer["size"].as_str(), &answer["output_format"]),
        (Some("64x64"), &json!("png"))
    );
    let omni = &answer["omni"];
    assert_eq!(omni["request_id"], id.as_str());
    assert_eq!(
        (&omni["seed"], &omni["steps"], &omni["n"]),
        (&json!(7), &json!(3), &json!(3))
    );
    assert_eq!(
        omni["images"][2],
        json!({ "index": 2, "seed": 9, "worker": "dit" })
    );
    assert_eq!(
        (&omni["ar_stage"], &omni["transport"]),
        (&json!("ar"), &json!("posix"))
    );
    assert_eq!(omni["timings"]["denoise_ms"], 5.0);
    assert_eq!(answer["usage"]["output_tokens"], 3 * 16);
    assert_eq!((site.ar.calls(), site.dit.calls()), (1, 3));
}

#[tokio::test]
async fn a_stream_tells_each_step_and_ends_with_the_image_and_what_it_took() {
    let site = site(Script::new([])).await;
    let response = site
        .post(IMAGES, wish_with(&json!({ "stream": true })))
        .await;
    assert_eq!(response.headers()[CONTENT_TYPE], "text/event-stream");
    let events = events(&text(response).await);
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "omni.accepted",
            "omni.queued",
            "omni.step",
            "omni.step",
            "omni.step",
            "image_generation.completed"
        ]
    );
    assert!(
        events
            .iter()
            .all(|(name, data)| data["type"] == name.as_str())
    );
    assert_eq!(events[0].1["omni"]["seed"], 7);
    for (at, step) in [(2, 1), (3, 2), (4, 3)] {
        let omni = &events[at].1["omni"];
        assert_eq!((&omni["step"], &omni["steps"]), (&json!(step), &json!(3)));
    }
    let last = &events[5].1;
    assert_eq!(last["b64_json"], seed_bytes(7).as_str());
    assert_eq!(last["omni"]["timings"]["prefill_ms"], 1.0);
    assert_eq!(last["omni"]["images"][0]["worker"], "dit");
}

#[tokio::test]
async fn partial_images_are_events_of_a_stream_and_only_of_a_stream() {
    let site = site(Script::new([])).await;
    let wish = wish_with(&json!({ "stream": true, "partial_images": 2 }));
    let response = site.post("/v1/images/generations", wish).await;
    assert_eq!(response.status(), StatusCode::OK);
    let told = events(&text(response).await);
    let partial: Vec<&Value> = told
        .iter()
        .filter(|(name, _)| name == "image_generation.partial_image")
        .map(|(_, data)| data)
        .collect();
    assert_eq!(partial.len(), 2, "{told:?}");
    for (number, data) in partial.into_iter().enumerate() {
        assert_eq!(data["partial_image_index"], number);
        assert_eq!(
            (&data["size"], &data["image_index"]),
            (&json!("16x16"), &json!(0))
        );
        let bytes = vec![number as u8 + 1];
        assert_eq!(data["b64_json"], json!(STANDARD.encode(bytes)));
    }
    let wish = wish_with(&json!({ "partial_images": 2 }));
    let (status, error) = site.refused("/v1/images/generations", wish).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(error["param"], "partial_images", "{error}");
}

#[tokio::test]
async fn a_stream_of_several_images_tells_all_and_an_error_is_its_last_event() {
    let site = site(Script::new([])).await;
    let many = wish_with(&json!({ "stream": true, "n": 3 }));
    let told = events(&text(site.post(IMAGES, many.clone()).await).await);
    let images: Vec<_> = told
        .iter()
        .filter(|(name, _)| name == "image_generation.completed")
        .map(|(_, data)| data)
        .collect();
    let mut indices: Vec<_> = images
        .iter()
        .map(|data| data["image_index"].as_u64())
        .collect();
    indices.sort_unstable();
    assert_eq!(indices, [Some(0), Some(1), Some(2)]);
    for image in &images {
        let index = image["image_index"].as_u64().unwrap();
        assert_eq!(image["b64_json"], seed_bytes(7 + index).as_str());
    }
    assert_eq!(images[2]["omni"]["images"].as_array().unwrap().len(), 3);

    let broken = Failure::new(Code::Internal, "out of colours");
    *site.dit.acts.lock().unwrap() = [Act::Refuse(broken)].into();
    let told = events(&text(site.post(IMAGES, many).await).await);
    let (name, data) = told.last().unwrap();
    assert_eq!((name.as_str(), &data["type"]), ("error", &json!("error")));
    assert_eq!(data["error"]["type"], "server_error");
    assert_eq!(data["error"]["message"], "out of colours");
}

#[tokio::test]
async fn a_chat_answers_its_user_with_a_picture() {
    let site = site(Script::new([])).await;
    let mut wish = json!({
        "model": "tiny", "seed": 7, "steps": 3, "modalities": ["image", "text"],
        "messages": [
            { "role": "system", "content": "be bold" }, { "role": "user", "content": "a fox" },
        ],
    });
    let completion = answer(site.post(CHAT, wish.clone()).await).await;
    let choice = &completion["choices"][0];
    let url = format!("data:image/png;base64,{}", seed_bytes(7));
    assert_eq!(
        choice["message"]["images"][0]["image_url"]["url"],
        url.as_str()
    );
    assert_eq!(
        (&choice["finish_reason"], &completion["object"]),
        (&json!("stop"), &json!("chat.completion"))
    );
    assert_eq!(completion["omni"]["timings"]["decode_ms"], 6.0);
    let seen = site.ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(
        (seen.prompt.as_str(), seen.system_prompt.as_str()),
        ("a fox", "be bold")
    );

    wish["stream"] = true.into();
    let told = events(&text(site.post(CHAT, wish.clone()).await).await);
    assert_eq!(told.last().unwrap().1, "[DONE]");
    let chunks: Vec<_> = told[..told.len() - 1]
        .iter()
        .map(|(_, data)| data)
        .collect();
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk")
    );
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let steps = chunks
        .iter()
        .filter(|chunk| chunk["omni"]["type"] == "step");
    assert_eq!(steps.count(), 3);
    let delta = &chunks[chunks.len() - 2]["choices"][0]["delta"];
    assert_eq!(delta["images"][0]["image_url"]["url"], url.as_str());
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["omni"]["timings"]["decode_ms"], 6.0);

    wish["modalities"] = json!([]);
    let (status, error) = site.refused(CHAT, wish).await;
    assert_eq!(
        (status, &error["param"]),
        (StatusCode::BAD_REQUEST, &json!("modalities"))
    );
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_request() {
    for stream in [false, true] {
        let site = site(Script::paced(1)).await;
        let body = wish_with(&json!({ "stream": stream })).to_string();
        let head = format!(
            "POST {IMAGES} HTTP/1.1\r\nhost: test\r\nx-request-id: gone\r\n\
            content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut client = bounded(TcpStream::connect(site.address())).await.unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        site.dit.called().await;
        drop(client);
        site.dit.dropped().await;
        let cancelled = async {
            while site.cluster.state("gone").await != State::Cancelled {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        bounded(cancelled).await;
    }
}

#[tokio::test]
async fn requests_have_ids_and_one_id_runs_once() {
    let site = site(Script::paced(0)).await;
    let with_id = |id: &str, body: Value| {
        let mut request = post(IMAGES, body.to_string());
        request
            .headers_mut()
            .insert("x-request-id", id.parse().unwrap());
        request
    };
    let streamed = wish_with(&json!({ "stream": true }));
    let first = send(site.address(), with_id("mine", streamed)).await;
    assert_eq!(first.headers()["x-request-id"], "mine");
    let other = wish_with(&json!({ "prompt": "another fox" }));
    let second = send(site.address(), with_id("mine", other)).await;
    assert_eq!(second.status(), StatusCode::CONFLICT);
    assert_eq!(second.headers()["x-request-id"], "mine");
    assert_eq!(answer(second).await["error"]["param"], "x-request-id");
    let bad = send(site.address(), with_id("not mine!", wish())).await;
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    assert_ne!(bad.headers()["x-request-id"], "not mine!");
    assert_eq!(answer(bad).await["error"]["param"], "x-request-id");
}

#[tokio::test]
async fn a_page_of_another_site_cannot_make_this_one_work() {
    let site = site(Script::new([])).await;
    for (whose, status) in [("cross-site", 403), ("same-origin", 200)] {
        let mut request = post(IMAGES, wish().to_string());
        let headers = request.headers_mut();
        headers.insert("sec-fetch-site", whose.parse().unwrap());
        let response = send(site.address(), request).await;
        assert_eq!(response.status(), status, "{whose}");
    }
    assert_eq!(site.ar.calls(), 1);
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_time_to_come_back() {
    let limits = Limits {
        max_running: 1,
        max_queued: 0,
        max_cost: u64::MAX,
        ..Limits::default()
    };
    let (ar, dit) = (Script::new([]), Script::paced(0));
    let site = site_with(ar, dit, limits, HttpBounds::default()).await;
    let _running = site
        .post(IMAGES, wish_with(&json!({ "stream": true })))
        .await;
    let response = site.post(IMAGES, wish()).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let seconds = response.headers()["retry-after"].to_str().unwrap();
    assert!(seconds.parse::<u32>().unwrap() >= 1);
    assert_eq!(answer(response).await["error"]["type"], "rate_limit_error");
}

#[tokio::test]
async fn a_deadline_that_passes_is_the_servers_fault_by_status() {
    let site = site(Script::paced(0)).await;
    let (status, error) = site
        .refused(IMAGES, wish_with(&json!({ "deadline": 0.05 })))
        .await;
    assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(error["code"], "deadline_exceeded");
}

#[tokio::test]
async fn without_stages_a_good_request_is_503_and_a_bad_one_400() {
    let cluster = Cluster::start().await;
    let good = send(cluster.http, post(IMAGES, wish().to_string())).await;
    assert_eq!(good.status(), StatusCode::SERVICE_UNAVAILABLE);
    let bad = wish_with(&json!({ "steps": 0 })).to_string();
    let bad = send(cluster.http, post(IMAGES, bad)).await;
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    let models = send(cluster.http, get("/v1/models")).await;
    assert_eq!(answer(models).await["data"], json!([]));
}

fn get(path: &str) -> Request<Body> {
    let request = Request::get(path).header("host", "test");
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn models_and_the_document_are_there_and_nothing_else() {
    let site = site(Script::new([])).await;
    let listed = answer(send(site.address(), get("/v1/models")).await).await;
    assert_eq!(listed["data"][0]["id"], "tiny");
    assert_eq!(
        listed["data"][0]["omni"]["sizes"],
        json!(["64x64", "128x32"])
    );
    let one = answer(send(site.address(), get("/v1/models/tiny")).await).await;
    assert_eq!(one, listed["data"][0]);
    let document = answer(send(site.address(), get("/openapi.json")).await).await;
    assert_eq!(document, crate::openapi());
    // Probes and metrics are on the admin port alone.
    for path in [
        "/v1/models/other",
        "/",
        "/livez",
        "/readyz",
        "/metrics",
        "/v1/images/variations",
    ] {
        let response = send(site.address(), get(path)).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
        assert!(response.headers().contains_key("x-request-id"));
        assert_eq!(answer(response).await["error"]["code"], "not_found");
    }
    let wrong = send(site.address(), get(IMAGES)).await;
    assert_eq!(wrong.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(wrong.headers()["allow"], "POST");
    assert_eq!(
        answer(wrong).await["error"]["type"],
        "invalid_request_error"
    );
}

/// Reads until the server closes.
async fn closed(mut client: TcpStream) -> String {
    let mut got = Vec::new();
    bounded(client.read_to_end(&mut got)).await.unwrap();
    String::from_utf8(got).unwrap()
}

#[tokio::test]
async fn idle_and_dawdling_clients_are_let_go() {
    let bounds = HttpBounds {
        head: SHORT,
        body: SHORT,
        stall: SOON,
        connections: 2,
    };
    let scripts = (Script::new([]), Script::new([]));
    let site = site_with(scripts.0, scripts.1, Limits::default(), bounds).await;
    let connect = async || bounded(TcpStream::connect(site.address())).await.unwrap();
    // Nothing at all, half a head, half a body; more of them than there are places.
    let half_head = "POST /v1/models HTTP/1.1\r\nhost: te";
    let half_body = format!(
        "POST {IMAGES} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
        content-length: 900\r\n\r\n{{\"prompt\":"
    );
    for _ in 0..2 {
        for (said, status) in [("", ""), (half_head, ""), (half_body.as_str(), "408")] {
            let mut client = connect().await;
            client.write_all(said.as_bytes()).await.unwrap();
            let got = closed(client).await;
            assert!(got.contains(status), "{said:?}: {got:?}");
        }
    }
    let mut kept = Vec::new();
    for _ in 0..6 {
        kept.push(connect().await);
    }
    let response = site.post(IMAGES, wish()).await;
    assert_eq!(
        response.status(),
        StatusCode::OK,
        "idle clients hold no place for ever"
    );
}

const PICTURE: &str = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg==";

#[tokio::test]
async fn an_edit_is_checked_in_full_and_its_pictures_reach_the_stage() {
    let site = site(Script::new([])).await;
    let url = format!("data:image/png;base64,{PICTURE}");
    let wish = |more: Value| {
        let mut wish = wish_with(&more);
        if wish.get("image").is_none() {
            wish["image"] = json!(url);
        }
        wish
    };
    let edits = "/v1/images/edits";
    let (status, error) = site.refused(edits, wish(json!({ "mask": url }))).await;
    assert_eq!(
        (status, &error["param"]),
        (StatusCode::NOT_IMPLEMENTED, &json!("mask"))
    );
    for (more, param) in [
        (json!({ "image": "data:image/png;base64,AAAA" }), "image"),
        (json!({ "image": "http://localhost/x.png" }), "image"),
        (json!({ "image": [url, url, url, url] }), "image"),
        (json!({ "mask": "data:image/png;base64,AAAA" }), "mask"),
        (json!({ "steps": 201 }), "steps"),
        (json!({ "size": "63x63" }), "size"),
        (json!({ "model": "other" }), "model"),
        (json!({ "input_fidelity": "high" }), "input_fidelity"),
        (json!({ "temperature": 1 }), "temperature"),
        (json!({ "mode": "text" }), "mode"),
    ] {
        let (status, error) = site.refused(edits, wish(more.clone())).await;
        assert!(status.is_client_error(), "{more}: {status} {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
    }
    assert_eq!(site.ar.calls(), 0);
    let both = wish(json!({ "image": [url, { "image_url": url }], "sampling_seed": 5 }));
    let response = site.post(edits, both).await;
    assert_eq!(response.status(), StatusCode::OK);
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    // The stage said so; nobody asked for a size.
    assert_eq!(answer["size"], "128x32");
    let seen = site.ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(seen.images.len(), 2);
    assert!(seen.images[0].starts_with(b"\x89PNG") && seen.images[0] == seen.images[1]);
    assert_eq!(seen.size_from(), proto::v1::PrefillSize::FirstImage);
    assert_eq!((seen.seed, seen.width), (5, 0));
}

#[tokio::test]
async fn a_chat_may_show_pictures_and_may_ask_for_words_alone() {
    let site = site(Script::new([])).await;
    let part = json!({ "type": "image_url", "image_url": {
        "url": format!("data:image/png;base64,{PICTURE}"),
    } });
    let message = json!({ "role": "user", "content": [part, { "type": "text", "text": "what?" }] });
    let body = |more: &Value| {
        let mut body = json!({ "messages": [message], "modalities": ["text"] });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let chat = "/v1/chat/completions";
    for (more, param) in [
        (json!({ "size": "64x64" }), "size"),
        (json!({ "n": 2 }), "n"),
        (json!({ "steps": 3 }), "steps"),
        (json!({ "mode": "think" }), "mode"),
        (json!({ "output_format": "webp" }), "output_format"),
        (
            json!({ "max_tokens": 3, "max_completion_tokens": 3 }),
            "max_tokens",
        ),
        (json!({ "modalities": [] }), "modalities"),
    ] {
        let (status, error) = site.refused(chat, body(&more)).await;
        assert!(status.is_client_error(), "{more}: {status} {error}");
        assert_eq!(error["param"], param, "{more}: {error}");
    }
    assert_eq!(site.ar.calls(), 0);
    let response = site
        .post(chat, body(&json!({ "max_tokens": 7, "top_p": 0.5 })))
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "a text");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["omni"]["mode"], "text");
    assert_eq!(site.dit.calls(), 0);
    let seen = site.ar.seen.lock().unwrap().clone().unwrap();
    assert_eq!(seen.task(), proto::v1::PrefillTask::Text);
    let sampling = seen.sampling.unwrap();
    assert_eq!(
        (sampling.max_new_tokens, sampling.top_p),
        (Some(7), Some(0.5))
    );
    assert!(!seen.negative_row && seen.images.len() == 1);
}

#[tokio::test]
async fn what_is_written_is_told_before_the_picture_and_n_images_share_it() {
    let site = site(Script::new([])).await;
    let wish = wish_with(&json!({
        "mode": "think_recaption", "size": "auto", "n": 2, "stream": true,
    }));
    let told = events(&text(site.post(IMAGES, wish).await).await);
    let names: Vec<_> = told.iter().map(|(name, _)| name.as_str()).collect();
    let place = |name: &str| names.iter().position(|told| *told == name).unwrap();
    assert!(place("omni.text") < place("omni.written"), "{names:?}");
    assert!(place("omni.written") < place("omni.step"), "{names:?}");
    let written = &told[place("omni.written")].1["omni"];
    assert_eq!(
        (&written["size"], &written["writing"]["text"]),
        (&json!("128x32"), &json!("a text"))
    );
    assert_eq!(told[place("omni.accepted")].1["omni"]["size"], "auto");
    let last = &told.last().unwrap().1;
    assert_eq!(
        (&last["size"], &last["omni"]["writing"]["cut"]),
        (&json!("128x32"), &json!(true))
    );
    assert_eq!((site.ar.calls(), site.dit.calls()), (1, 2));
}

#[tokio::test]
async fn a_stopping_router_finishes_its_streams_and_takes_no_more() {
    let site = site(Script::paced(1)).await;
    let response = site
        .post(IMAGES, wish_with(&json!({ "stream": true })))
        .await;
    site.dit.called().await;
    site.cluster.shutdown.trigger();
    let late = async {
        while site
            .post(
                IMAGES,
                wish_with(&json!({ "stream": false, "deadline": 0.2 })),
            )
            .await
            .status()
            != StatusCode::SERVICE_UNAVAILABLE
        {}
    };
    bounded(late).await;
    site.dit.steps.add_permits(10);
    let told = events(&text(response).await);
    assert_eq!(told.last().unwrap().0, "image_generation.completed");
    bounded(site.cluster.server).await.unwrap().unwrap();
}
