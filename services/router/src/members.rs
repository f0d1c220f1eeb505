//! The stages as this router sees them: the snapshot, one channel per address, and what this router
//! has under way at each.
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use proto::v1::{ModelInfo, Placement};
use registry::{Role, Snapshots};
use schedule::cost::Rows;
use tonic::transport::Channel;

use crate::{
    RouterError,
    directory::{Directory, Drawing, Need},
    placement::{self, Wish, role_name},
    validate::ValidRequest,
};

/// How long a request may wait for the first member that can serve it.
const STAGE_WAIT: Duration = Duration::from_secs(1);
/// Channels to addresses that are gone are dropped above this many.
const SPARE_CHANNELS: usize = 64;
/// How long a member must have been unknown to the registry to count as gone: who lost its lease for a moment
/// registers again.
const GONE_AFTER: Duration = Duration::from_secs(2);
/// Members of which all are looked at to explain a placement; among more it would cost more than the placement.
const EXPLAINED: usize = 64;
/// Numbers that roles have on the wire.
const ROLES: usize = 5;

/// Who may be asked.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) snapshots: Snapshots,
    /// Of the snapshot, for as long as nobody joins or leaves.
    directory: Mutex<Arc<Directory>>,
    channels: Mutex<HashMap<String, Channel>>,
    under_way: Arc<Mutex<HashMap<String, u32>>>,
    /// One counter a role, by its number: phases that alternate must not share one.
    turns: [AtomicU64; ROLES],
}

/// A member chosen for one call. Dropping it ends what is under way there.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) member_id: String,
    pub(crate) channel: Channel,
    pub(crate) epoch: u64,
    /// What it was chosen from.
    pub(crate) considered: Placement,
    under_way: Arc<Mutex<HashMap<String, u32>>>,
}

impl Drop for Assignment {
    fn drop(&mut self) {
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = under_way.get_mut(&self.member_id) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(&self.member_id);
            }
        }
    }
}

impl Members {
    pub(crate) fn new(snapshots: Snapshots) -> Self {
        Self {
            snapshots,
            directory: Mutex::default(),
            channels: Mutex::default(),
            under_way: Arc::default(),
            turns: Default::default(),
        }
    }

    /// Every model that can be served now.
    pub(crate) fn models(&self) -> Vec<ModelInfo> {
        let snapshot = self.snapshots.current();
        placement::servable(&snapshot)
            .into_iter()
            .cloned()
            .collect()
    }

    /// The model of this name (empty: the only one). Waits [`STAGE_WAIT`] at most for stages.
    pub(crate) async fn model(&self, name: &str) -> Result<ModelInfo, RouterError> {
        let any = |now: &registry::Snapshot| !placement::servable(now).is_empty();
        let Some(snapshot) = self.snapshots.wait(STAGE_WAIT, any).await else {
            let role = placement::missing_role(&self.snapshots.current());
            return Err(RouterError::NoStage { role });
        };
        let models = placement::servable(&snapshot);
        if name.is_empty() {
            return match models.as_slice() {
                [only] => Ok((*only).clone()),
                several => {
                    let names: Vec<_> = several.iter().map(|model| model.name.as_str()).collect();
                    let reason = format!("must be one of {}", names.join(", "));
                    Err(RouterError::invalid("model", reason))
                }
            };
        }
        let found = models.into_iter().find(|model| model.name == name);
        found
            .cloned()
            .ok_or_else(|| RouterError::NoModel(name.to_owned()))
    }

