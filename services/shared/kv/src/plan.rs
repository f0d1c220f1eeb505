//! Which checksummed chunks of a payload a receiver must read for its part of the prefix.
use std::ops::Range;

use crate::checksum::chunk_range;
use crate::{KvError, KvGeometry, KvShard, Manifest, Reshard, limits};

/// Bytes that one checksum should cover: one head of one half of one layer, so that a receiver that needs
/// only some heads reads and checks these alone. Where such a part is too small for a checksum of its own,
/// the next larger one that goes evenly into a layer; `fallback` where none fits the bounds.
#[must_use]
pub fn digest_bytes(geometry: &KvGeometry, tokens: usize, fallback: usize) -> usize {
    let head = tokens
        .saturating_mul(geometry.head_dim)
        .saturating_mul(geometry.dtype.bytes());
    let half = head.saturating_mul(geometry.kv_heads);
    let layer = half.saturating_mul(2);
    let payload = geometry.prefix_bytes(tokens);
    [head, half, layer]
        .into_iter()
        .find(|&bytes| {
            (limits::MIN_CHUNK_BYTES..=limits::MAX_CHUNK_BYTES).contains(&bytes)
                && payload / bytes <= limits::MAX_CHUNKS
        })
        .unwrap_or(fallback)
}

/// Bytes of a part, from the payload to the part's own buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    src: usize,
    dst: usize,
    len: usize,
}

/// The chunks that a receiver reads, and where their bytes go. The chunks lie in ascending order, so those
/// of an earlier layer come first.
///
/// The receiver keeps what it reads in *stores*: a store holds consecutive entries of [`Self::chunks`], one
/// after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPlan {
    bytes: usize,
    chunk_bytes: usize,
    chunks: Vec<usize>,
    pieces: Vec<Piece>,
    part_bytes: usize,
}

impl ReadPlan {
    /// The plan for `shard` of the payload that `manifest` describes.
    ///
    /// # Errors
    /// As [`Reshard::new`], and [`KvError::OutOfRange`] naming `bytes` for a payload that this machine cannot
    /// address.
    pub fn new(manifest: &Manifest, shard: &KvShard) -> Result<Self, KvError> {
        let geometry = &manifest.geometry;
        let whole = KvShard::whole(geometry, manifest.tokens);
        let copies = Reshard::new(
            geometry,
            manifest.tokens,
            std::slice::from_ref(&whole),
            std::slice::from_ref(shard),
        )?;
        let bytes = usize::try_from(manifest.bytes).map_err(|_| KvError::OutOfRange {
            field: "bytes",
            min: 1,
            max: usize::MAX as u64,
            got: manifest.bytes,
        })?;
        let element = geometry.dtype.bytes();
        let mut pieces: Vec<Piece> = vec![];
        for copy in copies.copies() {
            let next = Piece {
                src: copy.src_offset * element,
                dst: copy.dst_offset * element,
                len: copy.len * element,
            };
            match pieces.last_mut() {
                Some(last)
                    if last.src + last.len == next.src && last.dst + last.len == next.dst =>
                {
                    last.len += next.len;
                }
                _ => pieces.push(next),
            }
        }
        let chunk_bytes = manifest.chunk_bytes;
        let covered =
            |piece: &Piece| piece.src / chunk_bytes..=(piece.src + piece.len - 1) / chunk_bytes;
        let mut chunks: Vec<usize> = pieces.iter().flat_map(covered).collect();
        chunks.sort_unstable();
        chunks.dedup();
        Ok(Self {
            bytes,
            chunk_bytes,
            chunks,
            pieces,
            part_bytes: shard.elements(geometry) * element,
        })
    }

    /// Chunks to read, ascending.
    #[must_use]
    pub fn chunks(&self) -> &[usize] {
        &self.chunks
    }

