//! Structured logs on stderr. Levels: error = a person must act; warn = degraded but serving;
//! info = a state change of the process or a finished request; debug = one line per hop.
use std::io::{IsTerminal as _, stderr};

use tracing_subscriber::{
    EnvFilter, Layer as _, filter::filter_fn, fmt, layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::{
    TelemetryError,
    trace::{TARGET, TraceConfig, Traces},
};

/// Environment variable that overrides the configured level.
const ENV: &str = "RUST_LOG";

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// What to log, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// Filter such as "info" or "info,router=debug". `RUST_LOG` wins over it.
    pub level: String,
    /// Shape of a line.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            level: "info".to_owned(),
            format: LogFormat::Auto,
        }
    }
}

/// Starts logs and traces. Once per process.
///
/// # Errors
/// A filter or a collector that does not parse; a second call.
pub fn init(config: &LogConfig, traces: &TraceConfig) -> Result<Traces, TelemetryError> {
    let level = std::env::var(ENV).unwrap_or_else(|_| config.level.clone());
    let filter = filter(&level)?;
    let json = match config.format {
        LogFormat::Json => true,
        LogFormat::Text => false,
        LogFormat::Auto => !stderr().is_terminal(),
    };
    let traces = Traces::start(traces)?;
    let hops = filter_fn(|metadata| metadata.is_span() && metadata.target() == TARGET);
    let spans = tracing_opentelemetry::layer()
        .with_tracer(traces.tracer())
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        .with_filter(hops);
    let registry = tracing_subscriber::registry().with(spans);
    let done = if json {
        let lines = fmt::layer()
            .json()
            .flatten_event(true)
            .with_span_list(false);
        let lines = lines.with_writer(stderr).with_filter(filter);
        registry.with(lines).try_init()
    } else {
        let colour = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let lines = fmt::layer().with_ansi(colour).with_writer(stderr);
        registry.with(lines.with_filter(filter)).try_init()
    };
    done.map_err(|_| TelemetryError::AlreadyInitialised)?;
    Ok(traces)
}

fn filter(level: &str) -> Result<EnvFilter, TelemetryError> {
    // Whatever is logged says which request it belongs to.
    EnvFilter::try_new(format!("{TARGET}=info,{level}")).map_err(|error| TelemetryError::Level {
        level: level.to_owned(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use base::Fault as _;

    use super::*;

    #[test]
    fn a_bad_filter_names_the_setting() {
        assert!(filter("info,router=debug").is_ok());
        let error = filter("router=loud").unwrap_err();
        assert_eq!(error.field(), Some("log_level"));
        assert!(error.to_string().contains("router=loud"));
    }
}
