//! The status page: its JSON, its guards, and the page itself in a real browser.
use axum::{body::Body, http::Request, http::StatusCode};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use integration_tests::{
    browser::{self, Browser},
    cluster::Up,
    web::{get, post, send},
};
use serde_json::{Value, json};

use crate::IMAGES;

/// Set where a browser must be there, so that a test without one fails instead of passing over it.
const REQUIRED_VARIABLE: &str = "OMNI_REQUIRE_BROWSER";

#[tokio::test]
async fn the_page_allows_no_script_but_its_own_and_its_json_has_the_cluster() {
    let up = Up::shared();
    let site = up.admin("router");
    let (first, second) = (get(&site, "/").await, get(&site, "/").await);
    assert_eq!(first.status, StatusCode::OK);
    let policy = |page: &integration_tests::web::Answer| {
        let header = &page.headers["content-security-policy"];
        header.to_str().unwrap().to_owned()
    };
    assert!(policy(&first).starts_with("default-src 'none'; script-src 'nonce-"));
    assert!(!policy(&first).contains("unsafe"));
    assert_ne!(policy(&first), policy(&second), "a nonce is used once");
    assert_eq!(first.headers["x-content-type-options"], "nosniff");
    assert!(!first.text.contains("{{nonce}}"));

    let now = get(&site, "/status/cluster.json").await.json();
    let mut roles: Vec<_> = now["members"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["role"].clone())
        .collect();
    roles.sort_by_key(Value::to_string);
    assert_eq!(roles, ["ar-stage", "dit-worker", "kv-transfer", "router"]);
    assert_eq!(
        (&now["following"], &now["prompt"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(now["pools"].as_array().unwrap().len(), 3);
    assert_eq!(
        get(&site, "/status/preview/nobody").await.status,
        StatusCode::NOT_FOUND
    );
    // Probes and metrics are where they were.
    assert_eq!(get(&site, "/livez").await.status, StatusCode::OK);
}

#[tokio::test]
async fn pages_of_other_sites_may_not_draw() {
    let site = Up::shared().admin("router");
    let body = r#"{"prompt": "a boat"}"#;
    let mut foreign = post("/status/generate", "application/json", body);
    let header = "cross-site".parse().unwrap();
    foreign.headers_mut().insert("sec-fetch-site", header);
    assert_eq!(send(&site, foreign).await.status, StatusCode::FORBIDDEN);
    let form = post("/status/generate", "text/plain", body);
    assert_eq!(send(&site, form).await.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn the_box_draws_and_refuses_by_name() {
    let up = Up::shared();
    let site = up.admin("router");
    let draw = |wish: Value| post("/status/generate", "application/json", wish.to_string());
    for (wish, named) in [
        (json!({"prompt": "a boat", "steps": 0}), "steps"),
        (json!({"prompt": "a boat", "size": "7x"}), "size"),
        (json!({"prompt": "a boat", "seed": "many"}), "seed"),
        (json!({"prompt": "a boat", "colour": "red"}), "colour"),
    ] {
        let refused = send(&site, draw(wish)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        let told = refused.json();
        assert_eq!(told["event"], "error");
        assert!(told["message"].as_str().unwrap().contains(named), "{told}");
    }
    let mut wish =
        json!({"prompt": "a boat", "size": "256x256", "steps": 4, "seed": "9007199254740993"});
    // This model has no previews: that is told by the field that a page can do without.
    let without = send(&site, draw(wish.clone())).await.text;
    assert!(without.contains(r#""field":"preview_kind""#), "{without}");
    wish["previews"] = json!(0);
    assert_drawn(&send(&site, draw(wish)).await.text);
}

fn assert_drawn(text: &str) {
    let line = |line| serde_json::from_str::<Value>(line).unwrap();
    let events: Vec<Value> = text.lines().map(line).collect();
    let of = |name: &str| -> Vec<&Value> {
        let alike = events.iter().filter(|event| event["event"] == name);
        alike.collect()
    };
    assert_eq!(of("accepted")[0]["seed"], "9007199254740993");
    let counts = (of("step").len(), of("image").len(), of("done").len());
    assert_eq!(counts, (4, 1, 1));
    let png = of("image")[0]["png"].as_str().unwrap();
    let png = BASE64_STANDARD.decode(png).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
}

/// What the page shows when a person looks at it and draws.
#[test]
fn a_person_sees_the_cluster_and_draws_in_a_real_browser() {
    let Some(program) = browser::find() else {
        assert!(
            std::env::var_os(REQUIRED_VARIABLE).is_none(),
            "there is no browser"
        );
        eprintln!("skipped: no browser of Chromium's kind on this machine");
        return;
    };
    // The demo model has previews.
    let checkpoint = integration_tests::workspace_root().join("deploy/demo-model/checkpoint");
    let up = Up::start_on(&checkpoint, "shm", &[]);
    let site = up.admin("router");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // What callers write comes back in messages: it must stay text.
    let markup = json!({"prompt": "x", "size": "<img src=x>"});
    let refused = post(IMAGES, "application/json", markup.to_string());
    let refused: Request<Body> = refused;
    assert_eq!(
        runtime.block_on(send(up.http(), refused)).status,
        StatusCode::BAD_REQUEST
    );

    let mut page = Browser::start(&program);
    page.open(&format!("{site}/"));
    shows_the_cluster(&mut page);
    stops_what_it_draws(&mut page);
    draws(&mut page);
    is_guarded(&mut page);
    if let Some(path) = std::env::var_os("OMNI_SCREENSHOT") {
        let shot = BASE64_STANDARD.decode(page.screenshot()).unwrap();
        std::fs::write(path, shot).unwrap();
    }

    // The page says when its router is gone.
    drop(up);
    page.until("!document.getElementById('trouble').hidden");

    // A model without previews draws all the same, and the page says why none come.
    page.open(&format!("{}/", Up::shared().admin("router")));
    page.until("!document.getElementById('draw').hidden");
    fill(&mut page, 4);
    page.until("document.getElementById('said').textContent.startsWith('done')");
    assert_eq!(page.eval("document.getElementById('note').hidden"), false);
}

fn shows_the_cluster(page: &mut Browser) {
    page.until("document.querySelectorAll('#members tr').length === 4");
    page.until("document.getElementById('members').innerText.includes('dit-worker')");
    page.until("document.querySelectorAll('#pools tr').length === 3");
    page.until("document.getElementById('events').innerText.includes('<img src=x>')");
    let made = page.eval("document.querySelectorAll('#events img').length");
    assert_eq!(made, 0, "what a caller wrote became markup");
    assert_eq!(page.eval("document.getElementById('draw').hidden"), false);
}

/// A long request stays on the page, with its step and its preview, until it is stopped.
fn stops_what_it_draws(page: &mut Browser) {
    fill(page, 200);
    page.until("document.querySelectorAll('#running tr').length === 1");
    page.until("document.querySelector('#running progress').value > 0");
    page.until("document.querySelector('#running img')?.naturalWidth > 0");
    page.until("document.getElementById('picture').dataset.kind === 'preview'");
    page.eval("document.getElementById('stop').click(); true");
    page.until("document.getElementById('said').textContent === 'stopped'");
    page.until("document.querySelectorAll('#running tr').length === 0");
    page.until("document.getElementById('ended').innerText.includes('cancelled')");
}

/// A short request ends in a picture; a bad one is told where the person looks.
fn draws(page: &mut Browser) {
    fill(page, 4);
    page.until("document.getElementById('said').textContent.startsWith('done')");
    let kind = page.eval("document.getElementById('picture').dataset.kind");
    assert_eq!(kind, "image");
    page.until("document.getElementById('picture').naturalWidth > 0");
    page.until("document.getElementById('ended').innerText.includes('done')");
    page.eval("document.getElementById('size').value = '7x'; true");
    fill(page, 4);
    page.until("document.getElementById('said').textContent.includes('size')");
}

/// Nothing was complained of, and whoever could put a script into the page would not see it run.
fn is_guarded(page: &mut Browser) {
    let complaints = page.complaints();
    let mut unexpected = complaints.iter().filter(|said| !said.contains("400"));
    assert_eq!(unexpected.next(), None);
    page.eval(
        "const s = document.createElement('script'); s.textContent = 'window.broken = true';
         document.body.append(s); true",
    );
    assert_eq!(page.eval("window.broken === undefined"), true);
}

/// Fills the box and presses its button.
fn fill(page: &mut Browser, steps: u32) {
    page.eval(&format!(
        "document.getElementById('prompt').value = 'a red circle on a white background';
         document.getElementById('steps').value = {steps};
         document.getElementById('seed').value = 7;
         document.getElementById('go').click(); true"
    ));
}
