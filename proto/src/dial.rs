//! The seam for connections: a simulation puts a network of its own in the place of TCP, for the threads that it runs
//! on. Nothing else sets it.
use std::{
    cell::RefCell,
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::{
    codegen::{Service, http::Uri},
    transport::server::Connected,
};

/// What a connection can do.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// A connection being made.
pub type Dialing = Pin<Box<dyn Future<Output = io::Result<Wire>> + Send>>;

/// Makes connections to the host and port of an address.
pub type Dial = Arc<dyn Fn(Uri) -> Dialing + Send + Sync>;

thread_local! {
    static DIAL: RefCell<Option<Dial>> = const { RefCell::new(None) };
}

/// One end of a connection.
pub struct Wire(Box<dyn Io>);

impl Wire {
    /// Over `io`.
    pub fn new(io: impl Io) -> Self {
        Self(Box::new(io))
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wire")
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(cx)
    }
}

impl Connected for Wire {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

/// Ends the simulation's hold on its thread.
#[derive(Debug)]
pub struct Simulated(());

impl Drop for Simulated {
    fn drop(&mut self) {
        DIAL.with_borrow_mut(Option::take);
    }
}

/// From here on the channels of this thread connect through `dial`.
pub fn simulate(dial: Dial) -> Simulated {
    DIAL.with_borrow_mut(|set| *set = Some(dial));
    Simulated(())
}

/// What this thread's channels connect through, if not TCP.
pub(crate) fn installed() -> Option<Dialer> {
    DIAL.with_borrow(|set| set.clone().map(Dialer))
}

/// As tonic wants it.
#[derive(Clone)]
pub(crate) struct Dialer(Dial);

impl Service<Uri> for Dialer {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Wire>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialing = (self.0)(uri);
        Box::pin(async move { dialing.await.map(TokioIo::new) })
    }
}
