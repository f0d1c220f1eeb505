use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::clock::Clock;
use base::task;
use fabric::SharedMemory;
use kv::Manifest;
use proto::v1;
use telemetry::{Metrics, names};
use tokio::sync::watch;
use tonic::service::RoutesBuilder;

use super::line::Line;
use super::relay::Relay;
use super::slots::{Bounds, Grant, SlotTable, Token};
use crate::engine::{Engine, EngineConfig, Remote, Transport};
use crate::local::{Door, POOL_ID_BYTES, PoolId};
use crate::{PoolMemory, TransferError, limits, wire};

/// What a node service holds and how it treats it.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// Transports that peers may come over.
    pub engine: EngineConfig,
    /// Bytes of the registered pool, allocated once at the start.
    pub pool_bytes: u64,
    /// Slots start at multiples of this many bytes, a power of two.
    pub page_bytes: u64,
    /// Bytes of the largest prefix; what the pool holds when absent.
    pub max_prefix_bytes: Option<u64>,
    /// Prefixes that live at once.
    pub max_slots: usize,
    /// Bytes that one checksum covers.
    pub chunk_bytes: usize,
    /// Whether a seal is refused unless the pool holds what the manifest says. Costs one pass over
    /// the payload; consumers check in any case.
    pub verify_on_seal: bool,
    /// How long the memory of an expired slot rests before it is given out again.
    pub quarantine: Duration,
    /// Most bytes of prefixes that stay although nobody uses them; 0: none stays.
    pub cache_bytes: u64,
    /// Where processes of the node get the pool; under an abstract name when absent.
    pub pool_socket: Option<PathBuf>,
}

impl ServiceConfig {
    /// The defaults for a pool of `pool_bytes` bytes.
    #[must_use]
    pub fn new(engine: EngineConfig, pool_bytes: u64) -> Self {
        Self {
            engine,
            pool_bytes,
            page_bytes: limits::MIN_PAGE_BYTES,
            max_prefix_bytes: None,
            max_slots: limits::MAX_SLOTS,
            chunk_bytes: limits::DEFAULT_CHUNK_BYTES,
            verify_on_seal: true,
            quarantine: limits::QUARANTINE,
            cache_bytes: 0,
            pool_socket: None,
        }
    }

    /// Checks every field; nothing is allocated before.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] naming the field.
    pub fn validate(&self) -> Result<(), TransferError> {
        let range = |field, got: u64, min: u64, max: u64| {
            if (min..=max).contains(&got) {
                return Ok(());
            }
            Err(TransferError::invalid(
                field,
                format!("must lie in [{min}, {max}], got {got}"),
            ))
        };
        range(
            "pool_bytes",
            self.pool_bytes,
            limits::MIN_POOL_BYTES,
            limits::MAX_POOL_BYTES,
        )?;
        range("cache_bytes", self.cache_bytes, 0, self.pool_bytes)?;
        let largest = limits::MAX_PAGE_BYTES.min(self.pool_bytes);
        let page = self.page_bytes;
        range("page_bytes", page, limits::MIN_PAGE_BYTES, largest)?;
        if !page.is_power_of_two() {
            let message = format!("must be a power of two, got {page}");
            return Err(TransferError::invalid("page_bytes", message));
        }
        let prefix = self.max_prefix_bytes.unwrap_or(self.pool_bytes);
        range("max_prefix_bytes", prefix, 1, self.pool_bytes)?;
        let slots = self.max_slots as u64;
        range("max_slots", slots, 1, limits::MAX_SLOTS as u64)?;
        let (min, max) = (kv::limits::MIN_CHUNK_BYTES, kv::limits::MAX_CHUNK_BYTES);
        range(
            "chunk_bytes",
            self.chunk_bytes as u64,
            min as u64,
            max as u64,
        )?;
        if self.quarantine < limits::MIN_QUARANTINE || self.quarantine > limits::MAX_TTL {
            let (min, max) = (limits::MIN_QUARANTINE, limits::MAX_TTL);
            let message = format!("must lie in [{min:?}, {max:?}], got {:?}", self.quarantine);
            return Err(TransferError::invalid("quarantine", message));
        }
        self.engine.settings().map(drop)
    }
}

/// A pool and its leases. Clones share both.
#[derive(Debug, Clone)]
pub struct Service {
    pub(super) node: Arc<Node>,
}

#[derive(Debug)]
pub(super) struct Node {
    table: Mutex<SlotTable>,
    /// Counts changes of the table that somebody may wait for.
    changes: watch::Sender<u64>,
    pub(super) line: Line,
    pub(super) relay: Relay,
    pub(super) memory: Arc<SharedMemory>,
    door: Option<Arc<Door>>,
    pool_id: PoolId,
    /// Of pull tokens.
    chance: base::rng::Source,
    remote: Option<RemoteSide>,
    pub(super) chunk_bytes: usize,
    verify_on_seal: bool,
    transports: Vec<Transport>,
    /// gRPC address that handles name.
    pub(super) advertise: String,
    clock: Arc<dyn Clock>,
    pub(super) metrics: Metrics,
}

