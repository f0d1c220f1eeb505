//! What the router answers when it does not answer an image.
use std::time::Duration;

use base::{Code, Failure, Fault};

/// Error of every part of the router.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RouterError {
    /// A field of the request is out of bounds.
    #[error("{field} {reason}")]
    Invalid {
        /// Wire name of the field.
        field: &'static str,
        /// What it must be.
        reason: String,
    },
    /// The named model is not served.
    #[error("model {0:?} is not served here")]
    NoModel(String),
    /// No member of this role can take the request.
    #[error("no {role} is ready")]
    NoStage {
        /// "ar-stage" or "dit-worker".
        role: &'static str,
    },
    /// The queue is full.
    #[error("{waiting} requests are waiting already, retry in {retry_after:?}")]
    Full {
        /// Requests in the queue.
        waiting: usize,
        /// Computed from the work ahead.
        retry_after: Duration,
    },
    /// The tenant has as many requests waiting as it may.
    #[error("{waiting} requests of this tenant are waiting already, retry in {retry_after:?}")]
    Quota {
        /// Its requests in the queue.
        waiting: usize,
        /// Computed from the work that it has here.
        retry_after: Duration,
    },
    /// With the work that is ahead, it would be done after its deadline.
    #[error(
        "deadline is too near for the work ahead: this request would take about {needs:.1?}, retry in {retry_after:.1?}"
    )]
    Late {
        /// From now to its end.
        needs: Duration,
        /// When there may be time for it.
        retry_after: Duration,
    },
    /// Even alone it would be done after its deadline.
    #[error("deadline is too near: this request takes about {0:.1?} by itself")]
    Hopeless(Duration),
    /// A request with this id is running.
    #[error("request {0:?} is running already")]
    Duplicate(String),
    /// No such request, or it is long forgotten.
    #[error("no request {0:?} is known here")]
    NoRequest(String),
    /// Nobody who may ask.
    #[error("{0}")]
    Unauthenticated(&'static str),
    /// A class above what the caller may ask for.
    #[error("priority is above the most urgent class that this API key may ask for")]
    PriorityDenied,
    /// The caller, or somebody else through Cancel, gave up.
    #[error("the request was cancelled")]
    Cancelled,
    /// The deadline passed.
    #[error("the deadline of {0:?} passed before the image was done")]
    DeadlineExceeded(Duration),
    /// The router is going down.
    #[error("this router is shutting down")]
    ShuttingDown,
    /// A stage refused or failed; its own words.
    #[error("{0}")]
    Stage(Failure),
    /// A prefix may be gone from the pool before a worker had fetched it.
    #[error(
        "a prefix of this request was lost before it was fetched (on_prefix_loss is {policy}): {failure}"
    )]
    PrefixLost {
        /// Why.
        failure: Failure,
        /// What the request wants then.
        policy: &'static str,
    },
    /// A prefix could not be brought to a worker.
    #[error(
        "a prefix of this request did not reach its worker (on_prefix_loss is {policy}): {failure}"
    )]
    NotTransferred {
        /// Why.
        failure: Failure,
        /// What the request wants then.
        policy: &'static str,
    },
    /// A prefix that was computed again is not the one that was lost.
    #[error("a prefix of this request was lost, and computed again it is another one")]
    PrefixChanged,
    /// A stage broke the protocol between us.
    #[error("{stage} {reason}")]
    Protocol {
        /// Which stage.
        stage: &'static str,
        /// What it did.
        reason: String,
    },
    /// The router cannot start or go on.
    #[error("{0}")]
    Server(Failure),
}

impl Fault for RouterError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } | Self::Hopeless(_) => Code::InvalidArgument,
            Self::NoModel(_) | Self::NoRequest(_) => Code::NotFound,
            Self::NoStage { .. }
            | Self::ShuttingDown
            | Self::PrefixLost { .. }
            | Self::PrefixChanged => Code::Unavailable,
            Self::Full { .. } | Self::Quota { .. } | Self::Late { .. } => Code::ResourceExhausted,
            Self::Duplicate(_) => Code::AlreadyExists,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::PriorityDenied => Code::PermissionDenied,
            Self::Cancelled => Code::Cancelled,
            Self::DeadlineExceeded(_) => Code::DeadlineExceeded,
            Self::Protocol { .. } => Code::Internal,
            // A lease or a slot that is gone: nothing that the client has named, and another try makes a new one.
            Self::NotTransferred { failure, .. }
                if matches!(failure.code, Code::NotFound | Code::Aborted) =>
            {
                Code::Unavailable
            }
            Self::Stage(failure) | Self::Server(failure) | Self::NotTransferred { failure, .. } => {
                failure.code
            }
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            Self::Hopeless(_) => Some("deadline"),
            Self::NoModel(_) => Some("model"),
            Self::PriorityDenied => Some("priority"),
            Self::Duplicate(_) | Self::NoRequest(_) => Some("request_id"),
            Self::Stage(failure) | Self::Server(failure) => failure.field.as_deref(),
            _ => None,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Full { retry_after, .. }
            | Self::Quota { retry_after, .. }
            | Self::Late { retry_after, .. } => Some(*retry_after),
            Self::Stage(failure) => failure.retry_after,
            _ => None,
        }
    }
}

impl RouterError {
    /// Why a request that was not wrong was turned away, as a metric label.
    pub(crate) fn shed_reason(&self) -> Option<&'static str> {
        match self {
            Self::Full { .. } => Some("queue_full"),
            Self::Quota { .. } => Some("quota"),
            Self::Late { .. } | Self::Hopeless(_) => Some("deadline"),
            Self::NoStage { .. } => Some("no_stage"),
            Self::ShuttingDown => Some("shutting_down"),
            _ => None,
        }
    }

    /// A field out of bounds.
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            reason: reason.into(),
        }
    }
}

impl From<Failure> for RouterError {
    fn from(failure: Failure) -> Self {
        Self::Server(failure)
    }
}

impl From<schedule::ScheduleError> for RouterError {
    fn from(error: schedule::ScheduleError) -> Self {
        Self::invalid(error.field, error.reason)
    }
}

impl From<registry::RegistryError> for RouterError {
    fn from(error: registry::RegistryError) -> Self {
        Self::Server(Failure::of(&error))
    }
}
