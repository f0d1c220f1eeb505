//! What every crate of the workspace declares.
use std::{collections::BTreeSet, path::Path};

use toml::Table;

use crate::{assert_none, files, graph::Graph, read};

const SECTIONS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Crates that generated code names, so that no source file does.
const NAMED_BY_GENERATED_CODE: [(&str, &str); 2] = [("proto", "prost"), ("proto", "tonic-prost")];

fn manifest(folder: &str) -> Table {
    read(&Path::new(folder).join("Cargo.toml")).parse().unwrap()
}

#[test]
fn every_crate_follows_the_workspace() {
    let mut offences = Vec::new();
    for (name, folder) in Graph::load().members() {
        let table = manifest(&folder);
        let inherits = |key: &str| {
            table["package"]
                .get(key)
                .and_then(|v| v.get("workspace"))
                .is_some()
        };
        let mut rule = |holds: bool, what: &str| {
            if !holds {
                offences.push(format!("{name}: {what}"));
            }
        };
        rule(
            folder.rsplit('/').next() == Some(&name),
            "folder name is not the crate name",
        );
        for key in ["version", "edition", "rust-version", "license", "publish"] {
            rule(inherits(key), &format!("{key} is not the workspace's"));
        }
        let lints = table.get("lints").and_then(|lints| lints.get("workspace"));
        rule(lints.is_some(), "lints are not the workspace's");
        for section in SECTIONS {
            let Some(Some(entries)) = table.get(section).map(|s| s.as_table()) else {
                continue;
            };
            for (dependency, spec) in entries {
                let inherited = spec.get("workspace").is_some();
                rule(
                    inherited,
                    &format!("{section}.{dependency} has a version of its own"),
                );
            }
        }
    }
    assert_none(offences, "manifests");
    let root: Table = read(Path::new("Cargo.toml")).parse().unwrap();
    assert_eq!(
        root["workspace"]["package"]["publish"].as_bool(),
        Some(false)
    );
}

#[test]
fn every_declared_dependency_is_used() {
    let sources = files(&["rs"]);
    let mut offences = Vec::new();
    for (name, folder) in Graph::load().members() {
        let text: String = sources
            .iter()
            .filter(|path| path.starts_with(&folder))
            .map(|path| read(path))
            .collect();
        let table = manifest(&folder);
        for section in SECTIONS {
            let Some(Some(entries)) = table.get(section).map(|s| s.as_table()) else {
                continue;
            };
            for dependency in entries.keys() {
                let generated = NAMED_BY_GENERATED_CODE.contains(&(name.as_str(), dependency));
                if !generated && !names_crate(&text, &dependency.replace('-', "_")) {
                    offences.push(format!("{name}: {section}.{dependency}"));
                }
            }
        }
    }
    assert_none(offences, "declared, but no source file names it");
}

/// `ident` stands in `text` as a whole word where a crate name stands.
fn names_crate(text: &str, ident: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(ident).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = &text[at + ident.len()..];
        let whole = !before.is_some_and(is_word) && !after.chars().next().is_some_and(is_word);
        let used = before == Some(' ') && (after.starts_with(';') || after.starts_with(" as "));
        whole && (after.starts_with("::") || used)
    })
}

#[test]
fn every_workspace_dependency_is_used_by_a_crate() {
    let root: Table = read(Path::new("Cargo.toml")).parse().unwrap();
    let declared = root["workspace"]["dependencies"].as_table().unwrap();
    let mut used = BTreeSet::new();
    for (_, folder) in Graph::load().members() {
        let table = manifest(&folder);
        for section in SECTIONS {
            if let Some(entries) = table.get(section).and_then(|s| s.as_table()) {
                used.extend(entries.keys().cloned());
            }
        }
    }
    let unused = declared
        .keys()
        .filter(|name| !used.contains(*name))
        .cloned()
        .collect();
    assert_none(unused, "workspace dependencies nobody uses");
}

#[test]
fn the_code_map_names_every_crate() {
    let map = read(Path::new("ARCHITECTURE.md"));
    let missing = Graph::load()
        .members()
        .into_iter()
        .map(|(_, folder)| format!("`{folder}/`"))
        .filter(|folder| !map.contains(folder))
        .collect();
    assert_none(missing, "ARCHITECTURE.md does not name");
}
