//! `omni bench transfer`: how fast prefixes move, with `ucx_perftest` beside it in the same run.
//!
//! One service and its clients run in this process and meet over loopback or through the pool they map.
mod fan;
mod perftest;

use std::path::PathBuf;
use std::time::Duration;

use base::{BuildInfo, Shutdown, clock, task};
use clap::Args;
use kv::{KvDType, KvGeometry, PrefixIdentity};
use kv_transfer::engine::{EngineConfig, Transport};
use kv_transfer::{ClientConfig, Host, KvClient, PublishRequest, ServiceConfig, limits, service};
use serde_json::{Value, json};

use self::perftest::Beside;
use super::{bad, json as print, median};
use crate::error::OmniError;

/// One token of this shape has 64 KiB.
const SHAPE: KvGeometry = KvGeometry {
    layers: 32,
    kv_heads: 8,
    head_dim: 64,
    dtype: KvDType::Bf16,
};
const TOKEN_BYTES: usize = 64 << 10;
/// Largest payload, in MiB.
const MAX_MIB: f64 = 4096.0;
/// Room in the pool beyond one payload.
const SLACK_BYTES: u64 = 16 << 20;
/// Most rounds of one measurement.
const MAX_ROUNDS: usize = 1000;
/// Bound of one publication or fetch.
const DEADLINE: Duration = Duration::from_secs(120);

/// Measure how fast prefixes move; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct TransferArgs {
    /// Payload sizes in MiB, multiples of 0.0625.
    #[arg(long, value_delimiter = ',', default_values_t = [0.0625, 1.0, 16.0, 64.0, 256.0])]
    mib: Vec<f64>,
    /// Transports to measure: shm, tcp.
    #[arg(long, value_delimiter = ',', default_values_t = [Transport::Shm, Transport::Tcp])]
    transport: Vec<Transport>,
    /// Receivers that fetch one prefix at once.
    #[arg(long, default_value_t = 8)]
    fan_out: usize,
    /// Transfers of each size; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The program ucx_perftest, to be run beside each measurement.
    #[arg(long, value_name = "FILE")]
    perftest: Option<PathBuf>,
}

/// Runs the measurement.
pub(crate) fn run(args: &TransferArgs) -> Result<String, OmniError> {
    let legal = |mib: &f64| {
        let tokens = mib * 16.0;
        tokens.fract() == 0.0 && tokens >= 1.0 && *mib <= MAX_MIB
    };
    if args.mib.is_empty() || !args.mib.iter().all(legal) {
        return Err(bad(format!(
            "mib must be multiples of 0.0625 of at most {MAX_MIB}"
        )));
    }
    if !(1..=64).contains(&args.fan_out) || !(1..=MAX_ROUNDS).contains(&args.rounds) {
        return Err(bad(format!(
            "fan_out must lie in [1, 64] and rounds in [1, {MAX_ROUNDS}]"
        )));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| OmniError::io("start the runtime", error))?;
    let measured = runtime.block_on(Box::pin(measure_all(args)));
    runtime.shutdown_timeout(Duration::from_secs(5));
    print(&measured?)
}

