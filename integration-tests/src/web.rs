//! A small HTTP client for tests: one connection a request, JSON in and out, server-sent events. For
//! tests alone: what goes wrong here ends the test.
#![allow(clippy::unwrap_used)]

use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, Uri, header::CONTENT_TYPE, header::HOST},
};
use hyper::{Response, body::Incoming};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use crate::cluster::bounded;

/// Largest answer that is read, in bytes.
const MAX_ANSWER: usize = 256 << 20;

/// What a server said, read to its end.
#[derive(Debug)]
pub struct Answer {
    /// Status of the head.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        let parsed = serde_json::from_str(&self.text);
        parsed.unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The error object.
    pub fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    /// The body as server-sent events: their names ("" without one) and data. `[DONE]` is a string.
    pub fn events(&self) -> Vec<(String, Value)> {
        // A comment only says that the server is still there.
        let told = |block: &&str| !block.is_empty() && !block.starts_with(':');
        let blocks = self.text.split("\n\n").filter(told);
        let event = |block: &str| {
            let (mut name, mut data) = (String::new(), Value::Null);
            for line in block.lines() {
                match line.split_once(": ").unwrap() {
                    ("event", text) => text.clone_into(&mut name),
                    ("data", "[DONE]") => data = "[DONE]".into(),
                    ("data", text) => data = serde_json::from_str(text).unwrap(),
                    other => panic!("no server-sent event: {other:?}"),
                }
            }
            (name, data)
        };
        blocks.map(event).collect()
    }
}

/// Sends one request; the answer's body is still to be read. Dropping it closes the connection.
///
/// # Panics
/// When the server cannot be reached or does not answer.
pub async fn open(site: &str, request: Request<Body>) -> Response<Incoming> {
    let address: Uri = site.parse().unwrap();
    let authority = address.authority().unwrap();
    let stream = bounded(TcpStream::connect(authority.as_str()))
        .await
        .unwrap();
    open_on(stream, site, request).await
}

async fn open_on<S>(stream: S, site: &str, mut request: Request<Body>) -> Response<Incoming>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let address: Uri = site.parse().unwrap();
    let host = address.authority().unwrap().as_str().parse().unwrap();
    request.headers_mut().entry(HOST).or_insert(host);
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = bounded(handshake).await.unwrap();
    base::task::Tracker::new().spawn(connection);
    bounded(sender.send_request(request)).await.unwrap()
}

/// As [`send`], on a connection that is open already.
///
/// # Panics
/// As [`send`].
pub async fn send_on<S>(stream: S, site: &str, request: Request<Body>) -> Answer
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    read(open_on(stream, site, request).await).await
}

async fn read(answer: Response<Incoming>) -> Answer {
    let (head, body) = answer.into_parts();
    let bytes = bounded(to_bytes(Body::new(body), MAX_ANSWER))
        .await
        .unwrap();
    Answer {
        status: head.status,
        headers: head.headers,
        text: String::from_utf8(bytes.into()).unwrap(),
    }
}

/// Sends one request and reads its answer.
///
/// # Panics
/// As [`open`]; when the answer breaks off.
pub async fn send(site: &str, request: Request<Body>) -> Answer {
    read(open(site, request).await).await
}

/// A POST of a body of some media type.
///
/// # Panics
/// When `path` is none.
pub fn post(path: &str, media: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post(path).header(CONTENT_TYPE, media);
    request.body(body.into()).unwrap()
}

/// A POST of JSON.
///
/// # Panics
/// As [`send`].
pub async fn post_json(site: &str, path: &str, body: &Value) -> Answer {
    send(site, post(path, "application/json", body.to_string())).await
}

/// A GET.
///
/// # Panics
/// As [`send`].
pub async fn get(site: &str, path: &str) -> Answer {
    send(site, Request::get(path).body(Body::empty()).unwrap()).await
}
