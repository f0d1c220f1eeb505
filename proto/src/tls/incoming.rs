//! Connections that this process accepts: handshakes side by side, bounded in number and time.
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use base::{
    Code, Failure,
    task::{self, Tracker},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use super::Tls;
use crate::access::Peer;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Handshakes at once; more connections wait in the backlog.
const MAX_HANDSHAKES: usize = 256;
/// Connections that wait to be served.
const READY_QUEUE: usize = 64;
/// Pause after a connection could not be accepted, which is when files run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Who may open a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// Who has a certificate.
    Certified,
    /// Anybody; who has a certificate shows it.
    Anyone,
    /// Likewise, over HTTP/1.1.
    Web,
}

/// A connection whose other side is known.
#[derive(Debug)]
pub struct Secured {
    stream: Box<TlsStream<TcpStream>>,
    peer: Peer,
}

impl Secured {
    /// Who is at the other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Connected for Secured {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Secured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

pub(super) async fn handshake(
    tls: &Tls,
    callers: Callers,
    stream: TcpStream,
) -> Result<Secured, Failure> {
    let refused = |error: io::Error| {
        Failure::new(
            Code::Unauthenticated,
            format!("the TLS handshake failed: {error}"),
        )
    };
    stream.set_nodelay(true).map_err(refused)?;
    let config = tls
        .server(callers)
        .ok_or_else(|| Failure::new(Code::Internal, "a server needs a certificate of its own"))?;
    let accepted = TlsAcceptor::from(config).accept(stream);
    let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, accepted).await;
    let stream = stream
        .map_err(|_| Failure::new(Code::DeadlineExceeded, "the TLS handshake took too long"))?;
    let stream = Box::new(stream.map_err(refused)?);
    let shown = stream.get_ref().1.peer_certificates();
    let peer = Peer::of(shown.and_then(<[_]>::first));
    Ok(Secured { stream, peer })
}

/// Connections of `listener` after their handshakes. The task ends with its handle.
pub(crate) fn incoming(
    listener: TcpListener,
    tls: Arc<Tls>,
    callers: Callers,
) -> (ReceiverStream<io::Result<Secured>>, task::Owned<()>) {
    let (ready, accepted) = mpsc::channel(READY_QUEUE);
    let accepting = task::spawn(async move {
        let tasks = Tracker::new();
        let places = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        while let Ok(place) = places.clone().acquire_owned().await {
            let (stream, address) = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                // Nobody serves any more.
                () = ready.closed() => return,
            };
            let (ready, tls) = (ready.clone(), tls.clone());
            tasks.spawn(async move {
                let _place = place;
                match handshake(&tls, callers, stream).await {
                    // A server that has stopped takes no more.
                    Ok(secured) => drop(ready.send(Ok(secured)).await),
                    Err(error) => tracing::info!(%address, %error, "connection refused"),
                }
            });
        }
    });
    (ReceiverStream::new(accepted), accepting)
}
