//! The life of a stage process: serve health at once, load, join, warm up, serve, drain, leave.
use std::{sync::Arc, time::Duration};

use base::{
    BuildInfo, Code, Failure, MemberId, Shutdown,
    task::{self, Owned},
};
use proto::{server::Health, v1::StepCosts};
use registry::{Backend, JoinOptions, Load, Member, MemberState, Membership, Role};
use telemetry::{Admin, AdminPort, Metrics, Readiness};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::RoutesBuilder;

use crate::{Gate, StageError};

/// How often the load is reported; the registry bounds it further.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);
/// How long the server may take to close its connections once nothing runs any more.
const CLOSE_GRACE: Duration = Duration::from_secs(3);

/// What every stage process needs to know of its surroundings.
#[derive(Debug)]
pub struct HostConfig {
    /// Bound gRPC listener.
    pub listener: TcpListener,
    /// Bound port of /livez, /readyz and /metrics.
    pub admin: AdminPort,
    /// Address that others use to reach `listener`, `http://HOST:PORT`.
    pub advertise: String,
    /// Pool this process belongs to.
    pub pool: String,
    /// Which registry to join.
    pub registry: Backend,
    /// How long running requests may take once a stop or a drain was asked for.
    pub grace: Duration,
    /// What was built.
    pub build: BuildInfo,
}

/// A stage, as its host sees it.
#[tonic::async_trait]
pub trait Stage: Send + Sync + 'static {
    /// Role in the registry.
    const ROLE: Role;
    /// Full name of the gRPC service.
    const SERVICE: &'static str;

    /// Adds the gRPC service.
    fn mount(self: Arc<Self>, routes: &mut RoutesBuilder);

    /// Loads the model and runs one small forward pass, so that the first request meets a warm stage.
    async fn load(&self) -> Result<proto::v1::ModelInfo, StageError>;

    /// Id of this process start.
    fn member_id(&self) -> &MemberId;

    /// The stage's door.
    fn gate(&self) -> &Gate;

    /// How busy the stage is.
    fn report(&self) -> Load;

    /// What a step costs, as far as that is known once the model is loaded; asked before the stage joins.
    fn step_costs(&self) -> Option<StepCosts> {
        None
    }
}

/// The parts that live as long as the process.
struct Running {
    health: Health,
    readiness: Readiness,
    stop_servers: CancellationToken,
    server: Owned<Result<(), Failure>>,
    _admin: Owned<()>,
}

/// Runs `stage` until `shutdown`, until an operator drains it, or until something breaks.
///
/// # Errors
/// The model does not load, the registry cannot be joined, the server breaks.
pub async fn run<S: Stage>(
    stage: Arc<S>,
    config: HostConfig,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), StageError> {
    let HostConfig {
        listener,
        admin,
        advertise,
        pool,
        registry,
        grace,
        build,
    } = config;
    let mut running = start(&stage, listener, admin, metrics).await?;
    tracing::info!(version = %build.version, %advertise, "loading the model");
    let loading = async {
        let info = stage.load().await?;
        let weights_id = info.weights_id.clone();
        let member = member(&*stage, advertise, pool, info);
        let registry = registry::open(&registry).map_err(|error| StageError::of(&error))?;
        let membership = Membership::join(registry, member, JoinOptions::default())
            .await
            .map_err(|error| StageError::of(&error))?;
        Ok::<_, StageError>((weights_id, membership))
    };
    let (weights_id, membership) = tokio::select! {
        loaded = loading => loaded?,
        ended = &mut running.server => return Err(server_error(ended)),
        () = shutdown.requested() => return Ok(()),
    };
    stage.gate().open(&weights_id, membership.standings());
    membership.set_state(MemberState::Ready);
    running.health.set_all(true).await;
    running.readiness.set(true);
    tracing::info!(member = membership.id(), %weights_id, "ready");

    let ended = serve(&*stage, &membership, &mut running, &shutdown).await;
    drain(&*stage, membership, &running, grace, &shutdown).await;
    running.stop_servers.cancel();
    if ended.is_ok()
        && tokio::time::timeout(CLOSE_GRACE, &mut running.server)
            .await
            .is_err()
    {
        tracing::warn!("connections stayed open, closing them");
    }
    ended
}

async fn start<S: Stage>(
    stage: &Arc<S>,
    listener: TcpListener,
    port: AdminPort,
    metrics: Metrics,
) -> Result<Running, StageError> {
    let (mut routes, health) = proto::server::routes(&[S::SERVICE]).await?;
    Arc::clone(stage).mount(&mut routes);
    let stop_servers = CancellationToken::new();
    let readiness = Readiness::default();
    let admin = Admin {
        metrics,
        readiness: readiness.clone(),
    };
    let admin = task::spawn(admin.serve(port, stop_servers.clone()));
    let server_stop = stop_servers.clone();
    let server = task::spawn(proto::server::serve(listener, routes, async move {
        server_stop.cancelled().await;
    }));
    Ok(Running {
        health,
        readiness,
        stop_servers,
        server,
        _admin: admin,
    })
}

fn member<S: Stage>(
    stage: &S,
    endpoint: String,
    pool: String,
    model: proto::v1::ModelInfo,
) -> Member {
    Member {
        id: stage.member_id().to_string(),
        role: S::ROLE.into(),
        pool,
        endpoint,
        state: MemberState::Starting.into(),
        model: Some(model),
        epoch: 0,
        load: None,
        cordoned: false,
        step_costs: stage.step_costs(),
    }
}

/// Reports load until there is a reason to stop.
async fn serve<S: Stage>(
    stage: &S,
    membership: &Membership,
    running: &mut Running,
    shutdown: &Shutdown,
) -> Result<(), StageError> {
    let mut ticks = tokio::time::interval(LOAD_INTERVAL);
    loop {
        tokio::select! {
            _ = ticks.tick() => membership.set_load(stage.report()),
            () = shutdown.requested() => return Ok(()),
            () = membership.drain_requested() => {
                tracing::info!("an operator asked this member to drain");
                return Ok(());
            }
            ended = &mut running.server => return Err(server_error(ended)),
        }
    }
}

/// Takes nothing new, finishes what runs, leaves.
async fn drain<S: Stage>(
    stage: &S,
    membership: Membership,
    running: &Running,
    grace: Duration,
    shutdown: &Shutdown,
) {
    stage.gate().drain();
    running.readiness.set(false);
    running.health.set_all(false).await;
    membership.set_state(MemberState::Draining);
    let tasks = stage.gate().tasks();
    tracing::info!(requests = tasks.len(), "draining");
    tokio::select! {
        () = emptied(tasks) => {}
        () = tokio::time::sleep(grace) => {}
        () = shutdown.forced() => {}
    }
    if let Err(left) = tasks.stop(CLOSE_GRACE).await {
        tracing::warn!(error = %left, "requests were cut off");
    }
    if let Err(error) = membership.leave().await {
        // When a whole cluster stops, its registry is often the first to go.
        tracing::info!(%error, "the registry was not told, the lease will run out");
    }
}

async fn emptied(tasks: &task::Tracker) {
    while !tasks.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn server_error(ended: Result<Result<(), Failure>, tokio::task::JoinError>) -> StageError {
    StageError::Other(match ended {
        Ok(Err(failure)) => failure,
        Ok(Ok(())) => Failure::new(Code::Internal, "the server ended by itself"),
        Err(error) => Failure::new(Code::Internal, format!("the server task: {error}")),
    })
}
