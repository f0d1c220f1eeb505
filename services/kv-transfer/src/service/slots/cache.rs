//! Prefixes that stay after their last lease. Only an exact identity is ever found, within the scope it was
//! stored for or among those stored for everybody.
//!
//! What goes first is the entry with the least priority = age + cost / bytes. The age grows to the priority of
//! whatever was evicted last, so that an entry that nobody asks for grows old, and cheap or large ones grow
//! old sooner than dear or small ones.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use kv::{Manifest, PrefixIdentity};

use super::entry::{CacheTerms, Content, Grant, Holder, Kept, Slot};
use super::{SlotTable, find};
use crate::TransferError;
use crate::service::pool::Extent;

/// Every cached prefix by scope and identity, and what has happened to them.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// Most bytes of idle entries; 0 turns the cache off.
    budget: u64,
    index: HashMap<(String, PrefixIdentity), u64>,
    age: f64,
    counts: CacheCounts,
}

/// What has happened since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::service) struct CacheCounts {
    pub(in crate::service) hits: u64,
    pub(in crate::service) misses: u64,
    pub(in crate::service) evictions: u64,
    /// Bytes that were found instead of computed.
    pub(in crate::service) hit_bytes: u64,
}

impl Cache {
    pub(super) fn new(budget: u64) -> Self {
        Self {
            budget,
            ..Self::default()
        }
    }

    /// How a new slot will be kept, if at all.
    pub(super) fn admit(&self, terms: Option<CacheTerms>, bytes: u64) -> Option<Kept> {
        let terms = terms.filter(|_| bytes <= self.budget)?;
        Some(Kept {
            priority: self.priority(&terms, bytes),
            terms,
            pinned: false,
            hits: 0,
        })
    }

    /// Costs per byte and ages are for comparison: rounded numbers serve.
    fn priority(&self, terms: &CacheTerms, bytes: u64) -> f64 {
        self.age + terms.cost_us as f64 / bytes.max(1) as f64
    }
}

impl SlotTable {
    /// A lease on the cached prefix of this identity, stored for `scope` or for everybody.
    pub(in crate::service) fn lookup(
        &mut self,
        now: Instant,
        scope: &str,
        identity: PrefixIdentity,
        ttl: Duration,
    ) -> Result<Option<(Grant, Manifest)>, TransferError> {
        self.reap(now);
        let number = [scope, ""]
            .iter()
            .find_map(|&scope| self.cache.index.get(&(scope.to_owned(), identity)).copied());
        let Some((number, slot)) = number.and_then(|n| Some((n, self.slots.get_mut(&n)?))) else {
            self.cache.counts.misses += 1;
            return Ok(None);
        };
        let (Some(manifest), generation) = (slot.sealed().cloned(), slot.generation) else {
            self.cache.counts.misses += 1;
            return Ok(None);
        };
        if let Some(kept) = &mut slot.kept {
            kept.hits += 1;
            kept.priority = self.cache.priority(&kept.terms, slot.bytes);
        }
        let grant = self.lend(now, (number, generation), ttl, Holder::Owner)?;
        self.cache.counts.hits += 1;
        self.cache.counts.hit_bytes += manifest.bytes;
        Ok(Some((grant, manifest)))
    }

    /// Keeps a cached prefix from being evicted, or lets it go again.
    pub(in crate::service) fn pin(
        &mut self,
        now: Instant,
        named: (u64, u64),
        pinned: bool,
    ) -> Result<(), TransferError> {
        self.reap(now);
        let slot = find(&mut self.slots, named.0, named.1)?;
        let sealed = slot.sealed().is_some();
        let Some(kept) = slot.kept.as_mut().filter(|_| sealed) else {
            return Err(TransferError::WrongState {
                slot: named.0,
                state: "not cached",
            });
        };
        kept.pinned = pinned;
        Ok(())
    }

    /// Takes a prefix out of the cache. Pinned ones must be let go first.
    pub(in crate::service) fn evict(
        &mut self,
        now: Instant,
        named: (u64, u64),
    ) -> Result<(), TransferError> {
        self.reap(now);
        let slot = find(&mut self.slots, named.0, named.1)?;
        let state = match &slot.kept {
            None => Some("not cached"),
            Some(kept) if kept.pinned => Some("pinned"),
            Some(_) => None,
        };
        if let Some(state) = state {
            let slot = named.0;
            return Err(TransferError::WrongState { slot, state });
        }
        self.forget(now, named.0);
        Ok(())
    }

