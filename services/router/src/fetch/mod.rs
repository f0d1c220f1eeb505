//! Pictures that a request only names: fetched from places that the operator allows, and from nowhere else.
//!
//! Nothing is fetched unless a list of hosts is set. An address is looked up once, every answer must be a
//! public one, and the connection goes to the address that was checked; a redirect starts over with all of
//! this. Bytes, time, redirects and fetches at once are bounded.
mod address;
mod hosts;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::body::Body;
use base::limits::{CONNECT_TIMEOUT, MAX_EDIT_BYTES};
use futures_util::StreamExt as _;
use hyper::{
    Request, Response, StatusCode, Uri,
    body::Incoming,
    client::conn::http1,
    header::{ACCEPT, CONTENT_LENGTH, HOST, LOCATION},
};
use hyper_util::rt::TokioIo;
use proto::v1::input_image::Source;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    sync::Semaphore,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto, pki_types::ServerName},
};

pub use self::hosts::{HostList, HostListError};
use self::{address::is_public, hosts::Target};
use crate::{RouterError, validate::writing};

/// Fetches at once; others wait, within their own deadline.
const MAX_FETCHING: usize = 8;
/// What a request may carry besides its pictures, in bytes.
const REST: usize = 1 << 20;

/// What may be fetched, and within which bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchConfig {
    /// Allowed hosts; empty: nothing is fetched.
    pub hosts: HostList,
    /// Largest file, in bytes.
    pub bytes: usize,
    /// Longest time for one picture, redirects included.
    pub time: Duration,
    /// Most redirects of one picture.
    pub redirects: usize,
}

impl Default for FetchConfig {
    fn default() -> Self {
        Self {
            hosts: HostList::default(),
            bytes: 16 << 20,
            time: Duration::from_secs(10),
            redirects: 3,
        }
    }
}

/// Fetches pictures.
pub(crate) struct Fetcher {
    config: FetchConfig,
    tls: Option<TlsConnector>,
    places: Semaphore,
    /// Whether an address may be connected to.
    may_reach: fn(IpAddr) -> bool,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn refused(reason: impl Into<String>) -> RouterError {
    RouterError::invalid("images", reason)
}

impl Fetcher {
    /// # Errors
    /// Hosts are allowed, but TLS cannot be set up.
    pub(crate) fn new(config: FetchConfig) -> Result<Self, RouterError> {
        let tls = match config.hosts.is_empty() {
            true => None,
            false => Some(tls()?),
        };
        Ok(Self {
            config,
            tls,
            places: Semaphore::new(MAX_FETCHING),
            may_reach: is_public,
        })
    }

    /// Refuses addresses that would not be fetched, before anything else is done.
    pub(crate) fn allows(&self, images: &[Source]) -> Result<(), RouterError> {
        for (index, image) in images.iter().enumerate() {
            if let Source::Url(url) = image {
                self.target(url)
                    .map_err(|reason| refused(format!("[{index}] {reason}")))?;
            }
        }
        Ok(())
    }

    fn target(&self, url: &str) -> Result<Target, String> {
        if self.config.hosts.is_empty() {
            return Err("must carry its bytes: this server fetches nothing".to_owned());
        }
        self.config.hosts.target(url)
    }

    /// The files of pictures, fetched where they are only named.
    ///
    /// # Errors
    /// What cannot be fetched, is too large or no picture; all of them together being too large.
    pub(crate) async fn files(&self, images: &[Source]) -> Result<Vec<Vec<u8>>, RouterError> {
        let mut files = Vec::with_capacity(images.len());
        for (index, image) in images.iter().enumerate() {
            files.push(match image {
                Source::Data(bytes) => bytes.clone(),
                Source::Url(url) => {
                    let fetched = tokio::time::timeout(self.config.time, self.fetch(url)).await;
                    let fetched = fetched.unwrap_or_else(|_| {
                        Err(format!("did not come within {:?}", self.config.time))
                    });
                    let bytes = fetched.map_err(|reason| refused(format!("[{index}] {reason}")))?;
                    writing::file(index, &bytes)?;
                    bytes
                }
            });
        }
        let all: usize = files.iter().map(Vec::len).sum();
        if all > MAX_EDIT_BYTES - REST {
            let most = MAX_EDIT_BYTES - REST;
            return Err(refused(format!(
                "have {all} bytes, at most {most} are taken"
            )));
        }
        Ok(files)
    }

