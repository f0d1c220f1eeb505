//! Who is alive and what they hold. One trait, two backends with the same semantics: embedded in
//! the router, and remote over gRPC. Nothing here is per request.
//!
//! The pure core is [`state::State`]; [`Embedded`] gives it tasks and watchers, [`service`] a wire,
//! [`Remote`] is the other end of that wire. [`Membership`] keeps one member registered and
//! [`Snapshots`] keeps one process informed.
#![forbid(unsafe_code)]

mod embedded;
mod error;
mod membership;
mod remote;
pub mod service;
mod snapshots;
pub mod state;
mod watch;

use std::{sync::Arc, time::Duration};

pub use proto::v1::{Load, Member, MemberState, Role};

pub use crate::{
    embedded::Embedded,
    error::RegistryError,
    membership::{JoinOptions, Membership, Standing},
    remote::Remote,
    snapshots::{Snapshot, Snapshots},
    state::{Beat, Grant, Renewal},
    watch::{Event, Update, Watch},
};

/// Who is alive. Every backend passes the same conformance suite.
#[tonic::async_trait]
pub trait Registry: Send + Sync + std::fmt::Debug + 'static {
    /// Adds a member under a lease of `ttl`, or replaces the record of the same id.
    async fn register(&self, member: Member, ttl: Duration) -> Result<Grant, RegistryError>;
    /// Prolongs a lease and reports load and state.
    async fn keep_alive(&self, beat: Beat) -> Result<Renewal, RegistryError>;
    /// Ends a lease; the member is gone at once. Ending a lease that is gone is no error.
    async fn deregister(&self, member_id: &str, lease: u64) -> Result<(), RegistryError>;
    /// Membership from now on. Starts with a full snapshot and repeats it after falling behind.
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
    Etcd {
        /// Its addresses.
        endpoints: Vec<String>,
    },
}

/// Opens a registry that is not in this process.
///
/// # Errors
/// A bad address; a backend that this version does not have.
pub fn open(backend: &Backend) -> Result<Arc<dyn Registry>, RegistryError> {
    match backend {
        Backend::Remote { endpoint } => Ok(Arc::new(Remote::new(endpoint)?)),
        Backend::Embedded => Ok(Arc::new(Embedded::start(base::clock::system()))),
        Backend::Etcd { .. } => Err(RegistryError::Unimplemented),
    }
}

#[cfg(test)]
mod conformance;

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};

    use super::*;

    #[test]
    fn etcd_is_a_typed_refusal() {
        let error = open(&Backend::Etcd { endpoints: vec![] }).unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
        assert_eq!(
            error.to_string(),
            "the etcd registry is not built in this version"
        );
    }

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
