//! `omni up`: the four roles as processes on this machine, started in order of their needs, watched
//! while they run, stopped in reverse.
mod child;

use std::{
    ffi::OsString,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use base::{Deadline, Shutdown, clock::SystemClock};
use proto::tls::Tls;
use router::StatusPage;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    announce::Announcement,
    certs,
    error::OmniError,
    secure,
    settings::{Role, Settings},
};
use child::Child;
use stage::Device;

/// How often health is asked for.
const HEALTH_INTERVAL: Duration = Duration::from_millis(50);
/// How long one answer may take.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a death is looked for.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Children pick a free port on the loopback interface.
const ANY_PORT: &str = "127.0.0.1:0";

/// What `up` was asked to do.
#[derive(Debug, Clone)]
pub(crate) struct UpConfig {
    pub(crate) model: PathBuf,
    /// Plans of the AR stage and of the DiT worker, where they are given.
    pub(crate) plans: [Option<parallel::Plan>; 2],
    /// Devices of the AR stage and of the DiT worker, and how GPUs hold weights.
    pub(crate) devices: [Option<Device>; 2],
    pub(crate) weights: Option<&'static str>,
    pub(crate) listen: std::net::SocketAddr,
    pub(crate) http_listen: std::net::SocketAddr,
    /// Directory of certificates; `None`: the roles speak in clear.
    pub(crate) tls_dir: Option<PathBuf>,
    pub(crate) otlp_endpoint: Option<String>,
    pub(crate) status_page: StatusPage,
    pub(crate) transport: &'static str,
    pub(crate) pool_bytes: usize,
    pub(crate) ready_file: Option<PathBuf>,
    pub(crate) start_timeout: Duration,
    pub(crate) stop_grace: Duration,
    /// The config file, passed on to the roles.
    pub(crate) config: Option<PathBuf>,
    pub(crate) log_level: String,
    pub(crate) log_format: String,
}

impl UpConfig {
    /// Parses and checks the settings.
    pub(crate) fn from_settings(
        settings: &Settings,
        config: Option<&Path>,
    ) -> Result<Self, OmniError> {
        let given = |key| settings.get(key).is_some();
        let ar_plan = given("ar_plan").then(|| crate::roles::ar_plan(settings, "ar_plan"));
        let dit_plan = given("dit_plan").then(|| crate::roles::parallel_plan(settings, "dit_plan"));
        let tls_dir = settings.get("tls_dir").map(PathBuf::from);
        if tls_dir.is_none() {
            secure::check_clear(settings)?;
        }
        let plans = [ar_plan.transpose()?, dit_plan.transpose()?];
        let device = |key: &'static str, plan: &Option<parallel::Plan>| {
            let key = if given(key) { key } else { "device" };
            if !given(key) {
                return Ok(None);
            }
            let device = crate::roles::parsed_device(settings, key)?;
            let checked = device.check(&plan.unwrap_or_default());
            checked.map_err(|error| OmniError::Config(error.to_string()))?;
            Ok::<_, OmniError>(Some(device))
        };
        let devices = [
            device("ar_device", &plans[0])?,
            device("dit_device", &plans[1])?,
        ];
        let words = [("bf16", "bf16"), ("fp8", "fp8")];
        let weights = given("weights").then(|| settings.one_of("weights", &words));
        Ok(Self {
            tls_dir,
            otlp_endpoint: settings.get("otlp_endpoint").map(str::to_owned),
            model: crate::roles::model_dir(settings)?,
            plans,
            devices,
            weights: weights.transpose()?,
            listen: settings.socket("listen")?,
            http_listen: crate::roles::http_listen(settings)?,
            status_page: crate::roles::status_page(settings)?,
            transport: settings.one_of("transport", &[("shm", "shm"), ("tcp", "tcp")])?,
            pool_bytes: settings.bytes("pool_bytes")?,
            ready_file: settings.get("ready_file").map(PathBuf::from),
            start_timeout: settings.seconds("start_timeout_s")?,
            stop_grace: settings.seconds("stop_grace_s")?,
            config: config.map(Path::to_path_buf),
            log_level: settings.text("log_level")?.to_owned(),
            log_format: settings.text("log_format")?.to_owned(),
        })
    }

    fn arguments(&self, role: Role, own: &[(&str, String)]) -> Vec<OsString> {
        let mut common = vec![
            ("--admin-listen", ANY_PORT.to_owned()),
            ("--log-level", self.log_level.clone()),
            ("--log-format", self.log_format.clone()),
        ];
        let otlp = self.otlp_endpoint.iter().cloned();
        common.extend(otlp.map(|endpoint| ("--otlp-endpoint", endpoint)));
        common.extend(self.tls(role));
        let mut arguments: Vec<OsString> = common
            .iter()
            .chain(own)
            .flat_map(|(flag, value)| [OsString::from(*flag), OsString::from(value)])
            .collect();
        if let Some(config) = &self.config {
            arguments.extend(["--config".into(), config.into()]);
        }
        arguments
    }
}