    /// Bytes of the part.
    #[must_use]
    pub fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    /// Bytes to read: those of the part where its ends lie at ends of chunks, else a little more.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        let len = |&chunk: &usize| self.chunk(chunk).len() as u64;
        self.chunks.iter().map(len).sum()
    }

    /// Place of a chunk in the payload, in bytes.
    #[must_use]
    pub fn chunk(&self, chunk: usize) -> Range<usize> {
        chunk_range(chunk, self.bytes, self.chunk_bytes)
    }

    /// Place in a store of entry `index` of [`Self::chunks`], when the store begins with entry `first`.
    #[must_use]
    pub fn stored(&self, first: usize, index: usize) -> Range<usize> {
        // Only the last chunk of a payload is short, and nothing comes after it.
        let start = (index - first) * self.chunk_bytes;
        start..start + self.chunk(self.chunks[index]).len()
    }

    /// Bytes of the store that holds the entries `entries`.
    #[must_use]
    pub fn store_bytes(&self, entries: Range<usize>) -> usize {
        match entries.len() {
            0 => 0,
            _ => self.stored(entries.start, entries.end - 1).end,
        }
    }

    /// The entries `entries` as reads of the payload into their store: `(bytes of the payload, place in the
    /// store)`, neighbours joined.
    #[must_use]
    pub fn reads(&self, entries: Range<usize>) -> Vec<(Range<usize>, usize)> {
        let mut reads: Vec<(Range<usize>, usize)> = vec![];
        for index in entries.clone() {
            let (from, to) = (
                self.chunk(self.chunks[index]),
                self.stored(entries.start, index).start,
            );
            match reads.last_mut() {
                Some((last, _)) if last.end == from.start => last.end = from.end,
                _ => reads.push((from, to)),
            }
        }
        reads
    }

    /// Visits the part in the order of its chunks: `visit(entry, range in the chunk, place in the part)` for
    /// each run of bytes. The entry is an index of [`Self::chunks`].
    ///
    /// # Errors
    /// The first one of `visit`.
    pub fn scatter<E>(
        &self,
        mut visit: impl FnMut(usize, Range<usize>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let all = 0..self.bytes;
        self.pieces
            .iter()
            .try_for_each(|piece| self.cut(piece, &all, &mut visit))
    }

    /// As [`Self::scatter`], for the entries `entries` alone.
    pub fn scatter_within(
        &self,
        entries: Range<usize>,
        mut visit: impl FnMut(usize, Range<usize>, usize),
    ) {
        let chunks = &self.chunks[entries];
        let (Some(&first), Some(&last)) = (chunks.first(), chunks.last()) else {
            return;
        };
        // Whatever a piece has in between lies in chunks that are entries.
        let bounds = self.chunk(first).start..self.chunk(last).end;
        let mut visit = |entry, inside, to| {
            visit(entry, inside, to);
            Ok::<(), std::convert::Infallible>(())
        };
        for piece in &self.pieces {
            let Ok(()) = self.cut(piece, &bounds, &mut visit);
        }
    }

    /// Visits what `piece` has within `bounds`, chunk by chunk.
    fn cut<E>(
        &self,
        piece: &Piece,
        bounds: &Range<usize>,
        visit: &mut impl FnMut(usize, Range<usize>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = piece.src.max(bounds.start);
        let end = bounds.end.min(piece.src + piece.len);
        while at < end {
            let chunk = at / self.chunk_bytes;
            let inside = self.chunk(chunk);
            let len = inside.end.min(end) - at;
            let entry = self.chunks.partition_point(|&c| c < chunk);
            let from = at - inside.start;
            visit(entry, from..from + len, piece.dst + at - piece.src)?;
            at += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvDType, PrefixIdentity};
    use proptest::prelude::*;

    fn sample(geometry: KvGeometry, tokens: usize, chunk: usize) -> (Manifest, Vec<u8>) {
        let payload: Vec<u8> = (0..geometry.prefix_bytes(tokens))
            .map(|i| (i ^ (i >> 8)) as u8)
            .collect();
        let id = PrefixIdentity([1; 32]);
        let manifest = Manifest::describe(id, geometry, tokens, &payload, chunk).unwrap();
        (manifest, payload)
    }

    #[test]
    fn one_checksum_covers_one_head_of_the_published_model() {
        let geometry = KvGeometry {
            layers: 32,
            kv_heads: 8,
            head_dim: 128,
            dtype: KvDType::Bf16,
        };
        assert_eq!(digest_bytes(&geometry, 1250, 7), 1250 * 128 * 2);
        assert_eq!(digest_bytes(&geometry, 1, 7), 8 * 256, "half a layer");
        assert_eq!(digest_bytes(&geometry, 1 << 20, 7), 7);
    }

    /// Tensor-parallel halves and quarters: what four ranks read of a prefix is the prefix, once.
    #[test]
    fn ranks_read_exactly_their_heads() {
        let geometry = KvGeometry {
            layers: 3,
            kv_heads: 4,
            head_dim: 16,
            dtype: KvDType::F32,
        };
        let tokens = 40;
        let chunk = digest_bytes(&geometry, tokens, 1);
        let (manifest, payload) = sample(geometry, tokens, chunk);
        for ranks in [1, 2, 4] {
            let heads = 4 / ranks;
            let mut read = 0;
            for rank in 0..ranks {
                let shard = KvShard {
                    heads: rank * heads..(rank + 1) * heads,
                    ..KvShard::whole(&geometry, tokens)
                };
                let plan = ReadPlan::new(&manifest, &shard).unwrap();
                assert_eq!(plan.read_bytes(), plan.part_bytes() as u64);
                read += plan.read_bytes();
            }
            assert_eq!(read, payload.len() as u64, "{ranks} ranks");
        }
    }

    proptest! {
        /// Whatever the chunks and the part: reading the chunks into stores of any size and scattering them
        /// gives what copying the part out of the payload gives.
        #[test]
        fn chunks_scattered_are_the_part(
            layers in 1usize..4, kv_heads in 1usize..5, head_dim in 1usize..20, tokens in 1usize..40,
            chunk in 1024usize..3000, store in 1usize..5, cut in any::<[prop::sample::Index; 6]>(),
        ) {
            let geometry = KvGeometry { layers, kv_heads, head_dim, dtype: KvDType::F32 };
            let (manifest, payload) = sample(geometry, tokens, chunk);
            let range = |a: usize, b: usize, max: usize| {
                let (a, b) = (cut[a].index(max), cut[b].index(max));
                a.min(b)..a.max(b) + 1
            };
            let shard = KvShard {
                layers: range(0, 1, layers),
                heads: range(2, 3, kv_heads),
                tokens: std::iter::once(range(4, 5, tokens)).collect(),
            };
            let whole = KvShard::whole(&geometry, tokens);
            let copies = Reshard::new(&geometry, tokens, &[whole], std::slice::from_ref(&shard)).unwrap();
            let mut wanted = vec![0; shard.elements(&geometry) * 4];
            for copy in copies.copies() {
                let from = copy.src_offset * 4..(copy.src_offset + copy.len) * 4;
                wanted[copy.dst_offset * 4..(copy.dst_offset + copy.len) * 4].copy_from_slice(&payload[from]);
            }
            let plan = ReadPlan::new(&manifest, &shard).unwrap();
            let entries = plan.chunks().len();
            let stores: Vec<(usize, Vec<u8>)> = (0..entries).step_by(store).map(|first| {
                let all = first..(first + store).min(entries);
                let mut bytes = vec![0; plan.store_bytes(all.clone())];
                for (from, to) in plan.reads(all) {
                    bytes[to..to + from.len()].copy_from_slice(&payload[from]);
                }
                (first, bytes)
            }).collect();
            let mut part = vec![0; plan.part_bytes()];
            plan.scatter(|entry, inside, to| {
                let (first, bytes) = &stores[entry / store];
                let at = plan.stored(*first, entry).start;
                part[to..to + inside.len()].copy_from_slice(&bytes[at + inside.start..at + inside.end]);
                Ok::<_, ()>(())
            }).unwrap();
            prop_assert_eq!(&part, &wanted);
            // One store after the other, into memory that has been used.
            let mut part = vec![0xa5; plan.part_bytes()];
            for (first, bytes) in &stores {
                plan.scatter_within(*first..(first + store).min(entries), |entry, inside, to| {
                    let at = plan.stored(*first, entry).start;
                    part[to..to + inside.len()].copy_from_slice(&bytes[at + inside.start..at + inside.end]);
                });
            }
            prop_assert_eq!(part, wanted);
        }
    }
}
