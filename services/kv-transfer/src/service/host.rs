use std::time::Duration;

use base::{Failure, MemberId, Shutdown, task};
use registry::{Backend, JoinOptions, Member, MemberState, Membership, Role};
use telemetry::{Admin, AdminPort, Metrics, Readiness};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::node::{Service, ServiceConfig};
use crate::{TransferError, limits};

/// How long the server may take to close its connections at the end.
const CLOSE_GRACE: Duration = Duration::from_secs(3);

/// What a node service needs to know of its surroundings.
#[derive(Debug)]
pub struct Host {
    /// Bound gRPC listener.
    pub listener: TcpListener,
    /// Bound port of /livez, /readyz and /metrics, if those are wanted.
    pub admin: Option<AdminPort>,
    /// Address that others use to reach `listener`, `http://HOST:PORT`.
    pub advertise: String,
    /// Pool this process belongs to.
    pub pool: String,
    /// Registry to join, if any.
    pub registry: Option<Backend>,
    /// Where measurements go.
    pub metrics: Metrics,
}

/// Runs the node service until `shutdown`, until an operator drains it, or until something breaks.
///
/// # Errors
/// A bad configuration, a pool that the system cannot give, a registry that cannot be joined, a
/// server that breaks.
pub async fn run(
    config: ServiceConfig,
    host: Host,
    shutdown: Shutdown,
) -> Result<(), TransferError> {
    let Host {
        listener,
        admin: port,
        advertise,
        pool,
        registry,
        metrics,
    } = host;
    crate::measure(&metrics);
    let service = start(config, advertise.clone(), metrics.clone()).await?;
    let (mut routes, health) = proto::server::routes(&[proto::names::KV_TRANSFER]).await?;
    service.mount(&mut routes);
    let stop = CancellationToken::new();
    let readiness = Readiness::default();
    let admin = Admin {
        metrics,
        readiness: readiness.clone(),
    };
    let _admin = port.map(|port| task::spawn(admin.serve(port, stop.clone())));
    let cancelled = stop.clone().cancelled_owned();
    let mut server = task::spawn(proto::server::serve(listener, routes, cancelled));
    let _reaper = task::spawn(reap(service.clone()));
    let _door = service.share();

    let membership = tokio::select! {
        joined = join(registry.as_ref(), &advertise, pool) => joined?,
        () = shutdown.requested() => return Ok(()),
    };
    health.set_all(true).await;
    readiness.set(true);
    tracing::info!(%advertise, transports = ?service.transports(), "ready");

    let ended = tokio::select! {
        ended = &mut server => Err(server_error(ended)),
        () = shutdown.requested() => Ok(()),
        () = drained(membership.as_ref()) => Ok(()),
    };
    readiness.set(false);
    health.set_all(false).await;
    leave(membership).await;
    if ended.is_ok() {
        finish(&service, &shutdown).await;
        stop.cancel();
        if tokio::time::timeout(CLOSE_GRACE, &mut server)
            .await
            .is_err()
        {
            tracing::warn!("connections stayed open, closing them");
        }
    }
    ended
}

/// Opening transports and allocating the pool may take a while: off the async threads.
async fn start(
    config: ServiceConfig,
    advertise: String,
    metrics: Metrics,
) -> Result<Service, TransferError> {
    let open = move || Service::start(&config, &advertise, base::clock::system(), metrics);
    tokio::task::spawn_blocking(open)
        .await
        .map_err(|_| TransferError::Stopped)?
}

async fn join(
    registry: Option<&Backend>,
    advertise: &str,
    pool: String,
) -> Result<Option<Membership>, TransferError> {
    let Some(backend) = registry else {
        return Ok(None);
    };
    let member = Member {
        id: MemberId::generate().to_string(),
        role: Role::KvTransfer.into(),
        pool,
        endpoint: advertise.to_owned(),
        state: MemberState::Ready.into(),
        ..Default::default()
    };
    let registry = registry::open(backend).map_err(|error| Failure::of(&error))?;
    let joined = Membership::join(registry, member, JoinOptions::default()).await;
    Ok(Some(joined.map_err(|error| Failure::of(&error))?))
}

async fn leave(membership: Option<Membership>) {
    let Some(membership) = membership else { return };
    membership.set_state(MemberState::Draining);
    if let Err(error) = membership.leave().await {
        tracing::warn!(%error, "could not deregister");
    }
}

async fn drained(membership: Option<&Membership>) {
    match membership {
        Some(membership) => membership.drain_requested().await,
        None => std::future::pending().await,
    }
}

/// Lets transfers under way end. Prefixes that nobody reads now are dropped.
async fn finish(service: &Service, shutdown: &Shutdown) {
    let idle = async {
        while service.at_work() > 0 {
            tokio::time::sleep(limits::REAP_INTERVAL).await;
        }
    };
    tokio::select! {
        () = idle => {}
        () = shutdown.forced() => tracing::warn!("stopping under running transfers"),
        () = tokio::time::sleep(limits::FINISH_GRACE) => {
            tracing::warn!("transfers outlived the grace of a clean stop");
        }
    }
}

async fn reap(service: Service) {
    let mut ticks = tokio::time::interval(limits::REAP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        service.reap();
    }
}

fn server_error<E>(ended: Result<Result<(), Failure>, E>) -> TransferError {
    match ended {
        Ok(Err(failure)) => failure.into(),
        Ok(Ok(())) | Err(_) => TransferError::Stopped,
    }
}
