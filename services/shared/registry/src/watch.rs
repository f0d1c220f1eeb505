//! What watchers see, and the handle they see it through.
use proto::v1::{self, watch_response};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{Member, Plan, RegistryError};

/// One change of membership.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Everything there is; forget what was before.
    Snapshot(Picture),
    /// This member is new or has changed.
    Put(Box<Member>),
    /// The member of this id is gone.
    Removed(String),
    /// This pool has a new plan.
    Plan(Box<Plan>),
}

/// Everything a registry holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Picture {
    /// Every member, by id.
    pub members: Vec<Member>,
    /// Every plan, by pool.
    pub plans: Vec<Plan>,
}

/// A change and the epoch it led to.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// Epoch after the change.
    pub epoch: u64,
    /// The change.
    pub event: Event,
}

impl From<Update> for v1::WatchResponse {
    fn from(update: Update) -> Self {
        let event = match update.event {
            Event::Snapshot(Picture { members, plans }) => {
                watch_response::Event::Snapshot(v1::Snapshot { members, plans })
            }
            Event::Put(member) => watch_response::Event::Put(*member),
            Event::Removed(id) => watch_response::Event::Removed(id),
            Event::Plan(plan) => watch_response::Event::Plan(*plan),
        };
        Self {
            event: Some(event),
            epoch: update.epoch,
        }
    }
}

impl Update {
    /// Reads an update off the wire; `None` for an event this version does not know.
    pub fn from_wire(response: v1::WatchResponse) -> Option<Self> {
        let event = match response.event? {
            watch_response::Event::Snapshot(snapshot) => Event::Snapshot(Picture {
                members: snapshot.members,
                plans: snapshot.plans,
            }),
            watch_response::Event::Put(member) => Event::Put(Box::new(member)),
            watch_response::Event::Removed(id) => Event::Removed(id),
            watch_response::Event::Plan(plan) => Event::Plan(Box::new(plan)),
        };
        Some(Self {
            epoch: response.epoch,
            event,
        })
    }
}

/// Updates from now on, in order. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watch {
    updates: mpsc::Receiver<Result<Update, RegistryError>>,
    // Feeds `updates`; aborted with the watch.
    _feeder: base::task::Owned<()>,
}

impl Watch {
    pub(crate) fn new(
        updates: mpsc::Receiver<Result<Update, RegistryError>>,
        feeder: base::task::Owned<()>,
    ) -> Self {
        Self {
            updates,
            _feeder: feeder,
        }
    }

    /// The next update. `None` or an error: the watch is over, start another.
    pub async fn next(&mut self) -> Option<Result<Update, RegistryError>> {
        self.updates.recv().await
    }

    /// The parts, for a server that streams the updates on.
    pub(crate) fn into_parts(
        self,
    ) -> (
        ReceiverStream<Result<Update, RegistryError>>,
        base::task::Owned<()>,
    ) {
        (ReceiverStream::new(self.updates), self._feeder)
    }
}
