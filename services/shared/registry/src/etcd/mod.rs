//! The registry in etcd: every process talks to etcd itself, so no router owns anything and any of
//! them may be killed. See [`keys`] for the layout.
//!
//! A record is bound to a lease of etcd and every write to it compares that lease first: whoever was
//! replaced, or has expired, writes nothing. The holder of the lease is the only writer of a record
//! and of its load; operators write drains beside it, publishers plans.
//!
//! etcd counts leases in whole seconds and not below its election bound (2 s by default): a lease
//! may live longer than asked, never shorter.
mod config;
mod feed;
mod keys;
mod link;
mod plans;
mod table;

#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base::clock;
use etcd_client::{
    Compare, CompareOp, Error, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use prost::Message as _;

pub use config::{EtcdConfig, EtcdTls, EtcdUser};

use crate::{
    Load, Member, MemberState, Plan, Registry, RegistryError,
    etcd::{feed::unsigned, keys::Keys, link::Link},
    state::{Beat, Grant, Renewal, check},
    watch::Watch,
};
use base::limits::MAX_MEMBERS;

/// How often a write is tried again after another writer was faster.
const MAX_TRIES: u32 = 16;
/// Least time between two writes of a load: each is a write to the disks of every node.
const LOAD_INTERVAL: Duration = Duration::from_millis(250);
/// A lease that was renewed within this part of its time to live is not renewed again.
const RENEWAL_PART: u32 = 6;

/// A registry in etcd. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Etcd {
    link: Arc<Link>,
    keys: Keys,
    leases: Arc<Mutex<HashMap<u64, Lease>>>,
}

/// A lease that this process holds.
#[derive(Debug, Clone, Copy)]
struct Lease {
    ttl: Duration,
    renewed: Instant,
}

/// One member as its keys say.
#[derive(Debug)]
struct Held {
    member: Member,
    load: Load,
    drain: bool,
    epoch: u64,
}

