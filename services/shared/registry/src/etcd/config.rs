//! Which etcd, and as whom.
use std::path::{Path, PathBuf};

use base::MemberId;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::RegistryError;

/// Scheme of the setting.
const SCHEME: &str = "etcd://";
/// Most addresses of one etcd cluster.
const MAX_ENDPOINTS: usize = 16;
/// Largest certificate, key or password file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// An etcd cluster and the part of it that is ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `HOST:PORT` of one or more of its nodes.
    pub endpoints: Vec<String>,
    /// Name of the Omni cluster: everything lies under `/omni/<cluster>/`.
    pub cluster: String,
    /// `None`: in clear.
    pub tls: Option<EtcdTls>,
    /// `None`: without a name, or under the name in the client certificate.
    pub user: Option<EtcdUser>,
}

/// Files of the TLS connection, PEM. They are read at every connect, so that they may be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdTls {
    /// Whom to trust.
    pub ca: PathBuf,
    /// Certificate chain and key of this process, for mutual TLS.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Name and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUser {
    /// Name.
    pub name: String,
    /// File that holds the password; read at every connect.
    pub password_file: PathBuf,
}

/// What the files hold.
#[derive(Default)]
pub(crate) struct Credentials {
    pub(crate) tls: Option<ClientTlsConfig>,
    /// Name and password.
    pub(crate) user: Option<(String, String)>,
}

impl EtcdConfig {
    /// Reads `etcd://HOST:PORT[,HOST:PORT…]`.
    ///
    /// # Errors
    /// Another scheme, an address that is none, none or too many of them. Blames `registry`.
    pub fn parse(text: &str) -> Result<Self, RegistryError> {
        let bad = |reason: String| invalid("registry", reason);
        let list = text.strip_prefix(SCHEME).ok_or_else(|| {
            bad(format!(
                "must be {SCHEME}HOST:PORT[,HOST:PORT…], got {text:?}"
            ))
        })?;
        let endpoints: Vec<String> = list
            .trim_end_matches('/')
            .split(',')
            .map(str::to_owned)
            .collect();
        let config = Self {
            endpoints,
            cluster: "default".to_owned(),
            tls: None,
            user: None,
        };
        config.check_endpoints()?;
        Ok(config)
    }

    /// Checks everything, the files included.
    ///
    /// # Errors
    /// The first setting at fault, by name.
    pub fn validate(&self) -> Result<(), RegistryError> {
        self.check_endpoints()?;
        // Same alphabet as an id: it becomes part of every key.
        if let Err(error) = self.cluster.parse::<MemberId>() {
            let reason = error.to_string().replace("member_id ", "");
            return Err(invalid("cluster", reason));
        }
        let clear = self.tls.is_none() && !self.endpoints.iter().all(|at| is_loopback(at));
        if self.user.is_some() && clear {
            let reason = "needs registry_ca: a password does not travel in clear".to_owned();
            return Err(invalid("registry_user", reason));
        }
        self.credentials().map(drop)
    }

    fn check_endpoints(&self) -> Result<(), RegistryError> {
        let count = self.endpoints.len();
        if !(1..=MAX_ENDPOINTS).contains(&count) {
            let reason = format!("must name 1 to {MAX_ENDPOINTS} addresses, got {count}");
            return Err(invalid("registry", reason));
        }
        for endpoint in &self.endpoints {
            // The one reader of addresses; it wants a scheme.
            if proto::channel::of_kind(&format!("http://{endpoint}"), "registry", false).is_err() {
                let reason = format!("must be {SCHEME}HOST:PORT[,HOST:PORT…], got {endpoint:?}");
                return Err(invalid("registry", reason));
            }
        }
        Ok(())
    }

    /// Address of one node, with its scheme.
    pub(crate) fn url(&self, index: usize) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.endpoints[index])
    }

    /// Reads the files.
    pub(crate) fn credentials(&self) -> Result<Credentials, RegistryError> {
        let mut credentials = Credentials::default();
        if let Some(tls) = &self.tls {
            let ca = read(&tls.ca, "registry_ca")?;
            let mut client = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
            if let Some((certificate, key)) = &tls.identity {
                let certificate = read(certificate, "registry_cert")?;
                let key = read(key, "registry_key")?;
                client = client.identity(Identity::from_pem(certificate, key));
            }
            credentials.tls = Some(client);
        }
        if let Some(user) = &self.user {
            let password = read(&user.password_file, "registry_password_file")?;
            let password = password.trim_end_matches(['\r', '\n']).to_owned();
            credentials.user = Some((user.name.clone(), password));
        }
        Ok(credentials)
    }
}

fn invalid(field: &'static str, reason: String) -> RegistryError {
    RegistryError::Invalid { field, reason }
}

fn read(path: &Path, field: &'static str) -> Result<String, RegistryError> {
    let bad = |reason: String| invalid(field, format!("{}: {reason}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?;
    if size.len() > MAX_FILE_BYTES {
        return Err(bad(format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    if text.trim().is_empty() {
        return Err(bad("is empty".to_owned()));
    }
    Ok(text)
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};

    use super::*;

    #[test]
    fn one_and_several_addresses_are_read() {
        let one = EtcdConfig::parse("etcd://a:2379").unwrap();
        assert_eq!(one.endpoints, ["a:2379"]);
        assert_eq!(one.url(0), "http://a:2379");
        let three = EtcdConfig::parse("etcd://10.0.0.1:1,b:2,[::1]:3").unwrap();
        assert_eq!(three.endpoints, ["10.0.0.1:1", "b:2", "[::1]:3"]);
        three.validate().unwrap();
    }

    #[test]
    fn bad_settings_are_refused_by_name() {
        let many = format!("etcd://{}", vec!["a:1"; 17].join(","));
        for text in [
            "etcd",
            "etcd://",
            "etcd://a",
            "etcd://a:1,",
            "etcd://a:1/x",
            "http://a:1",
            &many,
        ] {
            let error = EtcdConfig::parse(text).unwrap_err();
            let blamed = (error.code(), error.field());
            assert_eq!(blamed, (Code::InvalidArgument, Some("registry")), "{text}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let (gone, empty) = (PathBuf::from("/nonexistent/file"), file.path().to_owned());
        let base = EtcdConfig::parse("etcd://far:1").unwrap();
        let tls = |ca: &PathBuf| {
            Some(EtcdTls {
                ca: ca.clone(),
                identity: None,
            })
        };
        let user = Some(EtcdUser {
            name: "omni".to_owned(),
            password_file: empty.clone(),
        });
        let near = EtcdConfig::parse("etcd://localhost:1,127.0.0.1:2").unwrap();
        let cases = [
            (
                EtcdConfig {
                    cluster: "a/b".to_owned(),
                    ..base.clone()
                },
                "cluster",
            ),
            (
                EtcdConfig {
                    tls: tls(&gone),
                    ..base.clone()
                },
                "registry_ca",
            ),
            (
                EtcdConfig {
                    tls: tls(&empty),
                    ..base.clone()
                },
                "registry_ca",
            ),
            (
                EtcdConfig {
                    user: user.clone(),
                    ..base
                },
                "registry_user",
            ),
            (EtcdConfig { user, ..near }, "registry_password_file"),
        ];
        for (config, field) in cases {
            let error = config.validate().unwrap_err();
            let blamed = (error.code(), error.field());
            assert_eq!(blamed, (Code::InvalidArgument, Some(field)), "{error}");
        }
    }
}
