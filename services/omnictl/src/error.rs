//! What can go wrong in a command, and the exit code each of it means.
use std::{io, path::PathBuf};

use base::{Failure, code};

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The server, or the way to it, refused.
    #[error("{}", sentence(.0))]
    Server(Failure),
    /// The picture cannot be written there.
    #[error("output: cannot write {}: {reason}", path.display())]
    Output { path: PathBuf, reason: String },
    /// The operating system refused something else.
    #[error("cannot {what}: {source}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
    /// Another program was to do the work.
    #[error("cannot run {}: {source}; {variable} names another one", program.display())]
    Program {
        program: PathBuf,
        variable: &'static str,
        source: io::Error,
    },
    /// Something is not as it must be; the lines before say what.
    #[error("{0} of the checks failed")]
    Checks(usize),
    /// Ctrl-C.
    #[error("interrupted: {0}")]
    Interrupted(&'static str),
}

impl CliError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            CliError::Server(failure) => failure.code.exit_code(),
            CliError::Output { .. } => code::EXIT_CONFIG,
            CliError::Program { .. } => code::EXIT_UNAVAILABLE,
            CliError::Io { .. } | CliError::Interrupted(_) | CliError::Checks(_) => {
                code::EXIT_FAILURE
            }
        }
    }
}

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        CliError::Server(failure)
    }
}

impl From<tonic::Status> for CliError {
    fn from(status: tonic::Status) -> Self {
        CliError::Server(proto::status::failure(&status))
    }
}

/// "steps: must be 1 to 200 (INVALID_ARGUMENT)": the field is named once, first.
fn sentence(failure: &Failure) -> String {
    let Failure { code, message, .. } = failure;
    let named = match &failure.field {
        Some(field) if !message.starts_with(field.as_str()) => format!("{field}: {message}"),
        _ => message.clone(),
    };
    match failure.retry_after {
        Some(after) => format!("{named} ({code}, retry in {:.1} s)", after.as_secs_f64()),
        None => format!("{named} ({code})"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::Code;

    use super::*;

    #[test]
    fn the_field_is_named_once() {
        let error = CliError::from(Failure::invalid("steps", "must be 1 to 200"));
        assert_eq!(
            error.to_string(),
            "steps: must be 1 to 200 (INVALID_ARGUMENT)"
        );
        let error = CliError::from(Failure::invalid("steps", "steps must be 1 to 200"));
        assert_eq!(
            error.to_string(),
            "steps must be 1 to 200 (INVALID_ARGUMENT)"
        );
    }

    #[test]
    fn a_retry_hint_is_shown() {
        let full = Failure::new(Code::ResourceExhausted, "queue is full")
            .with_retry_after(Duration::from_millis(1500));
        let text = CliError::from(full).to_string();
        assert_eq!(text, "queue is full (RESOURCE_EXHAUSTED, retry in 1.5 s)");
    }

    #[test]
    fn exit_codes_follow_the_table() {
        let exit = |code| CliError::from(Failure::new(code, "x")).exit_code();
        assert_eq!(exit(Code::InvalidArgument), 64);
        assert_eq!(exit(Code::Unavailable), 69);
        assert_eq!(exit(Code::Internal), 1);
    }
}
