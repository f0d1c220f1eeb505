//! Reads request bodies: bounded in bytes, in time, and in how many are read at once.
use axum::{
    body::{Body, BodyDataStream, Bytes},
    http::{HeaderMap, StatusCode, header::CONTENT_LENGTH, header::CONTENT_TYPE},
};
use base::{
    Code, Failure,
    limits::{MAX_EDIT_BYTES, MAX_REQUEST_BYTES},
};
use futures_util::{StreamExt as _, stream};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::Value;
use std::{fmt, time::Duration};
use tokio::sync::Semaphore;

use super::{error::HttpError, fields::Endpoint, schema::Raw};

/// Bodies that are read at once; their sum bounds the memory of requests on the way in.
pub(super) const MAX_READING: usize = 64;
/// Large bodies among them.
pub(super) const MAX_READING_EDITS: usize = 4;
/// Fields of one form.
const MAX_PARTS: usize = 64;
/// Bytes of a refused body that are still read, and dropped: a client that is sending gets its answer then,
/// and not a broken connection.
const MAX_DISCARD: usize = 8 << 20;
/// Longest time spent on that.
const DISCARD_TIME: Duration = Duration::from_secs(1);
/// When to come back if too many bodies are being read.
const RETRY: Duration = Duration::from_secs(1);

/// The bounds of reading.
#[derive(Debug)]
pub(super) struct Reader {
    /// How long a body may take to arrive.
    time: Duration,
    small: Semaphore,
    large: Semaphore,
}

/// Fields by name, in the order in which they came; a name may come twice.
pub(super) type Sent = Vec<(String, Raw)>;

impl Reader {
    pub(super) fn new(time: Duration) -> Self {
        Self {
            time,
            small: Semaphore::new(MAX_READING),
            large: Semaphore::new(MAX_READING_EDITS),
        }
    }

