//! Traces: one span a hop of a request, over all processes. Contexts travel as the W3C has them, in the
//! header `traceparent` of HTTP and gRPC. Spans leave the process only if there is a collector; without
//! one they still give every log line of a request its `trace_id`.
use std::{future::Future, time::Duration};

use opentelemetry::{
    Context, SpanId, TraceFlags, TraceId,
    trace::{SpanContext, TraceContextExt as _, TraceState, TracerProvider as _},
};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::{
    Resource,
    trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider, Tracer},
};
use tonic::{
    codegen::http::{HeaderMap, Uri},
    metadata::{AsciiMetadataValue, MetadataMap},
};
use tracing::{Instrument as _, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::TelemetryError;

/// Target of the spans that are hops, and of nothing else.
pub const TARGET: &str = "omni::hop";
/// Header of a context.
pub const HEADER: &str = "traceparent";
/// Field of the id in spans and log lines.
const TRACE_ID: &str = "trace_id";
/// Spans that wait for the collector; more are dropped.
const QUEUE: usize = 4_096;
/// How long spans are collected before they are sent.
const DELAY: Duration = Duration::from_millis(500);
/// How long the collector may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last spans may take at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Length of a context: version, trace id, span id, flags.
const HEADER_CHARS: usize = 55;

/// A hop of a request as a span below the one that runs now; its fields as in `tracing::info_span!`.
#[macro_export]
macro_rules! hop {
    ($name:literal $(, $($fields:tt)+)?) => {
        $crate::trace::begun($crate::trace::tracing::info_span!(
            target: $crate::trace::TARGET, $name,
            trace_id = $crate::trace::tracing::field::Empty $(, $($fields)+)?
        ))
    };
}

/// Likewise, below a span of another process if there is one.
#[macro_export]
macro_rules! hop_under {
    ($parent:expr, $name:literal $(, $($fields:tt)+)?) => {
        $crate::trace::under($parent, $crate::trace::tracing::info_span!(
            target: $crate::trace::TARGET, $name,
            trace_id = $crate::trace::tracing::field::Empty $(, $($fields)+)?
        ))
    };
}

#[doc(hidden)]
pub use tracing;

/// A span of another process, or none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parent(Option<SpanContext>);

impl Parent {
    /// From a header; anything but a valid one is none.
    pub fn parse(text: &str) -> Self {
        Self(context(text))
    }

    /// From the headers of HTTP or gRPC.
    pub fn of(headers: &HeaderMap) -> Self {
        let text = headers.get(HEADER).and_then(|value| value.to_str().ok());
        text.map(Self::parse).unwrap_or_default()
    }

    /// There is none.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

/// W3C Trace Context, level 1, version 00: `00-TRACE-SPAN-FLAGS` in lower-case hex.
fn context(text: &str) -> Option<SpanContext> {
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let mut parts = text.split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let shape = (version.len(), trace.len(), span.len(), flags.len()) == (2, 32, 16, 2);
    let hex = [version, trace, span, flags];
    if !shape || !hex.iter().all(|part| part.bytes().all(lower)) || version == "ff" {
        return None;
    }
    // A later version may say more; this one must not.
    if version == "00" && text.len() != HEADER_CHARS {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED,
        true,
        TraceState::default(),
    );
    context.is_valid().then_some(context)
}

fn header(context: &SpanContext) -> Option<AsciiMetadataValue> {
    let (trace, span) = (context.trace_id(), context.span_id());
    let flags = context.trace_flags().to_u8();
    let valid = context.is_valid();
    valid
        .then(|| format!("00-{trace}-{span}-{flags:02x}").parse().ok())
        .flatten()
}

#[doc(hidden)]
pub fn under(parent: &Parent, span: Span) -> Span {
    if let Some(remote) = &parent.0 {
        // Fails where nobody records spans, as in tests.
        let _ = span.set_parent(Context::new().with_remote_span_context(remote.clone()));
    }
    begun(span)
}

#[doc(hidden)]
pub fn begun(span: Span) -> Span {
    let context = span.context();
    let context = context.span().span_context().clone();
    if context.is_valid() {
        span.record(TRACE_ID, tracing::field::display(context.trace_id()));
    }
    span
}

/// Writes the span that runs now into the metadata of a call.
pub fn inject(metadata: &mut MetadataMap) {
    let context = Span::current().context();
    if let Some(value) = header(context.span().span_context()) {
        metadata.insert(HEADER, value);
    }
}

/// Id of the trace that runs now, in hex.
pub fn current_id() -> Option<String> {
    let context = Span::current().context();
    let id = context.span().span_context().trace_id();
    (id != TraceId::INVALID).then(|| id.to_string())
}

/// A future whose log lines and spans belong to `span`.
pub fn within<F: Future>(span: Span, future: F) -> tracing::instrument::Instrumented<F> {
    future.instrument(span)
}

/// The span of a call that another process makes here, for servers; none where the caller has none.
pub fn call(headers: &HeaderMap, path: &str) -> Span {
    let parent = Parent::of(headers);
    if parent.is_none() {
        return Span::none();
    }
    let method = path.rsplit('/').next().unwrap_or_default();
    hop_under!(
        &parent,
        "call",
        otel.name = method,
        otel.kind = "server",
        rpc.path = path
    )
}

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceConfig {
    /// Role of the process.
    pub service: &'static str,
    /// Version of the process.
    pub version: String,
    /// Collector, "http://HOST:PORT", OTLP over gRPC; `None`: nobody collects.
    pub endpoint: Option<String>,
}

impl TraceConfig {
    /// Checks the address.
    ///
    /// # Errors
    /// An address that is not `http://HOST:PORT`.
    pub fn validate(&self) -> Result<(), TelemetryError> {
        let Some(endpoint) = &self.endpoint else {
            return Ok(());
        };
        let uri = endpoint.parse::<Uri>().ok().filter(|uri| {
            let whole = uri.scheme_str() == Some("http") && uri.port_u16().is_some();
            whole
                && matches!(uri.path(), "" | "/")
                && uri.host().is_some_and(|host| !host.is_empty())
        });
        uri.map(drop)
            .ok_or_else(|| TelemetryError::Endpoint(endpoint.clone()))
    }
}

/// The spans of this process. [`Traces::finish`] sends the last ones.
#[derive(Debug)]
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Must run inside the runtime when there is a collector, whose connection lives there.
    pub(crate) fn start(config: &TraceConfig) -> Result<Self, TelemetryError> {
        config.validate()?;
        let resource = Resource::builder()
            .with_service_name(format!("omni-{}", config.service))
            .with_attribute(opentelemetry::KeyValue::new(
                "service.version",
                config.version.clone(),
            ))
            .build();
        let mut builder = SdkTracerProvider::builder().with_resource(resource);
        if let Some(endpoint) = &config.endpoint {
            let exporter = opentelemetry_otlp::SpanExporter::builder()
                .with_tonic()
                .with_endpoint(endpoint)
                .with_timeout(EXPORT_TIMEOUT)
                .build()
                .map_err(|error| TelemetryError::Exporter(error.to_string()))?;
            let batch = BatchConfigBuilder::default()
                .with_max_queue_size(QUEUE)
                .with_scheduled_delay(DELAY)
                .build();
            let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batch);
            builder = builder.with_span_processor(processor.build());
        }
        Ok(Self(builder.build()))
    }

    pub(crate) fn tracer(&self) -> Tracer {
        self.0.tracer("omni")
    }

    /// Sends what has not been sent yet, for a bounded time. Not on a thread of the runtime.
    pub fn finish(self) {
        if let Err(error) = self.0.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn contexts_are_read_strictly_and_written_as_they_were() {
        let Parent(context) = Parent::parse(GIVEN);
        assert_eq!(header(&context.unwrap()).unwrap(), GIVEN);
        let later = format!("01{}-more", &GIVEN[2..]);
        assert!(!Parent::parse(&later).is_none());
        for bad in [
            String::new(),
            GIVEN.to_uppercase(),
            GIVEN.replace("00-", "ff-"),
            format!("{GIVEN}-more"),
            GIVEN.replace('b', "g"),
            GIVEN[..54].to_owned(),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-0af7651916cd43dd8448eb211c80319c-{}-01", "0".repeat(16)),
            "ä".repeat(55),
        ] {
            assert!(Parent::parse(&bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_hop_belongs_to_the_trace_of_its_caller_and_passes_it_on() {
        let config = TraceConfig {
            service: "test",
            version: String::new(),
            endpoint: None,
        };
        let traces = Traces::start(&config).unwrap();
        let layer = tracing_opentelemetry::layer().with_tracer(traces.tracer());
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let parent = Parent::parse(GIVEN);
            let outer = hop_under!(&parent, "outer", request_id = "r");
            let _in = outer.enter();
            let inner = hop!("inner");
            let _in = inner.enter();
            let mut metadata = MetadataMap::new();
            inject(&mut metadata);
            let passed = metadata.get(HEADER).unwrap().to_str().unwrap().to_owned();
            assert_eq!(passed[..36], GIVEN[..36], "the same trace");
            assert_ne!(passed[36..52], GIVEN[36..52], "a span of its own");
        });
        let mut metadata = MetadataMap::new();
        inject(&mut metadata);
        assert!(metadata.is_empty(), "nothing runs, nothing is passed on");
    }

    #[test]
    fn a_collector_that_is_none_names_the_setting() {
        use base::Fault as _;

        for bad in [
            "collector:4317",
            "https://c:4317",
            "http://c",
            "http://c:1/x",
            "",
        ] {
            let config = TraceConfig {
                service: "test",
                version: String::new(),
                endpoint: Some(bad.to_owned()),
            };
            let error = config.validate().unwrap_err();
            assert_eq!(error.field(), Some("otlp_endpoint"), "{bad}");
        }
    }
}
