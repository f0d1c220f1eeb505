//! What the fuzz target holds, on its seeds and on changed files.

use std::{fs, path::Path};

use ingest::decode;
use proptest::prelude::*;

use crate::{LIMITS, make};

/// Whatever the bytes are, there is a picture of the size that was let in, or one error.
fn holds(bytes: &[u8]) {
    if let Ok(picture) = decode("fuzz", bytes, &LIMITS) {
        assert_eq!(picture.rgb.len(), picture.width * picture.height * 3);
        assert!(picture.width.max(picture.height) <= LIMITS.side as usize);
    }
}

#[test]
fn the_seeds_of_the_fuzz_target_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/decode");
    let mut seeds = 0;
    for entry in fs::read_dir(folder).unwrap() {
        holds(&fs::read(entry.unwrap().path()).unwrap());
        seeds += 1;
    }
    assert!(seeds >= 16, "only {seeds} seeds");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn changed_bytes_never_panic(
        which in 0..4_usize,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let mut bytes = make::one_of_each().swap_remove(which).1;
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        holds(&bytes);
    }
}
