//! Slots and leases: who may touch which part of the pool, and until when. Pure: time is passed
//! in, and no byte is moved here.
//!
//! A slot is reserved by a producer, sealed part by part or at once, and freed when its last lease ends,
//! unless the [cache](cache) keeps it. Its memory is reused at once only when every party has said it is
//! done; otherwise it rests for the quarantine first, because a late one-sided operation may still land in it.
mod cache;
mod entry;
mod tickets;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv::{Manifest, PrefixIdentity};

pub(super) use entry::{CacheTerms, Grant, LeaseKey, Reservation, SlotView};
pub(super) use tickets::{Bearer, Token};

use super::pool::{Extent, FreeList};
use crate::TransferError;
use crate::limits;
use cache::Cache;
use entry::{Content, Holder, Lease, Slot};
use tickets::Tickets;

/// Memory of a freed slot that is not given out yet.
#[derive(Debug)]
struct Resting {
    extent: Extent,
    until: Instant,
}

/// What a table may give out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Bytes of the pool.
    pub(super) pool: u64,
    /// Slots start at multiples of this many bytes.
    pub(super) page: u64,
    /// Bytes of the largest slot.
    pub(super) prefix: u64,
    /// Slots that live at once.
    pub(super) slots: usize,
    /// Bytes of cached prefixes that nobody uses.
    pub(super) cache: u64,
}

/// Every slot of a pool.
#[derive(Debug)]
pub(super) struct SlotTable {
    bounds: Bounds,
    pool: FreeList,
    slots: BTreeMap<u64, Slot>,
    resting: Vec<Resting>,
    cache: Cache,
    next_generation: u64,
    next_lease: u64,
    quarantine: Duration,
    /// Nothing expires before this; `None` when nothing can expire.
    next_end: Option<Instant>,
}

impl SlotTable {
    /// An empty table. `first` starts the generations; a restarted service passes another one, so
    /// that handles of its former life are told apart.
    pub(super) fn new(bounds: Bounds, first: u64, quarantine: Duration) -> Self {
        Self {
            bounds,
            pool: FreeList::new(bounds.pool, bounds.page),
            slots: BTreeMap::new(),
            resting: vec![],
            cache: Cache::new(bounds.cache),
            next_generation: first,
            next_lease: first,
            quarantine,
            next_end: None,
        }
    }

    /// Gives a producer what it asks for.
    pub(super) fn reserve(
        &mut self,
        now: Instant,
        asked: Reservation,
    ) -> Result<Grant, TransferError> {
        self.reap(now);
        let (most, bytes) = (self.pool.capacity().min(self.bounds.prefix), asked.bytes);
        if bytes == 0 || bytes > most {
            let message = format!("must lie in [1, {most}], what the pool takes, got {bytes}");
            return Err(TransferError::invalid("bytes", message));
        }
        if let Some(offer) = &asked.offer {
            offer
                .validate_announced()
                .map_err(TransferError::Manifest)?;
            same_bytes(bytes, offer.bytes)?;
        }
        if self.slots.len() >= self.bounds.slots {
            return Err(TransferError::TooMany {
                what: "slots",
                limit: self.bounds.slots,
            });
        }
        let Some(extent) = self.make_room(now, bytes) else {
            return Err(TransferError::PoolFull {
                bytes,
                retry_after: self.retry_after(now),
            });
        };
        let slot = extent.start / self.bounds.page;
        let generation = next(&mut self.next_generation);
        let entry = Slot {
            extent,
            bytes,
            generation,
            request_id: asked.request_id,
            content: asked.offer.map_or(Content::Unknown, Content::Open),
            leases: BTreeMap::new(),
            kept: self.cache.admit(asked.cache, bytes),
            pulls: 0,
            tickets: Tickets::default(),
            haunted: None,
        };
        self.slots.insert(slot, entry);
        self.lend(now, (slot, generation), asked.ttl, Holder::Owner)
    }

