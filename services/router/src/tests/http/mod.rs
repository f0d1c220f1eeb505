//! The HTTP API of a whole router over loopback.
mod doors;
mod shown;

use std::net::SocketAddr;

use axum::{
    body::{Body, to_bytes},
    http::{Request, Response, StatusCode, header::CONTENT_TYPE},
};
use base::{Code, Failure, task};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use proto::web::HttpBounds;
use registry::Role;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{
    Cluster, SOON, bounded,
    fake::{self, Act, Script, Stage},
};
use crate::admission::Limits;

pub(super) const IMAGES: &str = "/v1/images/generations";
const CHAT: &str = "/v1/chat/completions";

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
