//! The exchange of sequence-parallel attention by heads: before attention every rank trades its
//! tokens of all heads for all tokens of its heads, and back afterwards.
//!
//! Nothing is computed, so the exchange is exact; only padding is added and dropped.

use std::ops::Range;

use crate::{Collective, ParallelError, Pending, TokenShards};

/// How tokens and heads of one row are spread over a Ulysses group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadExchange {
    shards: TokenShards,
    heads: usize,
    own: Vec<Range<usize>>,
    dim: usize,
}

fn equal(field: &'static str, expected: usize, got: usize) -> Result<(), ParallelError> {
    if expected == got {
        return Ok(());
    }
    Err(ParallelError::Mismatch {
        field,
        expected,
        got,
    })
}

impl HeadExchange {
    /// An exchange of `heads` heads of `dim` elements, of which rank `r` takes `own[r]`.
    ///
    /// Key and value heads may be taken by several ranks (see [`crate::HeadShard`]); then there is
    /// no way back. All ranks take the same number of heads.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when there is not one range a rank of one length,
    /// [`ParallelError::OutOfRange`] when one is not part of the heads.
    pub fn new(
        shards: TokenShards,
        heads: usize,
        own: Vec<Range<usize>>,
        dim: usize,
    ) -> Result<Self, ParallelError> {
        equal("head ranges", shards.ranks(), own.len())?;
        for range in &own {
            crate::error::in_range("head range", range.end, range.start, heads)?;
            equal("heads of a rank", own[0].len(), range.len())?;
        }
        Ok(Self {
            shards,
            heads,
            own,
            dim,
        })
    }

    /// Elements of a shard of tokens, padding included, with all heads: `[shard, heads, dim]`.
    #[must_use]
    pub fn token_side(&self) -> usize {
        self.shards.shard_len() * self.heads * self.dim
    }

    /// Elements of all tokens with the heads of one rank: `[tokens, own heads, dim]`.
    #[must_use]
    pub fn head_side(&self) -> usize {
        self.shards.tokens() * self.own[0].len() * self.dim
    }

    /// Trades `[shard, heads, dim]` for `[tokens, own heads, dim]`, in the order of tokens and
    /// without padding. `group` is the Ulysses group the shards are for.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] naming what has another size, and those of
    /// [`Collective::all_to_all`].
    pub fn to_heads(
        &self,
        group: &dyn Collective,
        local: &[f32],
    ) -> Result<Pending<Vec<f32>>, ParallelError> {
        equal("group size", self.own.len(), group.size())?;
        equal("token shard", self.token_side(), local.len())?;
        let row = self.heads * self.dim;
        let mut parts = Vec::new();
        for own in &self.own {
            let columns = own.start * self.dim..own.end * self.dim;
            for token in 0..self.shards.shard_len() {
                parts.extend_from_slice(&local[token * row..][columns.clone()]);
            }
        }
        let exchange = self.clone();
        let pending = group.all_to_all(parts)?;
        Ok(pending.and_then(move |got| exchange.by_token(&got)))
    }

    /// Where the tokens of every shard lie among all: `(rank, place in the shard, token)`.
    fn places(&self) -> Result<Vec<(usize, usize, usize)>, ParallelError> {
        let mut places = Vec::with_capacity(self.shards.tokens());
        for rank in 0..self.shards.ranks() {
            for (chunk, range) in self.shards.ranges(rank)?.into_iter().enumerate() {
                let first = chunk * self.shards.chunk_len();
                let local = first..first + range.len();
                places.extend(local.zip(range).map(|(at, token)| (rank, at, token)));
            }
        }
        Ok(places)
    }

    /// The received shards `[rank][shard, own heads, dim]` in the order of tokens.
    fn by_token(&self, got: &[f32]) -> Result<Vec<f32>, ParallelError> {
        let row = self.own[0].len() * self.dim;
        let mut all = vec![0.0; self.head_side()];
        for (rank, at, token) in self.places()? {
            let from = (rank * self.shards.shard_len() + at) * row;
            all[token * row..(token + 1) * row].copy_from_slice(&got[from..from + row]);
        }
        Ok(all)
    }

    /// Trades `[tokens, own heads, dim]` back for `[shard, heads, dim]`; padding is zero.
    ///
    /// # Errors
    /// As [`Self::to_heads`], and [`ParallelError::Mismatch`] when several ranks took one head.
    pub fn to_tokens(
        &self,
        group: &dyn Collective,
        local: &[f32],
    ) -> Result<Pending<Vec<f32>>, ParallelError> {
        equal("group size", self.own.len(), group.size())?;
        equal("head shard", self.head_side(), local.len())?;
        let mut next = 0;
        for own in &self.own {
            equal("first head of a rank", next, own.start)?;
            next = own.end;
        }
        equal("heads of all ranks", self.heads, next)?;
        let row = self.own[0].len() * self.dim;
        let mut parts = vec![0.0; self.own.len() * self.shards.shard_len() * row];
        for (rank, at, token) in self.places()? {
            let to = (rank * self.shards.shard_len() + at) * row;
            parts[to..to + row].copy_from_slice(&local[token * row..(token + 1) * row]);
        }
        let (shard, ranks) = (self.shards.shard_len(), self.own.len());
        let pending = group.all_to_all(parts)?;
        Ok(pending.and_then(move |got| {
            let mut all = Vec::with_capacity(got.len());
            for token in 0..shard {
                for rank in 0..ranks {
                    all.extend_from_slice(&got[(rank * shard + token) * row..][..row]);
                }
            }
            Ok(all)
        }))
    }
}

#[cfg(test)]
mod tests;
