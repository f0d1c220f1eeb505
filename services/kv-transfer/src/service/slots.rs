//! Slots and leases: who may touch which part of the pool, and until when. Pure: time is passed
//! in, and no byte is moved here.
//!
//! A slot is reserved by a producer, sealed once it is complete, and freed when its last lease ends.
//! Its memory is reused at once only when every party has said it is done; otherwise it rests for
//! the quarantine first, because a late one-sided operation may still land in it.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv::{Manifest, PrefixIdentity};

use super::pool::{Extent, FreeList};
use crate::TransferError;
use crate::limits::{self, SLOT_ALIGN};

/// What names a lease on a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeaseKey {
    pub(super) slot: u64,
    pub(super) generation: u64,
    pub(super) lease: u64,
}

/// A part of the pool given to a lease holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) key: LeaseKey,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// One slot, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotView {
    pub(super) slot: u64,
    pub(super) generation: u64,
    pub(super) bytes: u64,
    pub(super) sealed: bool,
    pub(super) leases: usize,
    pub(super) request_id: String,
}

#[derive(Debug)]
struct Slot {
    extent: Extent,
    bytes: u64,
    generation: u64,
    request_id: String,
    /// Set when the slot is sealed.
    manifest: Option<Manifest>,
    leases: BTreeMap<u64, Lease>,
    /// A receiver has had it.
    pulled: bool,
    /// A lease ran out: its holder may still be at work.
    abandoned: bool,
}

#[derive(Debug)]
struct Lease {
    expiry: Instant,
    /// Held by a receiver, not by the producer.
    receiver: bool,
}

/// Memory of a freed slot that is not given out yet.
#[derive(Debug)]
struct Resting {
    extent: Extent,
    until: Instant,
}

/// Every slot of a pool.
#[derive(Debug)]
pub(super) struct SlotTable {
    pool: FreeList,
    slots: BTreeMap<u64, Slot>,
    resting: Vec<Resting>,
    next_generation: u64,
    next_lease: u64,
    quarantine: Duration,
    /// Nothing expires before this; `None` when nothing can expire.
    next_end: Option<Instant>,
}

impl SlotTable {
    /// An empty table. `first` starts the generations; a restarted service passes another one, so
    /// that handles of its former life are told apart.
    pub(super) fn new(pool_bytes: u64, first: u64, quarantine: Duration) -> Self {
        Self {
            pool: FreeList::new(pool_bytes),
            slots: BTreeMap::new(),
            resting: vec![],
            next_generation: first,
            next_lease: first,
            quarantine,
            next_end: None,
        }
    }

    /// Gives a producer `bytes` bytes to write.
    pub(super) fn reserve(
        &mut self,
        now: Instant,
        bytes: u64,
        ttl: Duration,
        request_id: &str,
    ) -> Result<Grant, TransferError> {
        self.reap(now);
        let capacity = self.pool.capacity();
        if bytes == 0 || bytes > capacity {
            let message = format!("must lie in [1, {capacity}], the size of the pool, got {bytes}");
            return Err(TransferError::invalid("bytes", message));
        }
        if self.slots.len() >= limits::MAX_SLOTS {
            return Err(TransferError::TooMany {
                what: "slots",
                limit: limits::MAX_SLOTS,
            });
        }
        let Some(extent) = self.pool.take(bytes) else {
            return Err(TransferError::PoolFull {
                bytes,
                retry_after: self.retry_after(now),
            });
        };
        let slot = extent.start / SLOT_ALIGN;
        let generation = next(&mut self.next_generation);
        let lease = next(&mut self.next_lease);
        let entry = Slot {
            extent,
            bytes,
            generation,
            request_id: request_id.to_owned(),
            manifest: None,
            leases: BTreeMap::from([(
                lease,
                Lease {
                    expiry: now + ttl,
                    receiver: false,
                },
            )]),
            pulled: false,
            abandoned: false,
        };
        self.slots.insert(slot, entry);
        self.ends_at(now + ttl);
        Ok(Grant {
            key: LeaseKey {
                slot,
                generation,
                lease,
            },
            offset: extent.start,
            bytes,
        })
    }

