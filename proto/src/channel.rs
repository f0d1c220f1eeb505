//! The one builder of client connections. Keepalive is always on: without it a connection that a
//! partition swallowed stays dead for good.
use base::{
    Code, Failure,
    limits::{CONNECT_TIMEOUT, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT},
};
use tonic::transport::{Channel, Endpoint};

/// Checks an address and builds its endpoint. `field` names the setting in the error.
///
/// # Errors
/// `INVALID_ARGUMENT` when `address` is not `http://HOST:PORT`.
pub fn endpoint(address: &str, field: &str) -> Result<Endpoint, Failure> {
    let bad = || {
        Failure::invalid(
            field,
            format!("{field} must be http://HOST:PORT, got {address:?}"),
        )
    };
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|_| bad())?;
    let uri = endpoint.uri();
    let plain = uri.scheme_str() == Some("http") && uri.port_u16().is_some();
    if !plain || !matches!(uri.path(), "" | "/") || uri.host().is_none_or(str::is_empty) {
        return Err(bad());
    }
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// A channel that connects on first use and reconnects after a break.
///
/// # Errors
/// `INVALID_ARGUMENT` for a bad address.
pub fn lazy(address: &str) -> Result<Channel, Failure> {
    Ok(endpoint(address, "endpoint")?.connect_lazy())
}

/// A connected channel.
///
/// # Errors
/// `INVALID_ARGUMENT` for a bad address, `UNAVAILABLE` when nobody answers within
/// [`CONNECT_TIMEOUT`].
pub async fn connect(address: &str) -> Result<Channel, Failure> {
    endpoint(address, "endpoint")?
        .connect()
        .await
        .map_err(|_| Failure::new(Code::Unavailable, format!("cannot connect to {address}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_use() {
        for bad in [
            "",
            "127.0.0.1:1",
            "http://",
            "http://host",
            "ftp://h:1",
            "http://h:1/x",
            " ",
        ] {
            let error = endpoint(bad, "registry").unwrap_err();
            assert_eq!(error.field.as_deref(), Some("registry"), "{bad:?}");
        }
        assert!(endpoint("http://127.0.0.1:7000", "registry").is_ok());
        assert!(endpoint("http://[::1]:7000", "registry").is_ok());
    }

    #[tokio::test]
    async fn a_closed_port_is_unavailable_and_names_the_address() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let error = connect(&address).await.unwrap_err();
        assert_eq!(error.code, Code::Unavailable);
        assert!(error.message.contains(&address));
    }
}
