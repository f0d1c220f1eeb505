//! The connection to etcd: one node at a time, the next one when it fails. Every call is bounded, and
//! only calls that may be sent twice go through here: reads, and writes that a comparison guards.
use std::{sync::Mutex, sync::PoisonError, time::Duration};

use base::{
    Code, Failure,
    limits::{CONNECT_TIMEOUT, CONTROL_DEADLINE, KEEPALIVE_TIMEOUT},
};
use etcd_client::{Channel, Client, ConnectOptions, Error};
use tonic::transport::Endpoint;

use crate::{EtcdConfig, RegistryError};

/// How long one node may take to answer before the next one is asked: a node that hangs must not
/// cost a member its lease.
const ATTEMPT_DEADLINE: Duration = Duration::from_millis(1_500);
/// Interval of HTTP/2 pings; etcd cuts off clients that ping more often than every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// What etcd says when the users changed after a token was given.
const OLD_TOKEN: &str = "revision of auth store is old";

/// The node in use.
#[derive(Debug)]
struct Current {
    index: usize,
    /// Grows whenever the connection is given up, so that of several calls that fail together one
    /// moves on.
    turn: u64,
    client: Option<Handle>,
}

#[derive(Clone)]
struct Handle(Client);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

/// A client that moves from node to node.
#[derive(Debug)]
pub(crate) struct Link {
    config: EtcdConfig,
    current: Mutex<Current>,
}

impl Link {
    /// Checks the settings; does not connect yet.
    pub(crate) fn new(config: EtcdConfig) -> Result<Self, RegistryError> {
        config.validate()?;
        let current = Current {
            index: 0,
            turn: 0,
            client: None,
        };
        Ok(Self {
            config,
            current: Mutex::new(current),
        })
    }

    /// Calls etcd, trying each node at most once and the first one twice, [`CONTROL_DEADLINE`] at
    /// most in all.
    pub(crate) async fn call<T, F>(
        &self,
        what: &'static str,
        call: impl Fn(Client) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let tries = async {
            let mut left = self.config.endpoints.len() + 1;
            loop {
                left -= 1;
                let (turn, error) = match self.attempt(&call).await {
                    Ok(answer) => return Ok(answer),
                    Err(failed) => failed,
                };
                if !moves_on(&error) {
                    return Err(error);
                }
                self.give_up(turn);
                if left == 0 {
                    return Err(error);
                }
            }
        };
        match tokio::time::timeout(CONTROL_DEADLINE, tries).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Refusal::Ours(error))) => Err(error),
            Ok(Err(Refusal::Etcd(error))) => Err(RegistryError::Remote(failure(what, &error))),
            Ok(Err(Refusal::Slow)) | Err(_) => Err(RegistryError::Remote(Failure::new(
                Code::Unavailable,
                format!("etcd did not answer in time: {what}"),
            ))),
        }
    }

    async fn attempt<T, F>(&self, call: &impl Fn(Client) -> F) -> Result<T, (u64, Refusal)>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let (turn, index, known) = {
            let current = self.lock();
            (current.turn, current.index, current.client.clone())
        };
        let answer = tokio::time::timeout(ATTEMPT_DEADLINE, async {
            let client = match known {
                Some(Handle(client)) => client,
                None => self.connect(turn, index).await?,
            };
            call(client).await.map_err(Refusal::Etcd)
        });
        let answer = answer.await.unwrap_or(Err(Refusal::Slow));
        answer.map_err(|error| (turn, error))
    }

    async fn connect(&self, turn: u64, index: usize) -> Result<Client, Refusal> {
        let credentials = self.config.credentials().map_err(Refusal::Ours)?;
        let transport = |error| Refusal::Etcd(Error::TransportError(error));
        // Connected here and not by the client, which would hide why a connection fails.
        let mut endpoint = Endpoint::from_shared(self.config.url(index))
            .map_err(transport)?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(false);
        if let Some(tls) = credentials.tls {
            endpoint = endpoint.tls_config(tls).map_err(transport)?;
        }
        let channel = endpoint.connect().await.map_err(transport)?;
        let mut options = ConnectOptions::new()
            .with_auto_token_refresh(true)
            .with_require_leader(true);
        if let Some((name, password)) = credentials.user {
            options = options.with_user(name, password);
        }
        let client = Client::from_channel(Channel::Tonic(channel), Some(options))
            .await
            .map_err(Refusal::Etcd)?;
        let mut current = self.lock();
        if current.turn == turn {
            current.client = Some(Handle(client.clone()));
        }
        Ok(client)
    }

    /// Drops the connection and turns to the next node, unless another call has done so already.
    fn give_up(&self, turn: u64) {
        let mut current = self.lock();
        if current.turn == turn {
            current.turn += 1;
            current.index = (current.index + 1) % self.config.endpoints.len();
            current.client = None;
        }
    }

    /// Turns to the next node because a stream broke.
    pub(crate) fn stream_broke(&self) {
        let turn = self.lock().turn;
        self.give_up(turn);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why an attempt failed.
#[derive(Debug)]
enum Refusal {
    /// Our own settings.
    Ours(RegistryError),
    /// etcd, or the way to it.
    Etcd(Error),
    /// No answer.
    Slow,
}

/// Another node, or a new connection, may do better.
fn moves_on(refusal: &Refusal) -> bool {
    match refusal {
        Refusal::Ours(_) => false,
        Refusal::Slow => true,
        Refusal::Etcd(Error::GRpcStatus(status)) => {
            let code = proto::status::code(status);
            matches!(
                code,
                Code::Unavailable
                    | Code::DeadlineExceeded
                    | Code::Unauthenticated
                    | Code::Cancelled
            ) || status.message().contains(OLD_TOKEN)
        }
        Refusal::Etcd(error) => !matches!(error, Error::InvalidArgs(_) | Error::InvalidUri(_)),
    }
}

/// What etcd said, in our own terms.
pub(crate) fn failure(what: &str, error: &Error) -> Failure {
    match error {
        Error::GRpcStatus(status) => {
            let mut failure = proto::status::failure(status);
            failure.message = format!("etcd: {what}: {}", failure.message);
            failure
        }
        Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::InvalidMetadataValue(_) => {
            Failure::invalid("registry", format!("etcd: {what}: {error}"))
        }
        error => Failure::new(Code::Unavailable, format!("etcd: {what}: {}", chain(error))),
    }
}

/// An error with its causes: those of a transport say only at the end what is wrong.
fn chain(error: &Error) -> String {
    let Error::TransportError(error) = error else {
        return error.to_string();
    };
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
