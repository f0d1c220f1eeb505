//! One request through the real processes.
use std::path::Path;
use std::time::Duration;

use axum::{body::Body, http::Request, http::header::CONTENT_TYPE};
use base::clock;
use integration_tests::{cluster::Up, web};
use serde_json::{Value, json};

use super::collector::{Collector, Span};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";
/// How long spans may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(60);

/// Name of a hop, the process that it is in, and the hop above it.
const HOPS: [(&str, &str, &str); 17] = [
    ("request", "omni-router", ""),
    ("admit", "omni-router", "request"),
    ("prefix", "omni-router", "request"),
    ("place", "omni-router", "prefix"),
    ("prefill", "omni-ar-stage", "Prefill"),
    ("Prefill", "omni-ar-stage", "prefix"),
    ("ship", "omni-ar-stage", "prefill"),
    ("Reserve", "omni-kv-transfer", "ship"),
    ("Seal", "omni-kv-transfer", "ship"),
    ("image", "omni-router", "request"),
    ("place", "omni-router", "image"),
    ("Denoise", "omni-dit-worker", "image"),
    ("denoise", "omni-dit-worker", "Denoise"),
    ("fetch", "omni-dit-worker", "denoise"),
    ("steps", "omni-dit-worker", "denoise"),
    ("decode", "omni-dit-worker", "denoise"),
    ("answer", "omni-router", "request"),
];

async fn arrived(collector: &Collector, up: &Up) -> Vec<Span> {
    let start = clock::now();
    loop {
        let spans: Vec<_> = collector
            .spans()
            .into_iter()
            .filter(|span| span.trace == TRACE)
            .collect();
        let missing = HOPS.iter().find(|(name, service, _)| {
            !spans
                .iter()
                .any(|span| span.name == *name && span.service == *service)
        });
        let Some(missing) = missing else { return spans };
        let names: Vec<_> = spans
            .iter()
            .map(|span| format!("{} {}", span.service, span.name))
            .collect();
        assert!(
            start.elapsed() < ARRIVAL,
            "no {missing:?} among {names:#?}\n{}",
            up.log()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A cluster that sends its spans to `collector` and writes a record of each request to `record`.
fn traced_cluster(collector: &Collector, dir: &Path, record: &Path) -> Up {
    let config = dir.join("omni.toml");
    let text = format!("[router]\nrecord_file = \"{}\"\n", record.display());
    std::fs::write(&config, text).unwrap();
    Up::start_with(
        "shm",
        &[
            "--otlp-endpoint",
            &collector.endpoint,
            "--log-format",
            "json",
            "--log-level",
            "info,ar_stage=debug,dit_worker=debug",
            "--config",
            config.to_str().unwrap(),
        ],
    )
}

/// Every hop is there, below the one above it, and none tells the prompt.
fn check_spans(spans: &[Span]) {
    let of = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    for (name, service, above) in HOPS {
        let found = spans.iter().any(|span| {
            let parent = if above.is_empty() {
                CALLER
            } else {
                &of(above).id
            };
            span.name == name && span.service == service && span.parent == parent
        });
        assert!(found, "{service} {name} below {above}: {spans:#?}");
    }
    // Both rows of guidance are pulled by the worker, below its fetch.
    let pulls: Vec<_> = spans.iter().filter(|span| span.name == "Pull").collect();
    assert!(
        !pulls.is_empty() && pulls.iter().all(|span| span.parent == of("fetch").id),
        "{pulls:?}"
    );
    let whole = of("request");
    let within = |span: &&Span| span.time.0 >= whole.time.0 && span.time.1 >= span.time.0;
    assert!(
        spans.iter().all(|span| within(&span)),
        "a hop begins before its request"
    );
    let told = &whole.attributes;
    assert!(
        told.contains(&("request_id".to_owned(), "traced".to_owned())),
        "{told:?}"
    );
    assert!(
        !format!("{spans:?}").contains("secret"),
        "no span holds a prompt"
    );
}

/// Lines of every role that computed have the trace, and none tells the prompt.
fn check_log(log: &str) {
    for role in ["router", "ar-stage", "dit-worker"] {
        let prefix = format!("[{role}] ");
        let lines = log.lines().filter_map(|line| line.strip_prefix(&prefix));
        let mut lines = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        assert!(
            lines.any(|line| line["span"]["trace_id"] == TRACE),
            "no line of {role} has the trace:\n{log}"
        );
    }
    assert!(!log.contains("secret"), "no log line holds a prompt");
}

/// What is kept of the request says how to repeat it.
fn check_record(lines: &str) {
    let line: Value = serde_json::from_str(lines.trim()).unwrap();
    for (key, value) in [
        ("request_id", json!("traced")),
        ("trace_id", json!(TRACE)),
        ("size", json!("256x256")),
        ("steps", json!(3)),
        ("seed", json!(7)),
        ("guidance", json!(3.0)),
        ("code", json!("OK")),
    ] {
        assert_eq!(line[key], value, "{key}: {line:#}");
    }
    assert_eq!(line["prefixes"].as_array().unwrap().len(), 2, "{line:#}");
    for key in ["weights_id", "template"] {
        assert!(!line[key].as_str().unwrap().is_empty(), "{key}: {line:#}");
    }
    let members = line["members"].as_array().unwrap();
    let roles: Vec<_> = members
        .iter()
        .map(|member| member["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["ar-stage", "dit-worker"], "{line:#}");
    let said = |member: &Value| member["plan"].is_string() && member["kernels"].is_string();
    assert!(members.iter().all(said), "{line:#}");
    assert!(
        !lines.contains("secret"),
        "the record repeats a request without its prompt's words"
    );
}

#[tokio::test]
async fn one_request_is_one_trace_over_all_processes_and_its_log_lines_say_so() {
    let collector = Collector::start().await;
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("requests.jsonl");
    let up = traced_cluster(&collector, dir.path(), &record);
    let wish = json!({ "prompt": "a secret boat", "size": "256x256", "steps": 3, "seed": 7, "guidance": 3.0 });
    let request = Request::post("/v1/images/generations")
        .header(CONTENT_TYPE, "application/json")
        .header("traceparent", format!("00-{TRACE}-{CALLER}-01"))
        .header("x-request-id", "traced")
        .body(Body::from(wish.to_string()));
    let answer = web::send(up.http(), request.unwrap()).await;
    assert_eq!(answer.status, 200, "{}", answer.text);

    check_spans(&arrived(&collector, &up).await);
    check_log(&up.log());
    check_record(&std::fs::read_to_string(&record).unwrap());
}