    /// Checks that a producer may seal now, before its bytes are read. Gives their offset, and whether
    /// they were all checked part by part.
    pub(super) fn check_seal(
        &mut self,
        now: Instant,
        key: LeaseKey,
        manifest: &Manifest,
    ) -> Result<(u64, bool), TransferError> {
        let slot = self.leased(now, key)?;
        manifest.validate().map_err(TransferError::Manifest)?;
        same_bytes(slot.bytes, manifest.bytes)?;
        let refused = |state| TransferError::WrongState {
            slot: key.slot,
            state,
        };
        match &slot.content {
            // A repeated seal, after its answer was lost, is answered again.
            Content::Sealed(sealed) if sealed != manifest => Err(refused("sealed already")),
            Content::Open(open) if open != manifest => Err(refused(
                "offered as another prefix, or not sealed in all parts",
            )),
            Content::Sealed(_) | Content::Open(_) => Ok((slot.extent.start, true)),
            Content::Unknown => Ok((slot.extent.start, false)),
        }
    }

    /// Makes a slot immutable and open to receivers.
    pub(super) fn seal(
        &mut self,
        now: Instant,
        key: LeaseKey,
        manifest: Manifest,
    ) -> Result<(), TransferError> {
        self.check_seal(now, key, &manifest)?;
        self.leased(now, key)?.content = Content::Sealed(manifest);
        self.index(key.slot);
        Ok(())
    }

    /// Checks that a producer may seal `crcs.len()` chunks from `first` on, before their bytes are read. Gives
    /// the slot's offset and its manifest with these checksums in it.
    pub(super) fn check_part(
        &mut self,
        now: Instant,
        key: LeaseKey,
        first: usize,
        crcs: &[u32],
    ) -> Result<(u64, Manifest), TransferError> {
        let slot = self.leased(now, key)?;
        let wrong = |state| TransferError::WrongState {
            slot: key.slot,
            state,
        };
        let manifest = match &slot.content {
            Content::Unknown => return Err(wrong("not offered")),
            Content::Open(manifest) | Content::Sealed(manifest) => manifest,
        };
        let end = first.saturating_add(crcs.len());
        if crcs.is_empty() || first > manifest.crcs.len() || end > manifest.chunks() {
            let (known, all) = (manifest.crcs.len(), manifest.chunks());
            let message = format!(
                "must go on after {known} of {all} chunks, got {} from {first} on",
                crcs.len()
            );
            return Err(TransferError::invalid("first_chunk", message));
        }
        // A repeated part, after its answer was lost, is answered again.
        let known = manifest.crcs.len().min(end);
        if manifest.crcs[first..known] != crcs[..known - first] {
            return Err(wrong("sealed already"));
        }
        let mut manifest = manifest.clone();
        manifest.crcs.extend(&crcs[known - first..]);
        Ok((slot.extent.start, manifest))
    }

    /// Makes a part of a slot immutable. Returns the chunks sealed so far.
    pub(super) fn seal_part(
        &mut self,
        now: Instant,
        key: LeaseKey,
        first: usize,
        crcs: &[u32],
    ) -> Result<usize, TransferError> {
        let (_, manifest) = self.check_part(now, key, first, crcs)?;
        let sealed = manifest.crcs.len();
        let slot = self.leased(now, key)?;
        if slot.sealed().is_none() {
            slot.content = Content::Open(manifest);
        }
        Ok(sealed)
    }

    /// Gives a receiver a lease on a sealed slot, or with `follows` on one that is offered.
    pub(super) fn pull(
        &mut self,
        now: Instant,
        named: (u64, u64),
        (identity, follows): (PrefixIdentity, bool),
        ttl: Duration,
    ) -> Result<(Grant, Manifest), TransferError> {
        self.reap(now);
        let slot = find(&mut self.slots, named.0, named.1)?;
        if slot.is_lost() {
            return Err(TransferError::ProducerLost { slot: named.0 });
        }
        let manifest = match &slot.content {
            Content::Sealed(manifest) => manifest.clone(),
            Content::Open(manifest) if follows => manifest.clone(),
            Content::Open(_) | Content::Unknown => {
                return Err(TransferError::WrongState {
                    slot: named.0,
                    state: "not sealed yet",
                });
            }
        };
        manifest
            .expect(identity, manifest.geometry)
            .map_err(TransferError::Mismatch)?;
        let grant = self.lend(now, named, ttl, Holder::Receiver)?;
        if let Some(slot) = self.slots.get_mut(&named.0) {
            slot.pulls += 1;
        }
        Ok((grant, manifest))
    }

