//! The other end of [`crate::service`]: the registry inside a router, over gRPC.
use std::time::Duration;

use base::limits::CONTROL_DEADLINE;
use proto::v1::{
    CordonMemberRequest, DeregisterRequest, DrainMemberRequest, KeepAliveRequest,
    PublishPlanRequest, RegisterRequest, WatchRequest,
    registry_service_client::RegistryServiceClient,
};
use tokio::sync::mpsc;
use tonic::{Request, Status, transport::Channel};

use crate::{
    Member, Plan, Registry, RegistryError,
    state::{Beat, Grant, Renewal},
    watch::{Update, Watch},
};

/// Largest snapshot that is decoded, in bytes.
const MAX_SNAPSHOT_BYTES: usize = 16 * 1024 * 1024;

/// A registry behind an address. Connects on first use and reconnects after a break.
#[derive(Debug, Clone)]
pub struct Remote {
    client: RegistryServiceClient<Channel>,
}

impl Remote {
    /// Checks the address; does not connect yet.
    ///
    /// # Errors
    /// The address is not `http://HOST:PORT`.
    pub fn new(endpoint: &str) -> Result<Self, RegistryError> {
        let channel =
            proto::channel::lazy_named(endpoint, "registry").map_err(RegistryError::Remote)?;
        let client =
            RegistryServiceClient::new(channel).max_decoding_message_size(MAX_SNAPSHOT_BYTES);
        Ok(Self { client })
    }
}

fn control<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CONTROL_DEADLINE);
    request
}

fn remote(status: &Status) -> RegistryError {
    RegistryError::Remote(proto::status::failure(status))
}

/// What a call about one member answered.
fn about(member_id: &str, answer: Result<(), RegistryError>) -> Result<(), RegistryError> {
    match answer {
        Err(RegistryError::Remote(failure)) if failure.code == base::Code::NotFound => {
            Err(RegistryError::NoMember(member_id.to_owned()))
        }
        answer => answer,
    }
}

/// Waits for an answer, [`CONTROL_DEADLINE`] at most.
async fn bounded<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, RegistryError> {
    match tokio::time::timeout(CONTROL_DEADLINE, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(remote(&status)),
        Err(_) => Err(remote(&Status::deadline_exceeded(
            "registry did not answer in time",
        ))),
    }
}

#[tonic::async_trait]
impl Registry for Remote {
    async fn register(&self, member: Member, ttl: Duration) -> Result<Grant, RegistryError> {
        let ttl_ms = u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX);
        let message = RegisterRequest {
            member: Some(member),
            ttl_ms,
        };
        let answer = bounded(self.client.clone().register(control(message))).await?;
        Ok(Grant {
            lease: answer.lease,
            epoch: answer.epoch,
        })
    }

    async fn keep_alive(&self, beat: Beat) -> Result<Renewal, RegistryError> {
        let (member_id, lease) = (beat.member_id.clone(), beat.lease);
        let message = KeepAliveRequest {
            member_id: beat.member_id,
            lease: beat.lease,
            load: Some(beat.load),
            state: beat.state.into(),
        };
        match bounded(self.client.clone().keep_alive(control(message))).await {
            Ok(answer) => Ok(Renewal {
                epoch: answer.epoch,
                drain: answer.drain,
            }),
            Err(RegistryError::Remote(failure)) if failure.code == base::Code::NotFound => {
                Err(RegistryError::LeaseGone { member_id, lease })
            }
            Err(error) => Err(error),
        }
    }

    async fn deregister(&self, member_id: &str, lease: u64) -> Result<(), RegistryError> {
        let message = DeregisterRequest {
            member_id: member_id.to_owned(),
            lease,
        };
        bounded(self.client.clone().deregister(control(message))).await?;
        Ok(())
    }

    async fn drain(&self, member_id: &str) -> Result<(), RegistryError> {
        let message = DrainMemberRequest {
            member_id: member_id.to_owned(),
        };
        let drained = bounded(self.client.clone().drain_member(control(message))).await;
        about(member_id, drained.map(|_| ()))
    }

    async fn cordon(&self, member_id: &str, cordoned: bool) -> Result<(), RegistryError> {
        let message = CordonMemberRequest {
            member_id: member_id.to_owned(),
            cordoned,
        };
        let done = bounded(self.client.clone().cordon_member(control(message))).await;
        about(member_id, done.map(|_| ()))
    }

    async fn publish_plan(&self, plan: Plan) -> Result<u64, RegistryError> {
        let message = PublishPlanRequest { plan: Some(plan) };
        let answer = bounded(self.client.clone().publish_plan(control(message))).await?;
        Ok(answer.epoch)
    }

    async fn watch(&self) -> Result<Watch, RegistryError> {
        // No timeout on the stream itself: keepalive finds a dead connection.
        let mut stream = bounded(self.client.clone().watch(WatchRequest {})).await?;
        let (tx, rx) = mpsc::channel(1);
        let feeder = base::task::spawn(async move {
            loop {
                let update = match stream.message().await {
                    Ok(None) => return,
                    Ok(Some(response)) => match Update::from_wire(response) {
                        Some(update) => Ok(update),
                        None => continue,
                    },
                    Err(status) => Err(remote(&status)),
                };
                let over = update.is_err();
                if tx.send(update).await.is_err() || over {
                    return;
                }
            }
        });
        Ok(Watch::new(rx, feeder))
    }
}
