//! The fuzzers' corpus, replayed: every file as it is, and changed in many places. New findings belong into
//! `fuzz/corpus/TARGET`.
#![allow(clippy::unwrap_used)]
use std::path::Path;

use kv_transfer::fuzzing;

/// Changed copies of each file.
const CHANGES: u64 = 3000;

fn replay(target: &str, parse: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let seed = std::fs::read(entry.unwrap().path()).unwrap();
        files += 1;
        parse(&seed);
        let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ seed.len() as u64;
        let mut roll = |sides: usize| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % sides.max(1)
        };
        for _ in 0..CHANGES {
            let mut bytes = seed.clone();
            for _ in 0..=roll(4) {
                let at = roll(bytes.len());
                match roll(4) {
                    0 => bytes.truncate(at),
                    1 => bytes.insert(at, roll(256) as u8),
                    _ if at < bytes.len() => bytes[at] ^= 1 << roll(8),
                    _ => {}
                }
            }
            parse(&bytes);
        }
    }
    assert!(files > 0, "{} is empty", folder.display());
}

#[test]
fn control_messages_are_read_or_refused() {
    replay("message", fuzzing::message);
}

#[test]
fn descriptions_of_remote_memory_are_read_or_refused() {
    replay("remote", fuzzing::remote);
}

#[test]
fn messages_at_the_door_are_read_or_refused() {
    replay("door", fuzzing::door);
}
