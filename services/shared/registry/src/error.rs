//! What can go wrong with a registry.
use base::{Code, Failure, Fault};

/// Error of every registry call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// A record or a bound does not fit.
    #[error("{field} {reason}")]
    Invalid {
        /// Field of the record.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The lease has expired or was replaced: register again.
    #[error("member {member_id:?} holds no lease {lease}")]
    LeaseGone {
        /// Who asked.
        member_id: String,
        /// Lease it named.
        lease: u64,
    },
    /// No such member.
    #[error("no member {0:?}")]
    NoMember(String),
    /// The table is full.
    #[error("the registry holds its maximum of {0} members")]
    Full(usize),
    /// The backend does not exist in this version.
    #[error("the etcd registry is not built in this version")]
    Unimplemented,
    /// The registry could not be reached or answered an error of its own.
    #[error("registry: {0}")]
    Remote(Failure),
    /// The registry did not answer in time.
    #[error("no answer from the registry within {tried:?}: {last}")]
    TimedOut {
        /// How long it was tried.
        tried: std::time::Duration,
        /// Error of the last try.
        last: String,
    },
}

impl Fault for RegistryError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::LeaseGone { .. } | Self::NoMember(_) => Code::NotFound,
            Self::Full(_) => Code::ResourceExhausted,
            Self::Unimplemented => Code::Unimplemented,
            Self::Remote(failure) => failure.code,
            Self::TimedOut { .. } => Code::Unavailable,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            Self::NoMember(_) | Self::LeaseGone { .. } => Some("member_id"),
            Self::Remote(failure) => failure.field.as_deref(),
            _ => None,
        }
    }
}