    /// Reads the fields of a request.
    ///
    /// # Errors
    /// A body that is too large, too slow, of another media type or malformed; too many readers.
    pub(super) async fn read(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Sent, HttpError> {
        let mut chunks = body.into_data_stream();
        let read = self.take(endpoint, headers, &mut chunks).await;
        if read.is_err() {
            // Whether it ends or not, the answer follows.
            let _ = tokio::time::timeout(DISCARD_TIME, discard(&mut chunks)).await;
        }
        read
    }

    async fn take(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        chunks: &mut BodyDataStream,
    ) -> Result<Sent, HttpError> {
        let media = Media::of(headers)?;
        let length = headers.get(CONTENT_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        let small = length.is_some_and(|length| length <= MAX_REQUEST_BYTES as u64);
        let (limit, readers) = match endpoint {
            Endpoint::Generations => (MAX_REQUEST_BYTES, &self.small),
            // A message of a chat may have pictures, but few do.
            Endpoint::Chat if small => (MAX_REQUEST_BYTES, &self.small),
            Endpoint::Edits | Endpoint::Chat => (MAX_EDIT_BYTES, &self.large),
        };
        if length.is_some_and(|length| length > limit as u64) {
            return Err(too_large(limit));
        }
        let reading = async {
            let _reader = readers.acquire().await.map_err(|_| busy())?;
            let bytes = collect(chunks, limit).await?;
            media.parse(bytes).await
        };
        let read = tokio::time::timeout(self.time, reading).await;
        read.unwrap_or_else(|_| match readers.available_permits() {
            0 => Err(busy()),
            _ => Err(HttpError::of_http(
                StatusCode::REQUEST_TIMEOUT,
                format!("the body did not arrive within {:?}", self.time),
            )),
        })
    }
}

fn busy() -> HttpError {
    let message = "too many request bodies are being read";
    Failure::new(Code::ResourceExhausted, message)
        .with_retry_after(RETRY)
        .into()
}

fn too_large(limit: usize) -> HttpError {
    let message = format!("the body is larger than {limit} bytes");
    HttpError::of_http(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn malformed(reason: impl fmt::Display) -> HttpError {
    Failure::new(Code::InvalidArgument, format!("the body is {reason}")).into()
}

/// Reads on without keeping anything.
async fn discard(chunks: &mut BodyDataStream) {
    let mut dropped = 0;
    while let Some(Ok(chunk)) = chunks.next().await {
        dropped += chunk.len();
        if dropped > MAX_DISCARD {
            return;
        }
    }
}

async fn collect(chunks: &mut BodyDataStream, limit: usize) -> Result<Vec<u8>, HttpError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| malformed(format!("cut short: {error}")))?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// The media types of a body.
enum Media {
    Json,
    /// With its boundary.
    Form(String),
}

impl Media {
    fn of(headers: &HeaderMap) -> Result<Self, HttpError> {
        let named = headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let named = named.unwrap_or_default();
        let plain = named.split(';').next().unwrap_or_default().trim();
        if plain.eq_ignore_ascii_case("application/json") {
            return Ok(Self::Json);
        }
        multer::parse_boundary(named).map(Self::Form).map_err(|_| {
            HttpError::of_http(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "content-type must be application/json, or multipart/form-data with a boundary",
            )
        })
    }

    async fn parse(self, bytes: Vec<u8>) -> Result<Sent, HttpError> {
        match self {
            Self::Json => {
                let object = serde_json::from_slice::<Object>(&bytes);
                let object =
                    object.map_err(|error| malformed(format!("no JSON object: {error}")))?;
                let json = |(name, value)| (name, Raw::Json(value));
                Ok(object.0.into_iter().map(json).collect())
            }
            Self::Form(boundary) => form(bytes.into(), boundary).await,
        }
    }
}

async fn form(bytes: Bytes, boundary: String) -> Result<Sent, HttpError> {
    let bad = |error: multer::Error| malformed(format!("no form: {error}"));
    let whole = stream::iter([Ok::<_, std::io::Error>(bytes)]);
    let mut parts = multer::Multipart::new(whole, boundary);
    let mut sent = Sent::new();
    while let Some(part) = parts.next_field().await.map_err(bad)? {
        let name = part.name().map(str::to_owned);
        let name = name.ok_or_else(|| malformed("a form with a part that has no name"))?;
        if sent.len() == MAX_PARTS {
            return Err(malformed(format!("a form of more than {MAX_PARTS} parts")));
        }
        sent.push((name, Raw::Part(part.bytes().await.map_err(bad)?)));
    }
    Ok(sent)
}

/// A JSON object that forgets nothing: a name that stands twice is there twice.
struct Object(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Pairs)
    }
}

struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Object;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Object(pairs))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use axum::response::IntoResponse as _;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    fn headers(media: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(media))])
    }

    async fn read(media: &'static str, body: impl Into<Body>) -> Result<Sent, HttpError> {
        let reader = Reader::new(Duration::from_secs(20));
        let headers = headers(media);
        reader
            .read(Endpoint::Generations, &headers, body.into())
            .await
    }

    fn status(error: HttpError) -> u16 {
        error.into_response().status().as_u16()
    }

    #[tokio::test]
    async fn json_keeps_order_and_repetition() {
        let sent = read("application/json; charset=utf-8", r#"{"b":1,"a":2,"b":3}"#).await;
        let names: Vec<_> = sent.unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["b", "a", "b"]);
    }

    #[tokio::test]
    async fn a_form_keeps_its_parts_as_bytes() {
        let body = "--X\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\na fox\r\n\
            --X\r\nContent-Disposition: form-data; name=\"image[]\"; filename=\"a.png\"\r\n\
            Content-Type: image/png\r\n\r\n\u{1}\u{2}\r\n--X--\r\n";
        let sent = read("multipart/form-data; boundary=X", body).await.unwrap();
        let parts: Vec<_> = sent
            .iter()
            .map(|(name, raw)| match raw {
                Raw::Part(bytes) => (name.as_str(), &bytes[..]),
                Raw::Json(_) => panic!("a form is no JSON"),
            })
            .collect();
        assert_eq!(parts, [("prompt", &b"a fox"[..]), ("image[]", &[1, 2])]);
    }

    #[tokio::test]
    async fn what_is_no_request_is_the_callers_fault() {
        for (media, body, expected) in [
            ("application/json", "", 400),
            ("application/json", "[]", 400),
            ("application/json", "{\"a\":1", 400),
            ("application/json", "{\"a\":1} x", 400),
            ("text/plain", "{}", 415),
            ("multipart/form-data", "", 415),
            ("multipart/form-data; boundary=X", "no form", 400),
            (
                "multipart/form-data; boundary=X",
                "--X\r\n\r\nno name\r\n--X--",
                400,
            ),
        ] {
            let error = read(media, body).await.unwrap_err();
            assert_eq!(status(error), expected, "{media} {body:?}");
        }
        let nested = "{\"a\":".repeat(100_000);
        assert_eq!(
            status(read("application/json", nested).await.unwrap_err()),
            400
        );
    }

    #[tokio::test]
    async fn a_body_beyond_the_limit_is_refused_declared_or_not() {
        let chunk = Bytes::from(vec![b' '; 1 << 20]);
        let chunk = move || Ok::<_, std::io::Error>(chunk.clone());
        let endless = stream::repeat_with(chunk);
        let error = read("application/json", Body::from_stream(endless)).await;
        assert_eq!(status(error.unwrap_err()), 413);

        let mut headers = headers("application/json");
        headers.insert(CONTENT_LENGTH, HeaderValue::from(MAX_REQUEST_BYTES + 1));
        let never = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let reader = Reader::new(Duration::from_secs(20));
        let error = reader.read(Endpoint::Generations, &headers, never).await;
        assert_eq!(status(error.unwrap_err()), 413);
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_given_up_and_others_are_told_to_wait() {
        let never = || Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let (reader, headers) = (Reader::new(SHORT), headers("application/json"));
        let error = reader.read(Endpoint::Edits, &headers, never()).await;
        assert_eq!(status(error.unwrap_err()), 408);
        let held = reader.large.acquire_many(MAX_READING_EDITS as u32).await;
        let error = reader.read(Endpoint::Edits, &headers, never()).await;
        assert_eq!(status(error.unwrap_err()), 429);
        drop(held);
    }
}
