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
    DenoiseRequest, GenerateRequest, GrantRequest, PrefillRequest, ReleaseRequest, RenewRequest,
    ar_stage_service_client::ArStageServiceClient,
    dit_worker_service_client::DitWorkerServiceClient, generate_response::Event,
    image_service_client::ImageServiceClient, kv_transfer_service_client::KvTransferServiceClient,
    prefill_response::Event as Prefilled,
};
use registry::{Role, Snapshots};
use tonic::transport::Channel;

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

/// Milliseconds of calls of one kind, sorted, at [`RATE`] for twenty seconds.
async fn at_rate<T, F>(one: impl Fn() -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (tasks, mut running) = (Tracker::new(), Vec::new());
    let mut ticks = tokio::time::interval(Duration::from_micros(1_000_000 / RATE));
    for _ in 0..RATE * 20 {
        ticks.tick().await;
        running.push(tasks.spawn(one()));
    }
    let mut all = Vec::new();
    for one in running {
        all.push(one.await.unwrap());
    }
    all
}

fn sorted(samples: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut samples: Vec<f64> = samples.into_iter().collect();
    samples.sort_by(f64::total_cmp);
    samples
}

/// What a request asks of the stages and the pool, without a router.
#[derive(Clone)]
struct Direct {
    ar: ArStageServiceClient<Channel>,
    dit: DitWorkerServiceClient<Channel>,
    pool: KvTransferServiceClient<Channel>,
}

impl Direct {
    async fn new(cluster: &Cluster) -> Self {
        let snapshots = Snapshots::follow(cluster.registry.clone());
        let known = snapshots
            .wait(super::SOON, |now| now.members.len() > 2)
            .await;
        let members = known.unwrap().members.clone();
        let of = |role: Role| {
            let member = members.values().find(|member| member.role() == role);
            connect(&member.unwrap().endpoint)
        };
        let handle = cluster.pool.publish();
        Self {
            ar: ArStageServiceClient::new(of(Role::ArStage)),
            dit: DitWorkerServiceClient::new(of(Role::DitWorker)),
            pool: KvTransferServiceClient::new(connect(&handle.endpoint)),
        }
    }

    /// The calls in the router's order: the renewal beside the others, the release behind the answer.
    async fn run(mut self) -> f64 {
        let began = clock::now();
        let mut rows = Vec::new();
        let asked = self.ar.prefill(PrefillRequest::default()).await.unwrap();
        let mut stream = asked.into_inner();
        while let Some(message) = stream.message().await.unwrap() {
            if let Some(Prefilled::Done(done)) = message.event {
                rows = done.rows;
            }
        }
        let of = rows[0].prefix.clone().unwrap();
        let (slot, generation, lease) = (of.slot, of.generation, of.lease);
        let mut pool = self.pool.clone();
        let renewal = Tracker::new().spawn(async move {
            let message = RenewRequest {
                slot,
                generation,
                lease,
                ttl_ms: 10_000,
            };
            pool.renew(message).await.unwrap();
        });
        let grant = GrantRequest {
            slot,
            generation,
            lease,
            receiver: "dit".into(),
            ..GrantRequest::default()
        };
        self.pool.grant(grant).await.unwrap();
        let request = DenoiseRequest {
            rows,
            height: 64,
            width: 64,
            steps: 1,
            ..DenoiseRequest::default()
        };
        let asked = self.dit.denoise(request).await.unwrap();
        let mut stream = asked.into_inner();
        while stream.message().await.unwrap().is_some() {}
        let took = clock::millis_since(began);
        renewal.await.unwrap();
        let release = ReleaseRequest {
            slot,
            generation,
            lease,
        };
        self.pool.release(release).await.unwrap();
        took
    }
}

fn connect(endpoint: &str) -> Channel {
    Channel::from_shared(endpoint.to_owned())
        .unwrap()
        .connect_lazy()
}

/// Whole requests through the router, with stages that answer at once, and what the same calls to the stages and to the
/// pool take without it: the difference is the router's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn latency_at_five_hundred_requests_a_second() {
    let (cluster, _stages) = cluster().await;
    let direct = Direct::new(&cluster).await;
    let alone = sorted(at_rate(|| direct.clone().run()).await);
    let samples = at_rate(|| {
        let mut client: ImageServiceClient<_> = cluster.client.clone();
        async move {
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
        }
    })
    .await;
    let client = sorted(samples.iter().map(|sample| sample.0));
    let router = sorted(samples.iter().map(|sample| sample.1));
    println!("{} requests at {RATE}/s, ms:", samples.len());
    for (what, of) in [
        ("the calls without a router", &alone),
        ("within the router", &router),
        ("as the client sees it", &client),
    ] {
        println!("{what}: p50 {:.2} p99 {:.2}", at(of, 0.5), at(of, 0.99));
    }
    let added = |share| at(&router, share) - at(&alone, share);
    println!("added: p50 {:.2} p99 {:.2}", added(0.5), added(0.99));
}

/// `OMNI_BENCH_REQUESTS` of them, a million unless it says otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn memory_over_a_million_requests() {
    let (cluster, _stages) = cluster().await;
    let asked = std::env::var("OMNI_BENCH_REQUESTS").ok();
    let count: usize = asked.map_or(1_000_000, |text| text.parse().unwrap());
    let (done, tasks) = (Arc::new(AtomicUsize::new(0)), Tracker::new());
    let mut clients = Vec::new();
    for _ in 0..64 {
        let (done, mut client) = (done.clone(), cluster.client.clone());
        clients.push(tasks.spawn(async move {
            while done.fetch_add(1, Ordering::Relaxed) < count {
                let stream = client.generate(small()).await.unwrap().into_inner();
                let (_, error) = collect(stream).await;
                assert!(error.is_none(), "{error:?}");
            }
        }));
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
    for client in clients {
        client.await.expect("a client saw an error");
    }
}
