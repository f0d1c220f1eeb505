//! Mutual TLS between processes: the certificate of this process, whom it trusts, and how both are
//! read again while it runs. Connections that are open keep what they were opened with.
mod config;
mod connect;
mod incoming;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock, PoisonError, RwLock},
    time::Duration,
};

use base::{Code, Failure, Fault};
use tokio_rustls::rustls::{ClientConfig, ServerConfig};

pub(crate) use self::connect::connector;
pub(crate) use self::incoming::incoming;
pub use self::incoming::{Callers, Secured};

/// How often the files of a running process are looked at.
pub const POLL: Duration = Duration::from_secs(2);
/// Largest certificate, key or bundle that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why certificates cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or holds something else.
    #[error("{field} {path}: {reason}")]
    File {
        /// Setting that names the file.
        field: &'static str,
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// Key and certificate do not belong together, or cannot be used.
    #[error("tls_cert and tls_key: {0}")]
    Identity(String),
    /// The authorities cannot be used.
    #[error("tls_ca: {0}")]
    Authority(String),
    /// The process has an identity already.
    #[error("tls is set up already")]
    AlreadyInstalled,
}

impl Fault for TlsError {
    fn code(&self) -> Code {
        match self {
            Self::AlreadyInstalled => Code::Internal,
            _ => Code::InvalidArgument,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::File { field, .. } => Some(field),
            Self::Identity(_) => Some("tls_cert"),
            Self::Authority(_) => Some("tls_ca"),
            Self::AlreadyInstalled => None,
        }
    }
}

/// Where certificates lie, as PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Authorities whose certificates are accepted, from servers and from clients.
    pub ca: PathBuf,
    /// Certificate (chain) of this process and its key. A client that proves who it is by other means
    /// has none.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// What connections that begin now are made with.
#[derive(Debug)]
struct Loaded {
    /// Bytes of the files: what has not changed is not parsed again.
    bytes: Vec<Vec<u8>>,
    client: Arc<ClientConfig>,
    servers: Option<Servers>,
}

/// Of a server: for processes, for anybody, and for clients of HTTP.
#[derive(Debug, Clone)]
struct Servers {
    certified: Arc<ServerConfig>,
    anyone: Arc<ServerConfig>,
    web: Arc<ServerConfig>,
}

/// The identity of a process, read from its files.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    loaded: RwLock<Arc<Loaded>>,
}

impl Tls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// A file that cannot be read or used, by the setting that names it.
    pub fn load(files: TlsFiles) -> Result<Arc<Self>, TlsError> {
        let loaded = config::load(&files, config::read(&files)?)?;
        Ok(Arc::new(Self {
            files,
            loaded: RwLock::new(Arc::new(loaded)),
        }))
    }

    /// Reads the files again; true when they had changed and are used from now on.
    ///
    /// # Errors
    /// As [`Tls::load`]; what was in use stays in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let bytes = config::read(&self.files)?;
        if self.now().bytes == bytes {
            return Ok(false);
        }
        let loaded = Arc::new(config::load(&self.files, bytes)?);
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded;
        Ok(true)
    }

    /// Follows the files for as long as it is polled. Files that do not fit together (they are replaced
    /// one after the other) are looked at again at the next turn.
    pub async fn follow(self: Arc<Self>) {
        let told = |outcome: Result<(), &TlsError>| match outcome {
            Ok(()) => tracing::info!("certificates were read again"),
            Err(error) => tracing::warn!(%error, "the certificates in use stay in use"),
        };
        base::follow(POLL, || self.reload(), told).await;
    }

    fn now(&self) -> Arc<Loaded> {
        self.loaded
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// For a connection that this process begins now.
    fn client(&self) -> Arc<ClientConfig> {
        self.now().client.clone()
    }

    /// For a connection that is accepted now; `None` without a certificate of its own.
    fn server(&self, callers: Callers) -> Option<Arc<ServerConfig>> {
        let loaded = self.now();
        let servers = loaded.servers.as_ref()?;
        Some(match callers {
            Callers::Certified => servers.certified.clone(),
            Callers::Anyone => servers.anyone.clone(),
            Callers::Web => servers.web.clone(),
        })
    }
}

static INSTALLED: OnceLock<Arc<Tls>> = OnceLock::new();

/// Makes `tls` the identity of this process: from here on all of its connections and servers use it,
/// and none is in clear.
///
/// # Errors
/// A second call.
pub fn install(tls: Arc<Tls>) -> Result<(), TlsError> {
    INSTALLED.set(tls).map_err(|_| TlsError::AlreadyInstalled)
}

/// The identity of this process; `None`: it speaks in clear.
pub fn installed() -> Option<Arc<Tls>> {
    INSTALLED.get().cloned()
}

/// Scheme of this process's addresses.
pub fn scheme() -> &'static str {
    if INSTALLED.get().is_some() {
        "https"
    } else {
        "http"
    }
}

/// A server of HTTP needs what [`crate::server`] does for gRPC.
///
/// # Errors
/// `UNAUTHENTICATED` when the handshake fails, `DEADLINE_EXCEEDED` when it takes too long.
pub async fn accept_web(tls: &Tls, stream: tokio::net::TcpStream) -> Result<Secured, Failure> {
    incoming::handshake(tls, Callers::Web, stream).await
}

#[cfg(test)]
pub(crate) mod pki;
#[cfg(test)]
mod tests;