impl Etcd {
    /// Checks the settings and reads the files that they name; does not connect yet.
    ///
    /// # Errors
    /// A setting that cannot be used, by name.
    pub fn new(config: EtcdConfig) -> Result<Self, RegistryError> {
        let keys = Keys::new(&config.cluster);
        Ok(Self {
            link: Arc::new(Link::new(config)?),
            keys,
            leases: Arc::default(),
        })
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<u64, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn txn(&self, what: &'static str, txn: Txn) -> Result<TxnResponse, RegistryError> {
        let call = |mut client: etcd_client::Client| {
            let txn = txn.clone();
            async move { client.txn(txn).await }
        };
        self.link.call(what, call).await
    }

    async fn grant(&self, ttl: Duration) -> Result<i64, RegistryError> {
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
        let started = clock::now();
        let call = |mut client: etcd_client::Client| async move {
            client.lease_grant(seconds, None).await
        };
        let granted = self.link.call("grant a lease", call).await?;
        let lease = Lease {
            ttl: Duration::from_secs(unsigned(granted.ttl())),
            renewed: started,
        };
        self.leases().insert(unsigned(granted.id()), lease);
        Ok(granted.id())
    }

    /// Ends a lease that nothing depends on any more; if that fails it runs out by itself.
    async fn revoke(&self, lease: i64) {
        self.leases().remove(&unsigned(lease));
        let call =
            |mut client: etcd_client::Client| async move { client.lease_revoke(lease).await };
        if let Err(error) = self.link.call("revoke a lease", call).await {
            tracing::debug!(%error, lease, "lease not revoked");
        }
    }

    /// Prolongs a lease unless that was done a moment ago. False: it is gone.
    async fn renew(&self, lease: i64) -> Result<bool, RegistryError> {
        let started = clock::now();
        let known = self.leases().get(&unsigned(lease)).copied();
        let fresh = |held: Lease| started - held.renewed < held.ttl / RENEWAL_PART;
        if known.is_some_and(fresh) {
            return Ok(true);
        }
        let call = |mut client: etcd_client::Client| async move {
            match client.lease_keep_alive(lease).await {
                Ok(_) => Ok(true),
                // The client's word for a time to live of zero.
                Err(Error::LeaseKeepAliveError(_)) => Ok(false),
                Err(error) => Err(error),
            }
        };
        let alive = self.link.call("renew a lease", call).await?;
        let mut leases = self.leases();
        if !alive {
            leases.remove(&unsigned(lease));
        } else if let Some(held) = leases.get_mut(&unsigned(lease)) {
            held.renewed = started;
        }
        Ok(alive)
    }

    /// The member's lease is still this one.
    fn holds(&self, id: &str, lease: i64) -> Compare {
        Compare::lease(self.keys.member(id), CompareOp::Equal, lease)
    }

    fn put_epoch(&self) -> TxnOp {
        TxnOp::put(self.keys.epoch(), "", None)
    }

    fn put_member(&self, member: &Member, lease: i64) -> TxnOp {
        let record = Member {
            load: None,
            // It has a key of its own.
            cordoned: false,
            ..member.clone()
        };
        let leased = PutOptions::new().with_lease(lease);
        TxnOp::put(
            self.keys.member(&member.id),
            record.encode_to_vec(),
            Some(leased),
        )
    }

    fn put_load(&self, id: &str, load: &Load, lease: i64) -> TxnOp {
        let leased = PutOptions::new().with_lease(lease);
        TxnOp::put(self.keys.load(id), load.encode_to_vec(), Some(leased))
    }

    fn put_drain(&self, id: &str, lease: i64) -> TxnOp {
        let leased = PutOptions::new().with_lease(lease);
        TxnOp::put(self.keys.drain(id), "", Some(leased))
    }

    fn put_cordon(&self, id: &str, lease: i64) -> TxnOp {
        let leased = PutOptions::new().with_lease(lease);
        TxnOp::put(self.keys.cordon(id), "", Some(leased))
    }

    /// Everything about a member, provided it holds this lease.
    async fn held(&self, id: &str, lease: i64) -> Result<Option<Held>, RegistryError> {
        let reads = [
            TxnOp::get(self.keys.member(id), None),
            TxnOp::get(self.keys.load(id), None),
            TxnOp::get(self.keys.drain(id), None),
            TxnOp::get(self.keys.epoch(), None),
        ];
        let txn = Txn::new()
            .when([self.holds(id, lease)])
            .and_then(reads.to_vec());
        let mut answers = answers(&self.txn("read a record", txn).await?);
        let [epoch, drain, load, member] = [(); 4].map(|()| answers.pop().unwrap_or_default().kv);
        let Some(record) = member else {
            return Ok(None);
        };
        let revision = unsigned(record.mod_revision());
        let Some(member) = table::member(id, record.value(), revision) else {
            return Ok(None);
        };
        let load = load.and_then(|kv| Load::decode(kv.value()).ok());
        let epoch = epoch.map_or(revision, |kv| unsigned(kv.mod_revision()));
        Ok(Some(Held {
            member,
            load: load.unwrap_or_default(),
            drain: drain.is_some(),
            epoch,
        }))
    }

    /// Sets or removes a mark of an operator on a member, a key without a value.
    async fn mark(&self, member_id: &str, key: String, set: bool) -> Result<(), RegistryError> {
        for _ in 0..MAX_TRIES {
            let reads = [
                TxnOp::get(self.keys.member(member_id), None),
                TxnOp::get(key.clone(), None),
            ];
            let txn = Txn::new().and_then(reads.to_vec());
            let mut read = answers(&self.txn("read a record", txn).await?);
            let [mark, record] = [(); 2].map(|()| read.pop().unwrap_or_default().kv);
            let Some(record) = record else {
                return Err(RegistryError::NoMember(member_id.to_owned()));
            };
            if mark.is_some() == set {
                return Ok(());
            }
            // Under the member's lease, so that it ends with the member.
            let lease = record.lease();
            let leased = PutOptions::new().with_lease(lease);
            let write = if set {
                TxnOp::put(key.clone(), "", Some(leased))
            } else {
                TxnOp::delete(key.clone(), None)
            };
            let txn = Txn::new()
                .when([self.holds(member_id, lease)])
                .and_then([write, self.put_epoch()]);
            if self.txn("mark a member", txn).await?.succeeded() {
                return Ok(());
            }
        }
        Err(contended("marking a member"))
    }

    async fn write_record(&self, member: &Member, lease: i64) -> Result<Grant, RegistryError> {
        let id = &member.id;
        for _ in 0..MAX_TRIES {
            let count = GetOptions::new().with_prefix().with_count_only();
            let reads = [
                TxnOp::get(self.keys.member(id), None),
                TxnOp::get(self.keys.drain(id), None),
                TxnOp::get(self.keys.cordon(id), None),
                TxnOp::get(self.keys.members(), Some(count)),
            ];
            let txn = Txn::new().and_then(reads.to_vec());
            let mut read = answers(&self.txn("read a record", txn).await?);
            let [all, cordon, drain, before] = [(); 4].map(|()| read.pop().unwrap_or_default());
            if let Some(mine) = before.kv.as_ref().filter(|kv| kv.lease() == lease) {
                // A try before this one has written, only its answer was lost.
                return Ok(granted(lease, mine.mod_revision()));
            }
            if before.kv.is_none() && all.count >= MAX_MEMBERS {
                return Err(RegistryError::Full(MAX_MEMBERS));
            }
            let unchanged = [
                same(self.keys.member(id), before.kv.as_ref()),
                same(self.keys.drain(id), drain.kv.as_ref()),
                same(self.keys.cordon(id), cordon.kv.as_ref()),
            ];
            let mut writes = vec![
                self.put_member(member, lease),
                self.put_load(id, &member.load.unwrap_or_default(), lease),
                self.put_epoch(),
            ];
            if drain.kv.is_some() {
                writes.push(self.put_drain(id, lease));
            }
            if cordon.kv.is_some() {
                writes.push(self.put_cordon(id, lease));
            }
            let txn = Txn::new().when(unchanged.to_vec()).and_then(writes);
            let written = self.txn("write a record", txn).await?;
            if written.succeeded() {
                if let Some(old) = before.kv.filter(|kv| kv.lease() != 0) {
                    self.revoke(old.lease()).await;
                }
                return Ok(granted(lease, revision(&written)));
            }
        }
        Err(contended("writing a record"))
    }
}

#[tonic::async_trait]
impl Registry for Etcd {
    async fn register(&self, member: Member, ttl: Duration) -> Result<Grant, RegistryError> {
        check(&member, ttl)?;
        // The record's own revision is the epoch it joined in.
        let member = Member { epoch: 0, ..member };
        let lease = self.grant(ttl).await?;
        let grant = self.write_record(&member, lease).await;
        if grant.is_err() {
            self.revoke(lease).await;
        }
        grant
    }

