//! Keeps one member registered: renews at a third of the TTL, registers again when the lease is
//! gone, passes on what an operator asked for, and leaves at the end.
//!
//! A registry that cannot be reached takes nothing away: the member goes on serving, and routers go
//! on with the last picture they have. Only a registry that says so ends a lease.
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::{backoff::Backoff, clock, limits::LEASE_TTL, task};
use tokio::sync::watch;

use crate::{Beat, Grant, Load, Member, MemberState, Registry, RegistryError};

/// First and longest wait between tries to reach the registry.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(1);
/// How long a farewell may take; the lease runs out anyway.
const LEAVE_DEADLINE: Duration = Duration::from_secs(2);

/// How to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// Lease.
    pub ttl: Duration,
    /// How long the first registration may take, the registry's own start included.
    pub deadline: Duration,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            ttl: LEASE_TTL,
            deadline: Duration::from_secs(30),
        }
    }
}

/// Where the member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Epoch of its registration: it may refuse dispatches decided on an older one.
    pub epoch: u64,
    /// An operator asked it to drain.
    pub drain: bool,
    /// False: the registry has said that the lease is gone and has not given another yet; admit
    /// nothing new. A registry that merely cannot be reached leaves this as it is.
    pub leased: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Report {
    state: MemberState,
    load: Load,
}

/// A registered member. Dropping it stops renewing; [`Membership::leave`] is the polite way.
#[derive(Debug)]
pub struct Membership {
    id: String,
    registry: Arc<dyn Registry>,
    report: watch::Sender<Report>,
    standing: watch::Receiver<Standing>,
    lease: watch::Receiver<u64>,
    task: task::Owned<()>,
}

impl Membership {
    /// Registers, trying again until `options.deadline`, then renews in the background.
    ///
    /// # Errors
    /// A record that the registry refuses; no registry within the deadline.
    pub async fn join(
        registry: Arc<dyn Registry>,
        member: Member,
        options: JoinOptions,
    ) -> Result<Self, RegistryError> {
        let grant = first_grant(&*registry, &member, options).await?;
        let report = Report {
            state: member.state(),
            load: member.load.unwrap_or_default(),
        };
        let (report_tx, report_rx) = watch::channel(report);
        let standing = Standing {
            epoch: grant.epoch,
            drain: false,
            leased: true,
        };
        let (standing_tx, standing_rx) = watch::channel(standing);
        let (lease_tx, lease_rx) = watch::channel(grant.lease);
        let id = member.id.clone();
        let keeper = Keeper {
            registry: registry.clone(),
            member,
            ttl: options.ttl,
            report: report_rx,
            standing: standing_tx,
            lease: lease_tx,
        };
        let task = task::spawn(keeper.run());
        Ok(Self {
            id,
            registry,
            report: report_tx,
            standing: standing_rx,
            lease: lease_rx,
            task,
        })
    }

    /// Id of the member.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Says what the member is now; the registry hears it at once.
    pub fn set_state(&self, state: MemberState) {
        self.report.send_if_modified(|report| {
            let changed = report.state != state;
            report.state = state;
            changed
        });
    }

    /// Says how busy the member is; the registry hears it within [`Registry::load_interval`] or so.
    pub fn set_load(&self, load: Load) {
        self.report.send_if_modified(|report| {
            let changed = report.load != load;
            report.load = load;
            changed
        });
    }

