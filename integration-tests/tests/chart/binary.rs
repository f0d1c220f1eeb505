//! `files/binary.json` against the binary.
use std::{collections::BTreeSet, fs, process::Command};

use serde::Deserialize;

use crate::read;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claims {
    #[serde(rename = "about")]
    _about: String,
    settings: std::collections::BTreeMap<String, BTreeSet<String>>,
    transports: BTreeSet<String>,
    registries: BTreeSet<String>,
    devices: BTreeSet<String>,
}

fn claims() -> Claims {
    serde_json::from_str(&read("files/binary.json")).unwrap()
}

/// Exit code, standard output and standard error of `omni`, run without settings from the environment.
fn omni(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(integration_tests::binary("omni").unwrap())
        .args(arguments)
        .env_clear()
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// Flags of a role that are settings, as keys.
fn settings(role: &str) -> BTreeSet<String> {
    let (code, help, _) = omni(&[role, "--help"]);
    assert_eq!(code, 0, "{role}");
    let flags = help
        .lines()
        .filter_map(|line| line.split_once("--")?.1.split([' ', ',']).next());
    flags
        .filter(|flag| !["help", "config", "exit-with-parent"].contains(flag))
        .map(|flag| flag.replace('-', "_"))
        .collect()
}

/// The `words` that the checks of `omni config show` let pass.
fn accepted<'a>(arguments: &[&str], words: &[(&'a str, &str)]) -> BTreeSet<String> {
    let pass = |&&(_, value): &&(&'a str, &str)| omni(&[arguments, &[value]].concat()).0 == 0;
    words
        .iter()
        .filter(pass)
        .map(|(name, _)| (*name).to_owned())
        .collect()
}

#[test]
fn the_chart_renders_no_setting_that_the_binary_does_not_have() {
    let claims = claims();
    assert_eq!(claims.settings.len(), 4);
    for (role, claimed) in claims.settings {
        let real = settings(&role);
        let invented: Vec<_> = claimed.difference(&real).collect();
        assert!(
            !claimed.is_empty() && invented.is_empty(),
            "{role}: {invented:?}"
        );
    }
}

#[test]
fn the_chart_offers_no_transport_or_registry_that_the_binary_refuses() {
    let transports = ["shm", "tcp", "rdma"].map(|name| (name, name));
    let show = ["config", "show", "kv-transfer", "--transport"];
    assert!(claims().transports.is_subset(&accepted(&show, &transports)));

    let registries = [
        ("embedded", "embedded"),
        ("etcd", "etcd://127.0.0.1:2379,127.0.0.2:2379"),
    ];
    let show = ["config", "show", "router", "--registry"];
    assert!(claims().registries.is_subset(&accepted(&show, &registries)));
}

#[test]
fn the_chart_offers_no_gpu_before_the_binary_can_be_built_for_one() {
    let manifest = integration_tests::workspace_root().join("services/omni/Cargo.toml");
    let manifest: toml::Table = fs::read_to_string(manifest).unwrap().parse().unwrap();
    let cuda = manifest
        .get("features")
        .and_then(|features| features.get("cuda"));
    let devices = ["cpu"].into_iter().chain(cuda.map(|_| "cuda"));
    let built: BTreeSet<_> = devices.map(str::to_owned).collect();
    assert!(claims().devices.is_subset(&built), "{built:?}");
}

#[test]
fn the_version_of_the_chart_is_the_version_of_the_binary() {
    let (_, version, _) = omni(&["--version"]);
    let version = version.split(' ').nth(1).unwrap();
    let chart = read("Chart.yaml");
    assert!(
        chart.contains(&format!("\nappVersion: {version}\n")),
        "{version}: {chart}"
    );
}