async fn measure_all(args: &TransferArgs) -> Result<Value, OmniError> {
    let mut results = vec![];
    for &transport in &args.transport {
        for &mib in &args.mib {
            let tokens = (mib * 16.0) as usize;
            results.push(measure(args, transport, tokens).await?);
        }
    }
    Ok(json!({
        "bench": "transfer",
        "version": crate::cli::version(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "rounds": args.rounds,
        "results": results,
    }))
}

/// A node service in this process and clients of it.
struct Bench {
    endpoint: String,
    transport: Transport,
    tokens: usize,
    producer: KvClient,
    consumer: KvClient,
    _service: task::Owned<()>,
}

impl Bench {
    async fn start(transport: Transport, tokens: usize) -> Result<Self, OmniError> {
        let pool = (tokens * TOKEN_BYTES) as u64 + SLACK_BYTES;
        let config = ServiceConfig::new(EngineConfig::only(transport), pool);
        let listener = proto::server::bind("127.0.0.1:0", "listen").await;
        let listener = listener.map_err(|failure| OmniError::of(&failure))?;
        let address = listener
            .local_addr()
            .map_err(|error| OmniError::io("read the address of a listener", error))?;
        let endpoint = format!("http://{address}");
        let host = Host {
            listener,
            admin: None,
            advertise: endpoint.clone(),
            pool: "bench".to_owned(),
            registry: None,
            metrics: telemetry::Metrics::new(&BuildInfo::default()),
        };
        let service = task::spawn(async move {
            if let Err(error) = service::run(config, host, Shutdown::new()).await {
                tracing::error!(%error, "the service of the measurement ended");
            }
        });
        Ok(Self {
            endpoint,
            transport,
            tokens,
            producer: client(transport)?,
            consumer: client(transport)?,
            _service: service,
        })
    }

    fn bytes(&self) -> usize {
        self.tokens * TOKEN_BYTES
    }

    fn request(&self) -> PublishRequest {
        PublishRequest {
            request_id: "bench".to_owned(),
            identity: PrefixIdentity([1; 32]),
            geometry: SHAPE,
            tokens: self.tokens,
            payload: vec![0x5a; self.bytes()],
        }
    }
}

fn client(transport: Transport) -> Result<KvClient, OmniError> {
    let config = ClientConfig {
        deadline: DEADLINE,
        ttl: DEADLINE,
        ..ClientConfig::only(transport)
    };
    KvClient::new(config).map_err(|error| OmniError::of(&error))
}

/// Milliseconds of the steps of one transfer, medians.
#[derive(Debug, Default)]
struct Steps {
    publish: Vec<f64>,
    fetch: Vec<f64>,
    copy: Vec<f64>,
    checks: Vec<f64>,
}

impl Bench {
    /// Moves the prefix so many times; `out` takes it.
    async fn rounds(
        &self,
        rounds: usize,
        out: &mut [u8],
        mut beside: Option<&mut Beside>,
    ) -> Result<Steps, OmniError> {
        let failed = |error| OmniError::of(&error);
        let mut steps = Steps::default();
        // The first round touches every page for the first time and does not count.
        for round in 0..=rounds {
            let request = self.request();
            let start = clock::now();
            let published = self.producer.publish(&self.endpoint, request).await;
            let published = published.map_err(failed)?;
            let published_ms = clock::millis_since(start);
            // In a cluster the router has the token made while the worker waits for its turn.
            let mut handle = published.handle.clone();
            let bearer = ("bench", "bench", 0);
            handle.pull_token = self
                .producer
                .grant(&handle, bearer, None)
                .await
                .map_err(failed)?;
            let start = clock::now();
            let fetched = self
                .consumer
                .fetch(&handle, &SHAPE, "bench", "bench")
                .await
                .map_err(failed)?;
            let fetched_ms = clock::millis_since(start);
            let start = clock::now();
            fetched.copy_to(out).map_err(failed)?;
            let copied_ms = clock::millis_since(start);
            let checks_ms = fetched.checked.as_secs_f64() * 1e3;
            let released = self.consumer.release(fetched.lease).await;
            released.map_err(failed)?;
            let released = self.producer.release(published.lease).await;
            released.map_err(failed)?;
            if round > 0 {
                steps.publish.push(published_ms);
                steps.fetch.push(fetched_ms);
                steps.copy.push(copied_ms);
                steps.checks.push(checks_ms);
                if let Some(beside) = &mut beside {
                    beside.round().await?;
                }
            }
        }
        Ok(steps)
    }
}

async fn measure(
    args: &TransferArgs,
    transport: Transport,
    tokens: usize,
) -> Result<Value, OmniError> {
    let bench = Bench::start(transport, tokens).await?;
    let bytes = bench.bytes();
    let mut out = vec![1u8; bytes];
    let program = args.perftest.as_deref();
    let mut beside = program.map(|program| Beside::new(program, transport, bytes));
    let steps = bench.rounds(args.rounds, &mut out, beside.as_mut()).await?;
    let start = clock::now();
    drop(kv::chunk_crc32c(
        &out,
        kv::digest_bytes(&SHAPE, tokens, 4 << 20),
    ));
    let digest_ms = clock::millis_since(start);
    let alone = copy_alone(&mut out, args.rounds);
    let (publish, fetch) = (median(&steps.publish), median(&steps.fetch));
    let copy = median(&steps.copy);
    let mut result = json!({
        "transport": transport.to_string(),
        "bytes": bytes,
        "publish_ms": publish,
        "publish_gb_s": rate(bytes, publish),
        // Over shared memory this is the handing over; nothing is copied before copy_ms.
        "fetch_ms": fetch,
        "fetch_gb_s": rate(bytes, fetch),
        // Of what came over the wire, as it comes, most of it beside the transfer.
        "checks_ms": median(&steps.checks),
        "copy_out_ms": copy,
        "copy_out_gb_s": rate(bytes, copy),
        // The same copy by the same number of threads, of other memory, without checks.
        "copy_alone_ms": alone,
        "digest_alone_ms": digest_ms,
        "digest_alone_gb_s": rate(bytes, digest_ms),
        "fan_out": fan::out(&bench, args.fan_out).await?,
        "reshard": fan::reshard(&bench).await?,
        "layers": fan::layers(&bench).await?,
    });
    if let Some(beside) = beside {
        let beside = beside.medians();
        let rates = beside.iter().filter_map(|(_, rate)| *rate);
        let best = rates.fold(0.0, f64::max);
        let ours = match transport {
            Transport::Shm => rate(bytes, copy),
            Transport::Tcp => rate(bytes, fetch),
        };
        result["ucx_perftest_gb_s"] = beside.into_iter().map(|(n, r)| (n, json!(r))).collect();
        result["of_the_better"] = json!((best > 0.0).then_some(ours / best));
    }
    Ok(result)
}

/// Milliseconds of copying so many bytes without checks, over as many threads as a part is split over.
fn copy_alone(out: &mut [u8], rounds: usize) -> f64 {
    let from = vec![2u8; out.len()];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let useful = out.len() / limits::COPY_BYTES_PER_THREAD;
    let threads = useful.min(cores).clamp(1, limits::MAX_COPY_THREADS);
    let each = out.len().div_ceil(threads);
    let times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = clock::now();
            std::thread::scope(|scope| {
                for (to, from) in out.chunks_mut(each).zip(from.chunks(each)) {
                    scope.spawn(|| to.copy_from_slice(from));
                }
            });
            clock::millis_since(start)
        })
        .collect();
    median(&times)
}

/// GB/s. Both conversions lose nothing that a printed figure shows.
fn rate(bytes: usize, ms: f64) -> f64 {
    bytes as f64 / (ms * 1e6)
}