    /// Checks that a producer may seal now, before its bytes are read; gives their offset.
    pub(super) fn check_seal(
        &mut self,
        now: Instant,
        key: LeaseKey,
        manifest: &Manifest,
    ) -> Result<u64, TransferError> {
        let slot = self.leased(now, key)?;
        manifest.validate().map_err(TransferError::Manifest)?;
        if manifest.bytes != slot.bytes {
            return Err(TransferError::Manifest(kv::KvError::Inconsistent {
                field: "bytes",
                expected: slot.bytes,
                got: manifest.bytes,
            }));
        }
        match &slot.manifest {
            // A repeated seal, after its answer was lost, is answered again.
            Some(sealed) if sealed != manifest => Err(TransferError::WrongState {
                slot: key.slot,
                state: "sealed already",
            }),
            _ => Ok(slot.extent.start),
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
        self.leased(now, key)?.manifest = Some(manifest);
        Ok(())
    }

    /// Gives a receiver a lease on a sealed slot.
    pub(super) fn pull(
        &mut self,
        now: Instant,
        named: (u64, u64),
        identity: PrefixIdentity,
        ttl: Duration,
    ) -> Result<(Grant, Manifest), TransferError> {
        self.reap(now);
        let (number, generation) = named;
        let slot = find(&mut self.slots, number, generation)?;
        let Some(manifest) = slot.manifest.clone() else {
            return Err(TransferError::WrongState {
                slot: number,
                state: "not sealed yet",
            });
        };
        manifest
            .expect(identity, manifest.geometry)
            .map_err(TransferError::Mismatch)?;
        if slot.leases.len() >= limits::MAX_LEASES_PER_SLOT {
            let limit = limits::MAX_LEASES_PER_SLOT;
            return Err(TransferError::TooMany {
                what: "leases on one slot",
                limit,
            });
        }
        let lease = next(&mut self.next_lease);
        slot.pulled = true;
        slot.leases.insert(
            lease,
            Lease {
                expiry: now + ttl,
                receiver: true,
            },
        );
        let (offset, bytes) = (slot.extent.start, slot.bytes);
        self.ends_at(now + ttl);
        let key = LeaseKey {
            slot: number,
            generation,
            lease,
        };
        Ok((Grant { key, offset, bytes }, manifest))
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
            self.free(now, key.slot);
        }
    }

    /// Ends expired leases and gives rested memory back. Returns how many slots were freed.
    pub(super) fn reap(&mut self, now: Instant) -> usize {
        if self.next_end.is_none_or(|end| now < end) {
            return 0;
        }
        let mut empty = vec![];
        for (&number, slot) in &mut self.slots {
            let before = slot.leases.len();
            slot.leases.retain(|_, lease| lease.expiry > now);
            slot.abandoned |= slot.leases.len() < before;
            if slot.leases.is_empty() {
                empty.push(number);
            }
        }
        for &number in &empty {
            self.free(now, number);
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
    pub(super) fn list(&self) -> Vec<SlotView> {
        self.slots
            .iter()
            .map(|(&slot, entry)| SlotView {
                slot,
                generation: entry.generation,
                bytes: entry.bytes,
                sealed: entry.manifest.is_some(),
                leases: entry.leases.len(),
                request_id: entry.request_id.clone(),
            })
            .collect()
    }

    /// Bytes of the pool.
    pub(super) fn capacity(&self) -> u64 {
        self.pool.capacity()
    }

    /// Bytes that cannot be given out now, resting ones included.
    pub(super) fn used(&self) -> u64 {
        self.pool.used()
    }

    /// Parties at work: producers that have not sealed yet, receivers with a lease, and prefixes that are
    /// leased and whose first receiver is still on its way.
    pub(super) fn at_work(&self) -> usize {
        let at_work = |slot: &Slot| match slot.manifest {
            None => 1,
            Some(_) if !slot.pulled => usize::from(!slot.leases.is_empty()),
            Some(_) => slot.leases.values().filter(|lease| lease.receiver).count(),
        };
        self.slots.values().map(at_work).sum()
    }

    /// Leases alive.
    pub(super) fn leases(&self) -> usize {
        self.slots.values().map(|slot| slot.leases.len()).sum()
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
        if slot.abandoned || slot.manifest.is_none() {
            self.ends_at(now + self.quarantine);
            self.resting.push(Resting {
                extent: slot.extent,
                until: now + self.quarantine,
            });
        } else {
            self.pool.give(slot.extent);
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
#[path = "slots_tests.rs"]
mod tests;
