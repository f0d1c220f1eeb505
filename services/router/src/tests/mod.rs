//! A whole router over loopback, with stages that play a script.
mod bench;
mod ends;
mod fake;
mod http;
mod joined;
mod keys;
mod leases;
mod loss;
mod offered;
mod operate;
mod pool;
mod refusals;
mod resume;
mod simulated;
mod walk;

use std::time::Duration;

use base::{Shutdown, task};
use proto::v1::{
    Accepted, GenerateRequest, GenerateResponse, GetRequest, generate_response::Event,
    get_response::State, image_service_client::ImageServiceClient,
};
use registry::{Backend, JoinOptions, Registry, Remote, Snapshots};
use tonic::{Status, Streaming, transport::Channel};

use crate::{Bound, RouterConfig, RouterError, admission::Limits};

/// Bound of every wait; none is expected to come near it.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A running router and clients of it.
pub(crate) struct Cluster {
    pub(crate) address: String,
    /// Of probes and metrics.
    pub(crate) admin: std::net::SocketAddr,
    /// Of the HTTP API.
    pub(crate) http: std::net::SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) client: ImageServiceClient<Channel>,
    pub(crate) shutdown: Shutdown,
    pub(crate) server: task::Owned<Result<(), RouterError>>,
    pub(crate) registry: std::sync::Arc<dyn Registry>,
    /// Where the stages of this cluster publish.
    pub(crate) pool: pool::Pool,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        Self::configured(|_| ()).await
    }

    pub(crate) async fn with(limits: Limits) -> Self {
        Self::configured(|config| config.limits = limits).await
    }

    pub(crate) async fn configured(change: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = RouterConfig {
            listen: "127.0.0.1:0".into(),
            admin_listen: Some("127.0.0.1:0".into()),
            http_listen: Some("127.0.0.1:0".into()),
            registry: Backend::Embedded,
            join: JoinOptions {
                deadline: SOON,
                ..JoinOptions::default()
            },
            grace: SOON,
            ..RouterConfig::default()
        };
        change(&mut config);
        let bound = Bound::bind(config).await.unwrap();
        let address = format!("http://{}", bound.address());
        let admin = bound.admin_url().unwrap();
        let admin = admin.trim_start_matches("http://").parse().unwrap();
        let http = bound.http_address().unwrap();
        let shutdown = Shutdown::new();
        let server = task::spawn(Box::pin(bound.serve(shutdown.clone())));
        let channel = proto::channel::connect(&address).await.unwrap();
        let client = ImageServiceClient::new(channel.clone());
        let registry = std::sync::Arc::new(Remote::new(&address).unwrap());
        Self {
            address,
            admin,
            http,
            channel,
            client,
            shutdown,
            server,
            registry,
            pool: pool::Pool::start().await,
        }
    }

    /// Waits until the router knows `count` members besides itself.
    pub(crate) async fn members(&self, count: usize) {
        let snapshots = Snapshots::follow(self.registry.clone());
        let known = snapshots
            .wait(SOON, |now| now.members.len() == count + 1)
            .await;
        assert!(known.is_some(), "never saw {count} members");
    }

    /// Sends a request; answers its stream.
    pub(crate) async fn open(
        &self,
        request: GenerateRequest,
    ) -> Result<Streaming<GenerateResponse>, Status> {
        let mut client = self.client.clone();
        bounded(client.generate(request))
            .await
            .map(tonic::Response::into_inner)
    }

    /// Sends a request and collects what comes.
    pub(crate) async fn run(&self, request: GenerateRequest) -> (Vec<Event>, Option<Status>) {
        match self.open(request).await {
            Ok(stream) => collect(stream).await,
            Err(status) => (vec![], Some(status)),
        }
    }

    pub(crate) async fn state(&self, id: &str) -> State {
        let ask = GetRequest {
            request_id: id.into(),
        };
        bounded(self.client.clone().get(ask))
            .await
            .unwrap()
            .into_inner()
            .state()
    }
}

pub(crate) async fn bounded<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future)
        .await
        .expect("nothing may hang")
}

pub(crate) async fn next(stream: &mut Streaming<GenerateResponse>) -> Result<Event, Status> {
    let message = bounded(stream.message()).await?;
    Ok(message.expect("the stream goes on").event.unwrap())
}

pub(crate) async fn collect(
    mut stream: Streaming<GenerateResponse>,
) -> (Vec<Event>, Option<Status>) {
    let mut events = vec![];
    loop {
        match bounded(stream.message()).await {
            Ok(Some(message)) => events.push(message.event.unwrap()),
            Ok(None) => return (events, None),
            Err(status) => return (events, Some(status)),
        }
    }
}

pub(crate) fn request(id: &str) -> GenerateRequest {
    GenerateRequest {
        request_id: id.into(),
        prompt: "a red fox".into(),
        steps: Some(3),
        seed: Some(7),
        ..GenerateRequest::default()
    }
}

pub(crate) fn accepted(events: &[Event]) -> &Accepted {
    match events.first() {
        Some(Event::Accepted(accepted)) => accepted,
        other => panic!("not accepted first: {other:?}"),
    }
}
