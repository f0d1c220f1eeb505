//! `omnictl` on a running system: what an operator sees of a request, and how members are taken out of service.
use std::time::Duration;

use serde_json::Value;

use crate::harness::{Up, bounded};

/// What `omnictl` prints, and its exit code.
async fn omnictl(up: &Up, arguments: &[&str]) -> (i32, String) {
    let program = integration_tests::binary("omnictl").unwrap();
    let run = tokio::process::Command::new(program)
        .args(arguments)
        .args(["--endpoint", up.endpoint()])
        .output();
    let output = bounded(run).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code().unwrap(), text + &said)
}

async fn json(up: &Up, arguments: &[&str]) -> Value {
    let (code, text) = omnictl(up, &[arguments, &["-o", "json"]].concat()).await;
    assert_eq!(code, 0, "{text}");
    serde_json::from_str(&text).unwrap()
}

async fn generate(up: &Up, dir: &std::path::Path, id: &str) -> (i32, String) {
    let picture = dir.join("boat.png");
    let picture = picture.to_str().unwrap();
    let words = [
        "generate",
        "a small red boat",
        "--size",
        "256x256",
        "--steps",
        "4",
    ];
    omnictl(
        up,
        &[&words[..], &["--request-id", id, "-o", picture]].concat(),
    )
    .await
}

#[tokio::test]
async fn a_request_is_explained_and_a_worker_is_cordoned_let_again_and_drained() {
    let (up, dir) = (Up::start("shm"), tempfile::tempdir().unwrap());
    let (code, said) = generate(&up, dir.path(), "first").await;
    assert_eq!(code, 0, "{said}");
    explains(&up).await;
    traces(&up).await;

    let workers = json(&up, &["get", "members", "-l", "role=dit-worker"]).await;
    let worker = workers["members"][0]["id"].as_str().unwrap().to_owned();
    cordons(&up, dir.path(), &worker).await;
    shows(&up, &worker).await;

    // `omni up` ends when a role leaves: the drain is the last thing this system does.
    let words = ["drain", &worker, "--wait", "--timeout", "60"];
    let drained = omnictl(&up, &words);
    let drained = tokio::time::timeout(Duration::from_secs(90), drained).await;
    let (_, said) = drained.unwrap();
    let told = said.contains("drains") || said.contains("has left");
    assert!(told, "{said}");
}

async fn explains(up: &Up) {
    let record = json(up, &["explain", "first"]).await;
    assert_eq!(record["state"], "done");
    assert_eq!(record["steps"], "4/4");
    let placements = record["placements"].as_array().unwrap();
    let stages: Vec<_> = placements.iter().map(|p| p["stage"].clone()).collect();
    assert_eq!(stages, ["ar-stage", "dit-worker"]);
}

/// The stages' own times lie within what the router saw.
async fn traces(up: &Up) {
    let trace = json(up, &["trace", "first"]).await;
    let spans = trace["spans"].as_array().unwrap();
    let length = |name: &str| {
        let span = spans.iter().find(|span| span["name"] == name).unwrap();
        span["duration_ms"].as_f64().unwrap()
    };
    assert!(length("compute") <= length("prefill") + 1.0, "{trace}");
    assert!(length("steps") <= length("image 0") + 1.0, "{trace}");
    let total = trace["total_ms"].as_f64().unwrap();
    // Layers are fetched while later ones are computed, so both overlap.
    for part in ["prefill", "image 0"] {
        assert!(length(part) <= total + 1.0, "{part}: {trace}");
    }
    let (_, tree) = omnictl(up, &["trace", "first"]).await;
    assert!(tree.contains("└─ decode"), "{tree}");
}

async fn cordons(up: &Up, dir: &std::path::Path, worker: &str) {
    assert_eq!(omnictl(up, &["cordon", worker]).await.0, 0);
    let (code, said) = generate(up, dir, "second").await;
    assert_eq!(code, 69, "{said}");
    assert!(said.contains("no dit-worker is ready"), "{said}");
    assert_eq!(omnictl(up, &["uncordon", worker]).await.0, 0);
    let (code, said) = generate(up, dir, "third").await;
    assert_eq!(code, 0, "{said}");
    let object = format!("member/{worker}");
    let events = omnictl(up, &["events", "--for", &object]).await.1;
    assert!(events.contains("takes no new work"), "{events}");
    assert!(events.contains("takes work again"), "{events}");
}

async fn shows(up: &Up, worker: &str) {
    let pools = json(up, &["get", "pools"]).await;
    assert_eq!(pools["pools"].as_array().unwrap().len(), 3);
    let (_, report) = omnictl(up, &["check", "--ports", "1"]).await;
    assert!(report.contains("✓ dit-worker"), "{report}");
    assert!(report.contains("✓ registry"), "{report}");
    let top = omnictl(up, &["top", "--once"]).await.1;
    assert!(top.contains(worker), "{top}");
}