    /// Checksums that a receiver does not know yet, and whether these are the last.
    pub(super) fn news(
        &mut self,
        now: Instant,
        key: LeaseKey,
        known: usize,
    ) -> Result<(Vec<u32>, bool), TransferError> {
        let slot = self.leased(now, key)?;
        if slot.is_lost() {
            return Err(TransferError::ProducerLost { slot: key.slot });
        }
        let Some(manifest) = slot.manifest() else {
            return Err(TransferError::WrongState {
                slot: key.slot,
                state: "not offered",
            });
        };
        let news = manifest.crcs.get(known..).unwrap_or_default().to_vec();
        Ok((news, manifest.crcs.len() == manifest.chunks()))
    }

    /// Prolongs a lease; never shortens it.
    pub(super) fn renew(
        &mut self,
        now: Instant,
        key: LeaseKey,
        ttl: Duration,
    ) -> Result<(), TransferError> {
        let slot = self.leased(now, key)?;
        if let Some(lease) = slot.leases.get_mut(&key.lease) {
            lease.expiry = lease.expiry.max(now + ttl);
        }
        Ok(())
    }

    /// Ends a lease. Ending one that is gone is no error: it happened already.
    pub(super) fn release(&mut self, now: Instant, key: LeaseKey) {
        self.reap(now);
        let Some(slot) = self.slots.get_mut(&key.slot) else {
            return;
        };
        if slot.generation != key.generation || slot.leases.remove(&key.lease).is_none() {
            return;
        }
        if slot.leases.is_empty() {
            self.settle(now, key.slot);
        }
    }

    /// Ends expired leases and gives rested memory back. Returns how many slots lost their last lease.
    pub(super) fn reap(&mut self, now: Instant) -> usize {
        if self.next_end.is_none_or(|end| now < end) {
            return 0;
        }
        let mut empty = vec![];
        for (&number, slot) in &mut self.slots {
            let before = slot.leases.len();
            slot.leases.retain(|_, lease| lease.expiry > now);
            let ended = slot.leases.len() < before;
            if ended {
                slot.haunted = Some(now + self.quarantine);
            }
            if ended && slot.leases.is_empty() {
                empty.push(number);
            }
        }
        for &number in &empty {
            self.settle(now, number);
        }
        let pool = &mut self.pool;
        self.resting.retain(|resting| {
            let rests = resting.until > now;
            if !rests {
                pool.give(resting.extent);
            }
            rests
        });
        let leases = self.slots.values().flat_map(|slot| slot.leases.values());
        let ends = leases.map(|lease| lease.expiry);
        self.next_end = ends
            .chain(self.resting.iter().map(|resting| resting.until))
            .min();
        empty.len()
    }

    /// Every live slot.
    pub(super) fn list(&self, now: Instant) -> Vec<SlotView> {
        let view = |(&number, slot): (&u64, &Slot)| slot.view(number, now);
        self.slots.iter().map(view).collect()
    }

    /// Bytes of the pool.
    pub(super) fn capacity(&self) -> u64 {
        self.pool.capacity()
    }

    /// Bytes that are in use, resting and cached ones included.
    pub(super) fn used(&self) -> u64 {
        self.pool.used()
    }

