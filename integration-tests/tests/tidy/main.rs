//! The rules of ARCHITECTURE.md that a compiler does not check: who may know whom, what every
//! crate declares, where `unsafe` may stand, what no file may say.
#![allow(clippy::unwrap_used)]

mod graph;
mod manifests;
mod sources;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders that hold nothing written by hand.
const SKIPPED: [&str; 4] = ["target", ".git", "__pycache__", "fixtures"];

/// Every file below `directory` that people write, relative to the workspace root.
fn files(extensions: &[&str]) -> Vec<PathBuf> {
    let root = integration_tests::workspace_root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                if !SKIPPED.iter().any(|skipped| name == *skipped) {
                    folders.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|e| extensions.iter().any(|&x| e == x))
            {
                found.push(path.strip_prefix(&root).unwrap().to_owned());
            }
        }
    }
    found.sort();
    assert!(
        !found.is_empty(),
        "no {extensions:?} files under {}",
        root.display()
    );
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(integration_tests::workspace_root().join(path)).unwrap()
}

/// Fails with every offence at once.
fn assert_none(offences: Vec<String>, rule: &str) {
    assert!(offences.is_empty(), "{rule}:\n  {}", offences.join("\n  "));
}
