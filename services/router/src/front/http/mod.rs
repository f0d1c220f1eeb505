//! The HTTP API that OpenAI clients speak, on a port of its own. It is another spelling of the same
//! request: fields are checked against one table ([`fields`]), become a `GenerateRequest`, and go
//! through the same [`Context::accept`] as those of gRPC.
mod answer;
mod body;
mod chat;
mod encode;
mod error;
mod events;
mod fields;
mod models;
mod openapi;
mod order;
mod pictures;
mod schema;

use std::sync::Arc;

use axum::{
    Extension, Json, Router,
    extract::{Request, State},
    http::{
        HeaderValue, StatusCode,
        header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE},
    },
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use base::{
    Code, Failure, RequestId,
    clock::{self, Clock as _, SystemClock},
};
use proto::{
    access::Peer,
    v1::{Done, Image, generate_response::Event, input_image::Source},
    web::HttpBounds,
};
use telemetry::{names, trace::Parent};
use tokio::sync::{Semaphore, mpsc};

pub use self::openapi::document as openapi;
use self::{
    answer::{Picture, Run, complete},
    body::Reader,
    encode::{Format, MAX_ENCODING, Output},
    error::{HttpError, REQUEST_ID},
    events::{Dialect, Teller},
    fields::Endpoint,
    order::{Order, Said},
    schema::Fields,
};
use super::{Caller, Context};
use crate::dispatch::Answer;

/// Says, in requests of a browser, whose page it acts for. A page of another site could not read an
/// answer, but with a form it could make a server work that listens on the user's machine alone.
const FETCH_SITE: &str = "sec-fetch-site";

/// Path of the API's own document.
const DOCUMENT: &str = "/openapi.json";

/// What every handler needs.
#[derive(Debug, Clone)]
pub(crate) struct Desk(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    reader: Reader,
    encoding: Semaphore,
    /// When this router started, in seconds since the Unix epoch.
    started: u64,
}

fn unix_seconds() -> u64 {
    SystemClock.unix_millis() / 1_000
}

/// Every path of the API.
pub(crate) fn routes(context: Arc<Context>, bounds: &HttpBounds) -> Router {
    let desk = Desk(Arc::new(Inner {
        context,
        reader: Reader::new(bounds.body),
        encoding: Semaphore::new(MAX_ENCODING),
        started: unix_seconds(),
    }));
    Router::new()
        .route("/v1/images/generations", post(generations))
        .route("/v1/images/edits", post(edits))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{model}", get(models::retrieve))
        .route(DOCUMENT, get(|| async { Json(openapi()) }))
        .fallback(|| async { HttpError::from(Failure::new(Code::NotFound, "no such path")) })
        .method_not_allowed_fallback(|| async {
            let status = StatusCode::METHOD_NOT_ALLOWED;
            HttpError::of_http(
                status,
                "this path takes another method, see the allow header",
            )
        })
        .layer(from_fn_with_state(desk.clone(), authenticate))
        .layer(from_fn(identify))
        .with_state(desk)
}

/// Gives every request an id, its own if it brought one, and every answer the same.
async fn identify(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).map(|value| {
        let text = value.to_str().ok()?;
        text.parse::<RequestId>().ok()
    });
    let fetched_by = request.headers().get(FETCH_SITE);
    let (id, mut response) = match given {
        _ if fetched_by.is_some_and(|site| site == "cross-site") => {
            let message = "a page of another site may not make requests here";
            let error = HttpError::from(Failure::new(Code::PermissionDenied, message));
            (RequestId::generate(), error.into_response())
        }
        Some(None) => {
            let reason = format!("{REQUEST_ID} must be 1 to 64 characters of [A-Za-z0-9_-]");
            let error = HttpError::from(Failure::invalid(REQUEST_ID, reason));
            (RequestId::generate(), error.into_response())
        }
        given => {
            let id = given.flatten().unwrap_or_else(RequestId::generate);
            request.extensions_mut().insert(id.clone());
            (id, next.run(request).await)
        }
    };
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Finds out who is asking. The document of the API is for everybody.
async fn authenticate(
    State(desk): State<Desk>,
    mut request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    if request.uri().path() != DOCUMENT {
        let header = request.headers().get(AUTHORIZATION);
        let peer = request.extensions().get::<Peer>();
        let context = &desk.0.context;
        let caller = context.caller(header.map(HeaderValue::as_bytes), peer);
        let mut caller = caller.map_err(|error| desk.counted(error.into()))?;
        caller.trace = Parent::of(request.headers());
        request.extensions_mut().insert(caller);
    }
    Ok(next.run(request).await)
}

