//! The HTTP server of probes and metrics, on a port of its own so that a busy data port cannot
//! make a healthy process look dead.
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tokio::net::TcpListener;

use crate::{Metrics, TelemetryError};

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

/// What the admin port answers from.
#[derive(Debug, Clone, Default)]
pub struct Admin {
    /// Behind `/metrics`.
    pub metrics: Metrics,
    /// Behind `/readyz`.
    pub readiness: Readiness,
}

impl Admin {
    /// Serves `/livez`, `/readyz`, `/startupz` and `/metrics` until `shutdown` completes.
    ///
    /// # Errors
    /// The listener breaks.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), TelemetryError> {
        self.serve_with(listener, Router::new(), shutdown).await
    }

    /// Likewise, with `more` paths beside them.
    ///
    /// # Errors
    /// The listener breaks.
    pub async fn serve_with(
        self,
        listener: TcpListener,
        more: Router,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), TelemetryError> {
        let router = Router::new()
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/startupz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
            .merge(more);
        Ok(axum::serve(listener, router)
            .with_graceful_shutdown(shutdown)
            .await?)
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

    #[tokio::test]
    async fn probes_and_metrics_answer_on_their_own_port() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin::default();
        let readiness = admin.readiness.clone();
        let server = base::task::spawn(admin.serve(listener, std::future::pending()));

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
        drop(server);
    }
}
