//! Which fresh tokens of a row each rank of the sequence group `ring x ulysses` has.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{ParallelError, TokenShards};

/// How a row's tokens are dealt to the ranks of a ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenOrder {
    /// Consecutive tokens on consecutive ranks: balanced where every query sees the same keys.
    #[default]
    Contiguous,
    /// An early and a late chunk for every rank: balanced under a causal rule.
    ZigZag,
}

/// The fresh tokens of one row over a sequence group.
///
/// A ring rank owns a list of ascending ranges; the Ulysses ranks under it own consecutive pieces of
/// that list. Nothing is padded in memory: only the buffers of exchanges have one length, which is
/// [`Self::piece`] tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceShards {
    tokens: usize,
    ulysses: usize,
    piece: usize,
    lists: Vec<Vec<Range<usize>>>,
}

impl SequenceShards {
    /// `tokens` tokens over `ring` times `ulysses` ranks.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] when a size is zero or absurd.
    pub fn new(
        tokens: usize,
        ring: usize,
        ulysses: usize,
        order: TokenOrder,
    ) -> Result<Self, ParallelError> {
        crate::error::in_range("ulysses", ulysses, 1, crate::MAX_RANKS)?;
        crate::error::in_range("ring", ring, 1, crate::MAX_RANKS / ulysses)?;
        let (piece, lists) = match order {
            TokenOrder::Contiguous => {
                let piece = tokens.div_ceil(ring * ulysses);
                let start = |r: usize| (r * ulysses * piece).min(tokens);
                let list = |r| std::iter::once(start(r)..start(r + 1)).collect();
                (piece, (0..ring).map(list).collect())
            }
            TokenOrder::ZigZag => {
                let shards = TokenShards::zigzag(tokens, ring)?;
                let lists = (0..ring).map(|r| shards.ranges(r));
                let lists = lists.collect::<Result<Vec<_>, _>>()?;
                (shards.shard_len().div_ceil(ulysses), lists)
            }
        };
        Ok(Self {
            tokens,
            ulysses,
            piece,
            lists: lists.into_iter().map(joined).collect(),
        })
    }

    /// Tokens of the row.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Ranks of the ring.
    #[must_use]
    pub fn ring(&self) -> usize {
        self.lists.len()
    }

    /// Tokens that every rank's part of an exchange has room for.
    #[must_use]
    pub fn piece(&self) -> usize {
        self.piece
    }

    /// Padding tokens of an exchange over all ranks: what token counts that do not divide cost on the
    /// wire. No padding token is computed or attended to.
    #[must_use]
    pub fn padding(&self) -> usize {
        self.piece * self.ulysses * self.ring() - self.tokens
    }

    /// Tokens of ring rank `ring`, ascending; empty for a rank that is not there.
    #[must_use]
    pub fn ring_ranges(&self, ring: usize) -> &[Range<usize>] {
        self.lists.get(ring).map_or(&[], Vec::as_slice)
    }

    /// Number of tokens of a ring rank.
    #[must_use]
    pub fn ring_tokens(&self, ring: usize) -> usize {
        self.ring_ranges(ring).iter().map(Range::len).sum()
    }

    /// Tokens of one rank, ascending.
    #[must_use]
    pub fn own_ranges(&self, ring: usize, ulysses: usize) -> Vec<Range<usize>> {
        let (mut skip, mut left) = (ulysses * self.piece, self.piece);
        let mut own = Vec::new();
        for range in self.ring_ranges(ring) {
            let start = range.start + skip.min(range.len());
            let end = range.end.min(start + left);
            skip -= skip.min(range.len());
            left -= end - start;
            if start < end {
                own.push(start..end);
            }
        }
        own
    }

    /// Number of tokens of one rank.
    #[must_use]
    pub fn own_tokens(&self, ring: usize, ulysses: usize) -> usize {
        let held = self.ring_tokens(ring);
        held.saturating_sub(ulysses * self.piece).min(self.piece)
    }

    /// The own part of `whole`, which has `width` elements a token: for what a table cannot say.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when `whole` is not the whole row.
    pub fn sp_shard<T: Copy>(
        &self,
        whole: &[T],
        width: usize,
        ring: usize,
        ulysses: usize,
    ) -> Result<Vec<T>, ParallelError> {
        equal("elements of the row", self.tokens * width, whole.len())?;
        let own = self.own_ranges(ring, ulysses);
        let parts = own
            .iter()
            .map(|r| &whole[r.start * width..r.end * width])
            .collect::<Vec<_>>();
        Ok(parts.concat())
    }

