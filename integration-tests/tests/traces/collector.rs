//! A collector that keeps what it is sent.
use std::sync::{Arc, Mutex};

use base::task::Owned;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
};
use tonic::{Request, Response, Status};

/// A span as it came.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) service: String,
    pub(crate) name: String,
    pub(crate) trace: String,
    pub(crate) id: String,
    pub(crate) parent: String,
    pub(crate) attributes: Vec<(String, String)>,
    /// Nanoseconds since 1970.
    pub(crate) time: (u64, u64),
}

type Kept = Arc<Mutex<Vec<Span>>>;

struct Service(Kept);

pub(crate) struct Collector {
    pub(crate) endpoint: String,
    kept: Kept,
    _server: Owned<Result<(), base::Failure>>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(pairs: Vec<KeyValue>) -> Vec<(String, String)> {
    let text = |pair: KeyValue| {
        let value = pair.value.and_then(|value| value.value);
        let text = match value {
            Some(Value::StringValue(text)) => text,
            other => format!("{other:?}"),
        };
        (pair.key, text)
    };
    pairs.into_iter().map(text).collect()
}

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap();
        for process in request.into_inner().resource_spans {
            let of = texts(process.resource.unwrap_or_default().attributes);
            let service = of.into_iter().find(|(key, _)| key == "service.name");
            let service = service.map(|(_, name)| name).unwrap_or_default();
            let spans = process
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans);
            kept.extend(spans.map(|span| Span {
                service: service.clone(),
                name: span.name,
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                attributes: texts(span.attributes),
                time: (span.start_time_unix_nano, span.end_time_unix_nano),
            }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let kept = Kept::default();
        let (mut routes, _health) = proto::server::routes(&[]).await.unwrap();
        routes.add_service(TraceServiceServer::new(Service(kept.clone())));
        let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let served = proto::server::serve(listener, routes, std::future::pending());
        Self {
            endpoint,
            kept,
            _server: base::task::spawn(served),
        }
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.kept.lock().unwrap().clone()
    }
}
