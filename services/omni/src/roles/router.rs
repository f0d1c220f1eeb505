//! What a router is told: limits, doors, keys.
use std::{net::SocketAddr, path::PathBuf};

use ::router::{FetchConfig, HostList, HostListError, RouterConfig, StatusPage, admission::Limits};
use registry::Backend;

use super::{
    build_info,
    place::{advertise, backend, etcd_settings_unset},
};
use crate::{error::OmniError, secure, settings::Settings};

/// How far the port of the HTTP API is above that of gRPC, when it is not set.
const HTTP_PORT_OFFSET: u16 = 80;

pub(super) fn router_config(settings: &Settings) -> Result<RouterConfig, OmniError> {
    Ok(RouterConfig {
        listen: settings.socket("listen")?.to_string(),
        http_listen: Some(http_listen(settings)?.to_string()),
        advertise: advertise(settings)?,
        admin_listen: Some(settings.socket("admin_listen")?.to_string()),
        admin_tls: secure::admin_tls(settings)?,
        status_page: status_page(settings)?,
        registry: match settings.text("registry")? {
            "embedded" => {
                etcd_settings_unset(settings)?;
                Backend::Embedded
            }
            _ => backend(settings)?,
        },
        api_keys: api_keys(settings)?,
        record_file: settings.get("record_file").map(PathBuf::from),
        limits: Limits {
            max_running: settings.count("max_running", 1)?,
            max_queued: settings.count("max_queued", 1)?,
            ..Limits::default()
        },
        fetch: FetchConfig {
            hosts: settings
                .get("image_hosts")
                .map_or(Ok(HostList::default()), str::parse)
                .map_err(|error: HostListError| {
                    OmniError::Config(format!("image_hosts {error}"))
                })?,
            ..FetchConfig::default()
        },
        grace: settings.seconds("drain_grace_s")?,
        build: build_info(),
        ..RouterConfig::default()
    })
}

/// The file of API keys, which must be one.
fn api_keys(settings: &Settings) -> Result<Option<PathBuf>, OmniError> {
    let path = settings.get("api_keys").map(PathBuf::from);
    if let Some(path) = &path {
        ::router::ApiKeys::load(path).map_err(|error| OmniError::Config(error.to_string()))?;
    }
    Ok(path)
}

/// What the router's admin port shows.
pub(crate) fn status_page(settings: &Settings) -> Result<StatusPage, OmniError> {
    settings.one_of(
        "status_page",
        &[
            ("off", StatusPage::Off),
            ("view", StatusPage::View),
            ("prompt", StatusPage::Prompt),
        ],
    )
}

/// Where the HTTP API listens: as set, else beside `listen`; a free port where that takes one.
pub(crate) fn http_listen(settings: &Settings) -> Result<SocketAddr, OmniError> {
    if settings.get("http_listen").is_some() {
        return settings.socket("http_listen");
    }
    let listen = settings.socket("listen")?;
    let port = match listen.port() {
        0 => Some(0),
        port => port.checked_add(HTTP_PORT_OFFSET),
    };
    let port = port.ok_or_else(|| {
        OmniError::Config(format!(
            "http_listen is required when listening on {listen}: there is no port {HTTP_PORT_OFFSET} above"
        ))
    })?;
    Ok(SocketAddr::new(listen.ip(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{self, ConfigFile, Role};

    fn http(arguments: &[&str]) -> Result<String, OmniError> {
        let all = std::iter::once("router").chain(arguments.iter().copied());
        let matches = settings::command(Role::Router)
            .try_get_matches_from(all)
            .unwrap();
        let settings = Settings::resolve(Role::Router, &matches, &ConfigFile::default())?;
        http_listen(&settings).map(|address| address.to_string())
    }

    #[test]
    fn the_http_port_follows_that_of_grpc_unless_it_is_set() {
        assert_eq!(http(&[]).unwrap(), "127.0.0.1:7680");
        assert_eq!(http(&["--listen", "0.0.0.0:7000"]).unwrap(), "0.0.0.0:7080");
        assert_eq!(http(&["--listen", "127.0.0.1:0"]).unwrap(), "127.0.0.1:0");
        let given = ["--listen", "127.0.0.1:65500", "--http-listen", "[::1]:80"];
        assert_eq!(http(&given).unwrap(), "[::1]:80");
        for bad in [&given[..2], &["--http-listen", "80"]] {
            let error = http(bad).unwrap_err();
            assert!(error.to_string().contains("http_listen"), "{error}");
            assert_eq!(error.exit_code(), 64);
        }
    }
}
