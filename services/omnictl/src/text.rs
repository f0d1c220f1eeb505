//! The terminal: data on stdout, talk on stderr. A closed pipe ends the output, not the command.
use std::io::{self, IsTerminal as _, Write};

use serde::Serialize;

use crate::error::CliError;

/// The two streams of the process.
#[derive(Debug)]
pub(crate) struct Console {
    colour: bool,
}

impl Console {
    pub(crate) fn new() -> Self {
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            colour: io::stderr().is_terminal() && !no_colour,
        }
    }

    /// Colours may be used on stderr.
    pub(crate) fn colour(&self) -> bool {
        self.colour
    }

    /// One line of data.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> Result<(), CliError> {
        self.raw(format!("{}\n", text.as_ref()).as_bytes())
    }

    /// One JSON document on one line.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<(), CliError> {
        let text = serde_json::to_string(value).map_err(|error| CliError::Io {
            what: "encode JSON",
            source: error.into(),
        })?;
        self.line(text)
    }

    /// Bytes of data, as they are.
    pub(crate) fn raw(&self, bytes: &[u8]) -> Result<(), CliError> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CliError::Io {
                what: "write to stdout",
                source: error,
            }),
            _ => Ok(()),
        }
    }

    /// One line of talk, on stderr.
    #[allow(clippy::unnecessary_wraps)] // as its neighbours
    pub(crate) fn talk(&self, text: &str) -> Result<(), CliError> {
        // Nobody is left to tell when stderr is gone.
        let _ = writeln!(io::stderr().lock(), "{text}");
        Ok(())
    }

    /// The error line that ends a command.
    pub(crate) fn error(&self, error: &CliError) {
        let label = if self.colour {
            "\u{1b}[31merror:\u{1b}[0m"
        } else {
            "error:"
        };
        // Nobody is left to tell when stderr is gone.
        let _ = writeln!(io::stderr().lock(), "{label} {error}");
    }
}
