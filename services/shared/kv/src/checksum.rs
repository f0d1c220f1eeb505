use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C (Castagnoli) of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// CRC32C of what has the checksum `crc`, and `bytes` behind it.
#[must_use]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    // The checksum has 32 bits.
    digest.finalize() as u32
}

/// Chunks of a payload of `bytes` bytes; the last one may be short.
#[must_use]
pub fn chunk_count(bytes: u64, chunk_bytes: usize) -> u64 {
    bytes.div_ceil(chunk_bytes.max(1) as u64)
}

/// Byte range of chunk `index` in a payload of `bytes` bytes; empty past the end.
#[must_use]
pub fn chunk_range(index: usize, bytes: usize, chunk_bytes: usize) -> Range<usize> {
    let start = index.saturating_mul(chunk_bytes).min(bytes);
    start..start.saturating_add(chunk_bytes).min(bytes)
}

/// CRC32C of each chunk of `payload`, in order. A `chunk_bytes` of zero is read as one.
#[must_use]
pub fn chunk_crc32c(payload: &[u8], chunk_bytes: usize) -> Vec<u32> {
    payload.chunks(chunk_bytes.max(1)).map(crc32c).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_polynomial_is_castagnoli() {
        assert_eq!(chunk_crc32c(b"123456789", 9), vec![0xe306_9283]);
    }

    proptest! {
        /// Bit by bit, by the definition.
        #[test]
        fn checksums_are_those_of_the_definition_in_one_piece_or_two(
            bytes in prop::collection::vec(any::<u8>(), 0..700), cut in any::<prop::sample::Index>(),
        ) {
            let mut crc = u32::MAX;
            for byte in &bytes {
                crc ^= u32::from(*byte);
                for _ in 0..8 {
                    crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
                }
            }
            let cut = cut.index(bytes.len() + 1);
            prop_assert_eq!(crc32c(&bytes), !crc);
            prop_assert_eq!(crc32c_append(crc32c(&bytes[..cut]), &bytes[cut..]), !crc);
        }

        #[test]
        fn chunk_ranges_tile_the_payload(bytes in 0usize..5000, chunk in 1usize..700) {
            let n = usize::try_from(chunk_count(bytes as u64, chunk)).unwrap();
            let mut next = 0;
            for i in 0..n {
                let r = chunk_range(i, bytes, chunk);
                prop_assert_eq!(r.start, next);
                prop_assert!(!r.is_empty() && r.len() <= chunk);
                next = r.end;
            }
            prop_assert_eq!(next, bytes);
            prop_assert!(chunk_range(n, bytes, chunk).is_empty());
            prop_assert_eq!(chunk_crc32c(&vec![7; bytes], chunk).len(), n);
        }
    }
}
