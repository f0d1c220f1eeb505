//! Servers of HTTP/1.1: so many connections at once, each with bounds on how long its client may be waited for. A
//! client that goes away drops its handler, and with it the request.
use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Extension, Router};
use base::task::Tracker;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Sleep,
};
use tokio_util::sync::CancellationToken;

use crate::tls::{Tls, accept_web};

/// Largest head of a request, in bytes.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Pause after a connection could not be accepted, which is when files run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Bounds of what a client may make a port wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpBounds {
    /// The head of a request, from the moment its connection is open or its predecessor answered.
    pub head: Duration,
    /// The body of a request.
    pub body: Duration,
    /// A client that takes nothing of an answer that is ready.
    pub stall: Duration,
    /// Connections at once; more wait in the backlog.
    pub connections: usize,
}

impl Default for HttpBounds {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(30),
            body: Duration::from_secs(60),
            stall: Duration::from_secs(30),
            connections: 1_024,
        }
    }
}

/// What a server of HTTP needs besides its port.
#[derive(Debug, Clone)]
pub struct Site {
    /// What it answers. With `tls`, requests carry a [`crate::access::Peer`] among their extensions: somebody, or
    /// nobody where the client showed no certificate.
    pub routes: Router,
    /// `None`: in clear.
    pub tls: Option<Arc<Tls>>,
    /// How long clients are waited for; the body's bound is for the routes to keep.
    pub bounds: HttpBounds,
    /// How long connections may end their answers once the server is to stop.
    pub grace: Duration,
}

/// Serves until `stop`, then lets connections end their answers.
pub async fn serve(listener: TcpListener, site: Site, stop: CancellationToken) {
    let (bounds, grace) = (site.bounds, site.grace);
    let tasks = Tracker::new();
    let places = Arc::new(Semaphore::new(bounds.connections));
    let accepting = async {
        while let Ok(place) = places.clone().acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    tasks.spawn(connection(stream, site.clone(), stop.clone(), place));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    stop.run_until_cancelled(accepting).await;
    drop(listener);
    if let Err(left) = tasks.stop(grace).await {
        tracing::warn!(error = %left, "connections of HTTP clients are cut off");
    }
}

async fn connection(
    stream: TcpStream,
    site: Site,
    stop: CancellationToken,
    _place: OwnedSemaphorePermit,
) {
    let Site {
        routes,
        tls,
        bounds,
        ..
    } = site;
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection without nodelay");
    }
    let Some(tls) = tls else {
        return answer(stream, routes, bounds, stop).await;
    };
    match accept_web(&tls, stream).await {
        Ok(stream) => {
            let routes = routes.layer(Extension(stream.peer().clone()));
            answer(stream, routes, bounds, stop).await;
        }
        Err(error) => tracing::info!(%error, "connection refused"),
    }
}

/// Requests of one connection, one after the other.
async fn answer<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    routes: Router,
    bounds: HttpBounds,
    stop: CancellationToken,
) {
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(bounds.head)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(
                TokioIo::new(Timely::new(stream, bounds.stall)),
                TowerToHyperService::new(routes),
            )
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A stream whose writes fail once the other side has taken nothing for `stall`.
#[derive(Debug)]
struct Timely<S> {
    inner: S,
    stall: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Timely<S> {
    fn new(inner: S, stall: Duration) -> Self {
        Self {
            inner,
            stall,
            waiting: None,
        }
    }

    fn bound<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.waiting = None;
            return poll;
        }
        let stall = self.stall;
        let sleep = || Box::pin(tokio::time::sleep(stall));
        let waiting = self.waiting.get_or_insert_with(sleep);
        ready!(waiting.as_mut().poll(cx));
        let message = format!("the client took nothing for {stall:?}");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timely<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timely<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.bound(cx, poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.bound(cx, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_flush(cx);
        self.bound(cx, poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.bound(cx, poll)
    }
}

#[cfg(test)]
mod tests {
    use axum::{
        body::{Body, Bytes},
        routing::get,
    };
    use futures_util::stream;
    use tokio::{io::AsyncWriteExt as _, sync::mpsc};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Says when it is dropped.
    struct Guard(mpsc::Sender<()>);

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.try_send(()).unwrap();
        }
    }

    /// A body without end.
    fn endless(guard: Guard) -> Body {
        let chunk = move || {
            let _ = &guard;
            Ok::<_, std::convert::Infallible>(Bytes::from_static(&[b'x'; 4_096]))
        };
        Body::from_stream(stream::repeat_with(chunk))
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_loses_its_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (held, mut let_go) = mpsc::channel(1);
        let handler = get(move || async move { endless(Guard(held)) });
        let routes = Router::new().route("/", handler);
        let bounds = HttpBounds {
            stall: Duration::from_millis(50),
            ..HttpBounds::default()
        };
        let stop = CancellationToken::new();
        let site = Site {
            routes,
            tls: None,
            bounds,
            grace: SOON,
        };
        let server = base::task::spawn(serve(listener, site, stop.clone()));
        let mut client = TcpStream::connect(address).await.unwrap();
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let gone = tokio::time::timeout(SOON, let_go.recv()).await;
        assert_eq!(gone.unwrap(), Some(()));
        drop(client);
        stop.cancel();
        tokio::time::timeout(SOON, server).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_given_up_and_one_that_reads_is_not() {
        let (near, _far) = tokio::io::duplex(8);
        let mut timely = Timely::new(near, Duration::from_millis(20));
        let error = timely.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let (near, mut far) = tokio::io::duplex(8);
        let mut timely = Timely::new(near, Duration::from_secs(20));
        let read = async {
            let mut got = vec![0; 64];
            tokio::io::AsyncReadExt::read_exact(&mut far, &mut got).await
        };
        let (written, read) = tokio::join!(timely.write_all(&[7; 64]), read);
        written.unwrap();
        read.unwrap();
    }
}
