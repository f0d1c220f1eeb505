//! Who is alive and what they hold. One trait, three backends with the same semantics: embedded in
//! the router, remote over gRPC, and etcd. Nothing here is per request.
//!
//! The pure core is [`state::State`]; [`Embedded`] gives it tasks and watchers, [`service`] a wire,
//! [`Remote`] is the other end of that wire. [`Etcd`] keeps the same records as keys with leases, so
//! that several routers share one cluster and none of them owns it. [`Membership`] keeps one member
//! registered and [`Snapshots`] keeps one process informed.
#![forbid(unsafe_code)]

mod embedded;
mod error;
mod etcd;
mod membership;
mod remote;
pub mod service;
mod snapshots;
pub mod state;
mod watch;

use std::{sync::Arc, time::Duration};

pub use proto::v1::{Load, Member, MemberState, Plan, Role};

pub use crate::{
    embedded::Embedded,
    error::RegistryError,
    etcd::{Etcd, EtcdConfig, EtcdTls, EtcdUser},
    membership::{JoinOptions, Membership, Standing},
    remote::Remote,
    snapshots::{Contact, Snapshot, Snapshots},
    state::{Beat, Grant, Renewal},
    watch::{Event, Picture, Update, Watch},
};

/// Beats that load changes cause are at least this far apart.
const LOAD_INTERVAL: Duration = Duration::from_millis(50);

/// Who is alive. Every backend passes the same conformance suite.
#[tonic::async_trait]
pub trait Registry: Send + Sync + std::fmt::Debug + 'static {
    /// Adds a member under a lease of `ttl`, or replaces the record of the same id.
    async fn register(&self, member: Member, ttl: Duration) -> Result<Grant, RegistryError>;
    /// Prolongs a lease and reports load and state.
    async fn keep_alive(&self, beat: Beat) -> Result<Renewal, RegistryError>;
    /// Ends a lease; the member is gone at once. Ending a lease that is gone is no error.
    async fn deregister(&self, member_id: &str, lease: u64) -> Result<(), RegistryError>;
    /// Asks a member to drain: it gets no new work from now on, and hears of it at its next beat.
    /// Asking again changes nothing. It stays asked until its record ends.
    async fn drain(&self, member_id: &str) -> Result<(), RegistryError>;
    /// Keeps new work from a member, or lets it have work again. It is no state of the member's own: it
    /// goes on with what it has, hears nothing of it, and stays cordoned until its record ends.
    async fn cordon(&self, member_id: &str, cordoned: bool) -> Result<(), RegistryError>;
    /// Replaces the plan of a pool; the answer is the epoch of the publication. The plan must be of
    /// the generation that follows the one in force (1 for the first), so that of several
    /// publishers that saw the same plan one succeeds and the others get
    /// [`RegistryError::StalePlan`] (over gRPC: `ABORTED`).
    async fn publish_plan(&self, plan: Plan) -> Result<u64, RegistryError>;
    /// Least time between two beats that only load causes.
    fn load_interval(&self) -> Duration {
        LOAD_INTERVAL
    }
    /// Membership and plans from now on. Starts with a full snapshot and repeats it after falling behind.
    async fn watch(&self) -> Result<Watch, RegistryError>;
}

/// Which registry a process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// The one inside this process.
    Embedded,
    /// The one inside a router, at this address.
    Remote {
        /// `http://HOST:PORT`.
        endpoint: String,
    },
    /// An etcd cluster.
    Etcd(EtcdConfig),
}

/// Opens a registry that is not in this process.
///
/// # Errors
/// A bad address; a bad setting of etcd, or a file that it names and that cannot be read.
pub fn open(backend: &Backend) -> Result<Arc<dyn Registry>, RegistryError> {
    match backend {
        Backend::Remote { endpoint } => Ok(Arc::new(Remote::new(endpoint)?)),
        Backend::Embedded => Ok(Arc::new(Embedded::start(base::clock::system()))),
        Backend::Etcd(config) => Ok(Arc::new(Etcd::new(config.clone())?)),
    }
}

#[cfg(test)]
mod conformance;

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};

    use super::*;

    #[test]
    fn a_bad_address_is_refused_before_use() {
        let error = open(&Backend::Remote {
            endpoint: "nowhere".into(),
        })
        .unwrap_err();
        assert_eq!(
            (error.code(), error.field()),
            (Code::InvalidArgument, Some("registry"))
        );
    }
}
