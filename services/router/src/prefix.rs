//! The leases of a request's prefixes. The AR stage takes them when it publishes; from `PrefillDone`
//! on they are the router's, which renews them until the request ends and then releases them. When
//! the router dies, their time to live ends them.
use std::{mem, sync::Arc, time::Duration};

use base::{Code, Failure, clock, limits::CONTROL_DEADLINE, task::Tracker};
use futures_util::future::try_join_all;
use proto::v1::{
    GrantRequest, LossPolicy, PrefixRow, ReleaseRequest, RenewRequest,
    kv_transfer_service_client::KvTransferServiceClient,
};
use tokio::{
    sync::{Semaphore, watch},
    time::MissedTickBehavior,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, transport::Channel};

use crate::{RouterError, members::Members, validate::policy_name};

/// Time to live of a prefix whose router has died.
pub const PREFIX_TTL: Duration = Duration::from_secs(15);
/// Times that a lease is renewed within its time to live.
const RENEWALS_PER_TTL: u32 = 3;
/// Releases under way at once; past it a lease ends by its time to live.
const MAX_RELEASING: usize = 1_024;

/// Keeps the prefixes of the requests that run.
#[derive(Debug)]
pub(crate) struct Keeper {
    ttl: Duration,
    tasks: Tracker,
    releasing: Arc<Semaphore>,
}

/// The prefixes of one request. They stay where they are while this lives; dropping it releases
/// them, in tasks that outlive the request.
#[derive(Debug)]
pub(crate) struct Held {
    /// In the order of the rows.
    leases: Vec<Lease>,
    policy: LossPolicy,
    lost: watch::Receiver<Option<Failure>>,
    _ended_by_drop: DropGuard,
}

/// One lease.
#[derive(Debug, Clone)]
struct Lease {
    request_id: String,
    slot: u64,
    generation: u64,
    lease: u64,
    client: KvTransferServiceClient<Channel>,
}

impl Keeper {
    /// `tasks` waits for releases under way.
    pub(crate) fn new(ttl: Duration, tasks: Tracker) -> Self {
        Self {
            ttl,
            tasks,
            releasing: Arc::new(Semaphore::new(MAX_RELEASING)),
        }
    }

    /// Takes the leases out of the handles: who gets those next may read, not release.
    ///
    /// # Errors
    /// A row that cannot be kept, in the words of a complaint about the stage; the others are
    /// released.
    pub(crate) fn hold(
        &self,
        request_id: &str,
        rows: &mut [PrefixRow],
        (members, policy): (&Members, LossPolicy),
    ) -> Result<Held, &'static str> {
        let ended = CancellationToken::new();
        let (lost, watched) = watch::channel(None);
        let mut held = Held {
            leases: Vec::new(),
            policy,
            lost: watched,
            _ended_by_drop: ended.clone().drop_guard(),
        };
        let mut complaint = None;
        for prefix in rows.iter_mut().filter_map(|row| row.prefix.as_mut()) {
            let lease = mem::take(&mut prefix.lease);
            let channel = members.reach(&prefix.endpoint);
            let (1.., Ok(channel)) = (lease, channel) else {
                complaint = Some("published a prefix whose lease cannot be kept");
                continue;
            };
            let lease = Lease {
                request_id: request_id.to_owned(),
                slot: prefix.slot,
                generation: prefix.generation,
                lease,
                client: KvTransferServiceClient::new(channel),
            };
            held.leases.push(lease.clone());
            let (ttl, releasing) = (self.ttl, self.releasing.clone());
            // Who waits does not give a pool up that is merely silent.
            let patient = policy == LossPolicy::Wait;
            let (ended, lost) = (ended.clone(), lost.clone());
            self.tasks.spawn(async move {
                if let Some(failure) = lease.renewed(ttl, patient, &ended).await {
                    lost.send_replace(Some(failure));
                }
                lease.release(&releasing).await;
            });
        }
        complaint.map_or(Ok(held), Err)
    }
}

