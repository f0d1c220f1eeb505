//! How this program proves who it is: by a certificate, or to the front by an API key.
use std::{path::PathBuf, sync::OnceLock};

use base::Failure;
use clap::Args;
use proto::tls::{Tls, TlsFiles};
use tonic::{Request, metadata::AsciiMetadataValue};

/// Largest file of a key that is read, in bytes.
const MAX_KEY_BYTES: u64 = 1_024;

#[derive(Debug, Args)]
pub(crate) struct Secure {
    /// Whose certificates are trusted (PEM); given: TLS, and the endpoint begins with https.
    #[arg(long, global = true, env = "OMNI_TLS_CA", value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Certificate of an admin or a client (PEM).
    #[arg(long, global = true, env = "OMNI_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate (PEM).
    #[arg(long, global = true, env = "OMNI_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// File with the API key that images are asked for with.
    #[arg(long, global = true, env = "OMNI_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

static KEY: OnceLock<AsciiMetadataValue> = OnceLock::new();

impl Secure {
    /// Reads what was given; every connection from here on uses it.
    pub(crate) fn install(self) -> Result<(), Failure> {
        let identity = match (self.tls_cert, self.tls_key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                let message = "tls_cert and tls_key go together";
                return Err(Failure::invalid("tls_cert", message));
            }
        };
        match (self.tls_ca, identity) {
            (Some(ca), identity) => {
                let tls = Tls::load(TlsFiles { ca, identity });
                let installed = tls.and_then(proto::tls::install);
                installed.map_err(|error| Failure::of(&error))?;
            }
            (None, Some(_)) => {
                return Err(Failure::invalid("tls_ca", "tls_cert needs tls_ca as well"));
            }
            (None, None) => {}
        }
        self.api_key_file.map(read_key).transpose().map(drop)
    }
}

fn read_key(path: PathBuf) -> Result<(), Failure> {
    let bad = |reason: &str| {
        Failure::invalid(
            "api_key_file",
            format!("api_key_file {}: {reason}", path.display()),
        )
    };
    let size = std::fs::metadata(&path).map_err(|error| bad(&error.to_string()))?;
    if size.len() > MAX_KEY_BYTES {
        return Err(bad("is too long to be a key"));
    }
    let text = std::fs::read_to_string(&path).map_err(|error| bad(&error.to_string()))?;
    let value = format!("Bearer {}", text.trim()).parse::<AsciiMetadataValue>();
    let mut value = value.map_err(|_| bad("holds no key"))?;
    value.set_sensitive(true);
    // Once a process; a second call changes nothing.
    let _ = KEY.set(value);
    Ok(())
}

/// The request with the key, if one was given.
pub(crate) fn keyed<T>(mut request: Request<T>) -> Request<T> {
    if let Some(key) = KEY.get() {
        request.metadata_mut().insert("authorization", key.clone());
    }
    request
}
