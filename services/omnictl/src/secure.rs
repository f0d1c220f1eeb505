//! How this program proves who it is: by a certificate, or to the front by an API key.
use std::{path::PathBuf, sync::OnceLock};

use base::Failure;
use clap::Args;
use proto::tls::{Tls, TlsFiles};
use serde::{Deserialize, Serialize};
use tonic::{Request, metadata::AsciiMetadataValue};

/// Largest file of a key that is read, in bytes.
const MAX_KEY_BYTES: u64 = 1_024;

/// Files that prove who this program acts for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Proof {
    /// Whose certificates are trusted (PEM); given: TLS, and the endpoint begins with https.
    #[arg(long, global = true, env = "OMNI_TLS_CA", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Certificate of an admin or a client (PEM).
    #[arg(long, global = true, env = "OMNI_TLS_CERT", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key of the certificate (PEM).
    #[arg(long, global = true, env = "OMNI_TLS_KEY", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_key: Option<PathBuf>,
    /// File with the API key that images are asked for with.
    #[arg(long, global = true, env = "OMNI_API_KEY_FILE", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) api_key_file: Option<PathBuf>,
}

static KEY: OnceLock<AsciiMetadataValue> = OnceLock::new();

impl Proof {
    /// Nothing was given.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What was given goes before what a context has. A certificate and its key stay together.
    pub(crate) fn over(self, context: Self) -> Self {
        let (tls_cert, tls_key) = match (self.tls_cert, self.tls_key) {
            (None, None) => (context.tls_cert, context.tls_key),
            given => given,
        };
        Self {
            tls_ca: self.tls_ca.or(context.tls_ca),
            tls_cert,
            tls_key,
            api_key_file: self.api_key_file.or(context.api_key_file),
        }
    }

    /// The same files, wherever the program is started.
    pub(crate) fn absolute(self) -> Result<Self, Failure> {
        let whole = |field: &'static str, path: Option<PathBuf>| {
            let path = path.map(std::path::absolute).transpose();
            path.map_err(|error| Failure::invalid(field, error.to_string()))
        };
        Ok(Self {
            tls_ca: whole("tls_ca", self.tls_ca)?,
            tls_cert: whole("tls_cert", self.tls_cert)?,
            tls_key: whole("tls_key", self.tls_key)?,
            api_key_file: whole("api_key_file", self.api_key_file)?,
        })
    }

    /// What goes together is there together.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            let message = "tls_cert and tls_key go together";
            return Err(Failure::invalid("tls_cert", message));
        }
        if self.tls_cert.is_some() && self.tls_ca.is_none() {
            return Err(Failure::invalid("tls_ca", "tls_cert needs tls_ca as well"));
        }
        Ok(())
    }

    /// Reads what was given; every connection from here on uses it.
    pub(crate) fn install(self) -> Result<(), Failure> {
        self.check()?;
        let identity = self.tls_cert.zip(self.tls_key);
        if let Some(ca) = self.tls_ca {
            let tls = Tls::load(TlsFiles { ca, identity });
            let installed = tls.and_then(proto::tls::install);
            installed.map_err(|error| Failure::of(&error))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_goes_before_a_context_and_a_certificate_keeps_its_key() {
        let proof = |ca: &str, cert: &str, key: &str| {
            let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
            Proof {
                tls_ca: path(ca),
                tls_cert: path(cert),
                tls_key: path(key),
                api_key_file: None,
            }
        };
        let context = proof("ca", "cert", "key");
        assert_eq!(proof("", "", "").over(context.clone()), context);
        let other = proof("", "c", "k").over(context.clone());
        assert_eq!(other, proof("ca", "c", "k"));
        // Half of one and half of the other would be neither.
        let half = proof("", "c", "").over(context);
        assert_eq!(half.check().unwrap_err().field.as_deref(), Some("tls_cert"));
        let alone = proof("", "c", "k").check().unwrap_err();
        assert_eq!(alone.field.as_deref(), Some("tls_ca"));
    }
}
