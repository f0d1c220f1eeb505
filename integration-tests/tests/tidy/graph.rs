//! Dependency directions, over `cargo metadata`. Only what ships counts: development dependencies
//! may point anywhere.
use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, PackageId};

use crate::assert_none;

/// Which packages a package is built from.
pub(crate) struct Graph {
    pub(crate) metadata: Metadata,
    names: BTreeMap<PackageId, String>,
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    pub(crate) fn load() -> Self {
        let metadata = MetadataCommand::new()
            .manifest_path(integration_tests::workspace_root().join("Cargo.toml"))
            .other_options(["--locked".to_owned()])
            .exec()
            .unwrap();
        let names: BTreeMap<_, _> = metadata
            .packages
            .iter()
            .map(|p| (p.id.clone(), p.name.to_string()))
            .collect();
        let mut edges = BTreeMap::<String, BTreeSet<String>>::new();
        for node in &metadata.resolve.as_ref().unwrap().nodes {
            let ships = |dep: &&cargo_metadata::NodeDep| {
                dep.dep_kinds
                    .iter()
                    .any(|kind| kind.kind != DependencyKind::Development)
            };
            let to = node
                .deps
                .iter()
                .filter(ships)
                .map(|dep| names[&dep.pkg].clone());
            edges.entry(names[&node.id].clone()).or_default().extend(to);
        }
        Self {
            metadata,
            names,
            edges,
        }
    }

    /// Name and folder (relative to the root) of every crate of the workspace.
    pub(crate) fn members(&self) -> Vec<(String, String)> {
        let root = &self.metadata.workspace_root;
        let folder = |manifest: &cargo_metadata::camino::Utf8Path| {
            manifest
                .parent()
                .unwrap()
                .strip_prefix(root)
                .unwrap()
                .to_string()
        };
        let member = |id: &PackageId| {
            let package = self.metadata.packages.iter().find(|p| p.id == *id).unwrap();
            (self.names[id].clone(), folder(&package.manifest_path))
        };
        self.metadata.workspace_members.iter().map(member).collect()
    }

    fn direct(&self, package: &str) -> &BTreeSet<String> {
        &self.edges[package]
    }

    fn reachable(&self, package: &str) -> BTreeSet<String> {
        let (mut seen, mut open) = (BTreeSet::new(), vec![package.to_owned()]);
        while let Some(next) = open.pop() {
            for to in self.direct(&next) {
                if seen.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        seen
    }
}

/// A crate, and what must not be reachable from it by any path.
const NEVER_SEES: [(&str, &[&str]); 12] = [
    ("router", &["model", "kernels", "stage", "cudarc", "ucx-rs"]),
    (
        "omnictl",
        &["model", "kernels", "stage", "router", "registry", "ucx-rs"],
    ),
    (
        "model",
        &[
            "tokio",
            "tonic",
            "axum",
            "base",
            "proto",
            "registry",
            "etcd-client",
        ],
    ),
    ("kernels", &["tokio", "tonic", "model", "base"]),
    ("kv", &["tokio", "tonic", "kernels", "model", "base"]),
    ("parallel", &["tokio", "tonic", "model", "fabric"]),
    ("ranks", &["tokio", "tonic", "model", "base"]),
    ("fabric", &["tokio", "tonic", "kv", "parallel", "base"]),
    ("ingest", &["tokio", "tonic", "hyper", "model", "base"]),
    ("base", &["tonic", "prost", "axum", "proto"]),
    ("schedule", &["tokio", "tonic", "proto", "model", "base"]),
    ("stage", &["router", "ar-stage", "dit-worker"]),
];

/// A foreign crate, and the only crates that may name it.
const ONLY_IN: [(&str, &[&str]); 3] = [
    ("cudarc", &["kernels", "parallel"]),
    ("ucx-rs", &["fabric"]),
    ("etcd-client", &["registry"]),
];

#[test]
fn no_crate_sees_what_it_must_not() {
    let graph = Graph::load();
    let mut offences = Vec::new();
    for (package, forbidden) in NEVER_SEES {
        let seen = graph.reachable(package);
        assert!(!seen.is_empty(), "{package} has no dependencies at all");
        let bad = forbidden.iter().filter(|name| seen.contains(**name));
        offences.extend(bad.map(|name| format!("{package} sees {name}")));
    }
    assert_none(offences, "forbidden dependencies");
}

#[test]
fn heavy_foreign_crates_have_one_home() {
    let graph = Graph::load();
    let mut offences = Vec::new();
    for (foreign, homes) in ONLY_IN {
        for (name, _) in graph.members() {
            if graph.direct(&name).contains(foreign) && !homes.contains(&name.as_str()) {
                offences.push(format!("{name} depends on {foreign}"));
            }
        }
    }
    assert_none(offences, "only some crates may know these");
}

#[test]
fn libraries_never_depend_on_services() {
    let graph = Graph::load();
    let is_library =
        |folder: &str| !folder.starts_with("services/") || folder.starts_with("services/shared/");
    let members = graph.members();
    let services: BTreeSet<_> = members
        .iter()
        .filter(|(_, folder)| !is_library(folder))
        .map(|(name, _)| name)
        .collect();
    assert!(
        services.len() >= 6,
        "services were not recognised: {services:?}"
    );
    let mut offences = Vec::new();
    for (name, _) in members.iter().filter(|(_, folder)| is_library(folder)) {
        let bad = graph.direct(name).iter().filter(|to| services.contains(to));
        offences.extend(bad.map(|to| format!("{name} depends on {to}")));
    }
    assert_none(offences, "libraries never depend on services");
}
