//! From settings to running roles.
mod place;
mod router;
mod stages;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use ar_stage::ArStageConfig;
use base::{BuildInfo, Failure, Shutdown, task::Owned};
use dit_worker::{DitWorkerConfig, StepLimits};
use kv_transfer::{ClientConfig, Host, ServiceConfig};
use proto::tls::Tls;
use stage::HostConfig;
use telemetry::{AdminPort, Metrics, TraceConfig};
use tokio::net::TcpListener;

use self::{
    place::{Place, place, stage_place},
    router::router_config,
    stages::{
        ar_device, balance, device, engine, memory, receiver, residency, step_cache, threads, tiles,
    },
};
pub(crate) use self::{
    router::{http_listen, status_page},
    stages::{ar_plan, model_dir, parallel_plan, parsed_device, set_threads},
};
use crate::{
    announce::Announcement,
    error::OmniError,
    secure,
    settings::{Role, Settings},
    up::{self, UpConfig},
};

/// A role with everything it needs, parsed and checked; no port is open yet.
#[derive(Debug)]
enum Plan {
    Router(::router::RouterConfig),
    KvTransfer(Place, ServiceConfig),
    ArStage(Place, ArStageConfig, usize),
    DitWorker(Place, DitWorkerConfig, usize),
    Up(UpConfig),
}

/// Parses and checks the settings of a role without running it.
pub(crate) fn check(role: Role, settings: &Settings) -> Result<(), OmniError> {
    secure::identity(settings)?;
    traces(role, settings)?;
    plan(role, settings, None).map(drop)
}

/// Where the spans of a role go.
pub(crate) fn traces(role: Role, settings: &Settings) -> Result<TraceConfig, OmniError> {
    let config = TraceConfig {
        service: role.name(),
        version: build_info().version,
        endpoint: settings.get("otlp_endpoint").map(str::to_owned),
    };
    config.validate().map_err(|error| bad(&error))?;
    Ok(config)
}

/// Runs a role until `shutdown`.
pub(crate) async fn run(
    role: Role,
    settings: &Settings,
    file: Option<&Path>,
    shutdown: Shutdown,
) -> Result<(), OmniError> {
    let build = build_info();
    let planned = plan(role, settings, file)?;
    let _followed = secure::identity(settings)?.map(adopt).transpose()?;
    match planned {
        Plan::Up(config) => up::run(config, shutdown).await,
        Plan::Router(config) => {
            let bound = ::router::Bound::bind(config)
                .await
                .map_err(|e| OmniError::of(&e))?;
            let scheme = proto::tls::scheme();
            let announcement = Announcement {
                role: role.name().to_owned(),
                endpoint: format!("{scheme}://{}", bound.address()),
                admin: bound.admin_url().unwrap_or_default(),
                http: bound
                    .http_address()
                    .map(|address| format!("{scheme}://{address}")),
            };
            announcement.print()?;
            bound.serve(shutdown).await.map_err(|e| OmniError::of(&e))
        }
        Plan::KvTransfer(place, config) => {
            let (listener, admin, advertise) = open(role, &place).await?;
            let host = Host {
                listener,
                admin: Some(admin),
                advertise,
                pool: place.pool,
                registry: Some(place.registry),
                metrics: Metrics::new(&build),
            };
            kv_transfer::service::run(config, host, shutdown)
                .await
                .map_err(|error| OmniError::of(&error))
        }
        Plan::ArStage(place, config, threads) => {
            set_threads(threads)?;
            let host = host(role, place, &build).await?;
            ar_stage::run(config, host, Metrics::new(&build), shutdown)
                .await
                .map_err(|error| OmniError::of(&error))
        }
        Plan::DitWorker(place, config, threads) => {
            set_threads(threads)?;
            let host = host(role, place, &build).await?;
            dit_worker::run(config, host, Metrics::new(&build), shutdown)
                .await
                .map_err(|error| OmniError::of(&error))
        }
    }
}

/// Makes an identity that of this process; its files are followed as long as what comes back is held.
fn adopt(tls: Arc<Tls>) -> Result<Owned<()>, OmniError> {
    proto::tls::install(tls.clone()).map_err(|error| OmniError::of(&error))?;
    Ok(base::task::spawn(tls.follow()))
}

