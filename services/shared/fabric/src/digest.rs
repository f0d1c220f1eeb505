//! CRC32C of bytes while they are copied. A copy waits for memory, so that the checksum, which is formed from the
//! registers that hold the bytes anyway, takes no time of its own; and what was checked is what was copied, even
//! where somebody else writes to the source meanwhile.
use std::ptr;

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes that are copied and then checked in the first cache, where the processor lacks the instructions.
const PLAIN_BLOCK: usize = 16 << 10;

/// What becomes of the target's place in the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// The bytes stay there, for whoever reads them next.
    Cached,
    /// They go past the caches: for a copy that is larger than these, whose lines would be read first only to be
    /// overwritten.
    Past,
}

/// Copies `from[..len]` to `to[..len]` and gives the CRC32C of what has the checksum `crc` and those bytes
/// behind it. Each byte of the source is read once.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, they do not overlap, and nobody else uses `to`.
/// Others may write to `from`: the bytes are then any of those that stood there.
pub(crate) unsafe fn copy(
    from: *const u8,
    to: *mut u8,
    len: usize,
    (crc, store): (u32, Store),
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len >= wide::FOLDED + wide::LANE && wide::is_there() {
        if store == Store::Cached {
            // SAFETY: the instructions are there, and the ranges are those of the caller.
            return unsafe { wide::copy::<false>(from, Some(to), len, crc) };
        }
        let head = to.align_offset(wide::LANE).min(wide::LANE);
        // SAFETY: the ranges are those of the caller, which have more bytes than the head.
        let crc = unsafe { plain(from, to, head, crc) };
        // SAFETY: as above.
        let from = unsafe { from.add(head) };
        // SAFETY: as above.
        let to = unsafe { to.add(head) };
        // SAFETY: the instructions are there, the ranges are the rest of the caller's, and the target begins with
        // a whole lane.
        return unsafe { wide::copy::<true>(from, Some(to), len - head, crc) };
    }
    let _ = store;
    // SAFETY: the ranges are those of the caller.
    unsafe { plain(from, to, len, crc) }
}

/// CRC32C of what has the checksum `crc` and `from[..len]` behind it. Each byte is read once.
///
/// # Safety
/// `from` is readable for `len` bytes. Others may write there.
pub(crate) unsafe fn of(from: *const u8, len: usize, crc: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len >= wide::FOLDED && wide::is_there() {
        // SAFETY: the instructions are there, and the range is that of the caller.
        return unsafe { wide::copy::<false>(from, None, len, crc) };
    }
    let mut block = [0; PLAIN_BLOCK];
    let mut crc = crc;
    for at in (0..len).step_by(PLAIN_BLOCK) {
        let part = PLAIN_BLOCK.min(len - at);
        // SAFETY: `at` lies within the range of the caller.
        let from = unsafe { from.add(at) };
        // SAFETY: `part` bytes from there on lie in it too, and the block has room for them.
        crc = unsafe { plain(from, block.as_mut_ptr(), part, crc) };
    }
    crc
}

/// # Safety
/// As [`copy`].
unsafe fn plain(from: *const u8, to: *mut u8, len: usize, crc: u32) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    for at in (0..len).step_by(PLAIN_BLOCK) {
        let part = PLAIN_BLOCK.min(len - at);
        // SAFETY: `at` lies within the range of the caller.
        let from = unsafe { from.add(at) };
        // SAFETY: as above.
        let to = unsafe { to.add(at) };
        // SAFETY: `part` bytes from there on lie in them too.
        unsafe { ptr::copy_nonoverlapping(from, to, part) };
        // SAFETY: these bytes were just written, and nobody else uses them.
        digest.update(unsafe { std::slice::from_raw_parts(to, part) });
    }
    // The checksum has 32 bits.
    digest.finalize() as u32
}

