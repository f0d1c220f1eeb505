//! From settings to running roles.
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ar_stage::ArStageConfig;
use base::{BuildInfo, Failure, Shutdown, limits::SHUTDOWN_GRACE, task::Owned};
use dit_worker::{DitWorkerConfig, StepLimits};
use kv_transfer::{
    ClientConfig, Host, ServiceConfig,
    engine::{EngineConfig, Transport},
};
use model::{BalanceOptions, Residency, StepCache, vae::Tiles};
use parallel::eplb::EplbConfig;
use proto::tls::Tls;
use registry::{Backend, EtcdConfig, EtcdTls, EtcdUser, RegistryError};
use router::{FetchConfig, HostList, HostListError, RouterConfig, StatusPage, admission::Limits};
use stage::{Device, GpuSettings, HostConfig};
use telemetry::{Metrics, TraceConfig};
use tokio::net::TcpListener;

use crate::{
    announce::Announcement,
    error::OmniError,
    secure,
    settings::{Role, Settings},
    up::{self, UpConfig},
};

/// Most compute threads a process may be told to use.
const MAX_THREADS: usize = 1024;
/// Least and largest share by which tiles of a picture overlap.
const MIN_OVERLAP: f64 = 0.05;
const MAX_OVERLAP: f64 = 0.5;
/// How far the port of the HTTP API is above that of gRPC, when it is not set.
const HTTP_PORT_OFFSET: u16 = 80;
/// Cluster that a process joins when none is named.
const DEFAULT_CLUSTER: &str = "default";

/// A role with everything it needs, parsed and checked; no port is open yet.
#[derive(Debug)]
enum Plan {
    Router(RouterConfig),
    KvTransfer(Place, ServiceConfig),
    ArStage(Place, ArStageConfig, usize),
    DitWorker(Place, DitWorkerConfig, usize),
    Up(UpConfig),
}

