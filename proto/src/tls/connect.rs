//! Connections that this process begins.
use std::{io, sync::Arc};

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream, rustls::pki_types::ServerName};
use tonic::codegen::http::Uri;

use super::Tls;

type Connected = TokioIo<TlsStream<TcpStream>>;

/// Connects to the host of an address and checks that the server's certificate is for it.
pub(crate) fn connector(
    tls: Arc<Tls>,
) -> impl tower::Service<
    Uri,
    Response = Connected,
    Error = io::Error,
    Future = impl Future<Output = io::Result<Connected>> + Send,
> + Send
+ 'static {
    tower::service_fn(move |uri: Uri| {
        let tls = tls.clone();
        async move {
            let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
            let host = uri.host().ok_or_else(|| bad("an address without a host"))?;
            let host = host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned();
            let port = uri
                .port_u16()
                .ok_or_else(|| bad("an address without a port"))?;
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host).map_err(|_| bad("a host without a name"))?;
            let connector = TlsConnector::from(tls.client());
            Ok(TokioIo::new(connector.connect(name, stream).await?))
        }
    })
}
