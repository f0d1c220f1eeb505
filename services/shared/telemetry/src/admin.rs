//! The HTTP server of probes and metrics, on a port of its own so that a busy data port cannot
//! make a healthy process look dead.
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header::CONTENT_TYPE},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::get,
};
use proto::{
    access::{Peer, Role},
    web::{HttpBounds, Site, serve},
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::Metrics;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Paths that say nothing but whether the process is well: whoever starts it asks without a certificate.
const PROBES: [&str; 3] = ["/livez", "/readyz", "/startupz"];
/// How long answers may take to end once the port is to close.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Connections at once; more wait in the backlog.
const MAX_CONNECTIONS: usize = 128;

/// Whether the process wants traffic. Clones share the flag; it starts as not ready.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Sets the flag.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Release);
    }

    /// Reads the flag.
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How an admin port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdminTls {
    /// In clear, whatever the other ports do.
    Off,
    /// Over TLS where this process has an identity ([`proto::tls::installed`]); who asks may show a certificate.
    #[default]
    On,
    /// Likewise; all but probes is for holders of a certificate of a `monitor` or an `admin`.
    Mutual,
}

/// The port that probes and metrics are on.
#[derive(Debug)]
pub struct AdminPort {
    /// Where it listens.
    pub listener: TcpListener,
    /// How it speaks.
    pub tls: AdminTls,
}

impl AdminPort {
    /// "http://HOST:PORT", or with https.
    ///
    /// # Errors
    /// The listener has no address.
    pub fn url(&self) -> io::Result<String> {
        let scheme = match self.tls {
            AdminTls::Off => "http",
            AdminTls::On | AdminTls::Mutual => proto::tls::scheme(),
        };
        Ok(format!("{scheme}://{}", self.listener.local_addr()?))
    }
}

/// What the admin port answers from.
#[derive(Debug, Clone, Default)]
pub struct Admin {
    /// Behind `/metrics`.
    pub metrics: Metrics,
    /// Behind `/readyz`.
    pub readiness: Readiness,
}

impl Admin {
    /// Serves `/livez`, `/readyz`, `/startupz` and `/metrics` until `stop`.
    pub async fn serve(self, port: AdminPort, stop: CancellationToken) {
        self.serve_with(port, Router::new(), stop).await;
    }

    /// Likewise, with `more` paths beside them.
    pub async fn serve_with(self, port: AdminPort, more: Router, stop: CancellationToken) {
        let tls = match port.tls {
            AdminTls::Off => None,
            AdminTls::On | AdminTls::Mutual => proto::tls::installed(),
        };
        let site = Site {
            routes: self.routes(more, port.tls),
            tls,
            bounds: HttpBounds {
                connections: MAX_CONNECTIONS,
                ..HttpBounds::default()
            },
            grace: CLOSE_GRACE,
        };
        serve(port.listener, site, stop).await;
    }

    fn routes(self, more: Router, tls: AdminTls) -> Router {
        let routes = Router::new()
            .route(PROBES[0], get(|| async { "ok\n" }))
            .route(PROBES[1], get(ready))
            .route(PROBES[2], get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
            .merge(more);
        match tls {
            AdminTls::Mutual => routes.layer(from_fn(certified)),
            AdminTls::Off | AdminTls::On => routes,
        }
    }
}

async fn ready(State(admin): State<Admin>) -> (StatusCode, &'static str) {
    if admin.readiness.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    ([(CONTENT_TYPE, METRICS_TYPE)], admin.metrics.encode())
}

/// Lets probes through, and who may look at the rest. Nobody may where the port turns out to be in clear.
async fn certified(request: Request, next: Next) -> Response {
    if PROBES.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let peer = request.extensions().get::<Peer>();
    match peer.filter(|peer| !peer.is_nobody()) {
        None => {
            let reason = "a certificate of a monitor or an admin is needed here\n";
            (StatusCode::UNAUTHORIZED, reason).into_response()
        }
        Some(peer) if peer.is(Role::Monitor) || peer.is(Role::Admin) => next.run(request).await,
        Some(peer) => {
            let reason = format!("{} may not look at this port\n", peer.roles());
            (StatusCode::FORBIDDEN, reason).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    async fn get(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let ask = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn start(tls: AdminTls) -> (std::net::SocketAddr, Readiness, base::task::Owned<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin::default();
        let readiness = admin.readiness.clone();
        let port = AdminPort { listener, tls };
        let server = base::task::spawn(admin.serve(port, CancellationToken::new()));
        (address, readiness, server)
    }

    #[tokio::test]
    async fn probes_and_metrics_answer_on_their_own_port() {
        let (address, readiness, _server) = start(AdminTls::On).await;
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 503"));
        readiness.set(true);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        let text = get(address, "/metrics").await;
        assert!(
            text.contains(METRICS_TYPE) && text.contains("omni_build_info"),
            "{text}"
        );
        assert!(get(address, "/other").await.starts_with("HTTP/1.1 404"));
    }

    #[tokio::test]
    async fn a_port_that_asks_for_certificates_shows_nothing_but_probes_in_clear() {
        let (address, _, _server) = start(AdminTls::Mutual).await;
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200"));
        let refused = get(address, "/metrics").await;
        assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
        assert!(!refused.contains("omni_build_info"), "{refused}");
    }
}