/// Where a member listens and whom it joins.
#[derive(Debug)]
struct Place {
    listen: SocketAddr,
    admin_listen: SocketAddr,
    advertise: Option<String>,
    pool: String,
    registry: Backend,
    grace: Duration,
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
            let bound = router::Bound::bind(config)
                .await
                .map_err(|e| OmniError::of(&e))?;
            let admin = bound
                .admin_address()
                .map(|address| format!("http://{address}"));
            let scheme = proto::tls::scheme();
            let announcement = Announcement {
                role: role.name().to_owned(),
                endpoint: format!("{scheme}://{}", bound.address()),
                admin: admin.unwrap_or_default(),
                http: bound
                    .http_address()
                    .map(|address| format!("{scheme}://{address}")),
            };
            announcement.print()?;
            bound.serve(shutdown).await.map_err(|e| OmniError::of(&e))
        }
        Plan::KvTransfer(place, config) => {
            let (listener, admin_listener, advertise) = open(role, &place).await?;
            let host = Host {
                listener,
                admin_listener: Some(admin_listener),
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
            let cache = match settings.get("prefix_cache_bytes") {
                Some(_) => settings.bytes("prefix_cache_bytes")? as u64,
                None => 0,
            };
            let config = ServiceConfig {
                cache_bytes: cache,
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

fn router_config(settings: &Settings) -> Result<RouterConfig, OmniError> {
    Ok(RouterConfig {
        listen: settings.socket("listen")?.to_string(),
        http_listen: Some(http_listen(settings)?.to_string()),
        advertise: advertise(settings)?,
        admin_listen: Some(settings.socket("admin_listen")?.to_string()),
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
        router::ApiKeys::load(path).map_err(|error| OmniError::Config(error.to_string()))?;
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

fn place(settings: &Settings) -> Result<Place, OmniError> {
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
        advertise,
        pool: settings.text("pool")?.to_owned(),
        registry: backend(settings)?,
        grace: SHUTDOWN_GRACE,
    })
}

/// The place of a stage, which says itself how long its requests may take at the end.
fn stage_place(settings: &Settings) -> Result<Place, OmniError> {
    Ok(Place {
        grace: settings.seconds("drain_grace_s")?,
        ..place(settings)?
    })
}

fn advertise(settings: &Settings) -> Result<Option<String>, OmniError> {
    match settings.get("advertise") {
        Some(_) => settings.url("advertise").map(Some),
        None => Ok(None),
    }
}

/// A router's address, or an etcd cluster with what else is needed to use it.
fn backend(settings: &Settings) -> Result<Backend, OmniError> {
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
fn etcd_settings_unset(settings: &Settings) -> Result<(), OmniError> {
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

fn engine(settings: &Settings) -> Result<EngineConfig, OmniError> {
    let words = [("shm", Transport::Shm), ("tcp", Transport::Tcp)];
    Ok(EngineConfig {
        net_devices: settings.get("transfer_devices").map(str::to_owned),
        ..EngineConfig::only(settings.one_of("transport", &words)?)
    })
}

/// How a worker gets its prefixes.
fn receiver(settings: &Settings) -> Result<ClientConfig, OmniError> {
    let relay = settings.one_of("prefix_relay", &[("off", false), ("on", true)])?;
    Ok(ClientConfig {
        node: relay.then(|| settings.url("kv_transfer")).transpose()?,
        ..ClientConfig::new(engine(settings)?)
    })
}

fn threads(settings: &Settings) -> Result<usize, OmniError> {
    let threads = settings.count("threads", 0)?;
    if threads > MAX_THREADS {
        return Err(OmniError::Config(format!(
            "threads must be at most {MAX_THREADS}, got {threads}"
        )));
    }
    Ok(threads)
}

/// The plan of an AR stage, which computes both guidance rows of a request in one pass.
pub(crate) fn ar_plan(settings: &Settings, key: &'static str) -> Result<parallel::Plan, OmniError> {
    let plan = parallel_plan(settings, key)?;
    if plan.cfg == 1 {
        return Ok(plan);
    }
    Err(OmniError::Config(format!(
        "{key} \"{plan}\": an AR stage has both guidance rows in one pass, so cfg must be 1"
    )))
}

/// What a setting names as a device.
pub(crate) fn parsed_device(settings: &Settings, key: &'static str) -> Result<Device, OmniError> {
    let text = settings.text(key)?;
    text.parse()
        .map_err(|reason: String| OmniError::Config(format!("{key} {reason}")))
}

/// What a stage computes on. What only GPUs understand is not dropped quietly.
fn device(settings: &Settings) -> Result<Device, OmniError> {
    let fp8 = settings.one_of("weights", &[("bf16", false), ("fp8", true)])?;
    let memory = match settings.text("gpu_memory")? {
        "auto" => None,
        _ => Some(settings.bytes("gpu_memory")? as u64),
    };
    match parsed_device(settings, "device")? {
        Device::Cpu => {
            let only_gpus = [("weights", fp8), ("gpu_memory", memory.is_some())];
            match only_gpus.into_iter().find(|(_, set)| *set) {
                Some((key, _)) => Err(OmniError::Config(format!(
                    "{key} belongs to GPUs, and device is cpu"
                ))),
                None => Ok(Device::Cpu),
            }
        }
        Device::Cuda(gpus) => Ok(Device::Cuda(GpuSettings {
            fp8,
            memory,
            resident_layers: match residency(settings)? {
                Residency::All => None,
                Residency::Layers(layers) => Some(layers),
                Residency::Bytes(_) => {
                    let text = "resident_layers must be all or a number of layers on GPUs";
                    return Err(OmniError::Config(text.to_owned()));
                }
            },
            ..gpus
        })),
    }
}

/// That of a stage whose layers can only leave a GPU.
fn ar_device(settings: &Settings) -> Result<Device, OmniError> {
    let device = device(settings)?;
    if device == Device::Cpu && settings.text("resident_layers")? != "all" {
        let text = "resident_layers belongs to GPUs, and device is cpu".to_owned();
        return Err(OmniError::Config(text));
    }
    Ok(device)
}

/// How experts move between the ranks of a worker.
fn balance(settings: &Settings) -> Result<BalanceOptions, OmniError> {
    let interval_steps = settings.count("eplb_interval", 0)?;
    Ok(BalanceOptions {
        eplb: EplbConfig {
            enabled: interval_steps > 0,
            interval_steps: interval_steps.max(1),
        },
        extra_slots: settings.count("eplb_extra_slots", 0)?,
        hosts: 1,
    })
}

/// Memory of a worker; `None`: what is free.
fn memory(settings: &Settings) -> Result<Option<u64>, OmniError> {
    if settings.text("memory")? == "auto" {
        return Ok(None);
    }
    settings.bytes("memory").map(|bytes| Some(bytes as u64))
}

/// How much of the decoder stays in memory: all, a number of layers of each rank, or bytes of all ranks.
fn residency(settings: &Settings) -> Result<Residency, OmniError> {
    let text = settings.text("resident_layers")?;
    if text == "all" {
        return Ok(Residency::All);
    }
    if let Ok(layers) = text.parse() {
        return Ok(Residency::Layers(layers));
    }
    let bytes = settings.bytes("resident_layers").map_err(|_| {
        let message = "must be all, a number of layers or bytes such as 40GiB";
        OmniError::Config(format!("resident_layers {message}, got {text:?}"))
    })?;
    Ok(Residency::Bytes(bytes as u64))
}

/// How pictures are decoded.
fn tiles(settings: &Settings) -> Result<Tiles, OmniError> {
    let text = settings.text("vae_tiles")?;
    if text == "off" {
        return Ok(Tiles::Whole);
    }
    match text.parse() {
        Ok(overlap) if (MIN_OVERLAP..=MAX_OVERLAP).contains(&overlap) => {
            Ok(Tiles::Overlapping(overlap))
        }
        _ => Err(OmniError::Config(format!(
            "vae_tiles must be off or an overlap of {MIN_OVERLAP} to {MAX_OVERLAP}, got {text:?}"
        ))),
    }
}

/// How jobs save steps; what belongs to a model is read when that is loaded.
fn step_cache(settings: &Settings) -> Result<StepCache, OmniError> {
    let cache = settings.text("step_cache")?.parse::<StepCache>();
    cache.map_err(|error| OmniError::Config(error.to_string()))
}

/// A setting that is a plan; whether it fits the model is seen when that is loaded.
pub(crate) fn parallel_plan(
    settings: &Settings,
    key: &'static str,
) -> Result<parallel::Plan, OmniError> {
    let text = settings.text(key)?;
    text.parse().map_err(|error: parallel::ParallelError| {
        OmniError::Config(format!("{key} {text:?}: {error}"))
    })
}

/// The checkpoint directory, which must at least be one.
pub(crate) fn model_dir(settings: &Settings) -> Result<PathBuf, OmniError> {
    let path = PathBuf::from(settings.text("model")?);
    if !path.is_dir() {
        return Err(OmniError::Config(format!(
            "model must be a checkpoint directory, {} is none",
            path.display()
        )));
    }
    Ok(path)
}

/// Sizes the pool that all arithmetic of this process runs on; 0: one thread a core.
pub(crate) fn set_threads(threads: usize) -> Result<(), OmniError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("compute-{index}"))
        .build_global()
        .map_err(|error| OmniError::Config(format!("threads: {error}")))
}

async fn host(role: Role, place: Place, build: &BuildInfo) -> Result<HostConfig, OmniError> {
    let (listener, admin_listener, advertise) = open(role, &place).await?;
    Ok(HostConfig {
        listener,
        admin_listener,
        advertise,
        pool: place.pool,
        registry: place.registry,
        grace: place.grace,
        build: build.clone(),
    })
}

/// Binds both ports and says so on standard output.
async fn open(role: Role, place: &Place) -> Result<(TcpListener, TcpListener, String), OmniError> {
    let listener = bind(place.listen, "listen").await?;
    let admin_listener = bind(place.admin_listen, "admin_listen").await?;
    let local = |scheme: &str, listener: &TcpListener| {
        let address = listener.local_addr();
        address
            .map(|address| format!("{scheme}://{address}"))
            .map_err(|error| OmniError::io("read the address of a listener", error))
    };
    let endpoint = match &place.advertise {
        Some(advertise) => advertise.clone(),
        None => local(proto::tls::scheme(), &listener)?,
    };
    announce(role, endpoint.clone(), local("http", &admin_listener)?)?;
    Ok((listener, admin_listener, endpoint))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{self, ConfigFile};

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
