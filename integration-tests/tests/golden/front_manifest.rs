//! The golden set is what its manifest says.

use sha2::{Digest, Sha256};

use crate::common::{count, json, path};

#[test]
fn every_file_of_the_manifest_is_there_and_unchanged() {
    let manifest = json("MANIFEST.json");
    let files = manifest.as_object().unwrap();
    let mut checked = 0;
    for (name, entry) in files {
        let bytes = std::fs::read(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        // The prose may be edited after the numbers were made.
        if name.ends_with(".md") {
            continue;
        }
        assert_eq!(bytes.len(), count(&entry["bytes"]), "size of {name}");
        let digest: String = Sha256::digest(&bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(
            digest,
            entry["sha256"].as_str().unwrap(),
            "digest of {name}"
        );
        checked += 1;
    }
    println!("{checked} files have the digest of the manifest");
    assert!(checked > 0, "the manifest lists no data");
}

#[test]
fn no_data_file_is_outside_the_manifest() {
    let manifest = json("MANIFEST.json");
    let mut pending = vec![String::new()];
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(path(&folder)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{folder}{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() {
                pending.push(format!("{name}/"));
            } else if name != "MANIFEST.json" {
                assert!(
                    manifest.get(&name).is_some(),
                    "{name} is not in the manifest"
                );
            }
        }
    }
}
