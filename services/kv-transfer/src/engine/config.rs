use std::ffi::{CStr, CString};

use fabric::{Settings, Transport};
use serde::{Deserialize, Serialize};

use crate::TransferError;

/// Where the segments of shared memory live.
const SHARED_MEMORY_DIR: &str = "/dev/shm";

/// What the UCX thread of a process may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Allowed transports; with several, UCX takes the fastest that reaches the peer.
    pub transports: Vec<Transport>,
    /// Network devices for TCP, in UCX notation ("lo", "eth0,eth1"); every device when absent.
    #[serde(default)]
    pub net_devices: Option<String>,
}

impl EngineConfig {
    /// One transport on every device.
    #[must_use]
    pub fn only(transport: Transport) -> Self {
        Self {
            transports: vec![transport],
            net_devices: None,
        }
    }

    /// Refuses a region that the file system of shared memory has no room for: finding out by
    /// filling it would take the machine's memory first.
    pub(super) fn check_room(&self, bytes: u64) -> Result<(), TransferError> {
        if !self.transports.contains(&Transport::Shm) {
            return Ok(());
        }
        let stat = rustix::fs::statvfs(SHARED_MEMORY_DIR).map_err(|error| TransferError::Io {
            what: "look at /dev/shm",
            source: error.into(),
        })?;
        let room = stat.f_bavail.saturating_mul(stat.f_frsize);
        if bytes > room {
            let message =
                format!("asks for {bytes} bytes, {SHARED_MEMORY_DIR} has room for {room}");
            return Err(TransferError::invalid("pool_bytes", message));
        }
        Ok(())
    }

    /// The UCX options that this stands for, as environment variables: for whoever compares UCX alone.
    ///
    /// # Errors
    /// As a service or client with this configuration.
    pub fn ucx_options(&self) -> Result<Vec<(String, String)>, TransferError> {
        let text = |value: &CString| value.to_string_lossy().into_owned();
        let name = |name: &CStr| format!("UCX_{}", name.to_string_lossy());
        let settings = self.settings()?;
        Ok(settings.iter().map(|(n, v)| (name(n), text(v))).collect())
    }

    /// The UCX options that this stands for.
    pub(crate) fn settings(&self) -> Result<Settings, TransferError> {
        let mut settings = fabric::settings(&self.transports, self.net_devices.as_deref())?;
        if self.transports.contains(&Transport::Shm) {
            // A pool that peers cannot map would still work, copied through small buffers: refuse
            // it instead.
            settings.push((c"ALLOC_PRIO", c"md:posix".to_owned()));
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Fault as _;

    #[test]
    fn no_transport_and_null_bytes_are_refused_by_name() {
        let empty = EngineConfig {
            transports: vec![],
            net_devices: None,
        };
        assert_eq!(empty.settings().unwrap_err().field(), Some("transports"));
        let null = EngineConfig {
            net_devices: Some("lo\0".into()),
            ..EngineConfig::only(Transport::Tcp)
        };
        assert_eq!(null.settings().unwrap_err().field(), Some("net_devices"));
    }
}
