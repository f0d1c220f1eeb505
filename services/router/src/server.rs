//! A router as a server: bind everything, then serve until told to stop.
use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use base::{
    BuildInfo, Code, Failure, MemberId, Shutdown, clock,
    limits::SHUTDOWN_GRACE,
    rng::Source,
    task::{self, Tracker},
};
use proto::{
    names,
    server::Health,
    web::{HttpBounds, Site},
};
use registry::{
    Backend, Embedded, JoinOptions, Member, MemberState, Membership, Registry, Role, Snapshot,
    Snapshots,
};
use telemetry::{AdminPort, AdminTls, Metrics, Readiness, names as metric};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::RoutesBuilder;

use crate::{
    RouterError, admin,
    admission::Limits,
    audience::Audiences,
    events::{self, Events},
    fetch::{FetchConfig, Fetcher},
    front::{self, Context, StatusPage},
    gate::Gate,
    jobs::Jobs,
    keys::ApiKeys,
    members::Members,
    placement,
    prefix::{Keeper, PREFIX_TTL},
    recorder::Recorder,
};

/// How long connections may take to close once the last request is answered.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// How often the age of a picture that is no longer kept up to date is told.
const STALENESS_INTERVAL: Duration = Duration::from_secs(1);

const STATES: [(MemberState, &str); 3] = [
    (MemberState::Starting, "starting"),
    (MemberState::Ready, "ready"),
    (MemberState::Draining, "draining"),
];

/// Everything a router is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterConfig {
    /// gRPC address to listen on, "HOST:PORT"; port 0 takes a free one.
    pub listen: String,
    /// Address of the HTTP API to listen on; `None`: no such port.
    pub http_listen: Option<String>,
    /// What clients of the HTTP API may make it wait for.
    pub http_bounds: HttpBounds,
    /// Address others reach it at, "http://HOST:PORT"; `None`: where it listens.
    pub advertise: Option<String>,
    /// Address of probes and metrics; `None`: no such port.
    pub admin_listen: Option<String>,
    /// How the admin port speaks.
    pub admin_tls: AdminTls,
    /// What the admin port shows besides probes and metrics.
    pub status_page: StatusPage,
    /// Where members are registered.
    pub registry: Backend,
    /// File that a JSON line is added to for each request that ends; `None`: none.
    pub record_file: Option<PathBuf>,
    /// File of the API keys that are accepted; `None`: none is asked for, unless TLS is on.
    pub api_keys: Option<PathBuf>,
    /// Bounds of admission.
    pub limits: Limits,
    /// Which pictures are fetched that a request only names.
    pub fetch: FetchConfig,
    /// Time to live of the prefixes that a request holds; they are renewed at a third of it.
    pub prefix_ttl: Duration,
    /// How long running requests may take after a stop was asked for.
    pub grace: Duration,
    /// Lease of the router's own record.
    pub join: JoinOptions,
    /// Shown by GetVersion.
    pub build: BuildInfo,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7080".to_owned(),
            http_listen: None,
            http_bounds: HttpBounds::default(),
            advertise: None,
            admin_listen: None,
            admin_tls: AdminTls::default(),
            status_page: StatusPage::default(),
            registry: Backend::Embedded,
            api_keys: None,
            record_file: None,
            limits: Limits::default(),
            fetch: FetchConfig::default(),
            prefix_ttl: PREFIX_TTL,
            grace: SHUTDOWN_GRACE,
            join: JoinOptions::default(),
            build: BuildInfo::default(),
        }
    }
}

/// Binds and serves.
///
/// # Errors
/// An address that cannot be bound, a registry that cannot be used, a transport that breaks.
pub async fn run(config: RouterConfig, shutdown: Shutdown) -> Result<(), RouterError> {
    let bound = Bound::bind(config).await?;
    Box::pin(bound.serve(shutdown)).await
}

/// A router whose ports are open but which does not answer yet.
#[derive(Debug)]
pub struct Bound {
    config: RouterConfig,
    listener: TcpListener,
    admin: Option<AdminPort>,
    http_listener: Option<TcpListener>,
    address: SocketAddr,
    metrics: Metrics,
    keys: Option<Arc<ApiKeys>>,
    recorder: Option<Recorder>,
}

