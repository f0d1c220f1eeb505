//! The one line a role prints on standard output once its port is bound, and its reader in `up`.
use std::io::Write as _;

use serde::{Deserialize, Serialize};

use crate::error::OmniError;

/// Where a role listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Announcement {
    /// Name of the role.
    pub(crate) role: String,
    /// gRPC address, `http://HOST:PORT`.
    pub(crate) endpoint: String,
    /// Address of the probes and metrics.
    pub(crate) admin: String,
    /// Address of the HTTP API, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) http: Option<String>,
}

impl Announcement {
    /// Prints the line.
    pub(crate) fn print(&self) -> Result<(), OmniError> {
        let line = serde_json::to_string(self)
            .map_err(|error| OmniError::Config(format!("announcement: {error}")))?;
        writeln!(std::io::stdout(), "{line}")
            .map_err(|error| OmniError::io("write to standard output", error))
    }

    /// Reads the line back.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}
