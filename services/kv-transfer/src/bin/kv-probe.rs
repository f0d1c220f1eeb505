//! Tries a KV-transfer path between two processes: runs a bare node service, holds a prefix, or
//! measures how fast prefixes move.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;
use std::time::Duration;

use base::clock::millis_since;
use base::{Fault as _, Shutdown};
use clap::{Args, Parser, Subcommand};
use kv::{KvDType, KvGeometry, PrefixIdentity};
use kv_transfer::engine::{EngineConfig, Transport};
use kv_transfer::{
    ClientConfig, Description, Host, KvClient, PublishRequest, Published, ServiceConfig,
    TransferError, service,
};
use proto::v1::kv_transfer_service_client::KvTransferServiceClient;
use proto::v1::{self, PrefixHandle};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// How often the service is asked whether it serves yet.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(20);

/// How often a held lease is renewed.
const KEEP_INTERVAL: Duration = Duration::from_millis(200);

/// One token of this shape has 64 KiB.
const GEOMETRY: KvGeometry = KvGeometry {
    layers: 32,
    kv_heads: 8,
    head_dim: 64,
    dtype: KvDType::Bf16,
};

#[derive(Parser)]
#[command(about = "Tries a KV-transfer path between two processes", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a node service without a registry; prints its address once it serves.
    Serve(Serve),
    /// Publish a prefix, print "held", and keep it until killed.
    Hold(Path),
    /// Publish a prefix as far as a phase, print the phase, and stay there until killed.
    Produce(Staged),
    /// Fetch the first prefix as far as a phase, print the phase, and stay there until killed.
    Consume(Staged),
    /// Publish and fetch prefixes and print JSON lines with GB/s.
    Bench(Bench),
}

#[derive(Args)]
struct Wires {
    /// shm or tcp; several may be given.
    #[arg(long, required = true, value_delimiter = ',')]
    transport: Vec<Transport>,
    /// Network devices for tcp, for example lo.
    #[arg(long)]
    net_devices: Option<String>,
}

#[derive(Args)]
struct Serve {
    #[command(flatten)]
    wires: Wires,
    /// gRPC address.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// Size of the registered pool.
    #[arg(long, default_value_t = 256 << 20)]
    pool_bytes: u64,
    /// How long the memory of an expired slot rests.
    #[arg(long, default_value_t = 5000)]
    quarantine_ms: u64,
    /// Bytes that one checksum covers.
    #[arg(long, default_value_t = kv_transfer::limits::DEFAULT_CHUNK_BYTES)]
    chunk_bytes: usize,
    /// Most bytes of prefixes that stay although nobody uses them.
    #[arg(long, default_value_t = 0)]
    cache_bytes: u64,
    /// Slots start at multiples of this many bytes.
    #[arg(long, default_value_t = kv_transfer::limits::MIN_PAGE_BYTES)]
    page_bytes: u64,
    /// Bytes of the largest prefix; what the pool holds when absent.
    #[arg(long)]
    max_prefix_bytes: Option<u64>,
    /// Prefixes that live at once.
    #[arg(long, default_value_t = kv_transfer::limits::MAX_SLOTS)]
    max_slots: usize,
    /// Socket that hands out the pool; an abstract one when absent.
    #[arg(long)]
    pool_socket: Option<std::path::PathBuf>,
}

#[derive(Args)]
struct Path {
    #[command(flatten)]
    wires: Wires,
    /// Address of the node service.
    #[arg(long)]
    endpoint: String,
    /// Tokens of 64 KiB in the prefix.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// Time to live of the leases.
    #[arg(long, default_value_t = 60_000)]
    ttl_ms: u64,
    /// Deadline of one publication or fetch.
    #[arg(long, default_value_t = 30_000)]
    deadline_ms: u64,
}

#[derive(Args)]
struct Staged {
    #[command(flatten)]
    path: Path,
    /// Where to stop.
    #[arg(long)]
    phase: String,
    /// Lease of the producer of the prefix to fetch.
    #[arg(long, default_value_t = 0)]
    lease: u64,
}

#[derive(Args)]
struct Bench {
    #[command(flatten)]
    path: Path,
    /// Prefixes to move.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("kv-probe: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match Cli::parse().command {
            Command::Serve(args) => serve(args).await,
            Command::Hold(args) => hold(args).await,
            Command::Produce(args) => produce(args).await,
            Command::Consume(args) => consume(args).await,
            Command::Bench(args) => bench(args).await,
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv-probe: {error}");
            ExitCode::from(error.code().exit_code())
        }
    }
}

async fn serve(args: Serve) -> Result<(), TransferError> {
    let config = ServiceConfig {
        quarantine: Duration::from_millis(args.quarantine_ms),
        chunk_bytes: args.chunk_bytes,
        cache_bytes: args.cache_bytes,
        page_bytes: args.page_bytes,
        max_prefix_bytes: args.max_prefix_bytes,
        max_slots: args.max_slots,
        pool_socket: args.pool_socket,
        ..ServiceConfig::new(engine(args.wires), args.pool_bytes)
    };
    let listener = proto::server::bind(&args.listen, "listen").await?;
    let address = listener.local_addr().map_err(|source| TransferError::Io {
        what: "read the listen address",
        source,
    })?;
    let host = Host {
        listener,
        admin: None,
        advertise: format!("http://{address}"),
        pool: "probe".into(),
        registry: None,
        metrics: telemetry::Metrics::new(&base::BuildInfo::default()),
    };
    let (shutdown, _signals) = Shutdown::on_signals().map_err(|source| TransferError::Io {
        what: "listen for signals",
        source,
    })?;
    let _announcement = base::task::spawn(announce(host.advertise.clone()));
    service::run(config, host, shutdown).await
}