impl Bound {
    /// Opens the ports.
    ///
    /// # Errors
    /// An address that cannot be bound names its setting.
    pub async fn bind(config: RouterConfig) -> Result<Self, RouterError> {
        if let Some(advertise) = &config.advertise {
            proto::channel::endpoint(advertise, "advertise")?;
        }
        let keys = config.api_keys.as_deref().map(ApiKeys::load).transpose();
        let keys = keys.map_err(|error| Failure::of(&error))?;
        let recorder = config.record_file.as_deref().map(Recorder::open);
        let recorder = recorder.transpose()?;
        let listener = proto::server::bind(&config.listen, "listen").await?;
        let address = listener.local_addr().map_err(|error| io(&error))?;
        let admin = match &config.admin_listen {
            Some(address) => Some(AdminPort {
                listener: proto::server::bind(address, "admin_listen").await?,
                tls: config.admin_tls,
            }),
            None => None,
        };
        let http_listener = match &config.http_listen {
            Some(address) => Some(proto::server::bind(address, "http_listen").await?),
            None => None,
        };
        let metrics = Metrics::new(&config.build);
        Ok(Self {
            config,
            listener,
            admin,
            http_listener,
            address,
            metrics,
            keys,
            recorder,
        })
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where probes and metrics are, if anywhere.
    pub fn admin_url(&self) -> Option<String> {
        self.admin.as_ref().and_then(|port| port.url().ok())
    }

    /// Where the HTTP API answers, if anywhere.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_listener
            .as_ref()
            .and_then(|listener| listener.local_addr().ok())
    }

    /// Serves until `shutdown`, finishes what runs within the grace, and leaves.
    ///
    /// # Errors
    /// The registry refuses this router; the transport breaks.
    pub async fn serve(self, shutdown: Shutdown) -> Result<(), RouterError> {
        let stop = CancellationToken::new();
        let (registry, embedded): (Arc<dyn Registry>, _) = match &self.config.registry {
            Backend::Embedded => {
                let embedded = Embedded::start(clock::system());
                (Arc::new(embedded.clone()), Some(embedded))
            }
            other => (registry::open(other)?, None),
        };
        let snapshots = Snapshots::follow(registry.clone());
        let context = self.context(snapshots.clone())?;
        let served = (registry.clone(), embedded);
        let (routes, health) = routes(&self, &context, served, stop.clone()).await?;

        let (readiness, metrics) = (Readiness::default(), self.metrics);
        let probes = self.admin.map(|port| {
            let admin = telemetry::Admin {
                metrics: metrics.clone(),
                readiness: readiness.clone(),
            };
            let version = self.config.build.version.clone();
            let page = front::status_routes(context.clone(), version, self.config.status_page);
            task::spawn(admin.serve_with(port, page, stop.clone()))
        });
        let bounds = self.config.http_bounds;
        let http = self
            .http_listener
            .map(|listener| serve_http(listener, &context, bounds, stop.clone()));
        let mut server = task::spawn(proto::server::serve_anyone(
            self.listener,
            routes,
            stop.clone().cancelled_owned(),
        ));
        let _followed = context.keys.clone().map(|keys| task::spawn(keys.follow()));
        let contact = task::spawn(follow_contact(snapshots.clone(), metrics.clone()));
        let teller = task::spawn(events::follow(snapshots.clone(), context.events.clone()));
        let watcher = task::spawn(follow_readiness(
            snapshots,
            health.clone(),
            readiness.clone(),
            metrics,
        ));
        tracing::info!(address = %self.address, "router listening");

        let member = member(&self.config, self.address);
        let membership = Membership::join(registry, member, self.config.join).await?;
        tokio::select! {
            () = shutdown.requested() => {}
            ended = &mut server => return flat(ended),
        }

        tracing::info!("router stopping");
        drop((watcher, contact, teller));
        readiness.set(false);
        health.set_all(false).await;
        context.closing.cancel();
        finish(&context, self.config.grace, &shutdown).await;
        if let Err(error) = membership.leave().await {
            tracing::warn!(%error, "could not deregister");
        }
        stop.cancel();
        let closed = tokio::time::timeout(CLOSE_GRACE, server).await;
        // It bounds itself.
        let _ = futures_util::future::OptionFuture::from(http).await;
        drop(probes);
        match closed {
            Ok(ended) => flat(ended),
            Err(_) => {
                tracing::warn!(grace = ?CLOSE_GRACE, "connections still open, closing them");
                Ok(())
            }
        }
    }

    fn context(&self, snapshots: Snapshots) -> Result<Arc<Context>, RouterError> {
        let tasks = Tracker::new();
        Ok(Arc::new(Context {
            fetcher: Fetcher::new(self.config.fetch.clone())?,
            keys: self.keys.clone(),
            recorder: self.recorder.clone(),
            prefixes: Keeper::new(self.config.prefix_ttl, tasks.clone()),
            members: Members::new(snapshots),
            gate: Gate::new(self.config.limits, self.metrics.clone()),
            jobs: Jobs::default(),
            audiences: Audiences::default(),
            events: Events::default(),
            metrics: self.metrics.clone(),
            chance: Source::from_os(),
            tasks,
            closing: CancellationToken::new(),
            kill: CancellationToken::new(),
        }))
    }
}