/// The pool as peers see it that cannot map it.
#[derive(Debug)]
struct RemoteSide {
    whole: Remote,
    // In this order, so that the memory goes before the thread that serves it.
    _memory: PoolMemory,
    _engine: Engine,
}

impl RemoteSide {
    fn open(config: &EngineConfig, memory: &Arc<SharedMemory>) -> Result<Self, TransferError> {
        let engine = Engine::start(config)?;
        let registered = engine.register(memory)?;
        Ok(Self {
            whole: engine.export(&registered)?,
            _memory: registered,
            _engine: engine,
        })
    }
}

impl Service {
    /// Opens the transports and allocates the pool. `advertise` is the gRPC address that handles
    /// will name, `http://HOST:PORT`.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for a bad configuration or a pool that the system cannot give,
    /// [`TransferError::Ucx`] when a transport cannot be opened.
    pub fn start(
        config: &ServiceConfig,
        advertise: &str,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Result<Self, TransferError> {
        config.validate()?;
        proto::channel::endpoint(advertise, "advertise")?;
        let memory = Arc::new(super::pool::allocate(config.pool_bytes)?);
        let random = base::rng::Source::from_os();
        let mut pool_id = [0; POOL_ID_BYTES];
        for word in pool_id.chunks_mut(8) {
            word.copy_from_slice(&random.next_u64().to_le_bytes());
        }
        let engine = &config.engine;
        let door = || Door::open(config.pool_socket.as_deref(), pool_id, &memory).map(Arc::new);
        let door = engine.maps().then(door).transpose()?;
        let remote = |config: EngineConfig| RemoteSide::open(&config, &memory);
        let remote = engine.remote().map(remote).transpose()?;
        // Random high bits: a restarted service never repeats a generation of its former life.
        let first = (random.next_u64() >> 32) << 24 | 1;
        let bounds = Bounds {
            pool: config.pool_bytes,
            page: config.page_bytes,
            prefix: config.max_prefix_bytes.unwrap_or(config.pool_bytes),
            slots: config.max_slots,
            cache: config.cache_bytes,
        };
        let table = Mutex::new(SlotTable::new(bounds, first, config.quarantine));
        let node = Node {
            table,
            changes: watch::Sender::new(0),
            line: Line::default(),
            relay: Relay::new(engine.clone()),
            memory,
            door,
            pool_id,
            chance: random,
            remote,
            chunk_bytes: config.chunk_bytes,
            verify_on_seal: config.verify_on_seal,
            transports: engine.transports.clone(),
            advertise: advertise.to_owned(),
            clock,
            metrics,
        };
        Ok(Self {
            node: Arc::new(node),
        })
    }

    /// Hands the pool to processes of this node for as long as the answer lives; needs a tokio runtime.
    /// Nothing when the transports do not share it.
    #[must_use]
    pub fn share(&self) -> Option<task::Owned<()>> {
        let door = self.node.door.clone()?;
        Some(task::spawn(async move {
            if let Err(error) = door.serve().await {
                tracing::error!(%error, "the pool cannot be mapped any more");
            }
        }))
    }

    /// Adds the gRPC service.
    pub fn mount(&self, routes: &mut RoutesBuilder) {
        let server = v1::kv_transfer_service_server::KvTransferServiceServer::new(self.clone())
            .max_decoding_message_size(base::limits::MAX_REQUEST_BYTES);
        routes.add_service(server);
    }

    /// Transports that peers may come over.
    #[must_use]
    pub fn transports(&self) -> &[Transport] {
        &self.node.transports
    }

    /// Parties at work: see [`SlotTable::at_work`].
    pub(super) fn at_work(&self) -> usize {
        let mut table = self.node.table();
        table.reap(self.node.now());
        table.at_work()
    }

    /// Ends expired leases now; [`run`](super::run) does so every [`limits::REAP_INTERVAL`].
    pub fn reap(&self) {
        let node = &self.node;
        let ended = node.table().reap(node.now());
        if ended > 0 {
            tracing::info!(slots = ended, "the last lease of slots ran out");
        }
        // Rested memory and lost producers are news as well.
        node.changed();
        node.report();
    }
}

impl Node {
    pub(super) fn now(&self) -> std::time::Instant {
        self.clock.now()
    }

