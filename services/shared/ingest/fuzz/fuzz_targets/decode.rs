//! Any bytes: a picture of the size that was let in, or one error. `tests/corpus` replays the seeds.
#![no_main]

use ingest::{Limits, decode};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    bytes: 1 << 16,
    side: 512,
    pixels: 1 << 16,
};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(picture) = decode("fuzz", bytes, &LIMITS) {
        assert_eq!(picture.rgb.len(), picture.width * picture.height * 3);
        assert!(picture.width.max(picture.height) <= LIMITS.side as usize);
    }
});