/// The HTTP API as a task.
fn serve_http(
    listener: TcpListener,
    context: &Arc<Context>,
    bounds: HttpBounds,
    stop: CancellationToken,
) -> task::Owned<()> {
    let site = Site {
        routes: front::http_routes(context.clone(), &bounds),
        tls: proto::tls::installed(),
        bounds,
        grace: CLOSE_GRACE,
    };
    task::spawn(proto::web::serve(listener, site, stop))
}

async fn routes(
    bound: &Bound,
    context: &Arc<Context>,
    (registry, embedded): (Arc<dyn Registry>, Option<Embedded>),
    stop: CancellationToken,
) -> Result<(RoutesBuilder, Health), RouterError> {
    let mut services = vec![names::IMAGE, names::ADMIN];
    services.extend(embedded.as_ref().map(|_| names::REGISTRY));
    let (mut routes, health) = proto::server::routes(&services).await?;
    routes.add_service(front::server(context.clone()));
    if let Some(embedded) = &embedded {
        routes.add_service(registry::service::server(
            Arc::new(embedded.clone()),
            stop.clone(),
        ));
        health.set(names::REGISTRY, true).await;
    }
    routes.add_service(admin::server(admin::Admin {
        build: bound.config.build.clone(),
        context: context.clone(),
        registry,
        stop,
    }));
    health.set(names::ADMIN, true).await;
    Ok((routes, health))
}

/// Ready means that some model can be served; administration works regardless.
async fn follow_readiness(
    snapshots: Snapshots,
    health: Health,
    readiness: Readiness,
    metrics: Metrics,
) {
    let mut changes = snapshots.changes();
    loop {
        let now = changes.borrow_and_update().clone();
        count_members(&now, &metrics);
        let ready = !placement::servable(&now).is_empty();
        if ready != readiness.is_ready() {
            tracing::info!(ready, "router readiness changed");
        }
        health.set(names::IMAGE, ready).await;
        health.set("", ready).await;
        readiness.set(ready);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Tells how the picture that requests are placed by stands to the registry.
async fn follow_contact(snapshots: Snapshots, metrics: Metrics) {
    let mut contacts = snapshots.contacts();
    let mut resyncs = 0;
    loop {
        let now = *contacts.borrow_and_update();
        let followed = f64::from(u8::from(now.following));
        metrics.set(&metric::REGISTRY_FOLLOWED, &[], followed);
        let stale = now.stale_for().as_secs_f64();
        metrics.set(&metric::REGISTRY_STALENESS, &[], stale);
        metrics.add(&metric::REGISTRY_RESYNCS, &[], now.resyncs - resyncs);
        resyncs = now.resyncs;
        let changed = contacts.changed();
        if let Ok(Err(_)) = tokio::time::timeout(STALENESS_INTERVAL, changed).await {
            return;
        }
    }
}

fn count_members(snapshot: &Snapshot, metrics: &Metrics) {
    for role in [
        Role::Router,
        Role::ArStage,
        Role::KvTransfer,
        Role::DitWorker,
    ] {
        for (state, name) in STATES {
            let alike = |member: &&Member| member.role() == role && member.state() == state;
            #[allow(clippy::cast_precision_loss)] // bounded by the registry
            let count = snapshot.members.values().filter(alike).count() as f64;
            let labels = [placement::role_name(role), name];
            metrics.set(&metric::REGISTRY_MEMBERS, &labels, count);
        }
    }
}

/// Lets running requests end; what is left after the grace, or at a second signal, ends typed.
async fn finish(context: &Context, grace: Duration, shutdown: &Shutdown) {
    let ended = tokio::select! {
        stopped = context.tasks.stop(grace) => stopped.is_ok(),
        () = shutdown.forced() => false,
    };
    if !ended {
        tracing::warn!(left = context.tasks.len(), "ending running requests");
        context.kill.cancel();
        // They only have to write their last word.
        let _ = context.tasks.stop(CLOSE_GRACE).await;
    }
}

fn member(config: &RouterConfig, address: SocketAddr) -> Member {
    Member {
        id: MemberId::generate().to_string(),
        role: Role::Router.into(),
        endpoint: config
            .advertise
            .clone()
            .unwrap_or_else(|| format!("{}://{address}", proto::tls::scheme())),
        state: MemberState::Ready.into(),
        ..Member::default()
    }
}

fn flat(ended: Result<Result<(), Failure>, tokio::task::JoinError>) -> Result<(), RouterError> {
    match ended {
        Ok(result) => Ok(result?),
        Err(error) => Err(Failure::new(Code::Internal, format!("server task: {error}")).into()),
    }
}

fn io(error: &std::io::Error) -> RouterError {
    Failure::new(Code::Internal, format!("listener: {error}")).into()
}
