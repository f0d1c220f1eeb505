//! What can go wrong in a stage, and the one place that maps model errors to [`base::Code`].
use base::{Code, Failure, Fault};
use model::{ErrorKind, ModelError};

/// Errors of a stage process and of the requests it serves.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The model refused or failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A setting is missing or wrong.
    #[error("{field} {message}")]
    Config {
        /// Name of the setting.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A queue is at its bound.
    #[error("the {queue} queue is full ({bound} waiting)")]
    QueueFull {
        /// Which queue.
        queue: &'static str,
        /// Its bound.
        bound: usize,
    },
    /// The computing thread is gone.
    #[error("the {engine} engine has stopped")]
    EngineStopped {
        /// Which engine.
        engine: &'static str,
    },
    /// The computation panicked: a defect of this program.
    #[error("the {engine} engine panicked: {message}")]
    Panicked {
        /// Which engine.
        engine: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The request was decided on a view of the cluster from before this member joined.
    #[error("epoch {got} is older than the epoch {joined} this member joined at")]
    StaleEpoch {
        /// Epoch of the request.
        got: u64,
        /// Epoch of the registration.
        joined: u64,
    },
    /// The request names other weights than those loaded.
    #[error("weights_id {got} is not loaded here, {loaded} is")]
    WrongWeights {
        /// Id of the request.
        got: String,
        /// Id of the model in memory.
        loaded: String,
    },
    /// The stage cannot take work yet, or not any more.
    #[error("this member is not ready: {why}")]
    NotReady {
        /// What it waits for.
        why: &'static str,
    },
    /// The member finishes what it has and takes nothing new.
    #[error("this member is draining and takes no new work")]
    Draining,
    /// The caller has gone away or asked to stop.
    #[error("the request was cancelled")]
    Cancelled,
    /// A result holds values that are no numbers.
    #[error("{what} of this request hold values that are not finite")]
    NotFinite {
        /// Which tensor.
        what: &'static str,
    },
    /// An error of another part, already classified.
    #[error(transparent)]
    Other(#[from] Failure),
}

impl StageError {
    /// A bad setting.
    pub fn config(field: &'static str, message: impl Into<String>) -> Self {
        Self::Config {
            field,
            message: message.into(),
        }
    }

    /// Wraps any classified error of another crate.
    pub fn of(fault: &(impl Fault + ?Sized)) -> Self {
        Self::Other(Failure::of(fault))
    }
}

impl Fault for StageError {
    fn code(&self) -> Code {
        match self {
            Self::Model(error) => model_code(error),
            Self::Config { .. } => Code::InvalidArgument,
            Self::Io { .. } | Self::Panicked { .. } | Self::NotFinite { .. } => Code::Internal,
            Self::QueueFull { .. } => Code::ResourceExhausted,
            Self::EngineStopped { .. } | Self::NotReady { .. } | Self::Draining => {
                Code::Unavailable
            }
            Self::StaleEpoch { .. } => Code::Aborted,
            Self::WrongWeights { .. } => Code::FailedPrecondition,
            Self::Cancelled => Code::Cancelled,
            Self::Other(failure) => failure.code,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Model(error) => match error.kind() {
                ErrorKind::InvalidArgument { field } => Some(field),
                _ => None,
            },
            Self::Config { field, .. } => Some(field),
            Self::Other(failure) => failure.field.as_deref(),
            _ => None,
        }
    }

    fn retry_after(&self) -> Option<std::time::Duration> {
        match self {
            Self::Other(failure) => failure.retry_after,
            _ => None,
        }
    }
}

/// The category of a model error. A bad checkpoint is the operator's input: as an exit code it is
/// that of a bad configuration.
pub fn model_code(error: &ModelError) -> Code {
    match error.kind() {
        ErrorKind::InvalidArgument { .. } | ErrorKind::Checkpoint => Code::InvalidArgument,
        ErrorKind::Unimplemented => Code::Unimplemented,
        ErrorKind::Exhausted => Code::ResourceExhausted,
        ErrorKind::Internal => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_input_is_the_callers_and_names_the_field() {
        let error = StageError::from(ModelError::invalid("prompt", "is too long"));
        assert_eq!(error.code(), Code::InvalidArgument);
        assert_eq!(error.field(), Some("prompt"));
        assert!(error.message().contains("prompt"));
    }

    #[test]
    fn a_defect_is_never_the_callers() {
        let error = StageError::from(ModelError::Internal("shape".to_owned()));
        assert_eq!(error.code(), Code::Internal);
        assert_eq!(error.field(), None);
    }

    #[test]
    fn a_bad_checkpoint_exits_like_a_bad_configuration() {
        let error = StageError::from(ModelError::tensor("model.wte.weight", "shape"));
        assert_eq!(error.code().exit_code(), base::code::EXIT_CONFIG);
        assert!(error.message().contains("model.wte.weight"));
    }

    #[test]
    fn foreign_failures_keep_code_field_and_hint() {
        let failure =
            Failure::invalid("size", "bad").with_retry_after(std::time::Duration::from_secs(1));
        let error = StageError::of(&failure);
        assert_eq!(Failure::of(&error), failure);
    }
}
