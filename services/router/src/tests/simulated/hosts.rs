//! The hosts, each a process: what it is made of is made anew whenever it starts.
use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use base::{clock::Clock, rng::Source, task::Tracker};
use proto::{
    dial::{Dial, Wire},
    names,
    server::serve_wires,
};
use registry::{Embedded, JoinOptions, Member, MemberState, Membership, Remote, Role, Snapshots};
use telemetry::Metrics;
use tokio_util::sync::CancellationToken;
use tonic::service::RoutesBuilder;
use turmoil::{Sim, net::TcpListener};

use super::{AR, DIT, Judge, REGISTRY, ROUTERS, stages};
use crate::{
    FetchConfig,
    admission::Limits,
    audience::Audiences,
    events::Events,
    fetch::Fetcher,
    front::{self, Context},
    gate::Gate,
    jobs::Jobs,
    members::Members,
    prefix::Keeper,
    tests::fake,
};

/// Port of every server.
pub(super) const PORT: u16 = 7000;

/// A router by its name, as long as it runs.
type Named = (&'static str, Weak<Context>);

/// The routers that were started last.
#[derive(Debug, Clone, Default)]
pub(super) struct Routers(Arc<Mutex<Vec<Named>>>);

impl Routers {
    /// Requests that each of them still has, running and waiting.
    pub(super) fn left(&self) -> Vec<(&'static str, (usize, usize))> {
        let routers = self.0.lock().unwrap();
        let alive = |(name, context): &Named| {
            context
                .upgrade()
                .map(|context| (*name, context.gate.counts()))
        };
        routers.iter().filter_map(alive).collect()
    }
}

/// How processes find each other.
pub(super) fn address(host: &str) -> String {
    format!("http://{host}:{PORT}")
}

/// Channels go through the simulated network.
pub(super) fn dial() -> Dial {
    Arc::new(|uri| {
        Box::pin(async move {
            let host = uri.host().unwrap_or_default().to_owned();
            let port = uri.port_u16().unwrap_or(PORT);
            let stream = turmoil::net::TcpStream::connect((host, port)).await?;
            Ok(Wire::new(stream))
        })
    })
}

/// Serves until the host is no more.
pub(super) async fn serve(routes: RoutesBuilder) -> turmoil::Result {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let listener = TcpListener::bind((any, PORT)).await?;
    let incoming = futures_util::stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await;
        let wire: io::Result<Wire> = accepted.map(|(stream, _)| Wire::new(stream));
        Some((wire, listener))
    });
    serve_wires(incoming, routes, std::future::pending()).await?;
    Ok(())
}

/// Monotonic time is that of the simulation; wall time is off by a while that is another one at each start.
#[derive(Debug)]
struct Skewed(Duration);

impl Clock for Skewed {
    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn unix_millis(&self) -> u64 {
        let since = turmoil::sim_elapsed().unwrap_or_default() + self.0;
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Joins the registry and stays.
pub(super) async fn join(
    host: &'static str,
    role: Role,
    ttl: Duration,
) -> Result<Membership, registry::RegistryError> {
    let member = Member {
        id: format!(
            "{host}-{}",
            turmoil::sim_elapsed().unwrap_or_default().as_millis()
        ),
        role: role.into(),
        endpoint: address(host),
        state: MemberState::Ready.into(),
        model: (role != Role::Router).then(fake::model),
        ..Member::default()
    };
    let options = JoinOptions {
        ttl,
        deadline: Duration::from_secs(600),
    };
    Membership::join(Arc::new(Remote::new(&address(REGISTRY))?), member, options).await
}

pub(super) fn build(sim: &mut Sim<'_>, dice: &Source, judge: &Judge) -> Routers {
    let routers = Routers::default();
    let skews: Vec<_> = (0..8)
        .map(|_| Duration::from_secs(1_000 + dice.below(3_600)))
        .collect();
    let starts = Arc::new(Mutex::new(0_usize));
    let log = judge.clone();
    sim.host(REGISTRY, move || {
        let mut started = starts.lock().unwrap();
        let skew = skews[*started % skews.len()];
        *started += 1;
        log.note("the registry starts");
        registry(Skewed(skew))
    });
    for name in ROUTERS {
        let (known, log) = (routers.clone(), judge.clone());
        sim.host(name, move || router(name, known.clone(), log.clone()));
    }
    for (number, name) in AR.into_iter().enumerate() {
        // Leases of different lengths.
        let ttl = Duration::from_millis(2_000 + dice.below(4_000));
        let log = judge.clone();
        sim.host(name, move || stages::ar(name, number, ttl, log.clone()));
    }
    for name in DIT {
        let ttl = Duration::from_millis(2_000 + dice.below(4_000));
        let pace = Duration::from_millis(40 + dice.below(200));
        let log = judge.clone();
        sim.host(name, move || stages::dit(name, (ttl, pace), log.clone()));
    }
    routers
}

async fn registry(clock: Skewed) -> turmoil::Result {
    let embedded = Embedded::start(Arc::new(clock));
    let (mut routes, _health) = proto::server::routes(&[names::REGISTRY]).await?;
    let stop = CancellationToken::new();
    routes.add_service(registry::service::server(Arc::new(embedded), stop));
    serve(routes).await
}

async fn router(name: &'static str, known: Routers, judge: Judge) -> turmoil::Result {
    judge.note(format!("{name} starts"));
    let tasks = Tracker::new();
    let remote = Arc::new(Remote::new(&address(REGISTRY))?);
    let limits = Limits {
        max_running: 4,
        ..Limits::default()
    };
    let context = Arc::new(Context {
        fetcher: Fetcher::new(FetchConfig::default())?,
        prefixes: Keeper::new(Duration::from_secs(15), tasks.clone()),
        members: Members::new(Snapshots::follow(remote)),
        gate: Gate::new(limits, Metrics::default()),
        keys: None,
        recorder: None,
        jobs: Jobs::default(),
        audiences: Audiences::default(),
        events: Events::default(),
        metrics: Metrics::default(),
        chance: Source::seeded(1),
        tasks,
        closing: CancellationToken::new(),
        kill: CancellationToken::new(),
    });
    {
        let mut known = known.0.lock().unwrap();
        known.retain(|(other, _)| *other != name);
        known.push((name, Arc::downgrade(&context)));
    }
    let (mut routes, _health) = proto::server::routes(&[names::IMAGE]).await?;
    routes.add_service(front::server(context));
    let joining = join(name, Role::Router, Duration::from_secs(5));
    let serving = serve(routes);
    let (_joined, served) = tokio::join!(joining, serving);
    served
}
