//! A node service in a process of its own, and prefixes to move through it.
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use base::Deadline;
use kv::{KvDType, KvGeometry, Manifest, PrefixIdentity};
use kv_transfer::engine::{EngineConfig, Remote, Transport};
use kv_transfer::{
    Access, ClientConfig, Fetched, KvClient, PublishRequest, Reach, Sums, TransferError,
};
use proto::v1;
use proto::v1::kv_transfer_service_client::KvTransferServiceClient;
use tonic::transport::Channel;

pub(crate) const TRANSPORTS: [Transport; 2] = [Transport::Shm, Transport::Tcp];
pub(crate) const MIB: u64 = 1 << 20;
/// Bytes that one checksum covers in these tests.
pub(crate) const CHUNK: usize = 64 << 10;
/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process that dies with its handle.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// First line that it printed.
    pub(crate) line: String,
}

impl Process {
    /// Starts `kv-probe` and waits for its first line.
    pub(crate) fn probe(args: &[String]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kv-probe"))
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(!line.is_empty(), "kv-probe {args:?} ended without a word");
        Self {
            child,
            line: line.trim().to_owned(),
        }
    }

    /// Sends a signal by name, for example STOP.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill")
            .args(["-s", name, &pid])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A node service in another process.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) process: Process,
    pub(crate) endpoint: String,
}

impl Node {
    pub(crate) fn start(transport: Transport, pool_bytes: u64) -> Self {
        Self::start_with(&transport.to_string(), pool_bytes, &[])
    }

    pub(crate) fn start_with(transports: &str, pool_bytes: u64, more: &[String]) -> Self {
        let mut args = vec![
            "serve".to_owned(),
            format!("--transport={transports}"),
            format!("--pool-bytes={pool_bytes}"),
            format!("--chunk-bytes={CHUNK}"),
            "--quarantine-ms=1500".to_owned(),
        ];
        args.extend_from_slice(more);
        let process = Process::probe(&args);
        let endpoint = process.line.clone();
        Self { process, endpoint }
    }

    pub(crate) fn stub(&self) -> KvTransferServiceClient<Channel> {
        KvTransferServiceClient::new(proto::channel::lazy(&self.endpoint).unwrap())
    }

    pub(crate) async fn list(&self) -> v1::ListSlotsResponse {
        self.stub()
            .list(v1::ListSlotsRequest {})
            .await
            .unwrap()
            .into_inner()
    }

    /// Waits until the whole pool can be given out again.
    pub(crate) async fn wait_until_empty(&self) {
        let empty = async {
            while self.list().await.used_bytes > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, empty)
            .await
            .expect("the pool was not reclaimed");
    }
}

/// What a service says that does not start.
pub(crate) fn refused_probe(transports: &str, more: &[String]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kv-probe"))
        .args([
            "serve",
            &format!("--transport={transports}"),
            "--pool-bytes=1048576",
        ])
        .args(more)
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn client(transport: Transport) -> KvClient {
    KvClient::new(ClientConfig::only(transport)).unwrap()
}

/// A client whose leases are short.
pub(crate) fn hasty_client(transport: Transport, ttl: Duration) -> KvClient {
    KvClient::new(ClientConfig {
        ttl,
        ..ClientConfig::only(transport)
    })
    .unwrap()
}

pub(crate) fn config(transport: Transport) -> EngineConfig {
    EngineConfig::only(transport)
}

/// A geometry of `4 * heads` bytes a token.
pub(crate) fn geometry(heads: usize) -> KvGeometry {
    KvGeometry {
        layers: 1,
        kv_heads: heads,
        head_dim: 1,
        dtype: KvDType::Bf16,
    }
}

/// A prefix of `4 * heads * tokens` bytes.
pub(crate) fn prefix(heads: usize, tokens: usize) -> PublishRequest {
    let bytes = geometry(heads).prefix_bytes(tokens);
    let byte = |i: usize| (i.wrapping_mul(37) ^ (i >> 9)) as u8;
    PublishRequest {
        request_id: "conformance".into(),
        identity: PrefixIdentity([7; 32]),
        geometry: geometry(heads),
        tokens,
        payload: (0..bytes).map(byte).collect(),
    }
}

/// A prefix that was fetched, copied out and checked.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) payload: Vec<u8>,
    pub(crate) fetched: Fetched,
}

