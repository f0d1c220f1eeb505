//! Where a member listens, what it is called, and which registry it joins.
use std::{net::SocketAddr, path::PathBuf, time::Duration};

use base::limits::SHUTDOWN_GRACE;
use registry::{Backend, EtcdConfig, EtcdTls, EtcdUser, RegistryError};

use telemetry::AdminTls;

use crate::{error::OmniError, secure, settings::Settings};

/// Cluster that a process joins when none is named.
const DEFAULT_CLUSTER: &str = "default";

/// Where a member listens and whom it joins.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) listen: SocketAddr,
    pub(super) admin_listen: SocketAddr,
    pub(super) admin_tls: AdminTls,
    pub(super) advertise: Option<String>,
    pub(super) pool: String,
    pub(super) registry: Backend,
    pub(super) grace: Duration,
}

pub(super) fn place(settings: &Settings) -> Result<Place, OmniError> {
    let listen = settings.socket("listen")?;
    let advertise = advertise(settings)?;
    if listen.ip().is_unspecified() && advertise.is_none() {
        return Err(OmniError::Config(format!(
            "advertise is required when listening on {listen}: others cannot connect to that address"
        )));
    }
    Ok(Place {
        listen,
        admin_listen: settings.socket("admin_listen")?,
        admin_tls: secure::admin_tls(settings)?,
        advertise,
        pool: settings.text("pool")?.to_owned(),
        registry: backend(settings)?,
        grace: SHUTDOWN_GRACE,
    })
}

/// The place of a stage, which says itself how long its requests may take at the end.
pub(super) fn stage_place(settings: &Settings) -> Result<Place, OmniError> {
    Ok(Place {
        grace: settings.seconds("drain_grace_s")?,
        ..place(settings)?
    })
}

pub(super) fn advertise(settings: &Settings) -> Result<Option<String>, OmniError> {
    match settings.get("advertise") {
        Some(_) => settings.url("advertise").map(Some),
        None => Ok(None),
    }
}

/// A router's address, or an etcd cluster with what else is needed to use it.
pub(super) fn backend(settings: &Settings) -> Result<Backend, OmniError> {
    if !settings.text("registry")?.starts_with("etcd") {
        etcd_settings_unset(settings)?;
        return Ok(Backend::Remote {
            endpoint: settings.url("registry")?,
        });
    }
    let named = |error: RegistryError| OmniError::Config(error.to_string());
    let mut config = EtcdConfig::parse(settings.text("registry")?).map_err(named)?;
    settings.text("cluster")?.clone_into(&mut config.cluster);
    let path = |key| settings.get(key).map(PathBuf::from);
    let pair = |first, second| match (path(first), path(second)) {
        (Some(one), Some(two)) => Ok(Some((one, two))),
        (None, None) => Ok(None),
        (one, _) => {
            let (given, other) = if one.is_some() {
                (first, second)
            } else {
                (second, first)
            };
            Err(OmniError::Config(format!("{given} needs {other} as well")))
        }
    };
    let identity = pair("registry_cert", "registry_key")?;
    config.tls = match (path("registry_ca"), identity) {
        (Some(ca), identity) => Some(EtcdTls { ca, identity }),
        (None, None) => None,
        (None, Some(_)) => {
            let text = "registry_cert needs registry_ca as well".to_owned();
            return Err(OmniError::Config(text));
        }
    };
    config.user =
        pair("registry_user", "registry_password_file")?.map(|(name, password_file)| EtcdUser {
            name: name.display().to_string(),
            password_file,
        });
    config.validate().map_err(named)?;
    Ok(Backend::Etcd(config))
}

/// What only etcd understands is not dropped quietly.
pub(super) fn etcd_settings_unset(settings: &Settings) -> Result<(), OmniError> {
    let only_etcd = [
        "registry_ca",
        "registry_cert",
        "registry_key",
        "registry_user",
        "registry_password_file",
    ];
    let given = only_etcd
        .into_iter()
        .find(|key| settings.get(key).is_some());
    let named = (settings.text("cluster")? != DEFAULT_CLUSTER).then_some("cluster");
    match given.or(named) {
        Some(key) => Err(OmniError::Config(format!(
            "{key} belongs to an etcd registry, and registry is {:?}",
            settings.text("registry")?
        ))),
        None => Ok(()),
    }
}
