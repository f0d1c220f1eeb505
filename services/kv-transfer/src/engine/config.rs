use std::ffi::{CStr, CString};

use serde::{Deserialize, Serialize};

use crate::TransferError;

/// Where the segments of shared memory live.
const SHARED_MEMORY_DIR: &str = "/dev/shm";

/// A way for bytes to reach a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory of one node.
    Shm,
    /// TCP sockets.
    Tcp,
}

impl Transport {
    /// Names of the UCX transports behind this one.
    ///
    /// POSIX segments only: they are unlinked while mapped, so that a killed process leaves
    /// nothing behind, and they need no permission to read another process's memory.
    fn ucx_names(self) -> &'static str {
        match self {
            Self::Shm => "posix",
            Self::Tcp => "tcp",
        }
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        })
    }
}

impl std::str::FromStr for Transport {
    type Err = TransferError;

    fn from_str(text: &str) -> Result<Self, TransferError> {
        match text {
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            other => Err(TransferError::invalid(
                "transport",
                format!("must be \"shm\" or \"tcp\", got {other:?}"),
            )),
        }
    }
}

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

    /// The UCX options that this stands for.
    pub(crate) fn settings(&self) -> Result<Vec<(&'static CStr, CString)>, TransferError> {
        if self.transports.is_empty() {
            return Err(TransferError::invalid(
                "transports",
                "must name at least one transport",
            ));
        }
        let names: Vec<&str> = self.transports.iter().map(|t| t.ucx_names()).collect();
        let text = |field, value: String| {
            CString::new(value)
                .map_err(|_| TransferError::invalid(field, "must not hold a null byte"))
        };
        let mut settings = vec![
            (c"TLS", text("transports", names.join(","))?),
            // UCX prints to standard output; its failures reach us as statuses instead.
            (c"LOG_LEVEL", c"fatal".to_owned()),
        ];
        if self.transports.contains(&Transport::Shm) {
            // Lets an endpoint that reports the death of its peer run over shared memory.
            settings.push((c"POSIX_ERROR_HANDLING", c"y".to_owned()));
            // A pool that peers cannot map would still work, copied through small buffers: refuse
            // it instead.
            settings.push((c"ALLOC_PRIO", c"md:posix".to_owned()));
        }
        if let Some(devices) = &self.net_devices {
            settings.push((c"NET_DEVICES", text("net_devices", devices.clone())?));
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Fault as _;

    #[test]
    fn a_transport_that_is_not_built_is_refused_by_name() {
        let error = "rdma".parse::<Transport>().unwrap_err();
        assert_eq!(error.field(), Some("transport"));
        assert_eq!("shm".parse::<Transport>().unwrap().to_string(), "shm");
        assert_eq!("tcp".parse::<Transport>().unwrap().to_string(), "tcp");
    }

    #[test]
    fn no_transport_and_null_bytes_are_refused() {
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
