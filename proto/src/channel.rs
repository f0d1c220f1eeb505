//! The one builder of client connections. Keepalive is always on: without it a connection that a
//! partition swallowed stays dead for good.
use std::sync::Arc;

use base::{
    Code, Failure,
    limits::{CONNECT_TIMEOUT, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT},
};
use tonic::{
    codegen::http::Uri,
    transport::{Channel, Endpoint},
};

use crate::tls::{Tls, connector};

/// Checks an address and builds its endpoint. `field` names the setting in the error. Where this process
/// has an identity ([`crate::tls`]) addresses begin with `https://`, else with `http://`.
///
/// # Errors
/// `INVALID_ARGUMENT` when `address` is none, or is of the other kind.
pub fn endpoint(address: &str, field: &str) -> Result<Endpoint, Failure> {
    of_kind(address, field, crate::tls::installed().is_some())
}

/// Likewise, with the kind said.
///
/// # Errors
/// As [`endpoint`].
pub fn of_kind(address: &str, field: &str, secure: bool) -> Result<Endpoint, Failure> {
    let (scheme, other) = if secure {
        ("https", "http")
    } else {
        ("http", "https")
    };
    let bad = || {
        Failure::invalid(
            field,
            format!("{field} must be {scheme}://HOST:PORT, got {address:?}"),
        )
    };
    let uri: Uri = address.parse().map_err(|_| bad())?;
    if uri.scheme_str() == Some(other) {
        let how = if secure { "on" } else { "off" };
        let message =
            format!("{field} must be {scheme}://HOST:PORT, as TLS is {how}, got {address:?}");
        return Err(Failure::invalid(field, message));
    }
    let plain = uri.scheme_str() == Some(scheme) && uri.port_u16().is_some();
    if !plain || !matches!(uri.path(), "" | "/") || uri.host().is_none_or(str::is_empty) {
        return Err(bad());
    }
    // tonic brings up TLS of its own for https; ours is below it, and requests say what they travel on.
    let below = address.replacen("https", "http", 1);
    let endpoint = Endpoint::from_shared(below).map_err(|_| bad())?;
    let endpoint = if secure {
        endpoint.origin(uri)
    } else {
        endpoint
    };
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
    lazy_named(address, "endpoint")
}

/// Likewise; `field` names the setting in the error.
///
/// # Errors
/// `INVALID_ARGUMENT` for a bad address.
pub fn lazy_named(address: &str, field: &str) -> Result<Channel, Failure> {
    match crate::tls::installed() {
        Some(tls) => lazy_as(tls, address, field),
        None => {
            let endpoint = endpoint(address, field)?;
            Ok(match crate::dial::installed() {
                Some(dialer) => endpoint.connect_with_connector_lazy(dialer),
                None => endpoint.connect_lazy(),
            })
        }
    }
}

/// Likewise, as somebody else than this process.
///
/// # Errors
/// `INVALID_ARGUMENT` for a bad address.
pub fn lazy_as(tls: Arc<Tls>, address: &str, field: &str) -> Result<Channel, Failure> {
    let endpoint = of_kind(address, field, true)?;
    Ok(endpoint.connect_with_connector_lazy(connector(tls)))
}

/// A connected channel.
///
/// # Errors
/// `INVALID_ARGUMENT` for a bad address, `UNAVAILABLE` when nobody answers within
/// [`CONNECT_TIMEOUT`], or when TLS does not come up.
pub async fn connect(address: &str) -> Result<Channel, Failure> {
    let endpoint = endpoint(address, "endpoint")?;
    let connected = match crate::tls::installed() {
        Some(tls) => endpoint.connect_with_connector(connector(tls)).await,
        None => endpoint.connect().await,
    };
    connected.map_err(|error| {
        let mut message = format!("cannot connect to {address}");
        // Of a broken handshake the last cause says what is wrong.
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause.and_then(std::error::Error::source) {
            cause = Some(next);
        }
        if let (Some(cause), true) = (cause, address.starts_with("https")) {
            message = format!("{message}: {cause}");
        }
        Failure::new(Code::Unavailable, message)
    })
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

    #[test]
    fn an_address_of_the_other_kind_is_refused_and_says_why() {
        for (address, secure) in [("https://a:1", false), ("http://a:1", true)] {
            assert!(of_kind(address, "registry", !secure).is_ok());
            let error = of_kind(address, "registry", secure).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("registry"));
            let how = if secure { "TLS is on" } else { "TLS is off" };
            assert!(error.message.contains(how), "{error}");
        }
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