    /// Parties at work: producers that have not sealed yet, receivers with a lease, and prefixes that are
    /// leased and whose first receiver is still on its way.
    pub(super) fn at_work(&self) -> usize {
        let receives = |lease: &&Lease| lease.holder == Holder::Receiver;
        let at_work = |slot: &Slot| match slot.sealed() {
            None => slot.leases.len(),
            Some(_) if slot.pulls == 0 => usize::from(!slot.leases.is_empty()),
            Some(_) => slot.leases.values().filter(receives).count(),
        };
        self.slots.values().map(at_work).sum()
    }

    /// Leases alive.
    pub(super) fn leases(&self) -> usize {
        self.slots.values().map(|slot| slot.leases.len()).sum()
    }

    /// One more lease on a slot.
    fn lend(
        &mut self,
        now: Instant,
        (number, generation): (u64, u64),
        ttl: Duration,
        holder: Holder,
    ) -> Result<Grant, TransferError> {
        let slot = find(&mut self.slots, number, generation)?;
        if slot.leases.len() >= limits::MAX_LEASES_PER_SLOT {
            let limit = limits::MAX_LEASES_PER_SLOT;
            return Err(TransferError::TooMany {
                what: "leases on one slot",
                limit,
            });
        }
        let lease = next(&mut self.next_lease);
        let expiry = now + ttl;
        slot.leases.insert(lease, Lease { expiry, holder });
        let (offset, bytes) = (slot.extent.start, slot.bytes);
        self.ends_at(expiry);
        let key = LeaseKey {
            slot: number,
            generation,
            lease,
        };
        Ok(Grant { key, offset, bytes })
    }

    fn leased(&mut self, now: Instant, key: LeaseKey) -> Result<&mut Slot, TransferError> {
        self.reap(now);
        let slot = find(&mut self.slots, key.slot, key.generation)?;
        if !slot.leases.contains_key(&key.lease) {
            return Err(TransferError::UnknownLease {
                slot: key.slot,
                lease: key.lease,
            });
        }
        Ok(slot)
    }

    fn free(&mut self, now: Instant, number: u64) {
        let Some(slot) = self.slots.remove(&number) else {
            return;
        };
        // An unsealed slot was given up in the middle of its write.
        let torn = slot.sealed().is_none().then(|| now + self.quarantine);
        match slot.haunted.max(torn).filter(|&until| until > now) {
            Some(until) => {
                self.ends_at(until);
                let extent = slot.extent;
                self.resting.push(Resting { extent, until });
            }
            None => self.pool.give(slot.extent),
        }
    }

    fn ends_at(&mut self, end: Instant) {
        self.next_end = Some(self.next_end.map_or(end, |next| next.min(end)));
    }

    /// When memory comes free at the latest: the earliest end among rests and last leases.
    fn retry_after(&self, now: Instant) -> Duration {
        let rests = self.resting.iter().map(|resting| resting.until);
        let last = |slot: &Slot| slot.leases.values().map(|lease| lease.expiry).max();
        let slots = self.slots.values().filter_map(last);
        let next = rests.chain(slots).min();
        next.map_or(limits::RETRY_AFTER, |at| at.saturating_duration_since(now))
            .clamp(limits::REAP_INTERVAL, limits::MAX_TTL)
    }
}

fn same_bytes(expected: u64, got: u64) -> Result<(), TransferError> {
    let same = expected == got;
    same.then_some(())
        .ok_or(TransferError::Manifest(kv::KvError::Inconsistent {
            field: "bytes",
            expected,
            got,
        }))
}

fn find(
    slots: &mut BTreeMap<u64, Slot>,
    number: u64,
    generation: u64,
) -> Result<&mut Slot, TransferError> {
    let slot = slots
        .get_mut(&number)
        .ok_or(TransferError::UnknownSlot { slot: number })?;
    if slot.generation != generation {
        return Err(TransferError::StaleGeneration {
            slot: number,
            current: slot.generation,
            named: generation,
        });
    }
    Ok(slot)
}

fn next(counter: &mut u64) -> u64 {
    let value = *counter;
    *counter += 1;
    value
}

#[cfg(test)]
mod tests;