impl Held {
    /// One pull token a row for `receiver`; those of `replaces` are void from here on.
    pub(crate) async fn grant(
        &self,
        (receiver, epoch): (&str, u64),
        replaces: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let one = |(index, lease): (usize, &Lease)| {
            let lease = lease.clone();
            let message = GrantRequest {
                slot: lease.slot,
                generation: lease.generation,
                lease: lease.lease,
                request_id: lease.request_id,
                receiver: receiver.to_owned(),
                epoch,
                replaces: replaces.get(index).cloned().unwrap_or_default(),
            };
            let mut client = lease.client;
            async move {
                let call = client.grant(timed(message, CONTROL_DEADLINE));
                match tokio::time::timeout(CONTROL_DEADLINE, call).await {
                    Ok(Ok(made)) => Ok(made.into_inner().token),
                    Ok(Err(status)) => Err(proto::status::failure(&status)),
                    Err(_) => Err(silent(CONTROL_DEADLINE)),
                }
            }
        };
        try_join_all(self.leases.iter().enumerate().map(one)).await
    }

    /// Answers why, once a prefix may be gone; waits for ever while all are kept.
    pub(crate) async fn lost(&self) -> RouterError {
        let mut lost = self.lost.clone();
        let seen = lost.wait_for(Option::is_some).await;
        let failure = seen.ok().and_then(|failure| (*failure).clone());
        match failure {
            Some(failure) => RouterError::PrefixLost {
                failure,
                policy: policy_name(self.policy),
            },
            // Every keeper has ended, none with a loss.
            None => std::future::pending().await,
        }
    }
}

impl Lease {
    /// Renews until the lease is lost, and answers why, or until it is not needed any more. The first time at once, for
    /// the stage's time to live is not known here. A call that is under way is always heard out: those that are dropped are
    /// resets to the service, which ends a connection that brings many.
    async fn renewed(
        &self,
        ttl: Duration,
        patient: bool,
        ended: &CancellationToken,
    ) -> Option<Failure> {
        let every = ttl / RENEWALS_PER_TTL;
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut good = clock::now();
        loop {
            ended.run_until_cancelled(ticks.tick()).await?;
            let asked = clock::now();
            let Err(failure) = self.renew(ttl, every.min(CONTROL_DEADLINE)).await else {
                good = asked;
                continue;
            };
            let (request_id, slot, code) = (&self.request_id, self.slot, failure.code);
            let gone = matches!(code, Code::NotFound | Code::Aborted);
            let silent = clock::now().saturating_duration_since(good) >= ttl;
            if gone || (silent && !patient) {
                tracing::warn!(request_id, slot, %code, "prefix lease lost");
                return Some(failure);
            }
            tracing::debug!(request_id, slot, %code, "prefix lease not renewed, trying again");
        }
    }

    async fn renew(&self, ttl: Duration, limit: Duration) -> Result<(), Failure> {
        let message = RenewRequest {
            slot: self.slot,
            generation: self.generation,
            lease: self.lease,
            ttl_ms: u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX),
        };
        let mut client = self.client.clone();
        let answer = tokio::time::timeout(limit, client.renew(timed(message, limit))).await;
        match answer {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(proto::status::failure(&status)),
            Err(_) => Err(silent(limit)),
        }
    }

    async fn release(mut self, releasing: &Semaphore) {
        let (request_id, slot) = (self.request_id, self.slot);
        let message = ReleaseRequest {
            slot,
            generation: self.generation,
            lease: self.lease,
        };
        let released = match releasing.try_acquire() {
            Ok(_permit) => {
                let call = self.client.release(timed(message, CONTROL_DEADLINE));
                let answer = tokio::time::timeout(CONTROL_DEADLINE, call).await;
                answer.is_ok_and(|answer| answer.is_ok())
            }
            Err(_) => false,
        };
        if !released {
            tracing::debug!(request_id, slot, "prefix lease is left to its time to live");
        }
    }
}

fn silent(limit: Duration) -> Failure {
    let message = format!("no answer from its KV-transfer service within {limit:?}");
    Failure::new(Code::Unavailable, message)
}

fn timed<T>(message: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}