    /// The table keeps no promise across calls that a panic could break.
    pub(super) fn table(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody who waits for a change of the table.
    pub(super) fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Resolves at the next change after this call.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// A token that nobody can guess.
    pub(super) fn new_token(&self) -> Token {
        let mut token = [0; limits::TOKEN_BYTES];
        for word in token.chunks_mut(8) {
            word.copy_from_slice(&self.chance.next_u64().to_le_bytes());
        }
        token
    }

    /// What a peer needs to reach a slot.
    pub(super) fn region(&self, grant: &Grant) -> Option<v1::RemoteRegion> {
        let whole = &self.remote.as_ref()?.whole;
        Some(wire::region_to_proto(whole.part(grant.offset, grant.bytes)))
    }

    /// What a process of this node needs to map a slot.
    pub(super) fn local(&self, grant: &Grant) -> Option<v1::LocalRegion> {
        Some(v1::LocalRegion {
            pool_id: self.pool_id.to_vec(),
            socket: self.door.as_ref()?.socket().to_owned(),
            pool_bytes: self.memory.bytes() as u64,
            offset: grant.offset,
        })
    }

    /// Checks that the pool holds at `offset` the chunks `chunks` of what `manifest` says, off the async
    /// threads.
    pub(super) async fn verify(
        &self,
        offset: u64,
        manifest: Manifest,
        chunks: Range<usize>,
    ) -> Result<Manifest, TransferError> {
        if !self.verify_on_seal {
            return Ok(manifest);
        }
        let memory = Arc::clone(&self.memory);
        let check = move || verify(&memory, offset, &manifest, chunks).map(|()| manifest);
        let checked = tokio::task::spawn_blocking(check)
            .await
            .map_err(|_| TransferError::Stopped)?;
        if checked.is_err() {
            self.metrics.count(&names::TRANSFER_VERIFY, &["digest"]);
        }
        checked
    }

    fn report(&self) {
        let (used, capacity, leases, cached) = {
            let table = self.table();
            let (used, capacity) = (table.used(), table.capacity());
            (used, capacity, table.leases(), table.cached())
        };
        // Gauges are for people: a rounded number serves them.
        self.metrics
            .set(&names::TRANSFER_POOL, &["used"], used as f64);
        self.metrics
            .set(&names::TRANSFER_POOL, &["free"], (capacity - used) as f64);
        self.metrics
            .set(&names::TRANSFER_POOL, &["cached"], cached as f64);
        self.metrics
            .set(&names::TRANSFER_LEASES, &["live"], leases as f64);
    }
}

/// Checks chunks of one slot. A peer may still write to the pool; each byte is looked at once.
fn verify(
    memory: &SharedMemory,
    offset: u64,
    manifest: &Manifest,
    chunks: Range<usize>,
) -> Result<(), TransferError> {
    let outside = || TransferError::invalid("bytes", "the slot reaches past the pool");
    let offset = usize::try_from(offset).map_err(|_| outside())?;
    let bytes = usize::try_from(manifest.bytes).map_err(|_| outside())?;
    for index in chunks {
        let chunk = kv::chunk_range(index, bytes, manifest.chunk_bytes);
        let crc = memory.crc32c(offset + chunk.start, chunk.len(), 0);
        manifest
            .verify_chunk_crc(index, crc.ok_or_else(outside)?)
            .map_err(TransferError::Manifest)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Fault as _;

    #[test]
    fn each_bad_setting_is_named_before_anything_is_allocated() {
        let good = ServiceConfig::new(EngineConfig::only(Transport::Shm), 1 << 20);
        good.validate().unwrap();
        type Spoil = fn(&mut ServiceConfig);
        let cases: [(&str, Spoil); 9] = [
            ("pool_bytes", |config| config.pool_bytes = 0),
            ("pool_bytes", |config| config.pool_bytes = u64::MAX),
            ("page_bytes", |config| config.page_bytes = 3 << 12),
            ("page_bytes", |config| config.page_bytes = 2048),
            ("max_prefix_bytes", |config| {
                config.max_prefix_bytes = Some(config.pool_bytes + 1);
            }),
            ("max_slots", |config| config.max_slots = 0),
            ("chunk_bytes", |config| config.chunk_bytes = 0),
            ("cache_bytes", |config| {
                config.cache_bytes = config.pool_bytes + 1;
            }),
            ("quarantine", |config| {
                config.quarantine = limits::DRAIN_GRACE;
            }),
        ];
        for (field, spoil) in cases {
            let mut config = good.clone();
            spoil(&mut config);
            assert_eq!(config.validate().unwrap_err().field(), Some(field));
        }
        let metrics = Metrics::new(&base::build::BuildInfo::default());
        let error = Service::start(&good, "nonsense", base::clock::system(), metrics).unwrap_err();
        assert_eq!(error.field(), Some("advertise"));
    }
}
