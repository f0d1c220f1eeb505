//! Clients that leave, dawdle or come too late; a router that is full, empty or stopping.
use std::time::Duration;

use proto::v1::get_response::State;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// Bound of a test that waits for one.
const SHORT: Duration = Duration::from_millis(100);

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
