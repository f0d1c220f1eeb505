//! An authority of our own, and what it signs, as `--tls-dir` has it.
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use integration_tests::cluster::bounded;
use proto::{
    access::{Role, uri},
    tls::{Tls, TlsFiles},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType, date_time_ymd};
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring::default_provider,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    },
};
use tonic::transport::Channel;

pub(crate) struct Pki {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// An authority, and certificates of every role.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let text = ca.self_signed(&key).unwrap().pem();
        fs::write(dir.path().join("ca.pem"), text).unwrap();
        let issuer = Issuer::new(ca, key);
        let pki = Self { dir, issuer };
        pki.renew();
        pki
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// New certificates and keys for every role, over the old ones.
    pub(crate) fn renew(&self) {
        for role in Role::ALL {
            self.sign(role.name(), role, |_| ());
        }
    }

    /// A certificate that ran out long ago.
    pub(crate) fn expired(&self, role: Role) -> Arc<Tls> {
        self.sign("expired", role, |params| {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 1);
        });
        self.load("expired")
    }

    fn sign(&self, name: &str, role: Role, change: impl Fn(&mut CertificateParams)) {
        let hosts = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(hosts).unwrap();
        let identity = uri(role, "tests").as_str().try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(identity));
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        // As who replaces secrets does: each file appears whole.
        for (kind, text) in [("pem", certificate.pem()), ("key", key.serialize_pem())] {
            let draft = self.path(&format!("{name}.{kind}.draft"));
            fs::write(&draft, text).unwrap();
            fs::rename(draft, self.path(&format!("{name}.{kind}"))).unwrap();
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn load(&self, name: &str) -> Arc<Tls> {
        let path = |kind: &str| self.path(&format!("{name}.{kind}"));
        Tls::load(TlsFiles {
            ca: self.path("ca.pem"),
            identity: Some((path("pem"), path("key"))),
        })
        .unwrap()
    }

    /// The identity of a role.
    pub(crate) fn identity(&self, role: Role) -> Arc<Tls> {
        self.load(role.name())
    }

    /// Somebody without a certificate.
    pub(crate) fn nobody(&self) -> Arc<Tls> {
        Tls::load(TlsFiles {
            ca: self.path("ca.pem"),
            identity: None,
        })
        .unwrap()
    }

    pub(crate) fn channel(&self, role: Role, endpoint: &str) -> Channel {
        channel(self.identity(role), endpoint)
    }

    /// A connection that trusts this authority and shows no certificate.
    pub(crate) async fn connect(&self, site: &str) -> TlsStream<TcpStream> {
        self.connect_as(None, site).await
    }

    /// Likewise, with the certificate of a role.
    pub(crate) async fn connect_as(&self, role: Option<Role>, site: &str) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(self.path("ca.pem")).unwrap();
        roots.add(ca).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match role {
            None => config.with_no_client_auth(),
            Some(role) => {
                let file = |kind: &str| self.path(&format!("{}.{kind}", role.name()));
                let chain = vec![CertificateDer::from_pem_file(file("pem")).unwrap()];
                let key = PrivateKeyDer::from_pem_file(file("key")).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let address = site.trim_start_matches("https://");
        let stream = bounded(TcpStream::connect(address)).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream);
        bounded(connected).await.unwrap()
    }
}

/// A connection as somebody.
pub(crate) fn channel(tls: Arc<Tls>, endpoint: &str) -> Channel {
    proto::channel::lazy_as(tls, endpoint, "endpoint").unwrap()
}
