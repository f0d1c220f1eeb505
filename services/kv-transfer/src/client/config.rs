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
        }
    }

    pub(super) fn validate(&self) -> Result<(), TransferError> {
        wire::check_ttl("ttl", self.ttl)?;
        if self.deadline.is_zero() || self.deadline > limits::MAX_TRANSFER_DEADLINE {
            let max = limits::MAX_TRANSFER_DEADLINE;
            let message = format!("must lie in (0, {max:?}], got {:?}", self.deadline);
            return Err(TransferError::invalid("deadline", message));
        }
        self.engine.settings().map(drop)
    }
}
