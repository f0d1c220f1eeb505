//! `omni certs`: an authority and a certificate for each role, for one machine or a first try. A cluster
//! gets its certificates from whoever signs there.
use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use base::clock::{Clock as _, SystemClock};
use clap::Args;
use proto::{
    access::{Role, uri},
    tls::TlsFiles,
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, SanType, date_time_ymd,
};

use crate::error::OmniError;

/// Certificates are good from this long before they are made, for clocks that are behind.
const SKEW: Duration = Duration::from_secs(3_600);
const DAY: u64 = 86_400;
/// Names that every certificate is for.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Make an authority and certificates for every role.
#[derive(Debug, Args)]
pub(crate) struct CertsArgs {
    /// Directory to write ca.pem, and ROLE.pem and ROLE.key for each role; it must not hold any yet.
    dir: PathBuf,
    /// Host name or address that the certificates are for, beside those of this machine.
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Tenant that the client certificate is for.
    #[arg(long, default_value = "default")]
    tenant: String,
    /// How long they are good.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
}

/// Writes them and says where.
pub(crate) fn run(args: &CertsArgs) -> Result<String, OmniError> {
    write(args)?;
    let dir = args.dir.display();
    Ok(format!(
        "{dir}: ca.pem, and a certificate and key for each of {}",
        Role::ALL.map(Role::name).join(", ")
    ))
}

/// Files of a role in a directory that was written here.
pub(crate) fn files(dir: &Path, role: Role) -> TlsFiles {
    let path = |kind: &str| dir.join(format!("{role}.{kind}"));
    TlsFiles {
        ca: dir.join("ca.pem"),
        identity: Some((path("pem"), path("key"))),
    }
}

/// Makes the certificates of this machine unless `dir` has some.
pub(crate) fn ensure(dir: &Path) -> Result<(), OmniError> {
    if dir.join("ca.pem").exists() {
        return Ok(());
    }
    write(&CertsArgs {
        dir: dir.to_owned(),
        host: Vec::new(),
        tenant: "default".to_owned(),
        days: 365,
    })
}

fn write(args: &CertsArgs) -> Result<(), OmniError> {
    let bad = |error: rcgen::Error| OmniError::Config(format!("certificates: {error}"));
    let built = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&args.dir);
    built.map_err(|error| OmniError::io(format!("make {}", args.dir.display()), error))?;

    let key = KeyPair::generate().map_err(bad)?;
    let mut authority = params(args, "omni authority")?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let certificate = authority.self_signed(&key).map_err(bad)?;
    create(&args.dir.join("ca.pem"), &certificate.pem())?;
    let issuer = Issuer::new(authority, key);
    for role in Role::ALL {
        let key = KeyPair::generate().map_err(bad)?;
        let mut holder = params(args, role.name())?;
        let name = if role == Role::Client {
            &args.tenant
        } else {
            "local"
        };
        let name = uri(role, name);
        let name = name.as_str().try_into().map_err(bad)?;
        holder.subject_alt_names.push(SanType::URI(name));
        holder.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = holder.signed_by(&key, &issuer).map_err(bad)?;
        create(&args.dir.join(format!("{role}.pem")), &certificate.pem())?;
        create(&args.dir.join(format!("{role}.key")), &key.serialize_pem())?;
    }
    Ok(())
}

fn params(args: &CertsArgs, name: &str) -> Result<CertificateParams, OmniError> {
    let hosts = args.host.iter().cloned();
    let hosts = LOCAL.map(str::to_owned).into_iter().chain(hosts);
    let mut params = CertificateParams::new(hosts.collect::<Vec<_>>())
        .map_err(|error| OmniError::Config(format!("host: {error}")))?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = Duration::from_millis(SystemClock.unix_millis());
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(SKEW);
    params.not_after = epoch + now + Duration::from_secs(args.days * DAY);
    Ok(params)
}

/// A file that only its owner reads, and that was not there.
fn create(path: &Path, text: &str) -> Result<(), OmniError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| OmniError::io(format!("write {}", path.display()), error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_made_can_be_used_by_every_role_and_is_never_written_over() {
        let dir = std::env::temp_dir().join(format!("omni-certs-{}", std::process::id()));
        ensure(&dir).unwrap();
        for role in Role::ALL {
            let files = files(&dir, role);
            proto::tls::Tls::load(files.clone()).unwrap();
            let (_, key) = files.identity.unwrap();
            let mode = fs::metadata(key).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "others read {role}.key");
        }
        let before = fs::read(dir.join("ca.pem")).unwrap();
        ensure(&dir).unwrap();
        assert_eq!(fs::read(dir.join("ca.pem")).unwrap(), before);
        fs::remove_dir_all(&dir).unwrap();
    }
}
