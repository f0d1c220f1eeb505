//! What requests leave behind in the pool of prefixes: nothing, well before any lease runs out.
use std::time::Duration;

use base::Code;
use proto::v1::{
    CancelRequest, GenerateRequest, ListSlotsRequest, Role,
    kv_transfer_service_client::KvTransferServiceClient,
};
use tonic::{Request, transport::Channel};

use crate::harness::{Up, bounded, first_step, generate, request};

/// By then a released prefix is gone. A lease that nobody releases lives longer: 15 s after the
/// router's last renewal, 30 s before its first.
const RELEASED: Duration = Duration::from_secs(10);
/// Enough for a request that outlasts a test, and less than it takes until a worker that stands still is given up.
const LATE: Duration = Duration::from_secs(5);

async fn pool(up: &Up) -> KvTransferServiceClient<Channel> {
    let members = up.members().await;
    let mut nodes = members.iter().filter(|m| m.role() == Role::KvTransfer);
    KvTransferServiceClient::new(proto::channel::lazy(&nodes.next().unwrap().endpoint).unwrap())
}

async fn used(pool: &mut KvTransferServiceClient<Channel>) -> u64 {
    let list = bounded(pool.list(ListSlotsRequest {})).await.unwrap();
    list.into_inner().used_bytes
}

/// Waits until nothing is used any more.
async fn emptied(pool: &mut KvTransferServiceClient<Channel>, after: &str) {
    let empty = async {
        while used(pool).await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let emptied = tokio::time::timeout(RELEASED, empty).await;
    assert!(emptied.is_ok(), "after {after}, prefixes are left");
}

/// What `omnictl kv` with these arguments prints, as JSON.
async fn omnictl_kv(up: &Up, arguments: &[&str]) -> serde_json::Value {
    let omnictl = integration_tests::binary("omnictl").unwrap();
    let output = tokio::process::Command::new(omnictl)
        .args(["--endpoint", up.endpoint(), "kv"])
        .args(arguments)
        .output();
    let output = bounded(output).await.unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaint}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn omnictl_shows_the_prefixes_of_a_running_request_and_times_leases() {
    let up = Up::start("shm");
    let mut client = up.client();
    let stream = bounded(client.generate(long("watched"))).await;
    let mut stream = stream.unwrap().into_inner();
    let request_id = first_step(&mut stream).await;
    let pools = omnictl_kv(&up, &["ls", "-o", "json"]).await;
    let slots = pools[0]["slots"].as_array().unwrap();
    assert!(!slots.is_empty(), "{pools}");
    for slot in slots {
        assert_eq!(slot["request_id"], request_id.as_str());
        assert_eq!(slot["state"], "sealed");
        let number = slot["slot"].to_string();
        let one = omnictl_kv(&up, &["describe", &number, "-o", "json"]).await;
        assert_eq!(one["identity"], slot["identity"]);
    }
    let timed = omnictl_kv(&up, &["bench", "--rounds", "20"]).await;
    assert!(timed["median_ms"].as_f64().unwrap() > 0.0, "{timed}");
}

/// A request that outlasts everything a test does to it.
fn long(prompt: &str) -> GenerateRequest {
    GenerateRequest {
        steps: Some(200),
        ..request(prompt)
    }
}

/// Reads a stream to its error.
async fn ended(mut stream: tonic::Streaming<proto::v1::GenerateResponse>) -> Code {
    loop {
        match bounded(stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the request ended well"),
            Err(status) => return proto::status::failure(&status).code,
        }
    }
}

#[tokio::test]
async fn finished_cancelled_abandoned_and_late_requests_leave_the_pool_empty() {
    let up = Up::start("shm");
    let mut pool = pool(&up).await;
    let mut client = up.client();
    generate(&up, request("finished")).await.unwrap();
    emptied(&mut pool, "a finished request").await;

    let stream = bounded(client.generate(long("cancelled"))).await;
    let mut stream = stream.unwrap().into_inner();
    let request_id = first_step(&mut stream).await;
    assert!(used(&mut pool).await > 0, "a running request has a prefix");
    bounded(client.cancel(CancelRequest { request_id }))
        .await
        .unwrap();
    assert_eq!(ended(stream).await, Code::Cancelled);
    emptied(&mut pool, "a cancelled request").await;

    let stream = bounded(client.generate(long("abandoned"))).await;
    let mut stream = stream.unwrap().into_inner();
    first_step(&mut stream).await;
    drop(stream);
    emptied(&mut pool, "an abandoned request").await;

    // What is clearly too late is refused at once, so this one has the time, and its worker stands still.
    let mut late = Request::new(long("late"));
    late.set_timeout(LATE);
    let mut stream = bounded(client.generate(late)).await.unwrap().into_inner();
    first_step(&mut stream).await;
    up.stand_still("dit-worker");
    assert_eq!(ended(stream).await, Code::DeadlineExceeded);
    up.go_on("dit-worker");
    emptied(&mut pool, "a request out of time").await;
}
