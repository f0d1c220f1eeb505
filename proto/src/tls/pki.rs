//! An authority and what it has signed, as files, for tests.
use std::{fs, path::PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType, date_time_ymd};

use super::TlsFiles;
use crate::access::{Role, uri};

pub(crate) struct Pki {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        fs::write(
            dir.path().join("ca.pem"),
            ca.self_signed(&key).unwrap().pem(),
        )
        .unwrap();
        let issuer = Issuer::new(ca, key);
        Self { dir, issuer }
    }

    fn params(role: Role) -> CertificateParams {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        let name = uri(role, "test").as_str().try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(name));
        params
    }

    /// Files of a holder, written anew at every call.
    pub(crate) fn issue(&self, role: Role) -> TlsFiles {
        self.sign(role.name(), Self::params(role))
    }

    /// Likewise, long over.
    pub(crate) fn expired(&self, role: Role) -> TlsFiles {
        let mut params = Self::params(role);
        params.not_before = date_time_ymd(2019, 1, 1);
        params.not_after = date_time_ymd(2020, 1, 1);
        self.sign("expired", params)
    }

    fn sign(&self, name: &str, params: CertificateParams) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = (self.path(name, "pem"), self.path(name, "key"));
        fs::write(&identity.0, certificate.pem()).unwrap();
        fs::write(&identity.1, key.serialize_pem()).unwrap();
        TlsFiles {
            identity: Some(identity),
            ..self.nobody()
        }
    }

    /// Trusts this authority and shows no certificate.
    pub(crate) fn nobody(&self) -> TlsFiles {
        TlsFiles {
            ca: self.path("ca", "pem"),
            identity: None,
        }
    }

    fn path(&self, name: &str, kind: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.{kind}"))
    }
}
