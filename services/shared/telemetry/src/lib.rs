//! Logs, traces, metric names and values, and the probes of a process. It measures; it decides nothing.
#![forbid(unsafe_code)]

pub mod admin;
pub mod logs;
pub mod metrics;
pub mod names;
pub mod trace;

pub use admin::{Admin, AdminPort, AdminTls, Readiness};
pub use logs::{LogConfig, LogFormat, init};
pub use metrics::Metrics;
pub use trace::{TraceConfig, Traces};

/// Why telemetry could not start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log filter does not parse.
    #[error("log level {level:?} is not a filter such as \"info\" or \"router=debug\": {reason}")]
    Level {
        /// What was given.
        level: String,
        /// What the parser said.
        reason: String,
    },
    /// Logs were initialised before.
    #[error("logs are initialised already")]
    AlreadyInitialised,
    /// The collector is no address.
    #[error("otlp_endpoint must be http://HOST:PORT, got {0:?}")]
    Endpoint(String),
    /// Spans cannot be sent.
    #[error("otlp_endpoint: {0}")]
    Exporter(String),
}

impl base::Fault for TelemetryError {
    fn code(&self) -> base::Code {
        match self {
            Self::Level { .. } | Self::Endpoint(_) | Self::Exporter(_) => {
                base::Code::InvalidArgument
            }
            Self::AlreadyInitialised => base::Code::Internal,
        }
    }
    fn field(&self) -> Option<&str> {
        match self {
            Self::Level { .. } => Some("log_level"),
            Self::Endpoint(_) | Self::Exporter(_) => Some("otlp_endpoint"),
            _ => None,
        }
    }
}