async fn generations(
    State(desk): State<Desk>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, HttpError> {
    let order = async {
        let mut fields = desk.fields(Endpoint::Generations, request).await?;
        let said = said(&mut fields);
        Ok(Order::new(fields, &id, said)?)
    };
    let order = order.await.map_err(|error| desk.counted(error))?;
    desk.serve(caller, order, Dialect::Images).await
}

async fn chat_completions(
    State(desk): State<Desk>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, HttpError> {
    let order = async {
        let mut fields = desk.fields(Endpoint::Chat, request).await?;
        let words = fields.words("modalities");
        if words.is_some_and(<[_]>::is_empty) {
            let reason = "modalities must hold image or text";
            return Err(HttpError::from(Failure::invalid("modalities", reason)));
        }
        let text_only = words.is_some_and(|words| !words.contains(&"image"));
        let messages = fields.json("messages").unwrap_or_default();
        let said = chat::conversation(&messages)?;
        Ok(Order::new(fields, &id, Said { text_only, ..said })?)
    };
    let order = order.await.map_err(|error| desk.counted(error))?;
    desk.serve(caller, order, Dialect::Chat).await
}

async fn edits(
    State(desk): State<Desk>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, HttpError> {
    let order = async {
        let mut fields = desk.fields(Endpoint::Edits, request).await?;
        let images = fields.pictures("image");
        check_mask(&images, &fields.pictures("mask"))?;
        let said = said(&mut fields);
        Ok(Order::new(fields, &id, Said { images, ..said })?)
    };
    let order = order.await.map_err(|error| desk.counted(error))?;
    desk.serve(caller, order, Dialect::Images).await
}

fn said(fields: &mut Fields) -> Said {
    Said {
        prompt: fields.text("prompt").unwrap_or_default(),
        system_prompt: fields.text("system_prompt").unwrap_or_default(),
        ..Said::default()
    }
}

/// A client learns of its mistakes first, and then that there are no masks.
fn check_mask(images: &[Source], masks: &[Source]) -> Result<(), Failure> {
    let header = |name: &str, source: &Source| match source {
        Source::Data(bytes) => ingest::header(name, bytes, &ingest::Limits::default())
            .map_err(|error| Failure::invalid(name, error.to_string())),
        Source::Url(_) => {
            let reason = format!("{name} must carry its bytes where there is a mask");
            Err(Failure::invalid(name, reason))
        }
    };
    let Some(mask) = masks.first() else {
        return Ok(());
    };
    let mask = header("mask", mask)?;
    let first = images
        .first()
        .map(|image| header("image", image))
        .transpose()?;
    let size = first.map(|picture| (picture.width, picture.height));
    if mask.format != ingest::Format::Png || size != Some((mask.width, mask.height)) {
        let reason = "mask must be a PNG of the size of the first picture";
        return Err(Failure::invalid("mask", reason));
    }
    let message = "mask: the model has no masks; say in words what is to change";
    Err(Failure::new(Code::Unimplemented, message).with_field("mask"))
}

impl Desk {
    async fn fields(&self, endpoint: Endpoint, request: Request) -> Result<Fields, HttpError> {
        let (head, body) = request.into_parts();
        let sent = self.0.reader.read(endpoint, &head.headers, body).await?;
        Ok(Fields::parse(endpoint, sent)?)
    }

    /// Counts a request that never reached [`Context::accept`], which counts the others.
    fn counted(&self, error: HttpError) -> HttpError {
        let metrics = &self.0.context.metrics;
        metrics.count(&names::ROUTER_REQUESTS, &["", error.code().name()]);
        error
    }

    async fn serve(
        &self,
        caller: Caller,
        order: Order,
        dialect: Dialect,
    ) -> Result<Response, HttpError> {
        let Order {
            request,
            deadline,
            output,
            stream,
        } = order;
        let accepted = Box::pin(self.0.context.accept(caller, request, deadline)).await;
        let mut answers = accepted?;
        let Some(Event::Accepted(accepted)) = next(&mut answers).await? else {
            return Err(Failure::new(Code::Internal, "the request did not begin").into());
        };
        let mut run = Run {
            accepted,
            output,
            created: unix_seconds(),
            written: None,
        };
        if stream {
            let teller = Teller {
                dialect,
                run,
                pictures: Vec::new(),
            };
            let head = [
                (CONTENT_TYPE, "text/event-stream"),
                (CACHE_CONTROL, "no-cache"),
            ];
            return Ok((head, events::body(self.clone(), answers, teller)).into_response());
        }
        let (pictures, done) = self.collect(&mut answers, &mut run).await?;
        let answer = match dialect {
            Dialect::Images => run.images(&pictures, &done),
            Dialect::Chat => run.chat(&pictures, &done),
        };
        Ok(Json(answer).into_response())
    }

    async fn collect(
        &self,
        answers: &mut mpsc::Receiver<Answer>,
        run: &mut Run,
    ) -> Result<(Vec<Picture>, Done), HttpError> {
        let mut pictures = Vec::new();
        loop {
            match next(answers).await? {
                Some(Event::Image(image)) => pictures.push(self.draw(image, run.output).await?),
                Some(Event::Written(written)) => run.written = Some(written),
                Some(Event::Done(done)) => {
                    return Ok((complete(pictures, run.pictures())?, done));
                }
                _ => {}
            }
        }
    }

    /// The picture in the format that was asked for.
    async fn draw(&self, mut image: Image, output: Output) -> Result<Picture, HttpError> {
        let png = std::mem::take(&mut image.png);
        if output.format == Format::Png {
            return Ok(Picture::new(image, png, 0.0));
        }
        let internal = |error: String| Failure::new(Code::Internal, format!("picture: {error}"));
        let place = self.0.encoding.acquire().await;
        let _place = place.map_err(|error| internal(error.to_string()))?;
        let start = clock::now();
        let work = move || encode::encode(png, output);
        let encoded = self.0.context.tasks.spawn_blocking(work).await;
        let bytes = encoded.map_err(|error| internal(error.to_string()))??;
        Ok(Picture::new(image, bytes, clock::millis_since(start)))
    }
}

/// The next event; a stream that ends without its last word is a bug of ours.
async fn next(answers: &mut mpsc::Receiver<Answer>) -> Result<Option<Event>, HttpError> {
    match answers.recv().await {
        Some(answer) => Ok(answer?.event),
        None => Err(Failure::new(Code::Internal, "the request ended without a word").into()),
    }
}
