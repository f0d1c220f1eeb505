//! What ends the process early, and the exit code that says so.
use base::{Code, Failure, Fault, code::EXIT_CONFIG};

/// Errors of the `omni` binary.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OmniError {
    /// A setting is missing or wrong. Exit code 64.
    #[error("{0}")]
    Config(String),
    /// A service ended with a classified error.
    #[error("{0}")]
    Service(#[from] Failure),
    /// A stage ended while it should run. Exit code 1.
    #[error("{role} ended unexpectedly ({status}); the last it said: {last}")]
    ChildDied {
        role: &'static str,
        status: String,
        last: String,
        exit: u8,
    },
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        what: String,
        source: std::io::Error,
    },
}

impl OmniError {
    pub(crate) fn of(fault: &(impl Fault + ?Sized)) -> Self {
        Self::Service(Failure::of(fault))
    }

    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
        }
    }

    /// The process exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) => EXIT_CONFIG,
            Self::Service(failure) => failure.code.exit_code(),
            Self::ChildDied { exit, .. } => *exit,
            Self::Io { .. } => Code::Internal.exit_code(),
        }
    }
}
