//! What every server has: health, reflection (v1 and v1alpha), keepalive and limits.
use std::{
    future::Future,
    io,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use base::{
    Code, Failure,
    limits::{
        KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, MAX_REQUEST_BYTES, MAX_STREAMS_PER_CONNECTION,
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_stream::Stream;
use tonic::{
    Status,
    body::Body,
    codegen::http,
    service::{Routes, RoutesBuilder},
    transport::{
        Server,
        server::{Connected, TcpIncoming},
    },
};
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_reflection::server::Builder as Reflection;
use tower::{layer::layer_fn, util::MapResponseLayer};
use tracing::Instrument as _;

use crate::{
    DESCRIPTOR_SET,
    access::Guard,
    dial::Wire,
    names,
    tls::{Callers, Tls},
};

/// What tonic writes when a message is beyond the decoding limit.
const TOO_LARGE_TEXT: &str = "decoded message length too large";

const INFRASTRUCTURE: [&str; 3] = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// What `grpc.health.v1` answers for the services of one server.
#[derive(Debug, Clone)]
pub struct Health {
    reporter: HealthReporter,
    services: Vec<String>,
}

impl Health {
    /// Sets one service.
    pub async fn set(&self, service: &str, serving: bool) {
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        self.reporter.set_service_status(service, status).await;
    }

    /// Sets every service and the server as a whole (the empty name).
    pub async fn set_all(&self, serving: bool) {
        for service in &self.services {
            self.set(service, serving).await;
        }
        self.set("", serving).await;
    }
}

/// Routes that already answer health and reflection for `services` (full names); add the services
/// themselves, then [`serve`]. Everything starts as NOT_SERVING.
///
/// # Errors
/// `INTERNAL` when the descriptor set does not describe a service.
pub async fn routes(services: &[&str]) -> Result<(RoutesBuilder, Health), Failure> {
    let internal = |error: tonic_reflection::server::Error| {
        Failure::new(Code::Internal, format!("reflection: {error}"))
    };
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let health = Health {
        reporter,
        services: services.iter().map(|&name| name.to_owned()).collect(),
    };
    health.set_all(false).await;
    let mut routes = Routes::builder();
    routes
        .add_service(health_service)
        .add_service(reflection(services).build_v1().map_err(internal)?)
        .add_service(reflection(services).build_v1alpha().map_err(internal)?);
    Ok((routes, health))
}

fn reflection<'a>(services: &[&'a str]) -> Reflection<'a> {
    let builder = Reflection::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
        .include_reflection_service(false);
    INFRASTRUCTURE
        .iter()
        .chain(services)
        .fold(builder, |builder, name| builder.with_service_name(*name))
}

/// Makes the span of a call from its headers and its path.
pub type SpanOfCall = fn(&http::HeaderMap, &str) -> tracing::Span;

static SPAN_OF_CALL: OnceLock<SpanOfCall> = OnceLock::new();

/// Makes handlers of every server of this process run inside a span; the first call counts. Requests of
/// clients have a span of their own.
pub fn trace_calls(span: SpanOfCall) {
    let _ = SPAN_OF_CALL.set(span);
}

/// Runs handlers inside their span.
#[derive(Debug, Clone)]
struct Traced<S>(S);

impl<S> tower::Service<http::Request<Body>> for Traced<S>
where
    S: tower::Service<http::Request<Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = tracing::instrument::Instrumented<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let of_client = path.trim_start_matches('/').starts_with(names::IMAGE);
        let span = match SPAN_OF_CALL.get() {
            Some(span) if !of_client => span(request.headers(), path),
            _ => tracing::Span::none(),
        };
        let inside = span.clone();
        let _inside = inside.enter();
        self.0.call(request).instrument(span)
    }
}

/// Binds `address`. `field` names the setting in the error.
///
/// # Errors
/// `INVALID_ARGUMENT` when the address cannot be bound.
pub async fn bind(address: &str, field: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address)
        .await
        .map_err(|error| Failure::invalid(field, format!("cannot listen on {address:?}: {error}")))
}

/// Serves until `shutdown` completes, then finishes the streams that are open. Where this process has
/// an identity ([`crate::tls`]), only callers with a certificate connect.
///
/// # Errors
/// `INTERNAL` when the transport breaks.
pub async fn serve(
    listener: TcpListener,
    routes: RoutesBuilder,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let tls = crate::tls::installed().map(|tls| (tls, Callers::Certified));
    serve_as(tls, listener, routes, shutdown).await
}