    pub(in crate::service) fn cache_counts(&self) -> CacheCounts {
        self.cache.counts
    }

    pub(in crate::service) fn cache_budget(&self) -> u64 {
        self.cache.budget
    }

    /// Bytes of cached prefixes that nobody uses now.
    pub(in crate::service) fn cached(&self) -> u64 {
        let idle = self.slots.values().filter(|slot| slot.is_idle());
        idle.map(|slot| slot.extent.len).sum()
    }

    /// Makes a slot that was just sealed findable, unless its like is cached already.
    pub(super) fn index(&mut self, number: u64) {
        let Some(slot) = self.slots.get_mut(&number) else {
            return;
        };
        let (Some(kept), Content::Sealed(manifest)) = (&slot.kept, &slot.content) else {
            return;
        };
        let key = (kept.terms.scope.clone(), manifest.identity);
        if *self.cache.index.entry(key).or_insert(number) != number {
            slot.kept = None;
        }
    }

    /// The last lease of a slot has ended: it stays as a cache entry, or goes.
    pub(super) fn settle(&mut self, now: Instant, number: u64) {
        let stays = |slot: &Slot| slot.is_idle() && slot.sealed().is_some();
        if !self.slots.get(&number).is_some_and(stays) {
            self.free(now, number);
            return;
        }
        let may = |slot: &Slot| slot.is_idle() && slot.kept.as_ref().is_some_and(|k| !k.pinned);
        while self.cached() > self.cache.budget && self.evict_one(may, now) {}
    }

    /// Evicts idle entries until `bytes` bytes in one piece are free. Nothing is evicted in vain: when all
    /// of them together would not do, they stay.
    pub(super) fn make_room(&mut self, now: Instant, bytes: u64) -> Option<Extent> {
        if let Some(extent) = self.pool.take(bytes) {
            return Some(extent);
        }
        if self.largest_possible(now) < bytes {
            return None;
        }
        while self.evict_one(|slot| slot.makes_room(now), now) {
            if let Some(extent) = self.pool.take(bytes) {
                return Some(extent);
            }
        }
        None
    }

    /// The longest run of bytes that would be free if every entry went that may go.
    fn largest_possible(&self, now: Instant) -> u64 {
        let stays = self.slots.values().filter(|slot| !slot.makes_room(now));
        let resting = self.resting.iter().map(|resting| resting.extent);
        let mut busy: Vec<Extent> = stays.map(|slot| slot.extent).chain(resting).collect();
        busy.sort_by_key(|extent| extent.start);
        let (mut from, mut largest) = (0, 0);
        for extent in busy {
            largest = largest.max(extent.start - from);
            from = extent.start + extent.len;
        }
        largest.max(self.pool.capacity() - from)
    }

    /// Evicts the entry of least priority among those that `may` go; false when there is none.
    fn evict_one(&mut self, may: impl Fn(&Slot) -> bool, now: Instant) -> bool {
        let least = self
            .slots
            .iter()
            .filter(|(_, slot)| may(slot))
            .filter_map(|(&number, slot)| Some((number, slot.kept.as_ref()?)))
            .min_by(|(_, a), (_, b)| a.priority.total_cmp(&b.priority));
        let Some((number, priority)) = least.map(|(number, kept)| (number, kept.priority)) else {
            return false;
        };
        self.cache.age = self.cache.age.max(priority);
        self.cache.counts.evictions += 1;
        self.forget(now, number);
        true
    }

    /// Takes a slot out of the index; it goes now, or with its last lease.
    pub(super) fn forget(&mut self, now: Instant, number: u64) {
        let Some(slot) = self.slots.get_mut(&number) else {
            return;
        };
        let identity = slot.manifest().map(|manifest| manifest.identity);
        let idle = slot.leases.is_empty();
        if let (Some(kept), Some(identity)) = (slot.kept.take(), identity) {
            let key = (kept.terms.scope, identity);
            if self.cache.index.get(&key) == Some(&number) {
                self.cache.index.remove(&key);
            }
        }
        if idle {
            self.free(now, number);
        }
    }
}
