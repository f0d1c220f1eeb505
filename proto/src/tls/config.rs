//! From files to what rustls takes.
use std::{path::Path, sync::Arc};

use tokio_rustls::rustls::{
    ClientConfig, RootCertStore, ServerConfig, crypto,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::{TLS12, TLS13},
};

use super::{Loaded, MAX_FILE_BYTES, Servers, TlsError, TlsFiles};

const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// The bytes of the files: authorities, then certificate and key where there are any.
pub(super) fn read(files: &TlsFiles) -> Result<Vec<Vec<u8>>, TlsError> {
    let identity = files.identity.iter();
    let identity = identity.flat_map(|(cert, key)| [("tls_cert", cert), ("tls_key", key)]);
    std::iter::once(("tls_ca", &files.ca))
        .chain(identity)
        .map(|(field, path)| read_one(field, path))
        .collect()
}

fn read_one(field: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let bad = |reason: String| TlsError::File {
        field,
        path: path.display().to_string(),
        reason,
    };
    let size = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?;
    if size.len() > MAX_FILE_BYTES {
        return Err(bad(format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    std::fs::read(path).map_err(|error| bad(error.to_string()))
}

pub(super) fn load(files: &TlsFiles, bytes: Vec<Vec<u8>>) -> Result<Loaded, TlsError> {
    let roots = roots(files, &bytes[0])?;
    let identity = match &files.identity {
        Some(paths) => Some(identity(paths, &bytes[1], &bytes[2])?),
        None => None,
    };
    Ok(Loaded {
        client: Arc::new(client(&roots, identity.as_ref())?),
        servers: identity
            .map(|identity| servers(&roots, &identity))
            .transpose()?,
        bytes,
    })
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn certificates(
    field: &'static str,
    path: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |reason: String| TlsError::File {
        field,
        path: path.display().to_string(),
        reason,
    };
    let parsed = CertificateDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
    let parsed = parsed.map_err(|error| bad(error.to_string()))?;
    if parsed.is_empty() {
        return Err(bad("holds no certificate".to_owned()));
    }
    Ok(parsed)
}

fn identity(
    (cert, key): &(std::path::PathBuf, std::path::PathBuf),
    cert_bytes: &[u8],
    key_bytes: &[u8],
) -> Result<Identity, TlsError> {
    let chain = certificates("tls_cert", cert, cert_bytes)?;
    // What the parser found in a key is not repeated.
    let key = PrivateKeyDer::from_pem_slice(key_bytes).map_err(|_| TlsError::File {
        field: "tls_key",
        path: key.display().to_string(),
        reason: "holds no private key".to_owned(),
    })?;
    Ok((chain, key))
}

fn roots(files: &TlsFiles, bytes: &[u8]) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates("tls_ca", &files.ca, bytes)? {
        roots
            .add(authority)
            .map_err(|error| TlsError::Authority(error.to_string()))?;
    }
    Ok(Arc::new(roots))
}

fn provider() -> Arc<crypto::CryptoProvider> {
    Arc::new(crypto::ring::default_provider())
}

fn client(
    roots: &Arc<RootCertStore>,
    identity: Option<&Identity>,
) -> Result<ClientConfig, TlsError> {
    let bad = |error: tokio_rustls::rustls::Error| TlsError::Identity(error.to_string());
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(bad)?
        .with_root_certificates(roots.clone());
    let mut config = match identity {
        Some((chain, key)) => builder
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(bad)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

fn servers(roots: &Arc<RootCertStore>, identity: &Identity) -> Result<Servers, TlsError> {
    let bad = |error: String| TlsError::Authority(error);
    let build = || WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
    let must = build().build().map_err(|error| bad(error.to_string()))?;
    let may = build().allow_unauthenticated().build();
    let may = may.map_err(|error| bad(error.to_string()))?;
    Ok(Servers {
        certified: server(must, identity, false)?,
        anyone: server(may.clone(), identity, false)?,
        web: server(may, identity, true)?,
    })
}

fn server(
    clients: Arc<dyn ClientCertVerifier>,
    (chain, key): &Identity,
    web: bool,
) -> Result<Arc<ServerConfig>, TlsError> {
    let bad = |error: tokio_rustls::rustls::Error| TlsError::Identity(error.to_string());
    // Our own processes speak 1.3; clients of the HTTP API may be older.
    let versions = if web {
        &[&TLS13, &TLS12][..]
    } else {
        &[&TLS13]
    };
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .map_err(bad)?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(bad)?;
    config.alpn_protocols = vec![if web { HTTP1 } else { H2 }.to_vec()];
    // A resumed session would not look at the client's certificate again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
