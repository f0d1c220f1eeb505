use std::ffi::{CStr, CString};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes that one TCP send or receive moves at most.
const TCP_SEGMENT: &CStr = c"256k";

/// A setting that UCX must not see.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct SettingError {
    /// Name of the setting.
    pub field: &'static str,
    /// What is wrong with it.
    pub message: String,
}

/// Options of a UCX context, by name without the `UCX_` prefix.
pub type Settings = Vec<(&'static CStr, CString)>;

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
    /// Name of the UCX transport behind this one, as endpoints report it.
    ///
    /// POSIX segments only: they are unlinked while mapped, so that a killed process leaves
    /// nothing behind, and they need no permission to read another process's memory.
    #[must_use]
    pub fn ucx_name(self) -> &'static str {
        match self {
            Self::Shm => "posix",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        })
    }
}

impl FromStr for Transport {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        match text {
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            other => Err(SettingError {
                field: "transport",
                message: format!("must be \"shm\" or \"tcp\", got {other:?}"),
            }),
        }
    }
}

/// The options that every user of UCX here needs: `transports`, of which UCX takes the fastest that
/// reaches the peer, and for TCP the network devices in UCX notation ("lo", "eth0,eth1"), every
/// device when absent.
///
/// # Errors
/// No transport at all, or a text with a null byte in it.
pub fn settings(
    transports: &[Transport],
    net_devices: Option<&str>,
) -> Result<Settings, SettingError> {
    if transports.is_empty() {
        return Err(SettingError {
            field: "transports",
            message: "must name at least one transport".into(),
        });
    }
    let names: Vec<&str> = transports.iter().map(|t| t.ucx_name()).collect();
    let text = |field, value: String| {
        CString::new(value).map_err(|_| SettingError {
            field,
            message: "must not hold a null byte".into(),
        })
    };
    let mut settings = vec![
        (c"TLS", text("transports", names.join(","))?),
        // UCX prints to standard output; its failures reach us as statuses instead.
        (c"LOG_LEVEL", c"fatal".to_owned()),
    ];
    if transports.contains(&Transport::Shm) {
        // Lets an endpoint that reports the death of its peer run over shared memory.
        settings.push((c"POSIX_ERROR_HANDLING", c"y".to_owned()));
    }
    if transports.contains(&Transport::Tcp) {
        // With more, a connection that ends in the handling of one event is used again for the next
        // one of the same look, after its memory was freed.
        settings.push((c"TCP_MAX_POLL", c"1".to_owned()));
        // A one-sided read comes in segments of this size; the default of 8 KiB costs a system call each.
        settings.push((c"TCP_TX_SEG_SIZE", TCP_SEGMENT.to_owned()));
        settings.push((c"TCP_RX_SEG_SIZE", TCP_SEGMENT.to_owned()));
    }
    if let Some(devices) = net_devices {
        settings.push((c"NET_DEVICES", text("net_devices", devices.to_owned())?));
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_that_is_not_built_is_refused_by_name() {
        let error = "rdma".parse::<Transport>().unwrap_err();
        assert_eq!(error.field, "transport");
        assert_eq!("shm".parse::<Transport>().unwrap().to_string(), "shm");
        assert_eq!("tcp".parse::<Transport>().unwrap().to_string(), "tcp");
    }

    #[test]
    fn no_transport_and_null_bytes_are_refused() {
        assert_eq!(settings(&[], None).unwrap_err().field, "transports");
        let null = settings(&[Transport::Tcp], Some("lo\0")).unwrap_err();
        assert_eq!(null.to_string(), "net_devices: must not hold a null byte");
    }
}