    async fn keep_alive(&self, beat: Beat) -> Result<Renewal, RegistryError> {
        let gone = || RegistryError::LeaseGone {
            member_id: beat.member_id.clone(),
            lease: beat.lease,
        };
        let id = beat.member_id.as_str();
        let lease = i64::try_from(beat.lease).map_err(|_| gone())?;
        if !self.renew(lease).await? {
            return Err(gone());
        }
        let mut held = self.held(id, lease).await?.ok_or_else(gone)?;
        let moved = !held.drain
            && beat.state != MemberState::Unspecified
            && beat.state != held.member.state();
        let mut writes = Vec::new();
        if moved {
            held.member.set_state(beat.state);
            writes.extend([self.put_member(&held.member, lease), self.put_epoch()]);
        }
        if beat.load != held.load {
            writes.push(self.put_load(id, &beat.load, lease));
        }
        let mut epoch = held.epoch;
        if !writes.is_empty() {
            let txn = Txn::new().when([self.holds(id, lease)]).and_then(writes);
            let written = self.txn("report a state", txn).await?;
            if !written.succeeded() {
                return Err(gone());
            }
            if moved {
                epoch = unsigned(revision(&written));
            }
        }
        Ok(Renewal {
            epoch,
            drain: held.drain,
        })
    }

    async fn deregister(&self, member_id: &str, lease: u64) -> Result<(), RegistryError> {
        let Ok(lease) = i64::try_from(lease) else {
            return Ok(());
        };
        let deletes = [
            TxnOp::delete(self.keys.member(member_id), None),
            TxnOp::delete(self.keys.load(member_id), None),
            TxnOp::delete(self.keys.drain(member_id), None),
            TxnOp::delete(self.keys.cordon(member_id), None),
            self.put_epoch(),
        ];
        let txn = Txn::new()
            .when([self.holds(member_id, lease)])
            .and_then(deletes.to_vec());
        if self.txn("deregister", txn).await?.succeeded() {
            self.revoke(lease).await;
        }
        Ok(())
    }

    async fn drain(&self, member_id: &str) -> Result<(), RegistryError> {
        let key = self.keys.drain(member_id);
        self.mark(member_id, key, true).await
    }

    async fn cordon(&self, member_id: &str, cordoned: bool) -> Result<(), RegistryError> {
        let key = self.keys.cordon(member_id);
        self.mark(member_id, key, cordoned).await
    }

    async fn publish_plan(&self, plan: Plan) -> Result<u64, RegistryError> {
        self.replace_plan(plan).await
    }

    fn load_interval(&self) -> Duration {
        LOAD_INTERVAL
    }

    async fn watch(&self) -> Result<Watch, RegistryError> {
        feed::start(self.link.clone(), self.keys.clone()).await
    }
}

/// What a read in a transaction answered.
#[derive(Debug, Default)]
struct Answer {
    /// The only key asked for, if it is there.
    kv: Option<KeyValue>,
    /// Keys in the range asked for.
    count: usize,
}

/// The answers of the reads of a transaction, in their order; none when it did not succeed.
fn answers(response: &TxnResponse) -> Vec<Answer> {
    let read = |response| match response {
        TxnOpResponse::Get(mut get) => Some(Answer {
            count: usize::try_from(get.count()).unwrap_or(usize::MAX),
            kv: get.take_kvs().pop(),
        }),
        _ => None,
    };
    response
        .op_responses()
        .into_iter()
        .filter_map(read)
        .collect()
}

/// The key is as it was read.
fn same(key: String, read: Option<&KeyValue>) -> Compare {
    let revision = read.map_or(0, KeyValue::mod_revision);
    Compare::mod_revision(key, CompareOp::Equal, revision)
}

fn revision(response: &TxnResponse) -> i64 {
    response.header().map_or(0, |header| header.revision())
}

fn granted(lease: i64, revision: i64) -> Grant {
    Grant {
        lease: unsigned(lease),
        epoch: unsigned(revision),
    }
}

fn contended(what: &'static str) -> RegistryError {
    RegistryError::Contended {
        what,
        tries: MAX_TRIES,
    }
}