impl UpConfig {
    fn tls(&self, role: Role) -> Vec<(&'static str, String)> {
        let Some(dir) = &self.tls_dir else {
            return vec![("--tls", "off".to_owned())];
        };
        let path = |name: String| dir.join(name).to_string_lossy().into_owned();
        vec![
            ("--tls", "on".to_owned()),
            ("--tls-ca", path("ca.pem".to_owned())),
            ("--tls-cert", path(format!("{}.pem", role.name()))),
            ("--tls-key", path(format!("{}.key", role.name()))),
        ]
    }
}

/// Asks the roles for their health as an operator does.
fn adopt(dir: &Path) -> Result<(), OmniError> {
    certs::ensure(dir)?;
    let files = certs::files(dir, proto::access::Role::Admin);
    let tls = Tls::load(files).map_err(|error| OmniError::Config(error.to_string()))?;
    proto::tls::install(tls).map_err(|error| OmniError::of(&error))
}

/// Runs until a signal asks for the end or a role dies.
pub(crate) async fn run(config: UpConfig, shutdown: Shutdown) -> Result<(), OmniError> {
    config.tls_dir.as_deref().map(adopt).transpose()?;
    let mut fleet = Vec::new();
    let deadline = Deadline::after(&SystemClock, config.start_timeout);
    let started = tokio::select! {
        started = deadline.bound("the roles to start", start(&config, &mut fleet)) => {
            started.map_err(|late| OmniError::of(&late)).and_then(|started| started)
        }
        () = shutdown.requested() => {
            stop(&mut fleet, config.stop_grace, &shutdown).await;
            return Ok(());
        }
    };
    let outcome = match started {
        Ok(router) => match announce(&router, config.ready_file.as_deref()) {
            Ok(()) => tokio::select! {
                died = watch(&mut fleet) => Err(died),
                () = shutdown.requested() => Ok(()),
            },
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    stop(&mut fleet, config.stop_grace, &shutdown).await;
    if let Some(path) = &config.ready_file {
        // What it says is no longer true.
        let _ = std::fs::remove_file(path);
    }
    outcome
}

/// Router (with the registry), then the KV-transfer service, then both model stages side by side.
async fn start(config: &UpConfig, fleet: &mut Vec<Child>) -> Result<Announcement, OmniError> {
    let router = [
        ("--listen", config.listen.to_string()),
        ("--http-listen", config.http_listen.to_string()),
        ("--status-page", config.status_page.name().to_owned()),
    ];
    let router = launch(Role::Router, config.arguments(Role::Router, &router), fleet).await?;
    let registry = ("--registry", router.endpoint.clone());
    let transport = ("--transport", config.transport.to_owned());
    let listen = ("--listen", ANY_PORT.to_owned());

    let kv = [
        listen.clone(),
        registry.clone(),
        transport.clone(),
        ("--pool-bytes", config.pool_bytes.to_string()),
    ];
    let kv = launch(
        Role::KvTransfer,
        config.arguments(Role::KvTransfer, &kv),
        fleet,
    )
    .await?;
    healthy(&kv, fleet).await?;

    let stage = [
        listen,
        registry,
        transport,
        ("--kv-transfer", kv.endpoint),
        ("--model", config.model.to_string_lossy().into_owned()),
    ];
    let with = |role: Role, index: usize| {
        let plan = config.plans[index].map(|plan| ("--plan", plan.to_string()));
        let device = &config.devices[index];
        let weights = match device {
            // What was said of GPUs does not concern it.
            Some(Device::Cpu) => Some("bf16"),
            _ => config.weights,
        };
        let device = device.as_ref().map(|d| ("--device", d.to_string()));
        let weights = weights.map(|w| ("--weights", w.to_owned()));
        let own = stage.iter().cloned().chain(plan).chain(device);
        config.arguments(role, &own.chain(weights).collect::<Vec<_>>())
    };
    let ar = launch(Role::ArStage, with(Role::ArStage, 0), fleet).await?;
    let dit = launch(Role::DitWorker, with(Role::DitWorker, 1), fleet).await?;
    healthy(&ar, fleet).await?;
    healthy(&dit, fleet).await?;
    healthy(&router, fleet).await?;
    Ok(router)
}

async fn launch(
    role: Role,
    arguments: Vec<OsString>,
    fleet: &mut Vec<Child>,
) -> Result<Announcement, OmniError> {
    let mut child = Child::start(role, arguments)?;
    let announced = child.announcement().await;
    fleet.push(child);
    let announced = announced?;
    let Announcement {
        endpoint, admin, ..
    } = &announced;
    tracing::info!(role = role.name(), %endpoint, %admin, "started");
    Ok(announced)
}

/// Waits until a server says that it serves; ends early when any role dies.
async fn healthy(of: &Announcement, fleet: &mut [Child]) -> Result<(), OmniError> {
    let channel = proto::channel::lazy(&of.endpoint)?;
    let mut client = HealthClient::new(channel);
    loop {
        let ask = client.check(HealthCheckRequest::default());
        if let Ok(Ok(answer)) = tokio::time::timeout(HEALTH_TIMEOUT, ask).await
            && answer.into_inner().status() == ServingStatus::Serving
        {
            return Ok(());
        }
        if let Some(died) = dead(fleet).await {
            return Err(died);
        }
        tokio::time::sleep(HEALTH_INTERVAL).await;
    }
}

async fn dead(fleet: &mut [Child]) -> Option<OmniError> {
    for child in fleet {
        if let Some(status) = child.exit_status() {
            return Some(child.died(Some(status)).await);
        }
    }
    None
}

/// Ends with the first death. A role that ended well was drained by its operator: that is no death,
/// unless it is the router, without which nothing else can be reached.
async fn watch(fleet: &mut Vec<Child>) -> OmniError {
    loop {
        fleet.retain_mut(|child| {
            let left = child.role() != Role::Router
                && child.exit_status().is_some_and(|status| status.success());
            if left {
                tracing::info!(role = child.role().name(), "has drained and left");
            }
            !left
        });
        if let Some(died) = dead(fleet).await {
            return died;
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

fn announce(router: &Announcement, ready_file: Option<&Path>) -> Result<(), OmniError> {
    let endpoint = &router.endpoint;
    if let Some(path) = ready_file {
        let failed = |source| OmniError::io(format!("write {}", path.display()), source);
        let draft = path.with_extension("tmp");
        std::fs::write(&draft, format!("{endpoint}\n")).map_err(failed)?;
        std::fs::rename(&draft, path).map_err(failed)?;
    }
    // The base URL of OpenAI clients; the line that says that all is well comes last.
    let http = router.http.iter().map(|http| format!("openai {http}/v1\n"));
    let lines: String = http.chain([format!("ready {endpoint}\n")]).collect();
    std::io::stdout()
        .write_all(lines.as_bytes())
        .map_err(|error| OmniError::io("write to standard output", error))
}

/// The router first, so that what it has accepted can still finish; the pool last.
async fn stop(fleet: &mut [Child], grace: Duration, shutdown: &Shutdown) {
    for group in [
        &[Role::Router][..],
        &[Role::ArStage, Role::DitWorker],
        &[Role::KvTransfer],
    ] {
        let in_group = |child: &&mut Child| group.contains(&child.role());
        for child in fleet.iter_mut().filter(in_group) {
            child.terminate();
        }
        for child in fleet.iter_mut().filter(in_group) {
            if !child.finish(grace, shutdown.forced()).await {
                tracing::warn!(
                    role = child.role().name(),
                    "did not stop in time and was killed"
                );
            }
        }
    }
    tracing::info!("all roles have stopped");
}
