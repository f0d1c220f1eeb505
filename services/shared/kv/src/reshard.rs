//! From the ranks that computed a prefix to the ranks that need it, as a list of copies.
//!
//! Because a payload is laid out `[layer][k|v][kv_head][token][dim]`, a shard by heads is contiguous
//! per layer and half, and going from one tensor-parallel size to another needs no kernel.

use std::ops::Range;

use crate::error::in_range;
use crate::{KvError, KvGeometry, limits};

/// Most ranks on either side of a reshard.
pub const MAX_SHARDS: usize = 4096;

/// Most token ranges of one shard; a zig-zag ring has two.
pub const MAX_TOKEN_RANGES: usize = 1024;

/// The part of a prefix one rank holds or needs.
///
/// Its buffer has the layout of a payload, with only these layers, heads and tokens; the token
/// ranges lie one after the other, without padding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvShard {
    /// Decoder layers: all of them but under pipeline parallelism.
    pub layers: Range<usize>,
    /// Key-value heads; several ranks may hold the same.
    pub heads: Range<usize>,
    /// Tokens in the order they are stored: one range, or the chunks of a ring rank.
    pub tokens: Vec<Range<usize>>,
}

/// Elements to copy from one rank's buffer to another's, all of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCopy {
    /// Layer the elements belong to: a layer can be sent when its copies can be read.
    pub layer: usize,
    /// Index of the producing shard.
    pub src: usize,
    /// First element in the producing shard's buffer.
    pub src_offset: usize,
    /// Index of the receiving shard.
    pub dst: usize,
    /// First element in the receiving shard's buffer.
    pub dst_offset: usize,
    /// Elements.
    pub len: usize,
}

/// A complete list of copies between two sets of shards of one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reshard {
    copies: Vec<KvCopy>,
    src_elements: Vec<usize>,
    dst_elements: Vec<usize>,
    element_bytes: usize,
}

impl KvShard {
    /// The whole prefix.
    #[must_use]
    pub fn whole(geometry: &KvGeometry, tokens: usize) -> Self {
        Self {
            layers: 0..geometry.layers,
            heads: 0..geometry.kv_heads,
            tokens: std::iter::once(0..tokens).collect(),
        }
    }

    /// Tokens of the shard.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.tokens.iter().map(Range::len).sum()
    }

    /// Elements of the shard's buffer.
    #[must_use]
    pub fn elements(&self, geometry: &KvGeometry) -> usize {
        2 * self.layers.len() * self.heads.len() * self.token_count() * geometry.head_dim
    }

    /// Checks that the shard is part of the prefix and holds no token twice.
    fn validate(&self, geometry: &KvGeometry, tokens: usize) -> Result<(), KvError> {
        let inside = |field, range: &Range<usize>, max: usize| {
            in_range(field, range.end as u64, range.start as u64, max as u64)
        };
        inside("shard.layers", &self.layers, geometry.layers)?;
        inside("shard.heads", &self.heads, geometry.kv_heads)?;
        let ranges = self.tokens.len() as u64;
        in_range("shard.token_ranges", ranges, 0, MAX_TOKEN_RANGES as u64)?;
        let mut next = 0;
        for (range, _) in self.by_token() {
            inside("shard.tokens", &range, tokens)?;
            in_range("shard.tokens", range.start as u64, next, tokens as u64)?;
            next = range.end as u64;
        }
        Ok(())
    }

    /// Token ranges in the order of tokens, each with its place in the shard.
    fn by_token(&self) -> Vec<(Range<usize>, usize)> {
        let mut place = 0;
        let mut ranges: Vec<_> = (self
            .tokens
            .iter()
            .filter(|r| !r.is_empty() || r.start > r.end))
        .map(|range| {
            let at = place;
            place += range.len();
            (range.clone(), at)
        })
        .collect();
        ranges.sort_by_key(|(range, _)| range.start);
        ranges
    }

    /// First element of a head of a layer and half in the shard's buffer.
    fn head_offset(&self, layer: usize, half: usize, head: usize, dim: usize) -> usize {
        let heads = ((layer - self.layers.start) * 2 + half) * self.heads.len();
        (heads + head - self.heads.start) * self.token_count() * dim
    }
}

/// A producing shard, ready for lookups.
struct Source<'a> {
    shard: &'a KvShard,
    ranges: Vec<(Range<usize>, usize)>,
}

impl Source<'_> {
    /// Place of `token` in the shard and the end of its range, when the shard holds it.
    fn find(&self, layer: usize, head: usize, token: usize) -> Option<(usize, usize)> {
        if !self.shard.layers.contains(&layer) || !self.shard.heads.contains(&head) {
            return None;
        }
        let after = self.ranges.partition_point(|(r, _)| r.start <= token);
        let (range, place) = self.ranges.get(after.checked_sub(1)?)?;
        range
            .contains(&token)
            .then(|| (place + token - range.start, range.end))
    }
}

