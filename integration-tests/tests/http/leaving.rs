//! A client that goes away takes its request with it.
use std::time::Duration;

use integration_tests::{
    cluster::{Up, bounded},
    web,
};
use proto::v1::{CancelRequest, Role};
use serde_json::json;

use crate::{IMAGES, wish, with};

/// Requests inside the worker.
async fn inside(up: &Up) -> u32 {
    let members = up.members().await;
    let worker = members
        .iter()
        .find(|m| m.role() == Role::DitWorker)
        .unwrap();
    let load = worker.load.unwrap_or_default();
    load.running + load.queued
}

async fn until(up: &Up, what: &str, right: impl Fn(u32) -> bool) {
    let wait = async {
        while !right(inside(up).await) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(waited.is_ok(), "the worker never becomes {what}");
}

#[tokio::test]
async fn a_disconnect_frees_the_worker_whether_the_answer_was_streamed_or_not() {
    let up = Up::start("shm");
    for stream in [false, true] {
        let body = with(
            wish("abandoned"),
            json!({ "steps": 200, "n": 3, "stream": stream }),
        );
        let request = web::post(IMAGES, "application/json", body.to_string());
        let answer = web::open(up.http(), request);
        if stream {
            let answer = answer.await;
            until(&up, "busy", |inside| inside > 0).await;
            drop(answer);
        } else {
            tokio::select! {
                answer = answer => panic!("answered already: {answer:?}"),
                () = until(&up, "busy", |inside| inside > 0) => {}
            }
        }
        until(&up, "idle", |inside| inside == 0).await;
    }
}

#[tokio::test]
async fn a_request_that_is_cancelled_elsewhere_ends_as_such() {
    let up = Up::start("shm");
    let body = with(wish("cancelled"), json!({ "steps": 200 }));
    let mut request = web::post(IMAGES, "application/json", body.to_string());
    request
        .headers_mut()
        .insert("x-request-id", "mine".parse().unwrap());
    let cancel = async {
        until(&up, "busy", |inside| inside > 0).await;
        let request_id = "mine".to_owned();
        let cancelled = up.client().cancel(CancelRequest { request_id }).await;
        assert!(cancelled.unwrap().into_inner().cancelled);
    };
    let both = Box::pin(async { tokio::join!(web::send(up.http(), request), cancel) });
    let (answer, ()) = bounded(both).await;
    assert_eq!(answer.status.as_u16(), 499, "{}", answer.text);
    assert_eq!(answer.headers["x-request-id"], "mine");
    assert_eq!(answer.error()["code"], "cancelled");
}