pub(crate) async fn fetch(
    client: &KvClient,
    handle: &v1::PrefixHandle,
    geometry: &KvGeometry,
) -> Result<Got, TransferError> {
    let fetched = client
        .fetch(handle, geometry, "conformance", "receiver")
        .await?;
    let payload = fetched.to_vec()?;
    Ok(Got { payload, fetched })
}

/// A way to slots beside the client's, for tests that do by hand what it does.
pub(crate) struct Hand(Reach);

impl Hand {
    pub(crate) fn new(transport: Transport) -> Self {
        Self(Reach::open(&config(transport)).unwrap())
    }

    /// Writes to a reserved slot, whatever is in it.
    pub(crate) async fn write(
        &self,
        reserved: &v1::ReserveResponse,
        at: usize,
        bytes: Arc<Vec<u8>>,
        deadline: Deadline,
    ) -> Result<(), TransferError> {
        let bytes_of_slot = reserved.region.as_ref().map_or(0, |region| region.bytes);
        let size = bytes_of_slot.max((at + bytes.len()) as u64);
        let place = self
            .0
            .place(
                reserved.region.clone(),
                reserved.local.clone(),
                (size, Access::Write),
                deadline,
            )
            .await?;
        // As if what lies in front had been written before.
        let mut sums = Sums::new(usize::MAX, u64::MAX);
        let seen = sums.add(&vec![0; at], |_, _, crc| Ok::<_, TransferError>(crc));
        seen?;
        self.0.write(&place, sums, bytes, deadline).await.map(drop)
    }
}

pub(crate) fn soon() -> Deadline {
    Deadline::after(&base::clock::SystemClock, Duration::from_secs(30))
}

/// Name of the way that must be taken.
pub(crate) fn way(transport: Transport) -> &'static str {
    match transport {
        Transport::Shm => kv_transfer::MAPPED,
        Transport::Tcp => "tcp",
    }
}

/// Reserves a slot, writes `payload` into it, and seals it with what `manifest` makes of it.
pub(crate) async fn seal_by_hand(
    node: &Node,
    hand: &Hand,
    request: &PublishRequest,
    damage: impl FnOnce(&mut v1::PrefixManifest),
) -> Result<(v1::ReserveResponse, v1::SealResponse), tonic::Status> {
    let mut stub = node.stub();
    let bytes = request.payload.len() as u64;
    let reserve = v1::ReserveRequest {
        request_id: "by-hand".into(),
        bytes,
        ttl_ms: 60_000,
        ..Default::default()
    };
    let reserved = stub.reserve(reserve).await?.into_inner();
    let payload = Arc::new(request.payload.clone());
    hand.write(&reserved, 0, payload, soon()).await.unwrap();
    let PublishRequest {
        identity,
        geometry,
        tokens,
        payload,
        ..
    } = request;
    let manifest = Manifest::describe(*identity, *geometry, *tokens, payload, CHUNK).unwrap();
    let mut wire = v1::PrefixManifest {
        identity: manifest.identity.as_bytes().to_vec(),
        geometry: Some(kv_transfer::wire::geometry_to_proto(geometry)),
        tokens: u32::try_from(*tokens).unwrap(),
        bytes,
        chunk_bytes: u32::try_from(CHUNK).unwrap(),
        chunk_crc32c: manifest.crcs,
    };
    damage(&mut wire);
    let seal = v1::SealRequest {
        slot: reserved.slot,
        generation: reserved.generation,
        lease: reserved.lease,
        manifest: Some(wire),
    };
    let sealed = stub.seal(seal).await?.into_inner();
    Ok((reserved, sealed))
}

pub(crate) fn remote(reserved: &v1::ReserveResponse) -> Remote {
    let region = reserved.region.clone().unwrap();
    Remote {
        worker_address: region.worker_address,
        key: region.rkey,
        address: region.address,
        bytes: region.bytes,
    }
}
