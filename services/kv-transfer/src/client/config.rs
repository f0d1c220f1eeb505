use std::time::Duration;

use crate::engine::{EngineConfig, Transport};
use crate::{TransferError, limits, wire};

/// How a client moves prefixes.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Transports that payloads may take.
    pub engine: EngineConfig,
    /// Deadline of one publication or fetch.
    pub deadline: Duration,
    /// Time to live of the leases it takes.
    pub ttl: Duration,
    /// Largest payload that a fetch makes room for, in bytes.
    pub max_payload_bytes: u64,
    /// How long a publication waits in line when the pool is full; not beyond `deadline`.
    pub wait: Duration,
    /// Bytes that one checksum covers where the shape of a prefix suggests none.
    pub chunk_bytes: usize,
    /// The service of this process's own node. Prefixes of other nodes are fetched through it, so that all
    /// receivers of a node read the producer once.
    pub node: Option<String>,
}

impl ClientConfig {
    /// The defaults over one transport.
    #[must_use]
    pub fn only(transport: Transport) -> Self {
        Self::new(EngineConfig::only(transport))
    }

    /// The defaults over given transports.
    #[must_use]
    pub fn new(engine: EngineConfig) -> Self {
        Self {
            engine,
            deadline: limits::DEFAULT_TRANSFER_DEADLINE,
            ttl: limits::DEFAULT_TTL,
            max_payload_bytes: limits::DEFAULT_MAX_PAYLOAD_BYTES,
            wait: Duration::ZERO,
            chunk_bytes: limits::DEFAULT_CHUNK_BYTES,
            node: None,
        }
    }

    pub(super) fn validate(&self) -> Result<(), TransferError> {
        wire::check_ttl("ttl", self.ttl)?;
        if self.deadline.is_zero() || self.deadline > limits::MAX_TRANSFER_DEADLINE {
            let max = limits::MAX_TRANSFER_DEADLINE;
            let message = format!("must lie in (0, {max:?}], got {:?}", self.deadline);
            return Err(TransferError::invalid("deadline", message));
        }
        if self.wait > self.deadline {
            let message = format!("must not be beyond the deadline, got {:?}", self.wait);
            return Err(TransferError::invalid("wait", message));
        }
        self.engine.settings().map(drop)
    }
}
