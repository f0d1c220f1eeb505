//! Whether this process speaks TLS, and with which certificates.
use std::{net::IpAddr, path::PathBuf, sync::Arc};

use proto::tls::{Tls, TlsFiles};
use telemetry::AdminTls;

use crate::{error::OmniError, settings::Settings};

const FILES: [&str; 3] = ["tls_cert", "tls_key", "tls_ca"];
/// Settings that are addresses, of this process or of others.
const SOCKETS: [&str; 3] = ["listen", "http_listen", "admin_listen"];
const URLS: [&str; 2] = ["registry", "kv_transfer"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Auto,
    On,
    Off,
}

/// The identity that the settings name; `None`: in clear, which is refused beyond this machine unless
/// the settings say so.
pub(crate) fn identity(settings: &Settings) -> Result<Option<Arc<Tls>>, OmniError> {
    let Some(files) = files(settings)? else {
        return Ok(None);
    };
    let tls = Tls::load(files).map_err(|error| OmniError::Config(error.to_string()))?;
    Ok(Some(tls))
}

/// In clear although others could listen is only done if the settings say so.
pub(crate) fn check_clear(settings: &Settings) -> Result<(), OmniError> {
    if mode(settings)? == Mode::Off {
        return Ok(());
    }
    let local = |key: &'static str| match settings.get(key) {
        None => Ok::<_, OmniError>(true),
        Some(_) if SOCKETS.contains(&key) => Ok(settings.socket(key)?.ip().is_loopback()),
        Some(text) => Ok(is_local(text)),
    };
    for key in SOCKETS.into_iter().chain(URLS) {
        if !local(key)? {
            let text = settings.get(key).unwrap_or_default();
            return Err(OmniError::Config(format!(
                "{key} {text:?} is not on this machine alone: set tls_cert, tls_key and tls_ca, \
                 or tls = off to speak in clear"
            )));
        }
    }
    Ok(())
}

/// How the admin port speaks. What needs certificates is refused without them.
pub(crate) fn admin_tls(settings: &Settings) -> Result<AdminTls, OmniError> {
    let words = [
        ("auto", None),
        ("off", Some(AdminTls::Off)),
        ("on", Some(AdminTls::On)),
        ("mutual", Some(AdminTls::Mutual)),
    ];
    let said = settings.one_of("admin_tls", &words)?;
    if matches!(said, Some(AdminTls::On | AdminTls::Mutual)) && files(settings)?.is_none() {
        return Err(OmniError::Config(format!(
            "admin_tls is {}, which needs tls_cert, tls_key and tls_ca",
            settings.text("admin_tls")?
        )));
    }
    Ok(said.unwrap_or_default())
}