    async fn fetch(&self, url: &str) -> Result<Vec<u8>, String> {
        let stopped = |_| "cannot be fetched now".to_owned();
        let _place = self.places.acquire().await.map_err(stopped)?;
        let mut target = self.target(url)?;
        for _ in 0..=self.config.redirects {
            let response = self.get(&target).await?;
            match response.status() {
                StatusCode::OK => return self.body(response).await,
                StatusCode::MOVED_PERMANENTLY
                | StatusCode::FOUND
                | StatusCode::SEE_OTHER
                | StatusCode::TEMPORARY_REDIRECT
                | StatusCode::PERMANENT_REDIRECT => {
                    let location = response.headers().get(LOCATION);
                    let location = location.and_then(|value| value.to_str().ok());
                    let location = location.ok_or("is redirected to nowhere")?;
                    let next = target.resolve(location);
                    target = self
                        .target(&next)
                        .map_err(|reason| format!("is redirected: {reason}"))?;
                }
                status => return Err(format!("was answered with status {}", status.as_u16())),
            }
        }
        Err(format!(
            "is redirected more than {} times",
            self.config.redirects
        ))
    }

    async fn get(&self, target: &Target) -> Result<Response<Incoming>, String> {
        let address = self.address(target).await?;
        let unreachable = |what: &str| format!("cannot be fetched: {what}");
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
        let stream = connected
            .map_err(|_| unreachable("the connection did not come up"))?
            .map_err(|_| unreachable("the connection was refused"))?;
        if !target.secure {
            return ask(stream, target).await;
        }
        let tls = self.tls.as_ref().ok_or_else(|| unreachable("no TLS"))?;
        let name = ServerName::try_from(target.host.clone())
            .map_err(|_| unreachable("its host is no name"))?;
        let stream = tls.connect(name, stream).await;
        ask(stream.map_err(|_| unreachable("TLS failed"))?, target).await
    }

    /// Where to connect: the host is looked up here, and only here.
    async fn address(&self, target: &Target) -> Result<SocketAddr, String> {
        let found = lookup_host((target.host.as_str(), target.port)).await;
        let found: Vec<SocketAddr> = found.map_err(|_| "has an unknown host")?.collect();
        if let Some(other) = found.iter().find(|address| !(self.may_reach)(address.ip())) {
            tracing::warn!(host = %target.host, address = %other.ip(), "picture address refused");
            return Err("is at an address that is not public".to_owned());
        }
        found
            .first()
            .copied()
            .ok_or_else(|| "has an unknown host".to_owned())
    }

    async fn body(&self, response: Response<Incoming>) -> Result<Vec<u8>, String> {
        let most = self.config.bytes;
        let too_large = || format!("is larger than {most} bytes");
        let length = response.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > most as u64) {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        // The head owns the connection.
        let (_head, body) = response.into_parts();
        let mut chunks = Body::new(body).into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| "broke off".to_owned())?;
            if bytes.len() + chunk.len() > most {
                return Err(too_large());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }
}

/// One request on a connection of its own.
async fn ask<S>(stream: S, target: &Target) -> Result<Response<Incoming>, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let broken = |_| "broke off".to_owned();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(broken)?;
    let path: Uri = target.path.parse().map_err(|_| "has a malformed path")?;
    let request = Request::get(path)
        .header(HOST, target.authority())
        .header(ACCEPT, "image/*")
        .body(Body::empty())
        .map_err(|_| "has a malformed address")?;
    // It ends with the response's body, or when that is dropped.
    let driver = base::task::spawn(connection);
    let answered = sender.send_request(request).await.map_err(broken)?;
    let (mut head, body) = answered.into_parts();
    head.extensions.insert(Arc::new(driver));
    Ok(Response::from_parts(head, body))
}

fn tls() -> Result<TlsConnector, RouterError> {
    let setup = |what: String| {
        RouterError::Stage(base::Failure::new(
            base::Code::FailedPrecondition,
            format!("image_hosts: TLS cannot be set up: {what}"),
        ))
    };
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    let (_, _) = roots.add_parsable_certificates(system.certs);
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| setup(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests;
