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
    /// Too many pools have a plan.
    #[error("the registry holds its maximum of {0} plans")]
    FullOfPlans(usize),
    /// A plan does not follow the one in force.
    #[error("plan generation {got} of pool {pool:?} does not follow generation {current}")]
    StalePlan {
        /// Pool of the plan.
        pool: String,
        /// Generation that was offered.
        got: u64,
        /// Generation in force; 0: none.
        current: u64,
    },
    /// Others changed the same record again and again.
    #[error("{what} lost against other writers {tries} times")]
    Contended {
        /// What was tried.
        what: &'static str,
        /// How often.
        tries: u32,
    },
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
            Self::Full(_) | Self::FullOfPlans(_) => Code::ResourceExhausted,
            Self::StalePlan { .. } | Self::Contended { .. } => Code::Aborted,
            Self::Remote(failure) => failure.code,
            Self::TimedOut { .. } => Code::Unavailable,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            Self::NoMember(_) | Self::LeaseGone { .. } => Some("member_id"),
            Self::StalePlan { .. } => Some("generation"),
            Self::Remote(failure) => failure.field.as_deref(),
            _ => None,
        }
    }
}
