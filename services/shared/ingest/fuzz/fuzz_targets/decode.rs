//! Any bytes: a picture of the size that was let in, or one error. `tests/corpus` replays the seeds.
#![no_main]

use std::{panic, sync::Once};

use ingest::{Limits, decode};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    bytes: 1 << 16,
    side: 512,
    pixels: 1 << 16,
};

/// A panic inside a decoder is an error like any other, which the usual hook would not wait for. One that comes
/// out still ends the run.
static HOOK: Once = Once::new();

fuzz_target!(|bytes: &[u8]| {
    HOOK.call_once(|| panic::set_hook(Box::new(|_| ())));
    if let Ok(picture) = decode("fuzz", bytes, &LIMITS) {
        assert_eq!(picture.rgb.len(), picture.width * picture.height * 3);
        assert!(picture.width.max(picture.height) <= LIMITS.side as usize);
    }
});
