use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv::Manifest;

use super::tickets::Tickets;

use crate::service::pool::Extent;

/// What names a lease on a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::service) struct LeaseKey {
    pub(in crate::service) slot: u64,
    pub(in crate::service) generation: u64,
    pub(in crate::service) lease: u64,
}

/// A part of the pool given to a lease holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::service) struct Grant {
    pub(in crate::service) key: LeaseKey,
    pub(in crate::service) offset: u64,
    pub(in crate::service) bytes: u64,
}

/// What a producer asks for.
#[derive(Debug, Clone)]
pub(in crate::service) struct Reservation {
    pub(in crate::service) bytes: u64,
    pub(in crate::service) ttl: Duration,
    pub(in crate::service) request_id: String,
    /// When receivers may follow: what the slot will hold.
    pub(in crate::service) offer: Option<Manifest>,
    /// When the sealed prefix is to be cached.
    pub(in crate::service) cache: Option<CacheTerms>,
}

/// How a prefix is cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::service) struct CacheTerms {
    /// Who may find it; everybody when empty.
    pub(in crate::service) scope: String,
    /// What computing it again would cost.
    pub(in crate::service) cost_us: u64,
}

/// One slot, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::service) struct SlotView {
    pub(in crate::service) slot: u64,
    pub(in crate::service) generation: u64,
    pub(in crate::service) bytes: u64,
    pub(in crate::service) leases: usize,
    pub(in crate::service) request_id: String,
    pub(in crate::service) sealed: bool,
    /// What is announced or sealed.
    pub(in crate::service) manifest: Option<Manifest>,
    pub(in crate::service) kept: Option<Kept>,
    pub(in crate::service) pulls: u64,
    /// Until the last lease ends.
    pub(in crate::service) expires: Duration,
}

/// What a slot holds.
#[derive(Debug, Clone)]
pub(super) enum Content {
    /// Nobody but its producer knows.
    Unknown,
    /// This, as far as there are checksums.
    Open(Manifest),
    /// All of this.
    Sealed(Manifest),
}

/// A prefix that stays after its last lease.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::service) struct Kept {
    pub(in crate::service) terms: CacheTerms,
    pub(in crate::service) pinned: bool,
    pub(in crate::service) hits: u64,
    /// The least goes first.
    pub(super) priority: f64,
}

// The priority is a number that was computed from others, never NaN.
impl Eq for Kept {}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) extent: Extent,
    pub(super) bytes: u64,
    pub(super) generation: u64,
    pub(super) request_id: String,
    pub(super) content: Content,
    pub(super) leases: BTreeMap<u64, Lease>,
    pub(super) kept: Option<Kept>,
    /// Leases that receivers have had.
    pub(super) pulls: u64,
    /// Pulls that are allowed.
    pub(super) tickets: Tickets,
    /// When a lease has run out: until then its holder may still be at work.
    pub(super) haunted: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Lease {
    pub(super) expiry: Instant,
    pub(super) holder: Holder,
}

/// Who holds a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// Who wrote the prefix, or found it in the cache, or took over from one of these.
    Owner,
    /// Who reads it.
    Receiver,
}

impl Slot {
    pub(super) fn sealed(&self) -> Option<&Manifest> {
        match &self.content {
            Content::Sealed(manifest) => Some(manifest),
            Content::Unknown | Content::Open(_) => None,
        }
    }

    /// What is announced or sealed.
    pub(super) fn manifest(&self) -> Option<&Manifest> {
        match &self.content {
            Content::Unknown => None,
            Content::Open(manifest) | Content::Sealed(manifest) => Some(manifest),
        }
    }

    /// It will never be complete: whoever wrote it is gone.
    pub(super) fn is_lost(&self) -> bool {
        let owned = |lease: &Lease| lease.holder == Holder::Owner;
        self.sealed().is_none() && !self.leases.values().any(owned)
    }

    /// Cached, and used by nobody now.
    pub(super) fn is_idle(&self) -> bool {
        self.leases.is_empty() && self.kept.is_some()
    }

    /// Idle, and of use to others at once when it goes.
    pub(super) fn makes_room(&self, now: Instant) -> bool {
        let pinned = self.kept.as_ref().is_some_and(|kept| kept.pinned);
        self.is_idle() && !pinned && self.haunted.is_none_or(|until| until <= now)
    }

    pub(super) fn view(&self, number: u64, now: Instant) -> SlotView {
        let last = self.leases.values().map(|lease| lease.expiry).max();
        SlotView {
            slot: number,
            generation: self.generation,
            bytes: self.bytes,
            leases: self.leases.len(),
            request_id: self.request_id.clone(),
            sealed: self.sealed().is_some(),
            manifest: self.manifest().cloned(),
            kept: self.kept.clone(),
            pulls: self.pulls,
            expires: last.map_or(Duration::ZERO, |end| end.saturating_duration_since(now)),
        }
    }
}
