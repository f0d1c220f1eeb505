use std::ops::Range;

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
    payload
        .chunks(chunk_bytes.max(1))
        .map(crc32c::crc32c)
        .collect()
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
