use std::ops::Range;

use super::check;
use crate::ParallelError;

/// The tokens of one row spread over the ranks of a sequence group.
///
/// Every shard has the same length, because collectives want equal buffers; what is missing at the
/// end is padding, which is counted and never attended to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenShards {
    tokens: usize,
    chunk: usize,
    /// Chunk numbers of each shard, in the order the shard stores them.
    chunks: Vec<Vec<usize>>,
}

impl TokenShards {
    /// Consecutive tokens on consecutive ranks: Ulysses, ring without a mask, or both (ring outer).
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] when `ranks` is zero or absurd.
    pub fn contiguous(tokens: usize, ranks: usize) -> Result<Self, ParallelError> {
        check(ranks, 0)?;
        Ok(Self {
            tokens,
            chunk: tokens.div_ceil(ranks),
            chunks: (0..ranks).map(|r| vec![r]).collect(),
        })
    }

    /// Zig-zag: of `2 * ranks` chunks, rank `r` has `r` and `2 * ranks - 1 - r`, so that a causal
    /// mask gives every rank of a ring the same number of query-key pairs.
    ///
    /// # Errors
    /// As [`Self::contiguous`].
    pub fn zigzag(tokens: usize, ranks: usize) -> Result<Self, ParallelError> {
        check(ranks, 0)?;
        Ok(Self {
            tokens,
            chunk: tokens.div_ceil(2 * ranks),
            chunks: (0..ranks).map(|r| vec![r, 2 * ranks - 1 - r]).collect(),
        })
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.chunks.len()
    }

    /// Tokens of the row, without padding.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens every shard stores, padding included.
    #[must_use]
    pub fn shard_len(&self) -> usize {
        self.chunk * self.chunks[0].len()
    }

    /// Padding tokens over all shards: what auto-padding costs.
    #[must_use]
    pub fn padding(&self) -> usize {
        self.shard_len() * self.ranks() - self.tokens
    }

    /// Tokens of shard `rank` in the order it stores them, without padding.
    ///
    /// A range shorter than its chunk is followed by padding within the shard, so the ranges start
    /// at multiples of [`Self::chunk_len`] of the shard.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`].
    pub fn ranges(&self, rank: usize) -> Result<Vec<Range<usize>>, ParallelError> {
        let ranks = self.ranks();
        let chunks = self
            .chunks
            .get(rank)
            .ok_or(ParallelError::RankOutOfRange { rank, ranks })?;
        let clip = |token: usize| token.min(self.tokens);
        Ok(chunks
            .iter()
            .map(|c| clip(c * self.chunk)..clip((c + 1) * self.chunk))
            .collect())
    }

    /// Tokens of one chunk, padding included.
    #[must_use]
    pub fn chunk_len(&self) -> usize {
        self.chunk
    }

    /// Where `token` is: its rank, and its place in that shard. `None` past the last token.
    #[must_use]
    pub fn locate(&self, token: usize) -> Option<(usize, usize)> {
        if token >= self.tokens {
            return None;
        }
        let (chunk, at) = (token / self.chunk, token % self.chunk);
        self.chunks.iter().enumerate().find_map(|(rank, own)| {
            let place = own.iter().position(|&c| c == chunk)?;
            Some((rank, place * self.chunk + at))
        })
    }

    /// Query-key pairs under a causal mask that shard `rank` computes.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`].
    pub fn causal_pairs(&self, rank: usize) -> Result<u64, ParallelError> {
        let upto = |n: usize| (n as u64) * (n as u64 + 1) / 2;
        let ranges = self.ranges(rank)?;
        Ok(ranges.iter().map(|r| upto(r.end) - upto(r.start)).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(tokens: usize, ranks: usize) -> [TokenShards; 2] {
        [
            TokenShards::contiguous(tokens, ranks).unwrap(),
            TokenShards::zigzag(tokens, ranks).unwrap(),
        ]
    }

    proptest! {
        #[test]
        fn every_token_has_one_place(tokens in 0_usize..300, ranks in 1_usize..9) {
            for (kind, shards) in both(tokens, ranks).into_iter().enumerate() {
                let mut owners = vec![0; tokens];
                for rank in 0..ranks {
                    let mut stored = 0;
                    for (i, range) in shards.ranges(rank).unwrap().into_iter().enumerate() {
                        stored += range.len();
                        for token in range.clone() {
                            owners[token] += 1;
                            let place = i * shards.chunk_len() + token - range.start;
                            prop_assert_eq!(shards.locate(token), Some((rank, place)));
                        }
                    }
                    prop_assert!(stored <= shards.shard_len());
                }
                prop_assert!(owners.iter().all(|&n| n == 1));
                prop_assert_eq!(shards.locate(tokens), None);
                // Never a whole token more than needed on any chunk.
                prop_assert!(shards.padding() < ranks * (kind + 1));
                prop_assert_eq!(
                    shards.padding() + tokens, shards.shard_len() * ranks
                );
            }
        }

        #[test]
        fn zigzag_balances_causal_work_exactly_when_nothing_is_padded(
            chunk in 1_usize..20, ranks in 1_usize..9,
        ) {
            let shards = TokenShards::zigzag(2 * ranks * chunk, ranks).unwrap();
            prop_assert_eq!(shards.padding(), 0);
            let first = shards.causal_pairs(0).unwrap();
            let all: u64 = (0..ranks).map(|r| shards.causal_pairs(r).unwrap()).sum();
            for rank in 0..ranks {
                prop_assert_eq!(shards.causal_pairs(rank).unwrap(), first);
            }
            let n = shards.tokens() as u64;
            prop_assert_eq!(all, n * (n + 1) / 2);
        }
    }

    #[test]
    fn a_1024_image_over_seven_ranks_pads_five_tokens() {
        let shards = TokenShards::contiguous(4097, 7).unwrap();
        assert_eq!((shards.shard_len(), shards.padding()), (586, 5));
        assert_eq!(shards.ranges(6).unwrap(), vec![3516..4097; 1]);
        assert!(shards.ranges(7).is_err());
    }

    #[test]
    fn a_zigzag_rank_stores_its_early_chunk_first() {
        let shards = TokenShards::zigzag(15, 2).unwrap();
        assert_eq!(shards.ranges(0).unwrap(), [0..4, 12..15]);
        assert_eq!(shards.ranges(1).unwrap(), [4..8, 8..12]);
        assert_eq!(shards.locate(13), Some((0, 5)));
    }

    #[test]
    fn contiguous_causal_work_is_not_balanced() {
        let shards = TokenShards::contiguous(80, 4).unwrap();
        assert!(shards.causal_pairs(3).unwrap() > 6 * shards.causal_pairs(0).unwrap());
    }
}
