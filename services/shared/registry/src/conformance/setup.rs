//! The backends under test.
use std::{sync::Arc, time::Duration};

use base::{limits::WATCH_QUEUE, task};
use tokio_util::sync::CancellationToken;

use super::picture;
use crate::{
    Embedded, Etcd, EtcdConfig, Registry, Remote, Snapshot, etcd::tests::server::EtcdServer,
    service,
};

/// A backend under test.
pub(super) struct Setup {
    pub(super) registry: Arc<dyn Registry>,
    /// The same cluster as another process sees it.
    pub(super) other: Arc<dyn Registry>,
    /// A lease so short that a test can wait for its end.
    pub(super) short: Duration,
    /// Load changes that a watcher may sleep through, and whether it is then given a fresh picture
    /// (a store with a history may go through it instead).
    pub(super) flood: u32,
    pub(super) skips: bool,
    pub(super) stop: CancellationToken,
    _server: Option<task::Owned<()>>,
    _etcd: Option<EtcdServer>,
}

impl Setup {
    /// What the registry holds.
    pub(super) async fn now(&self) -> Snapshot {
        picture(&*self.other).await
    }
}

pub(super) async fn embedded() -> Setup {
    let core = Embedded::start(base::clock::system());
    Setup {
        registry: Arc::new(core.clone()),
        other: Arc::new(core),
        short: Duration::from_millis(200),
        flood: flood(),
        skips: true,
        stop: CancellationToken::new(),
        _server: None,
        _etcd: None,
    }
}

/// Far more than the broadcast and the buffers of a connection hold.
fn flood() -> u32 {
    40 * u32::try_from(WATCH_QUEUE).unwrap()
}

pub(super) async fn remote() -> Setup {
    let core = Embedded::start(base::clock::system());
    let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let (mut routes, _health) = proto::server::routes(&[proto::names::REGISTRY])
        .await
        .unwrap();
    routes.add_service(service::server(Arc::new(core.clone()), stop.clone()));
    let stopped = stop.clone().cancelled_owned();
    let server = task::spawn(async move {
        proto::server::serve(listener, routes, stopped)
            .await
            .unwrap();
    });
    Setup {
        registry: Arc::new(Remote::new(&address).unwrap()),
        other: Arc::new(core),
        short: Duration::from_millis(200),
        flood: flood(),
        skips: true,
        stop,
        _server: Some(server),
        _etcd: None,
    }
}

pub(super) async fn etcd() -> Setup {
    let server = EtcdServer::start();
    let config = EtcdConfig::parse(&format!("etcd://{}", server.endpoint())).unwrap();
    Setup {
        registry: Arc::new(Etcd::new(config.clone()).unwrap()),
        other: Arc::new(Etcd::new(config).unwrap()),
        // The shortest that etcd grants with its usual election timeout.
        short: Duration::from_secs(2),
        flood: 300,
        skips: false,
        stop: CancellationToken::new(),
        _server: None,
        _etcd: Some(server),
    }
}