/// Likewise, for callers that may prove who they are by other means than a certificate.
///
/// # Errors
/// `INTERNAL` when the transport breaks.
pub async fn serve_anyone(
    listener: TcpListener,
    routes: RoutesBuilder,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let tls = crate::tls::installed().map(|tls| (tls, Callers::Anyone));
    serve_as(tls, listener, routes, shutdown).await
}

/// Likewise, with an identity and callers that are said; without one in clear.
///
/// # Errors
/// `INTERNAL` when the transport breaks.
pub async fn serve_as(
    tls: Option<(Arc<Tls>, Callers)>,
    listener: TcpListener,
    routes: RoutesBuilder,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure> {
    match tls {
        Some((tls, callers)) => {
            let (incoming, _accepting) = crate::tls::incoming(listener, tls, callers);
            serve_on(incoming, routes, shutdown).await
        }
        None => {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            serve_on(incoming, routes, shutdown).await
        }
    }
}

/// Likewise, on connections that come some other way.
///
/// # Errors
/// `INTERNAL` when the transport breaks.
pub async fn serve_wires(
    incoming: impl Stream<Item = io::Result<Wire>>,
    routes: RoutesBuilder,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure> {
    serve_on(incoming, routes, shutdown).await
}

/// The one server there is, on connections of any kind.
async fn serve_on<IO, E>(
    incoming: impl Stream<Item = Result<IO, E>>,
    routes: RoutesBuilder,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure>
where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let served = Server::builder()
        .layer(MapResponseLayer::new(blame_oversize))
        .layer(layer_fn(Guard))
        .layer(layer_fn(Traced))
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_routes(routes.routes())
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await;
    served.map_err(|error| Failure::new(Code::Internal, format!("server transport: {error}")))
}

/// tonic calls a message beyond the limit OUT_OF_RANGE; for us it is an argument like any other.
fn blame_oversize(response: http::Response<Body>) -> http::Response<Body> {
    match Status::from_header_map(response.headers()) {
        Some(status)
            if status.code() == tonic::Code::OutOfRange
                && status.message().contains(TOO_LARGE_TEXT) =>
        {
            // Services have limits of their own; the text ends with the one that was met.
            let said = status
                .message()
                .rsplit("limit is: ")
                .next()
                .unwrap_or_default();
            let digits: String = said.chars().take_while(char::is_ascii_digit).collect();
            let limit = digits.parse().unwrap_or(MAX_REQUEST_BYTES);
            let message = format!("the message is larger than {limit} bytes");
            crate::status::status(&Failure::new(Code::InvalidArgument, message)).into_http()
        }
        _ => response,
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };

    use super::*;
    use crate::names;

    #[tokio::test]
    async fn every_server_answers_health_and_reflection() {
        let (routes, health) = routes(&[names::IMAGE]).await.unwrap();
        let listener = bind("127.0.0.1:0", "listen").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = base::task::spawn(serve(listener, routes, async {
            let _ = stopped.await;
        }));
        let channel = crate::channel::connect(&address).await.unwrap();

        let mut client = HealthClient::new(channel.clone());
        for (name, serving) in [(names::IMAGE, 1), ("", 1)] {
            let ask = HealthCheckRequest {
                service: name.to_owned(),
            };
            health.set_all(false).await;
            let before = client.check(ask.clone()).await.unwrap().into_inner().status;
            health.set_all(true).await;
            let after = client.check(ask).await.unwrap().into_inner().status;
            assert_eq!((before, after), (2, serving), "{name:?}");
        }

        let ask = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut answers = ServerReflectionClient::new(channel)
            .server_reflection_info(tokio_stream::once(ask))
            .await
            .unwrap()
            .into_inner();
        let answer = answers.next().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = answer else {
            panic!("unexpected {answer:?}");
        };
        let mut listed: Vec<_> = list
            .service
            .into_iter()
            .map(|service| service.name)
            .collect();
        let mut expected: Vec<_> = INFRASTRUCTURE.iter().map(|&name| name.to_owned()).collect();
        expected.push(names::IMAGE.to_owned());
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected);
        drop(answers);
        drop(stop);
        drop(client);
        server.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_address_in_use_names_the_setting() {
        let first = bind("127.0.0.1:0", "listen").await.unwrap();
        let taken = first.local_addr().unwrap().to_string();
        let error = bind(&taken, "listen").await.unwrap_err();
        assert_eq!(error.field.as_deref(), Some("listen"));
        assert!(error.message.contains(&taken));
    }
}