/// With carry-less products of 512 bits: four registers hold a remainder of 256 bytes, into which the next 256
/// are folded ("Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009).
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::is_x86_feature_detected;
    use std::arch::x86_64::{
        __m512i, _mm_cvtsi32_si128, _mm_sfence, _mm512_clmulepi64_epi128, _mm512_set_epi64,
        _mm512_setzero_si512, _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
        _mm512_zextsi128_si512,
    };
    use std::ptr;

    use crc_fast::{CrcAlgorithm, Digest};

    /// Bytes that are folded at once.
    pub(super) const FOLDED: usize = 256;
    /// Bytes of a register.
    pub(super) const LANE: usize = 64;
    const LANES: usize = FOLDED / LANE;
    /// a ^ b ^ c, as a table of three inputs.
    const XOR3: i32 = 0x96;
    /// The Castagnoli polynomial without its leading term.
    const POLYNOMIAL: u32 = 0x1edc_6f41;
    /// The two 64-bit halves of a 128-bit lane move 8 * [`FOLDED`] bits ahead; reflected, they are 32 bits above
    /// and below that.
    const LOW: i64 = key(8 * FOLDED + 32);
    const HIGH: i64 = key(8 * FOLDED - 32);

    /// x^power modulo the polynomial, reflected, one bit further up for the product of reflected numbers.
    const fn key(power: usize) -> i64 {
        let mut rest: u32 = 1;
        let mut done = 0;
        while done < power {
            let carry = rest >> 31;
            rest = (rest << 1) ^ (POLYNOMIAL & carry.wrapping_neg());
            done += 1;
        }
        (rest.reverse_bits() as i64) << 1
    }

    /// 64 bytes at any address.
    #[repr(C, packed)]
    #[derive(Clone, Copy)]
    struct Lane(__m512i);

    /// Whether the processor has what [`copy`] needs.
    pub(super) fn is_there() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
    }

    /// As [`super::copy`], or without a place to copy to as [`super::of`].
    ///
    /// # Safety
    /// As there; [`is_there`] must hold and `len` be at least [`FOLDED`]. To store past the caches the target must
    /// begin at a multiple of [`LANE`].
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn copy<const PAST: bool>(
        from: *const u8,
        to: Option<*mut u8>,
        len: usize,
        crc: u32,
    ) -> u32 {
        let keys = _mm512_set_epi64(HIGH, LOW, HIGH, LOW, HIGH, LOW, HIGH, LOW);
        let mut rest = [_mm512_setzero_si512(); LANES];
        for (lane, rest) in rest.iter_mut().enumerate() {
            // SAFETY: the first `FOLDED` bytes are in the ranges of the caller.
            *rest = unsafe { step::<PAST>(from, to, lane * LANE) };
        }
        // The first four bytes take up what came before.
        let before = _mm512_zextsi128_si512(_mm_cvtsi32_si128((!crc).cast_signed()));
        rest[0] = _mm512_xor_si512(rest[0], before);
        let whole = len / FOLDED * FOLDED;
        for at in (FOLDED..whole).step_by(FOLDED) {
            for (lane, rest) in rest.iter_mut().enumerate() {
                // SAFETY: `at + FOLDED` is at most `whole`, within the ranges of the caller.
                let bytes = unsafe { step::<PAST>(from, to, at + lane * LANE) };
                let low = _mm512_clmulepi64_epi128(*rest, keys, 0x00);
                let high = _mm512_clmulepi64_epi128(*rest, keys, 0x11);
                *rest = _mm512_ternarylogic_epi64(low, high, bytes, XOR3);
            }
        }
        // What is left has the checksum of the whole: the remainder, and the bytes that fill no 256.
        let mut end = [0u8; 2 * FOLDED];
        for (lane, rest) in rest.into_iter().enumerate() {
            let place = end[lane * LANE..][..LANE].as_mut_ptr().cast::<Lane>();
            // SAFETY: the slice has the bytes of one lane, which may lie at any address.
            unsafe { place.write(Lane(rest)) };
        }
        let tail = &mut end[FOLDED..FOLDED + len - whole];
        // SAFETY: `whole` lies within the range of the caller.
        let from = unsafe { from.add(whole) };
        // SAFETY: the tail has as many bytes as the source behind `whole`.
        unsafe { ptr::copy_nonoverlapping(from, tail.as_mut_ptr(), tail.len()) };
        if let Some(to) = to {
            // SAFETY: `whole` lies within the range of the caller.
            let to = unsafe { to.add(whole) };
            // SAFETY: the target has as many bytes behind `whole`, and is no memory of this function.
            unsafe { ptr::copy_nonoverlapping(tail.as_ptr(), to, tail.len()) };
        }
        if PAST {
            // Before anybody is told that the bytes are there.
            _mm_sfence();
        }
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, 0);
        digest.update(&end[..FOLDED + len - whole]);
        digest.finalize() as u32
    }

    /// Reads the 64 bytes at `at` once, copies them and gives them.
    ///
    /// # Safety
    /// They are in the ranges of the caller of [`copy`].
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn step<const PAST: bool>(from: *const u8, to: Option<*mut u8>, at: usize) -> __m512i {
        // SAFETY: they are readable, as the caller says.
        let from = unsafe { from.add(at) };
        // SAFETY: as above, at any address; volatile, so that they are not read a second time for the copy.
        let lane = unsafe { ptr::read_volatile(from.cast::<Lane>()) };
        if let Some(to) = to {
            // SAFETY: they are writable, as the caller says.
            let to = unsafe { to.add(at) };
            if PAST {
                // SAFETY: as above, at a multiple of a lane, as the caller says.
                unsafe { _mm512_stream_si512(to.cast(), lane.0) };
            } else {
                // SAFETY: as above, at any address.
                unsafe { to.cast::<Lane>().write(lane) };
            }
        }
        lane.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, by the definition.
    fn defined(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
            })
        })
    }

    proptest! {
        /// Whatever the length, the place and the cut: the bytes arrive, nothing beside them changes, and the
        /// checksum is that of the definition, with the wide instructions and without.
        #[test]
        fn copies_are_whole_and_their_checksum_is_that_of_the_definition(
            len in prop_oneof![0usize..600, 1000usize..1100, 16_000usize..50_000],
            skip in 0usize..70, seed: u8, cut in any::<prop::sample::Index>(),
        ) {
            let bytes: Vec<u8> = (0..len + skip).map(|i| ((i * 7) ^ (i >> 6)) as u8 ^ seed).collect();
            let bytes = &bytes[skip..];
            let cut = cut.index(len + 1);
            let expected = defined(bytes);
            type Way = unsafe fn(*const u8, *mut u8, usize, u32) -> u32;
            // SAFETY: as the caller of the pointers below.
            let cached: Way = |from, to, len, crc| unsafe { copy(from, to, len, (crc, Store::Cached)) };
            // SAFETY: as above.
            let past: Way = |from, to, len, crc| unsafe { copy(from, to, len, (crc, Store::Past)) };
            for way in [cached, past, plain as Way] {
                let mut out = vec![0xa5u8; len + 64];
                // SAFETY: both parts have `cut` bytes.
                let first = unsafe { way(bytes.as_ptr(), out[32..].as_mut_ptr(), cut, 0) };
                let (rest, to) = (&bytes[cut..], out[32 + cut..].as_mut_ptr());
                // SAFETY: both have the other bytes.
                let crc = unsafe { way(rest.as_ptr(), to, rest.len(), first) };
                prop_assert_eq!(crc, expected);
                prop_assert_eq!(&out[32..32 + len], bytes);
                prop_assert!(out[..32].iter().chain(&out[32 + len..]).all(|byte| *byte == 0xa5));
            }
            // SAFETY: they are there.
            prop_assert_eq!(unsafe { of(bytes.as_ptr(), len, 0) }, expected);
        }
    }
}
