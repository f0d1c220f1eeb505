//! The shipped files are the ones that the model card describes.

use std::collections::BTreeMap;
use std::fs;

use integration_tests::demo::checkpoint_dir;
use sha2::{Digest as _, Sha256};

const CARD: &str = "MODEL_CARD.md";

#[test]
fn the_model_card_lists_every_file_with_its_digest() {
    let dir = checkpoint_dir();
    let card = fs::read_to_string(dir.join(CARD)).unwrap();
    let listed: BTreeMap<String, String> = card
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [file, digest] = cells[..] else {
                return None;
            };
            let digest = digest.trim_matches('`');
            let hex = digest.len() == 64 && digest.chars().all(|c| c.is_ascii_hexdigit());
            hex.then(|| (file.to_owned(), digest.to_owned()))
        })
        .collect();
    let shipped: BTreeMap<String, String> = fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name() != CARD)
        .map(|entry| {
            let digest = Sha256::digest(fs::read(entry.path()).unwrap());
            let hex = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            (entry.file_name().into_string().unwrap(), hex)
        })
        .collect();
    assert_eq!(listed, shipped);
}