/// Prints the address once the service says that it serves.
async fn announce(address: String) {
    let Ok(channel) = proto::channel::lazy(&address) else {
        return;
    };
    let mut health = HealthClient::new(channel);
    loop {
        let asked = HealthCheckRequest {
            service: proto::names::KV_TRANSFER.into(),
        };
        match health.check(asked).await {
            Ok(answer) if answer.get_ref().status() == ServingStatus::Serving => break,
            _ => tokio::time::sleep(ANNOUNCE_INTERVAL).await,
        }
    }
    println!("{address}");
}

async fn hold(args: Path) -> Result<(), TransferError> {
    let (client, endpoint) = client(&args)?;
    let held = client.publish(&endpoint, prefix(args.tokens)).await?;
    println!("held slot {}", held.handle.slot);
    std::future::pending::<()>().await;
    drop(held);
    Ok(())
}

/// Says where it is and which lease it has, and stays there if that is where it was told to stop.
async fn reach(phase: &str, args: &Staged, lease: u64) {
    if phase == args.phase {
        println!("{phase} {lease}");
        std::future::pending::<()>().await;
    }
}

async fn produce(args: Staged) -> Result<(), TransferError> {
    let (client, endpoint) = client(&args.path)?;
    let request = prefix(args.path.tokens);
    let description = Description {
        request_id: request.request_id,
        identity: request.identity,
        geometry: request.geometry,
        tokens: request.tokens,
        cache: None,
    };
    let mut publication = client.offer(&endpoint, description).await?;
    let lease = publication.handle().map_or(0, |handle| handle.lease);
    reach("reserved", &args, lease).await;
    // Less than a chunk: nothing of it can be sealed.
    publication.write(request.payload[..1000].to_vec()).await?;
    reach("written", &args, lease).await;
    let half = request.payload.len() / 2;
    publication
        .write(request.payload[1000..half].to_vec())
        .await?;
    reach("part-sealed", &args, lease).await;
    publication.write(request.payload[half..].to_vec()).await?;
    let published = publication.finish().await?;
    let _kept = base::task::spawn(keep(client, published));
    reach("sealed", &args, lease).await;
    Ok(())
}

/// Renews a lease for as long as this process lives.
async fn keep(client: KvClient, published: Published) {
    loop {
        tokio::time::sleep(KEEP_INTERVAL).await;
        if let Err(error) = client.renew(&published.lease).await {
            eprintln!("kv-probe: {error}");
            return;
        }
    }
}

async fn consume(args: Staged) -> Result<(), TransferError> {
    let (client, endpoint) = client(&args.path)?;
    let channel = proto::channel::lazy(&endpoint)?;
    let listed = KvTransferServiceClient::new(channel)
        .list(v1::ListSlotsRequest {})
        .await?
        .into_inner();
    let Some(slot) = listed.slots.first() else {
        return Err(TransferError::UnknownSlot { slot: 0 });
    };
    let handle = PrefixHandle {
        identity: slot.identity.clone(),
        endpoint,
        generation: slot.generation,
        slot: slot.slot,
        tokens: slot.tokens,
        bytes: slot.bytes,
        lease: args.lease,
        pull_token: vec![],
    };
    let fetched = client.fetch(&handle, &GEOMETRY, "probe", "probe").await?;
    reach("pulled", &args, args.lease).await;
    fetched.to_vec()?;
    reach("copied", &args, args.lease).await;
    client.release(fetched.lease).await?;
    reach("acknowledged", &args, args.lease).await;
    Ok(())
}

async fn bench(args: Bench) -> Result<(), TransferError> {
    let (client, endpoint) = client(&args.path)?;
    for round in 0..args.rounds {
        let request = prefix(args.path.tokens);
        let start = base::clock::now();
        let published = client.publish(&endpoint, request).await?;
        let publish_ms = millis_since(start);
        let start = base::clock::now();
        let fetched = client
            .fetch(&published.handle, &GEOMETRY, "bench", "bench")
            .await?;
        let fetch_ms = millis_since(start);
        let bytes = fetched.bytes;
        println!(
            "{{\"round\":{round},\"transport\":\"{}\",\"bytes\":{bytes},\
             \"publish_ms\":{publish_ms:.3},\"publish_gb_s\":{:.3},\
             \"fetch_ms\":{fetch_ms:.3},\"fetch_gb_s\":{:.3}}}",
            fetched.transport,
            rate(bytes, publish_ms),
            rate(bytes, fetch_ms),
        );
        client.release(fetched.lease).await?;
        client.release(published.lease).await?;
    }
    Ok(())
}

fn prefix(tokens: usize) -> PublishRequest {
    PublishRequest {
        request_id: "probe".into(),
        identity: PrefixIdentity([1; 32]),
        geometry: GEOMETRY,
        tokens,
        payload: vec![0x5a; GEOMETRY.prefix_bytes(tokens)],
    }
}

fn client(args: &Path) -> Result<(KvClient, String), TransferError> {
    let wires = Wires {
        transport: args.wires.transport.clone(),
        net_devices: args.wires.net_devices.clone(),
    };
    let config = ClientConfig {
        ttl: Duration::from_millis(args.ttl_ms),
        deadline: Duration::from_millis(args.deadline_ms),
        ..ClientConfig::new(engine(wires))
    };
    Ok((KvClient::new(config)?, args.endpoint.clone()))
}

fn engine(wires: Wires) -> EngineConfig {
    EngineConfig {
        transports: wires.transport,
        net_devices: wires.net_devices,
    }
}

/// GB/s. Both conversions lose nothing that a printed figure shows.
fn rate(bytes: u64, ms: f64) -> f64 {
    bytes as f64 / (ms * 1e6)
}