    /// A member for a call, `wait` at most until there is one.
    pub(crate) async fn assign(
        &self,
        role: Role,
        weights_id: &str,
        tried: &HashSet<String>,
        (need, wait): (&Need, bool),
    ) -> Result<Assignment, RouterError> {
        let turn = self.turns[role as usize % ROLES].fetch_add(1, Ordering::Relaxed);
        let wish = Wish {
            role,
            weights_id,
            tried,
            turn,
        };
        let none = HashMap::new();
        let some = |now: &registry::Snapshot| {
            let directory = self.directory(now);
            directory.pick(now, wish, need, &none).is_some()
        };
        let most = if wait { STAGE_WAIT } else { Duration::ZERO };
        let missing = || RouterError::NoStage {
            role: role_name(role),
        };
        let snapshot = self.snapshots.wait(most, some).await.ok_or_else(missing)?;

        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let directory = self.directory(&snapshot);
        let member = directory.pick(&snapshot, wish, need, &under_way);
        let member = member.ok_or_else(missing)?;
        let channel = self.channel(&member.endpoint, &snapshot)?;
        let considered = if snapshot.members.len() <= EXPLAINED {
            placement::considered(&snapshot, wish, need, &under_way)
        } else {
            let eligible = directory.count(role, weights_id);
            Placement {
                stage: role_name(role).to_owned(),
                epoch: snapshot.epoch,
                eligible: u32::try_from(eligible).unwrap_or(u32::MAX),
                ..Placement::default()
            }
        };
        *under_way.entry(member.id.clone()).or_default() += 1;
        Ok(Assignment {
            member_id: member.id.clone(),
            channel,
            epoch: snapshot.epoch,
            considered,
            under_way: self.under_way.clone(),
        })
    }

    /// Waits until the registry, while it is followed, has not known a member for [`GONE_AFTER`].
    pub(crate) async fn gone(&self, member_id: &str) {
        let mut changes = self.snapshots.changes();
        loop {
            let left = |now: &Arc<registry::Snapshot>| !now.members.contains_key(member_id);
            if changes.wait_for(left).await.is_err() {
                return std::future::pending().await;
            }
            let back = |now: &Arc<registry::Snapshot>| now.members.contains_key(member_id);
            let back = tokio::time::timeout(GONE_AFTER, changes.wait_for(back)).await;
            if back.is_err() && self.snapshots.contact().following {
                return;
            }
        }
    }

    /// Seconds that the images of a request are predicted to take by themselves, side by side.
    pub(crate) fn seconds_alone(&self, request: &ValidRequest) -> Option<f64> {
        let snapshot = self.snapshots.current();
        let directory = self.directory(&snapshot);
        directory.seconds(
            &snapshot,
            &request.weights_id,
            &drawing(request, request.tokens),
        )
    }

    fn directory(&self, snapshot: &registry::Snapshot) -> Arc<Directory> {
        let mut kept = self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !kept.fits(snapshot) {
            *kept = Arc::new(Directory::new(snapshot));
        }
        kept.clone()
    }

    /// A channel to a service that a stage has named.
    pub(crate) fn reach(&self, endpoint: &str) -> Result<Channel, RouterError> {
        self.channel(endpoint, &self.snapshots.current())
    }

    fn channel(
        &self,
        endpoint: &str,
        snapshot: &registry::Snapshot,
    ) -> Result<Channel, RouterError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(endpoint) {
            return Ok(channel.clone());
        }
        if channels.len() > snapshot.members.len() + SPARE_CHANNELS {
            let alive: HashSet<_> = snapshot
                .members
                .values()
                .map(|member| member.endpoint.as_str())
                .collect();
            channels.retain(|address, _| alive.contains(address.as_str()));
        }
        let channel = proto::channel::lazy(endpoint)?;
        channels.insert(endpoint.to_owned(), channel.clone());
        Ok(channel)
    }
}

/// One image of a request, of so many tokens, as far as its time goes; its prefixes hardly matter to that.
pub(crate) fn drawing(request: &ValidRequest, image_tokens: u64) -> Drawing {
    let image_tokens = u32::try_from(image_tokens).unwrap_or(u32::MAX);
    Drawing {
        rows: Rows {
            rows: request.rows,
            tokens: image_tokens,
            prefix: 0,
        },
        steps: request.steps,
        image_tokens,
    }
}