/// An address on the loopback interface, or none of a process of ours.
fn is_local(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("http://") else {
        return true;
    };
    let host = rest
        .trim_end_matches('/')
        .rsplit_once(':')
        .map_or(rest, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ip = host.parse::<IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}

fn mode(settings: &Settings) -> Result<Mode, OmniError> {
    let words = [("auto", Mode::Auto), ("on", Mode::On), ("off", Mode::Off)];
    settings.one_of("tls", &words)
}

fn files(settings: &Settings) -> Result<Option<TlsFiles>, OmniError> {
    let bad = |text: String| Err(OmniError::Config(text));
    let mode = mode(settings)?;
    let given = FILES.into_iter().find(|key| settings.get(key).is_some());
    let missing = FILES.into_iter().find(|key| settings.get(key).is_none());
    match (mode, given, missing) {
        (Mode::Off, Some(key), _) => bad(format!("{key} is set, but tls is off")),
        (Mode::On, _, Some(key)) => bad(format!("{key} is required, because tls is on")),
        (_, Some(given), Some(missing)) => bad(format!("{given} needs {missing} as well")),
        (_, None, _) => {
            check_clear(settings)?;
            Ok(None)
        }
        (_, Some(_), None) => {
            let path = |key| settings.text(key).map(PathBuf::from);
            Ok(Some(TlsFiles {
                ca: path("tls_ca")?,
                identity: Some((path("tls_cert")?, path("tls_key")?)),
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{self, ConfigFile, Role};

    fn settings(role: Role, arguments: &[&str]) -> Settings {
        let all = std::iter::once(role.name()).chain(arguments.iter().copied());
        let matches = settings::command(role).try_get_matches_from(all).unwrap();
        Settings::resolve(role, &matches, &ConfigFile::default()).unwrap()
    }

    #[test]
    fn in_clear_beyond_this_machine_only_when_it_is_said() {
        for arguments in [
            &[][..],
            &["--listen", "[::1]:0"],
            &["--listen", "0.0.0.0:7601", "--tls", "off"],
            &["--registry", "http://localhost:1"],
            &["--registry", "etcd://10.0.0.1:2379"],
            &["--registry", "http://[::1]:1/"],
        ] {
            assert!(
                identity(&settings(Role::KvTransfer, arguments))
                    .unwrap()
                    .is_none()
            );
        }
        for (arguments, key) in [
            (&["--listen", "0.0.0.0:7601"][..], "listen"),
            (&["--registry", "http://10.0.0.1:7600"], "registry"),
            (&["--registry", "http://router:7600"], "registry"),
        ] {
            let error = identity(&settings(Role::KvTransfer, arguments)).unwrap_err();
            assert!(error.to_string().starts_with(key), "{error}");
            assert!(error.to_string().contains("tls = off"), "{error}");
            assert_eq!(error.exit_code(), 64);
        }
        for (flag, key) in [
            ("--http-listen", "http_listen"),
            ("--admin-listen", "admin_listen"),
        ] {
            let error = identity(&settings(Role::Router, &[flag, "0.0.0.0:80"])).unwrap_err();
            assert!(error.to_string().starts_with(key), "{error}");
        }
    }

    #[test]
    fn the_admin_port_is_told_apart_and_asks_for_no_certificate_it_cannot_check() {
        let of = |arguments: &[&str]| admin_tls(&settings(Role::KvTransfer, arguments));
        let tls = ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"];
        let with = |word| of(&[&tls[..], &["--admin-tls", word]].concat()).unwrap();
        assert_eq!(of(&[]).unwrap(), AdminTls::On);
        assert_eq!(of(&["--admin-tls", "off"]).unwrap(), AdminTls::Off);
        assert_eq!(with("off"), AdminTls::Off);
        assert_eq!(with("mutual"), AdminTls::Mutual);
        for word in ["on", "mutual"] {
            let error = of(&["--admin-tls", word]).unwrap_err();
            let said = format!("admin_tls is {word}, which needs tls_cert");
            assert!(error.to_string().starts_with(&said), "{error}");
            assert_eq!(error.exit_code(), 64);
        }
        let error = of(&["--admin-tls", "yes"]).unwrap_err().to_string();
        assert!(error.contains("auto, off, on, mutual"), "{error}");
    }

    #[test]
    fn half_an_identity_is_refused_by_what_is_missing() {
        for (arguments, said) in [
            (
                &["--tls", "on"][..],
                "tls_cert is required, because tls is on",
            ),
            (
                &["--tls-cert", "c", "--tls-key", "k"],
                "tls_cert needs tls_ca as well",
            ),
            (&["--tls-ca", "a"], "tls_ca needs tls_cert as well"),
            (
                &["--tls", "off", "--tls-ca", "a"],
                "tls_ca is set, but tls is off",
            ),
            (&["--tls", "yes"], "tls must be one of auto, on, off"),
            (
                &[
                    "--tls-cert",
                    "/nonexistent/c",
                    "--tls-key",
                    "k",
                    "--tls-ca",
                    "/nonexistent/a",
                ],
                "tls_ca /nonexistent/a:",
            ),
        ] {
            let error = identity(&settings(Role::KvTransfer, arguments)).unwrap_err();
            assert!(error.to_string().starts_with(said), "{error}");
            assert_eq!(error.exit_code(), 64);
        }
    }
}
