use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::clock::Clock;
use kv::Manifest;
use proto::v1;
use telemetry::{Metrics, names};
use tonic::service::RoutesBuilder;

use super::slots::SlotTable;
use crate::engine::{Engine, EngineConfig, Remote, Transport};
use crate::{PoolMemory, TransferError, limits};

/// What a node service holds and how it treats it.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// Transports that peers may come over.
    pub engine: EngineConfig,
    /// Bytes of the registered pool, allocated once at the start.
    pub pool_bytes: u64,
    /// Bytes that one checksum covers.
    pub chunk_bytes: usize,
    /// Whether a seal is refused unless the pool holds what the manifest says. Costs one pass over
    /// the payload; consumers check in any case.
    pub verify_on_seal: bool,
    /// How long the memory of an expired slot rests before it is given out again.
    pub quarantine: Duration,
}

impl ServiceConfig {
    /// The defaults for a pool of `pool_bytes` bytes.
    #[must_use]
    pub fn new(engine: EngineConfig, pool_bytes: u64) -> Self {
        Self {
            engine,
            pool_bytes,
            chunk_bytes: limits::DEFAULT_CHUNK_BYTES,
            verify_on_seal: true,
            quarantine: limits::QUARANTINE,
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
    memory: Arc<PoolMemory>,
    whole: Remote,
    pub(super) chunk_bytes: usize,
    verify_on_seal: bool,
    transports: Vec<Transport>,
    /// gRPC address that handles name.
    pub(super) advertise: String,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    // Last, so that the memory goes before the thread that serves it.
    _engine: Engine,
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
        let bytes = usize::try_from(config.pool_bytes)
            .map_err(|_| TransferError::invalid("pool_bytes", "does not fit this machine"))?;
        let engine = Engine::start(&config.engine)?;
        let memory = Arc::new(engine.allocate(bytes)?);
        let whole = engine.export(&memory)?;
        // Random high bits: a restarted service never repeats a generation of its former life.
        let first = (base::rng::Source::from_os().next_u64() >> 32) << 24 | 1;
        let table = Mutex::new(SlotTable::new(config.pool_bytes, first, config.quarantine));
        let node = Node {
            table,
            memory,
            whole,
            chunk_bytes: config.chunk_bytes,
            verify_on_seal: config.verify_on_seal,
            transports: config.engine.transports.clone(),
            advertise: advertise.to_owned(),
            clock,
            metrics,
            _engine: engine,
        };
        Ok(Self {
            node: Arc::new(node),
        })
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
        let freed = node.table().reap(node.now());
        if freed > 0 {
            tracing::info!(slots = freed, "freed slots whose leases ran out");
        }
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

    /// What a peer needs to reach `[offset, offset + bytes)` of the pool.
    pub(super) fn region(&self, offset: u64, bytes: u64) -> Remote {
        self.whole.part(offset, bytes)
    }

    /// Checks that the pool holds at `offset` what `manifest` says, off the async threads.
    pub(super) async fn verify(
        &self,
        offset: u64,
        manifest: Manifest,
    ) -> Result<Manifest, TransferError> {
        if !self.verify_on_seal {
            return Ok(manifest);
        }
        let memory = Arc::clone(&self.memory);
        let check = move || verify(&memory, offset, &manifest).map(|()| manifest);
        let checked = tokio::task::spawn_blocking(check)
            .await
            .map_err(|_| TransferError::Stopped)?;
        if checked.is_err() {
            self.metrics.count(&names::TRANSFER_VERIFY, &["digest"]);
        }
        checked
    }

    fn report(&self) {
        let (used, capacity, leases) = {
            let table = self.table();
            (table.used(), table.capacity(), table.leases())
        };
        // Gauges are for people: a rounded number serves them.
        self.metrics
            .set(&names::TRANSFER_POOL, &["used"], used as f64);
        self.metrics
            .set(&names::TRANSFER_POOL, &["free"], (capacity - used) as f64);
        self.metrics
            .set(&names::TRANSFER_LEASES, &["live"], leases as f64);
    }
}

/// Checks one slot chunk by chunk through a small buffer: a peer may still write to the pool, so
/// its memory is never looked at in place.
fn verify(memory: &PoolMemory, offset: u64, manifest: &Manifest) -> Result<(), TransferError> {
    let outside = || TransferError::invalid("bytes", "the slot reaches past the pool");
    let offset = usize::try_from(offset).map_err(|_| outside())?;
    let bytes = usize::try_from(manifest.bytes).map_err(|_| outside())?;
    let mut block = vec![0; limits::VERIFY_BLOCK_BYTES];
    for index in 0..manifest.crcs.len() {
        let chunk = kv::chunk_range(index, bytes, manifest.chunk_bytes);
        let mut crc = 0;
        for start in chunk.clone().step_by(limits::VERIFY_BLOCK_BYTES) {
            let len = (chunk.end - start).min(limits::VERIFY_BLOCK_BYTES);
            let block = &mut block[..len];
            if !memory.read(offset + start, block) {
                return Err(outside());
            }
            crc = crc32c::crc32c_append(crc, block);
        }
        manifest
            .verify_chunk_crc(index, crc)
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
        let cases = [
            (
                "pool_bytes",
                ServiceConfig {
                    pool_bytes: 0,
                    ..good.clone()
                },
            ),
            (
                "pool_bytes",
                ServiceConfig {
                    pool_bytes: u64::MAX,
                    ..good.clone()
                },
            ),
            (
                "chunk_bytes",
                ServiceConfig {
                    chunk_bytes: 0,
                    ..good.clone()
                },
            ),
            (
                "quarantine",
                ServiceConfig {
                    quarantine: limits::DRAIN_GRACE,
                    ..good.clone()
                },
            ),
        ];
        for (field, config) in cases {
            assert_eq!(config.validate().unwrap_err().field(), Some(field));
        }
        let metrics = Metrics::new(&base::build::BuildInfo::default());
        let error = Service::start(&good, "nonsense", base::clock::system(), metrics).unwrap_err();
        assert_eq!(error.field(), Some("advertise"));
    }
}