    /// Puts the parts of all ranks, in the order of the sequence group, back in the order of tokens. A
    /// part may be padded at its end up to [`Self::piece`] tokens.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when a part is missing or too short.
    pub fn sp_gather<T: Copy + Default>(
        &self,
        parts: &[&[T]],
        width: usize,
    ) -> Result<Vec<T>, ParallelError> {
        equal("parts", self.ring() * self.ulysses, parts.len())?;
        let mut whole = vec![T::default(); self.tokens * width];
        for (rank, part) in parts.iter().enumerate() {
            let mut next = 0;
            for range in self.own_ranges(rank / self.ulysses, rank % self.ulysses) {
                let end = next + range.len() * width;
                if end > part.len() {
                    return Err(mismatch("elements of a part", end, part.len()));
                }
                whole[range.start * width..range.end * width].copy_from_slice(&part[next..end]);
                next = end;
            }
        }
        Ok(whole)
    }
}

/// The ranges without empty ones, neighbours made one.
fn joined(list: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::with_capacity(list.len());
    for range in list.into_iter().filter(|r| !r.is_empty()) {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    out
}

fn mismatch(field: &'static str, expected: usize, got: usize) -> ParallelError {
    ParallelError::Mismatch {
        field,
        expected,
        got,
    }
}

fn equal(field: &'static str, expected: usize, got: usize) -> Result<(), ParallelError> {
    if expected == got {
        return Ok(());
    }
    Err(mismatch(field, expected, got))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order() -> impl Strategy<Value = TokenOrder> {
        prop_oneof![Just(TokenOrder::Contiguous), Just(TokenOrder::ZigZag)]
    }

    proptest! {
        #[test]
        fn every_token_has_one_owner_and_comes_back(
            tokens in 0_usize..150, ring in 1_usize..5, ulysses in 1_usize..5, order in order(),
        ) {
            let shards = SequenceShards::new(tokens, ring, ulysses, order).unwrap();
            let whole: Vec<usize> = (0..tokens * 2).collect();
            let mut parts = Vec::new();
            for r in 0..ring {
                let mut of_ring = Vec::new();
                for u in 0..ulysses {
                    let own = shards.own_ranges(r, u);
                    let count: usize = own.iter().map(Range::len).sum();
                    prop_assert_eq!(count, shards.own_tokens(r, u));
                    prop_assert!(count <= shards.piece());
                    of_ring.extend(own.into_iter().flatten());
                    parts.push(shards.sp_shard(&whole, 2, r, u).unwrap());
                }
                let list: Vec<usize> = shards.ring_ranges(r).iter().cloned().flatten().collect();
                prop_assert!(list.is_sorted());
                prop_assert_eq!(of_ring, list);
            }
            let parts: Vec<&[usize]> = parts.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(shards.sp_gather(&parts, 2).unwrap(), whole);
        }

        #[test]
        fn a_contiguous_row_is_cut_as_a_table_cuts_it(tokens in 0_usize..99, ranks in 1_usize..9) {
            let shards = SequenceShards::new(tokens, ranks, 1, TokenOrder::Contiguous).unwrap();
            let table = TokenShards::contiguous(tokens, ranks).unwrap();
            prop_assert_eq!(shards.padding(), table.padding());
            for rank in 0..ranks {
                let own: Vec<usize> = shards.own_ranges(rank, 0).into_iter().flatten().collect();
                let table: Vec<usize> = table.ranges(rank).unwrap().into_iter().flatten().collect();
                prop_assert_eq!(own, table);
            }
        }
    }

    #[test]
    fn a_1024_picture_over_eight_ranks_pads_seven_tokens_on_the_wire() {
        let shards = SequenceShards::new(4097, 2, 4, TokenOrder::Contiguous).unwrap();
        assert_eq!((shards.piece(), shards.padding()), (513, 7));
        assert_eq!(shards.own_tokens(1, 3), 506);
        assert_eq!(shards.own_ranges(1, 3), vec![3591..4097; 1]);
    }

    #[test]
    fn parts_that_do_not_belong_to_the_row_are_refused() {
        let shards = SequenceShards::new(10, 2, 1, TokenOrder::ZigZag).unwrap();
        assert!(shards.sp_shard(&[0; 9], 1, 0, 0).is_err());
        assert!(shards.sp_gather(&[&[0; 6][..]], 1).is_err());
        assert!(shards.sp_gather(&[&[0; 6][..], &[0; 1][..]], 1).is_err());
        assert!(SequenceShards::new(10, 0, 1, TokenOrder::ZigZag).is_err());
    }
}
