//! Pull tokens: each lets one receiver pull one slot once.
//!
//! A token is bound to the request, the receiver and the epoch that it was made for, and to one life of one
//! slot: it goes with the slot, so neither a recycled slot nor a restarted service knows it.
use std::collections::BTreeMap;
use std::time::Instant;

use super::entry::{Holder, LeaseKey};
use super::{SlotTable, find};
use crate::{TransferError, limits};

/// What a receiver shows.
pub(in crate::service) type Token = [u8; limits::TOKEN_BYTES];

/// Whom a token is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::service) struct Bearer {
    pub(in crate::service) request_id: String,
    pub(in crate::service) receiver: String,
    pub(in crate::service) epoch: u64,
}

/// The tokens of one slot that were not used yet.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    open: BTreeMap<Token, (Bearer, Instant)>,
    /// The newest epoch that a token was made for.
    newest: u64,
}

impl Tickets {
    /// Uses a token up. One that is shown by somebody else, or too late, is used up as well.
    fn take(&mut self, now: Instant, token: &Token, bearer: &Bearer) -> Result<(), TransferError> {
        let refused = |why| TransferError::Token { why };
        let (made_for, until) = self
            .open
            .remove(token)
            .ok_or(refused("is unknown or was used"))?;
        if made_for.request_id != bearer.request_id {
            return Err(refused("was made for another request"));
        }
        if made_for.receiver != bearer.receiver {
            return Err(refused("was made for another receiver"));
        }
        if made_for.epoch != bearer.epoch {
            return Err(refused("was made for another epoch"));
        }
        if until <= now {
            return Err(refused("has run out"));
        }
        Ok(())
    }
}

impl SlotTable {
    /// Makes `token` good for one pull by `bearer`; `replaces` is good for none from here on.
    pub(in crate::service) fn grant(
        &mut self,
        now: Instant,
        key: LeaseKey,
        (token, bearer): (Token, Bearer),
        replaces: Option<Token>,
    ) -> Result<(), TransferError> {
        let slot = self.leased(now, key)?;
        let owns = |lease: &super::entry::Lease| lease.holder == Holder::Owner;
        if !slot.leases.get(&key.lease).is_some_and(owns) {
            return Err(TransferError::WrongState {
                slot: key.slot,
                state: "not the caller's to pass on",
            });
        }
        let tickets = &mut slot.tickets;
        if bearer.epoch < tickets.newest {
            return Err(TransferError::StaleEpoch {
                got: bearer.epoch,
                newest: tickets.newest,
            });
        }
        if let Some(old) = replaces {
            tickets.open.remove(&old);
        }
        tickets.open.retain(|_, (_, until)| *until > now);
        if tickets.open.len() >= limits::MAX_TOKENS_PER_SLOT {
            return Err(TransferError::TooMany {
                what: "pull tokens of one slot",
                limit: limits::MAX_TOKENS_PER_SLOT,
            });
        }
        tickets.newest = bearer.epoch;
        tickets
            .open
            .insert(token, (bearer, now + limits::TOKEN_TTL));
        Ok(())
    }

    /// Uses a token of a slot up.
    pub(in crate::service) fn redeem(
        &mut self,
        now: Instant,
        named: (u64, u64),
        (token, bearer): (&Token, &Bearer),
    ) -> Result<(), TransferError> {
        self.reap(now);
        let slot = find(&mut self.slots, named.0, named.1)?;
        slot.tickets.take(now, token, bearer)
    }
}
