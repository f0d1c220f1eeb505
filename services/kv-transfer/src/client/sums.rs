//! Checksums of a payload that is written piece by piece.
use crate::limits;

/// CRC32C of the chunks of a payload, as far as it has been seen.
#[derive(Debug, Clone)]
pub struct Sums {
    chunk_bytes: usize,
    /// Bytes of the payload.
    total: u64,
    /// Bytes seen.
    seen: usize,
    /// CRC32C of what was seen of a chunk that is not complete.
    partial: u32,
    /// Of complete chunks that nobody has taken yet.
    complete: Vec<u32>,
}

impl Sums {
    /// Of a payload of `total` bytes, none of which has been seen.
    #[must_use]
    pub fn new(chunk_bytes: usize, total: u64) -> Self {
        Self {
            chunk_bytes,
            total,
            seen: 0,
            partial: 0,
            complete: vec![],
        }
    }

    /// Bytes seen.
    #[must_use]
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// Checksums of the chunks that were completed since the last call, in order.
    pub fn take(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.complete)
    }

    /// Takes note of the next bytes, in blocks of at most [`limits::WRITE_BLOCK_BYTES`]: `sum(place in the payload,
    /// block, checksum of what is in front)` gives the checksum with the block.
    ///
    /// # Errors
    /// The first one of `sum`.
    pub fn add<E>(
        &mut self,
        bytes: &[u8],
        mut sum: impl FnMut(usize, &[u8], u32) -> Result<u32, E>,
    ) -> Result<(), E> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = self.chunk_bytes - self.seen % self.chunk_bytes;
            let (block, behind) =
                rest.split_at(left.min(rest.len()).min(limits::WRITE_BLOCK_BYTES));
            self.partial = sum(self.seen, block, self.partial)?;
            self.seen += block.len();
            if block.len() == left || self.seen as u64 == self.total {
                self.complete.push(std::mem::take(&mut self.partial));
            }
            rest = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However a payload is cut into writes, its checksums are those of the whole.
        #[test]
        fn checksums_do_not_depend_on_the_cuts(
            len in 1usize..5000, chunk in 1usize..700, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let payload: Vec<u8> = (0..len).map(|i| ((i * 7) ^ (i >> 5)) as u8).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            let mut sums = Sums::new(chunk, len as u64);
            let mut crcs = vec![];
            for pair in cuts.windows(2).filter(|pair| pair[0] < pair[1]) {
                let at = sums.seen();
                sums.add(&payload[pair[0]..pair[1]], |place, block, crc| {
                    assert_eq!(&payload[place..place + block.len()], block);
                    Ok::<_, ()>(kv::crc32c_append(crc, block))
                }).unwrap();
                prop_assert_eq!(sums.seen(), at + pair[1] - pair[0]);
                crcs.extend(sums.take());
            }
            prop_assert_eq!(crcs, kv::chunk_crc32c(&payload, chunk));
        }
    }
}