    /// Where the member stands.
    pub fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// Wakes when the standing changes.
    pub fn standings(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// Epoch of the registration.
    pub fn epoch(&self) -> u64 {
        self.standing().epoch
    }

    /// Waits until an operator asks this member to drain.
    pub async fn drain_requested(&self) {
        let mut standing = self.standing.clone();
        if standing.wait_for(|now| now.drain).await.is_err() {
            // The keeper is gone: nobody can ask any more.
            std::future::pending::<()>().await;
        }
    }

    /// Stops renewing and deregisters.
    ///
    /// # Errors
    /// The registry could not be told within a bounded time; the lease will run out.
    pub async fn leave(self) -> Result<(), RegistryError> {
        self.task.abort();
        let lease = *self.lease.borrow();
        let farewell = self.registry.deregister(&self.id, lease);
        match tokio::time::timeout(LEAVE_DEADLINE, farewell).await {
            Ok(result) => result,
            Err(_) => Err(RegistryError::TimedOut {
                tried: LEAVE_DEADLINE,
                last: "no answer to the deregistration".to_owned(),
            }),
        }
    }
}

async fn first_grant(
    registry: &dyn Registry,
    member: &Member,
    options: JoinOptions,
) -> Result<Grant, RegistryError> {
    let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST);
    let mut last = "no answer".to_owned();
    let tries = async {
        loop {
            match registry.register(member.clone(), options.ttl).await {
                Ok(grant) => return Ok(grant),
                Err(error) if !is_transient(&error) => return Err(error),
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    };
    match tokio::time::timeout(options.deadline, tries).await {
        Ok(result) => result,
        Err(_) => Err(RegistryError::TimedOut {
            tried: options.deadline,
            last,
        }),
    }
}

/// Another try may help.
fn is_transient(error: &RegistryError) -> bool {
    use base::Code;
    match error {
        RegistryError::Remote(failure) => {
            failure.code.is_retryable() || failure.code == Code::DeadlineExceeded
        }
        RegistryError::Full(_) => true,
        _ => false,
    }
}

struct Keeper {
    registry: Arc<dyn Registry>,
    member: Member,
    ttl: Duration,
    report: watch::Receiver<Report>,
    standing: watch::Sender<Standing>,
    lease: watch::Sender<u64>,
}

impl Keeper {
    async fn run(mut self) {
        let renewal = self.ttl / 3;
        let spacing = self.registry.load_interval().min(renewal);
        let mut backoff = Backoff::new(RETRY_FIRST, RETRY_MOST.min(renewal));
        let mut told = self.report.borrow().clone();
        let mut due = clock::now() + renewal;
        let mut load_from = clock::now() + spacing;
        while self.wait(&told, load_from, due).await {
            let started = clock::now();
            told = self.report.borrow().clone();
            let beat = tokio::time::timeout(self.ttl, self.beat()).await;
            match beat.unwrap_or_else(|_| Err(self.no_answer())) {
                Ok(()) => {
                    backoff.reset();
                    self.set_leased(true);
                    due = started + renewal;
                    load_from = clock::now() + spacing;
                }
                Err(error) => {
                    tracing::warn!(%error, member = %self.member.id, "lease not renewed");
                    due = clock::now() + backoff.next_delay();
                    load_from = due;
                }
            }
        }
    }

    /// Waits for the next beat: at once when the state is no longer the one `told`, from `load_from`
    /// on when the load is not, else at `due`. False: the member is no longer wanted.
    async fn wait(&mut self, told: &Report, load_from: Instant, due: Instant) -> bool {
        loop {
            let now = clock::now();
            let until = {
                let report = self.report.borrow_and_update();
                if report.state != told.state {
                    now
                } else if report.load != told.load {
                    due.min(load_from)
                } else {
                    due
                }
            };
            if until <= now {
                return true;
            }
            tokio::select! {
                () = tokio::time::sleep(until - now) => {}
                changed = self.report.changed() => if changed.is_err() { return false },
            }
        }
    }

    async fn beat(&mut self) -> Result<(), RegistryError> {
        let report = self.report.borrow_and_update().clone();
        let beat = Beat {
            member_id: self.member.id.clone(),
            lease: *self.lease.borrow(),
            load: report.load,
            state: report.state,
        };
        match self.registry.keep_alive(beat).await {
            Ok(renewal) => {
                self.standing.send_if_modified(|now| {
                    let changed = now.drain != renewal.drain;
                    now.drain = renewal.drain;
                    changed
                });
                Ok(())
            }
            Err(RegistryError::LeaseGone { .. }) => self.register_again(report).await,
            Err(error) => Err(error),
        }
    }

    async fn register_again(&mut self, report: Report) -> Result<(), RegistryError> {
        tracing::warn!(member = %self.member.id, "lease was gone, registering again");
        self.set_leased(false);
        self.member.set_state(report.state);
        self.member.load = Some(report.load);
        let grant = self
            .registry
            .register(self.member.clone(), self.ttl)
            .await?;
        self.lease.send_replace(grant.lease);
        self.standing.send_modify(|now| now.epoch = grant.epoch);
        Ok(())
    }

    fn no_answer(&self) -> RegistryError {
        RegistryError::TimedOut {
            tried: self.ttl,
            last: "no answer to the renewal".to_owned(),
        }
    }

    fn set_leased(&self, leased: bool) {
        self.standing.send_if_modified(|now| {
            let changed = now.leased != leased;
            now.leased = leased;
            changed
        });
    }
}
