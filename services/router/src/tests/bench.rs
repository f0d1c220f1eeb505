//! Figures of `services/router/BENCH.md`, by hand and in a release build:
//! `cargo test --release -p router --lib bench:: -- --ignored --nocapture --test-threads 1`.
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use base::{clock, task::Tracker};
use proto::v1::{
    GenerateRequest, generate_response::Event, image_service_client::ImageServiceClient,
};
use registry::Role;

use super::{
    Cluster, accepted, collect,
    fake::{self, Script},
    request,
};
use crate::admission::Limits;

/// Requests a second of the latency figure.
const RATE: u64 = 500;
/// Resident pages of this process, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.and_then(|text| text.parse().ok()).unwrap()
}

async fn cluster() -> (Cluster, Vec<fake::Stage>) {
    let limits = Limits {
        max_running: 512,
        max_queued: 4_096,
        ..Limits::default()
    };
    let cluster = Cluster::with(limits).await;
    cluster.pool.forget();
    let stages = vec![
        fake::join(&cluster, Role::ArStage, "ar", &Script::new([])).await,
        fake::join(&cluster, Role::DitWorker, "dit", &Script::new([])).await,
    ];
    cluster.members(2).await;
    (cluster, stages)
}

/// One step, one image, one row.
fn small() -> GenerateRequest {
    GenerateRequest {
        steps: Some(1),
        guidance: Some(0.0),
        request_id: String::new(),
        ..request("")
    }
}

/// Milliseconds at a share of sorted samples.
fn at(sorted: &[f64], share: f64) -> f64 {
    let place = (sorted.len() as f64 * share).ceil() as usize;
    sorted[place.clamp(1, sorted.len()) - 1]
}

/// Whole requests through the router, with stages that answer at once, and what the same calls to the stages and to the
/// pool take without it: the difference is the router's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn latency_at_five_hundred_requests_a_second() {
    let (cluster, _stages) = cluster().await;
    let seconds = 20;
    let (tasks, mut samples) = (Tracker::new(), Vec::new());
    let mut ticks = tokio::time::interval(Duration::from_micros(1_000_000 / RATE));
    let mut running = Vec::new();
    for _ in 0..RATE * seconds {
        ticks.tick().await;
        let mut client: ImageServiceClient<_> = cluster.client.clone();
        running.push(tasks.spawn(async move {
            let began = clock::now();
            let stream = client.generate(small()).await.unwrap().into_inner();
            let (events, error) = collect(stream).await;
            assert!(error.is_none(), "{error:?}");
            let Some(Event::Done(done)) = events.last() else {
                panic!("{events:?}");
            };
            let told = done.timings.as_ref().unwrap().total_ms;
            let _ = accepted(&events);
            (clock::millis_since(began), told)
        }));
    }
    for one in running {
        samples.push(one.await.unwrap());
    }
    let column = |of: fn(&(f64, f64)) -> f64| {
        let mut column: Vec<f64> = samples.iter().map(of).collect();
        column.sort_by(f64::total_cmp);
        column
    };
    let (client, router) = (column(|s| s.0), column(|s| s.1));
    println!(
        "{} requests at {RATE}/s: client p50 {:.2} p99 {:.2} ms; within the router, stages' calls included, p50 {:.2} p99 {:.2} ms",
        samples.len(),
        at(&client, 0.5),
        at(&client, 0.99),
        at(&router, 0.5),
        at(&router, 0.99),
    );
}

/// `OMNI_BENCH_REQUESTS` of them, a million unless it says otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn memory_over_a_million_requests() {
    let (cluster, _stages) = cluster().await;
    let asked = std::env::var("OMNI_BENCH_REQUESTS").ok();
    let count: usize = asked.map_or(1_000_000, |text| text.parse().unwrap());
    let (done, tasks) = (Arc::new(AtomicUsize::new(0)), Tracker::new());
    for _ in 0..64 {
        let (done, mut client) = (done.clone(), cluster.client.clone());
        tasks.spawn(async move {
            while done.fetch_add(1, Ordering::Relaxed) < count {
                let stream = client.generate(small()).await.unwrap().into_inner();
                let (_, error) = collect(stream).await;
                assert!(error.is_none(), "{error:?}");
            }
        });
    }
    let began = clock::now();
    let mut told = 0;
    while !tasks.is_empty() {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = done.load(Ordering::Relaxed).min(count);
        if now * 10 / count > told {
            told = now * 10 / count;
            let rate = now as f64 / (clock::millis_since(began) / 1e3);
            println!(
                "{now} requests: {} MiB resident, {rate:.0} requests/s",
                resident() / 1024
            );
        }
    }
}
