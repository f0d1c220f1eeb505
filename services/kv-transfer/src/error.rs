use std::time::Duration;

use base::{Code, Failure, Fault};

use fabric::UcxError;

/// Why bytes did not get from a producer to a consumer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// A setting or an argument is outside its bounds.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the setting or argument.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A manifest is not consistent, or a payload does not match it.
    #[error("manifest: {0}")]
    Manifest(kv::KvError),
    /// The sealed prefix is not the one the receiver expects.
    #[error("prefix mismatch: {0}")]
    Mismatch(kv::KvError),
    /// Bytes stayed damaged after every allowed read.
    #[error("{chunks} of the chunks still fail their checksum after {reads} reads: {first}")]
    DataLoss {
        /// Damaged chunks.
        chunks: usize,
        /// Reads that were made of each.
        reads: usize,
        /// What is wrong with the first.
        first: kv::KvError,
    },
    /// The pool has no room now.
    #[error("the pool has no room for {bytes} bytes now")]
    PoolFull {
        /// Bytes that were asked for.
        bytes: u64,
        /// When the next lease ends.
        retry_after: Duration,
    },
    /// A named bound on slots, leases or queued transfers is reached.
    #[error("too many {what}, the limit is {limit}")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// The bound.
        limit: usize,
    },
    /// No live slot has this number.
    #[error("slot {slot} is not in use")]
    UnknownSlot {
        /// Number of the slot.
        slot: u64,
    },
    /// The slot was recycled since the caller heard of it.
    #[error("slot {slot} has generation {current}, the caller names {named}")]
    StaleGeneration {
        /// Number of the slot.
        slot: u64,
        /// Generation that lives there now.
        current: u64,
        /// Generation the caller named.
        named: u64,
    },
    /// The lease ended, or never existed.
    #[error("slot {slot} has no lease {lease}")]
    UnknownLease {
        /// Number of the slot.
        slot: u64,
        /// The lease that was named.
        lease: u64,
    },
    /// The slot is not in the state the call needs.
    #[error("slot {slot} is {state}")]
    WrongState {
        /// Number of the slot.
        slot: u64,
        /// The state it is in.
        state: &'static str,
    },
    /// A pull token is missing, used up, or not for this caller. Tokens themselves are never shown.
    #[error("the pull token {why}")]
    Token {
        /// What is wrong with it.
        why: &'static str,
    },
    /// The caller decided on a view of the cluster that is older than what the slot has seen.
    #[error("epoch {got} is older than epoch {newest}, which the slot has seen")]
    StaleEpoch {
        /// The caller's epoch.
        got: u64,
        /// The newest one.
        newest: u64,
    },
    /// Whoever wrote the slot went away before it was complete.
    #[error("slot {slot} was given up by its producer")]
    ProducerLost {
        /// Number of the slot.
        slot: u64,
    },
    /// No way that this process may take leads to the pool.
    #[error("the pool cannot be reached: {why}")]
    NoPath {
        /// What is in the way.
        why: String,
    },
    /// The deadline passed first.
    #[error("deadline exceeded while {what}")]
    Deadline {
        /// What was going on.
        what: &'static str,
    },
    /// The peer went away, or its connection broke.
    #[error("the peer is lost: {0}")]
    PeerLost(UcxError),
    /// UCX refused something that should work.
    #[error("ucx: {0}")]
    Ucx(UcxError),
    /// The UCX thread has stopped.
    #[error("the transfer engine has stopped")]
    Stopped,
    /// The operating system refused something that should work.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The transfer service, or a library of this project, answered with an error.
    #[error("{0}")]
    Remote(Failure),
}

impl TransferError {
    pub(crate) fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            message: message.into(),
        }
    }
}

impl From<UcxError> for TransferError {
    fn from(error: UcxError) -> Self {
        Self::Ucx(error)
    }
}

impl From<fabric::SettingError> for TransferError {
    fn from(error: fabric::SettingError) -> Self {
        Self::invalid(error.field, error.message)
    }
}

impl From<Failure> for TransferError {
    fn from(failure: Failure) -> Self {
        Self::Remote(failure)
    }
}

impl From<tonic::Status> for TransferError {
    fn from(status: tonic::Status) -> Self {
        Self::Remote(proto::status::failure(&status))
    }
}

impl Fault for TransferError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } | Self::Manifest(_) => Code::InvalidArgument,
            Self::Mismatch(_) | Self::WrongState { .. } => Code::FailedPrecondition,
            Self::DataLoss { .. } => Code::DataLoss,
            Self::PoolFull { .. } | Self::TooMany { .. } => Code::ResourceExhausted,
            Self::UnknownSlot { .. } | Self::UnknownLease { .. } => Code::NotFound,
            Self::StaleGeneration { .. } | Self::StaleEpoch { .. } => Code::Aborted,
            Self::Token { .. } => Code::PermissionDenied,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::PeerLost(_) | Self::ProducerLost { .. } | Self::NoPath { .. } | Self::Stopped => {
                Code::Unavailable
            }
            Self::Ucx(_) | Self::Io { .. } => Code::Internal,
            Self::Remote(failure) => failure.code,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            Self::Manifest(error) | Self::Mismatch(error) => Some(error.field()),
            Self::StaleGeneration { .. } => Some("generation"),
            Self::StaleEpoch { .. } => Some("epoch"),
            Self::Token { .. } => Some("pull_token"),
            Self::UnknownSlot { .. } => Some("slot"),
            Self::UnknownLease { .. } => Some("lease"),
            Self::Remote(failure) => failure.field.as_deref(),
            _ => None,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::PoolFull { retry_after, .. } => Some(*retry_after),
            Self::Remote(failure) => failure.retry_after,
            _ => None,
        }
    }
}
