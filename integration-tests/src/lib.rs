//! What the integration tests share: finding the real binaries and the golden fixtures, running them as a system and
//! talking to it, reading drawings, and drawing with the demo model.
#![forbid(unsafe_code)]

pub mod browser;
pub mod cluster;
pub mod demo;
pub mod scene;
pub mod web;

use std::{
    env, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Directory that holds ready-built binaries; without it they are built on first use.
pub const BIN_DIR_VARIABLE: &str = "OMNI_BIN_DIR";
/// Directory of the golden set; without it the committed fixtures are read.
pub const GOLDEN_DIR_VARIABLE: &str = "OMNI_GOLDEN_DIR";

/// The root of the workspace.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The golden set: `OMNI_GOLDEN_DIR`, or the committed fixtures.
pub fn golden_dir() -> PathBuf {
    env::var_os(GOLDEN_DIR_VARIABLE)
        .map(PathBuf::from)
        .unwrap_or_else(|| workspace_root().join("integration-tests/fixtures/golden"))
}

/// Path of the binary of package `name`, as the tests of other packages run it.
///
/// # Errors
/// When it is not in `OMNI_BIN_DIR`, or cargo cannot build it; the compiler's words are on stderr.
pub fn binary(name: &str) -> io::Result<PathBuf> {
    if let Some(directory) = env::var_os(BIN_DIR_VARIABLE) {
        let path = PathBuf::from(directory).join(name);
        if path.is_file() {
            return Ok(path);
        }
        return Err(failed(format!("{} does not exist", path.display())));
    }
    build(name)
}

/// Asks cargo, because only cargo knows the target directory, the profile and what is stale.
fn build(name: &str) -> io::Result<PathBuf> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace_root()).stderr(Stdio::inherit());
    cargo.args(["build", "--package", name, "--bin", name]);
    cargo.arg("--message-format=json-render-diagnostics");
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let output = cargo.output()?;
    if !output.status.success() {
        return Err(failed(format!("cargo could not build {name}")));
    }
    output
        .stdout
        .split(|&byte| byte == b'\n')
        .filter_map(|line| serde_json::from_slice::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| failed(format!("cargo built no executable for {name}")))
}

fn failed(message: String) -> io::Error {
    io::Error::other(message)
}