fn plan(role: Role, settings: &Settings, file: Option<&Path>) -> Result<Plan, OmniError> {
    settings.text("log_level")?;
    Ok(match role {
        Role::Up => Plan::Up(UpConfig::from_settings(settings, file)?),
        Role::Router => Plan::Router(router_config(settings)?),
        Role::KvTransfer => {
            let pool = settings.bytes("pool_bytes")? as u64;
            let bytes = |key| settings.get(key).map(|_| settings.bytes(key)).transpose();
            let config = ServiceConfig {
                cache_bytes: bytes("prefix_cache_bytes")?.unwrap_or(0) as u64,
                page_bytes: settings.bytes("page_bytes")? as u64,
                max_prefix_bytes: bytes("max_prefix_bytes")?.map(|bytes| bytes as u64),
                max_slots: settings.count("max_slots", 1)?,
                pool_socket: settings.get("pool_socket").map(PathBuf::from),
                ..ServiceConfig::new(engine(settings)?, pool)
            };
            config.validate().map_err(|error| bad(&error))?;
            Plan::KvTransfer(place(settings)?, config)
        }
        Role::ArStage => {
            let mut client = ClientConfig::new(engine(settings)?);
            client.ttl = settings.seconds("prefix_ttl_s")?;
            // A full pool is waited for in line, as long as publishing may take.
            client.wait = client.deadline.min(client.ttl);
            let config = ArStageConfig {
                model: model_dir(settings)?,
                plan: ar_plan(settings, "plan")?,
                device: ar_device(settings)?,
                kv_transfer: settings.url("kv_transfer")?,
                client,
                max_queue: settings.count("max_queue", 1)?,
            };
            config.check().map_err(|error| bad(&error))?;
            Plan::ArStage(stage_place(settings)?, config, threads(settings)?)
        }
        Role::DitWorker => {
            let config = DitWorkerConfig {
                model: model_dir(settings)?,
                plan: parallel_plan(settings, "plan")?,
                device: device(settings)?,
                balance: balance(settings)?,
                residency: residency(settings)?,
                tiles: tiles(settings)?,
                by_cost: settings.one_of("batching", &[("cost", true), ("arrival", false)])?,
                client: receiver(settings)?,
                limits: StepLimits {
                    max_rows: settings.count("max_rows", 1)?,
                    max_tokens: settings.count("max_tokens", 1)?,
                },
                step_cache: step_cache(settings)?,
                memory: memory(settings)?,
                max_queue: settings.count("max_queue", 1)?,
            };
            config.check().map_err(|error| bad(&error))?;
            Plan::DitWorker(stage_place(settings)?, config, threads(settings)?)
        }
    })
}

async fn host(role: Role, place: Place, build: &BuildInfo) -> Result<HostConfig, OmniError> {
    let (listener, admin, advertise) = open(role, &place).await?;
    Ok(HostConfig {
        listener,
        admin,
        advertise,
        pool: place.pool,
        registry: place.registry,
        grace: place.grace,
        build: build.clone(),
    })
}

/// Binds both ports and says so on standard output.
async fn open(role: Role, place: &Place) -> Result<(TcpListener, AdminPort, String), OmniError> {
    let listener = bind(place.listen, "listen").await?;
    let admin = AdminPort {
        listener: bind(place.admin_listen, "admin_listen").await?,
        tls: place.admin_tls,
    };
    let failed = |error| OmniError::io("read the address of a listener", error);
    let endpoint = match &place.advertise {
        Some(advertise) => advertise.clone(),
        None => {
            let address = listener.local_addr().map_err(failed)?;
            format!("{}://{address}", proto::tls::scheme())
        }
    };
    announce(role, endpoint.clone(), admin.url().map_err(failed)?)?;
    Ok((listener, admin, endpoint))
}

async fn bind(address: SocketAddr, field: &str) -> Result<TcpListener, OmniError> {
    let bound = proto::server::bind(&address.to_string(), field).await;
    bound.map_err(|failure| OmniError::Config(failure.message))
}

fn announce(role: Role, endpoint: String, admin: String) -> Result<(), OmniError> {
    let announcement = Announcement {
        role: role.name().to_owned(),
        endpoint,
        admin,
        http: None,
    };
    announcement.print()
}

fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git_sha: env!("OMNI_GIT_SHA").to_owned(),
        profile: env!("OMNI_PROFILE").to_owned(),
    }
}

fn bad(error: &impl base::Fault) -> OmniError {
    OmniError::Config(Failure::of(error).message)
}