impl Reshard {
    /// The copies that give every shard of `dst` exactly its elements, each from one shard of
    /// `src`. Among shards that hold the same elements, different receivers ask different ones.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] naming the field of a shard that is no part of the prefix or holds a
    /// token twice, [`KvError::Uncovered`] when nobody holds an element that is needed.
    pub fn new(
        geometry: &KvGeometry,
        tokens: usize,
        src: &[KvShard],
        dst: &[KvShard],
    ) -> Result<Self, KvError> {
        geometry.validate()?;
        in_range("tokens", tokens as u64, 0, limits::MAX_PREFIX_TOKENS as u64)?;
        for (field, shards) in [("src", src), ("dst", dst)] {
            in_range(field, shards.len() as u64, 1, MAX_SHARDS as u64)?;
            for shard in shards {
                shard.validate(geometry, tokens)?;
            }
        }
        let sources: Vec<_> = src
            .iter()
            .map(|shard| Source {
                shard,
                ranges: shard.by_token(),
            })
            .collect();
        let mut copies = Vec::new();
        for (index, shard) in dst.iter().enumerate() {
            for layer in shard.layers.clone() {
                for (half, head) in (0..2).flat_map(|h| shard.heads.clone().map(move |n| (h, n))) {
                    let head = Head { layer, half, head };
                    head.copies(geometry.head_dim, &sources, (index, shard), &mut copies)?;
                }
            }
        }
        let elements = |s: &[KvShard]| s.iter().map(|s| s.elements(geometry)).collect();
        Ok(Self {
            copies,
            src_elements: elements(src),
            dst_elements: elements(dst),
            element_bytes: geometry.dtype.bytes(),
        })
    }

    /// The copies, grouped by receiver, then by layer.
    #[must_use]
    pub fn copies(&self) -> &[KvCopy] {
        &self.copies
    }

    /// Bytes that receiver `dst` gets from producer `src`; zero for shards that are not there.
    #[must_use]
    pub fn bytes(&self, src: usize, dst: usize) -> usize {
        let between = |c: &&KvCopy| (c.src, c.dst) == (src, dst);
        let elements: usize = self.copies.iter().filter(between).map(|c| c.len).sum();
        elements * self.element_bytes
    }

    /// Carries the copies out in memory.
    ///
    /// # Errors
    /// [`KvError::Inconsistent`] naming the side whose buffers do not have the shards' sizes.
    pub fn apply<T: Copy>(&self, src: &[Vec<T>], dst: &mut [Vec<T>]) -> Result<(), KvError> {
        fits("src", src, &self.src_elements)?;
        fits("dst", dst, &self.dst_elements)?;
        for c in &self.copies {
            let from = &src[c.src][c.src_offset..c.src_offset + c.len];
            dst[c.dst][c.dst_offset..c.dst_offset + c.len].copy_from_slice(from);
        }
        Ok(())
    }
}

/// Checks that buffers have the sizes of their shards.
fn fits<T>(field: &'static str, buffers: &[Vec<T>], elements: &[usize]) -> Result<(), KvError> {
    let differ = |expected: usize, got: usize| KvError::Inconsistent {
        field,
        expected: expected as u64,
        got: got as u64,
    };
    if buffers.len() != elements.len() {
        return Err(differ(elements.len(), buffers.len()));
    }
    let mut pairs = buffers.iter().zip(elements);
    match pairs.find(|(buffer, n)| buffer.len() != **n) {
        Some((buffer, &n)) => Err(differ(n, buffer.len())),
        None => Ok(()),
    }
}

/// One head of one half of one layer.
#[derive(Clone, Copy)]
struct Head {
    layer: usize,
    half: usize,
    head: usize,
}

impl Head {
    /// Appends the copies of this head's tokens to one receiver.
    fn copies(
        self,
        dim: usize,
        sources: &[Source<'_>],
        (dst, shard): (usize, &KvShard),
        copies: &mut Vec<KvCopy>,
    ) -> Result<(), KvError> {
        let Self { layer, half, head } = self;
        let mut dst_offset = shard.head_offset(layer, half, head, dim);
        for range in &shard.tokens {
            let mut token = range.start;
            while token < range.end {
                let holders: Vec<_> = sources
                    .iter()
                    .enumerate()
                    .filter_map(|(i, s)| Some((i, s, s.find(layer, head, token)?)))
                    .collect();
                let Some(&(src, source, (place, end))) = holders.get(dst % holders.len().max(1))
                else {
                    return Err(KvError::Uncovered { layer, head, token });
                };
                let tokens = end.min(range.end) - token;
                let src_offset = source.shard.head_offset(layer, half, head, dim) + place * dim;
                let copy = KvCopy {
                    layer,
                    src,
                    src_offset,
                    dst,
                    dst_offset,
                    len: tokens * dim,
                };
                push(copies, copy);
                dst_offset += copy.len;
                token += tokens;
            }
        }
        Ok(())
    }
}

/// Appends a copy, as part of the last one where both go on without a gap.
fn push(copies: &mut Vec<KvCopy>, next: KvCopy) {
    if let Some(last) = copies.last_mut() {
        let whole = KvCopy {
            src_offset: last.src_offset + last.len,
            dst_offset: last.dst_offset + last.len,
            len: next.len,
            ..*last
        };
        if whole == next {
            last.len += next.len;
            return;
        }
    }
    copies.push(next);
}

#[cfg(test)]
mod tests;
