//! The official Python client of the OpenAI API works against this server, unchanged.
use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use integration_tests::{cluster::Up, workspace_root};

/// The Python that has the client; without it, one is made as `deploy/test.sh` makes it.
const PYTHON_VARIABLE: &str = "OMNI_OPENAI_PYTHON";

fn python() -> PathBuf {
    if let Some(python) = std::env::var_os(PYTHON_VARIABLE) {
        return python.into();
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let script = workspace_root().join("integration-tests/openai/install.sh");
    let made = Command::new("bash").arg(script).arg(&folder).status();
    assert!(made.unwrap().success(), "the client cannot be installed");
    folder.join("bin/python")
}

#[test]
fn the_official_client_generates_streams_chats_and_understands_errors() {
    let up = Up::shared();
    let script = workspace_root().join("integration-tests/openai/check.py");
    let output = Command::new(python())
        .arg(script)
        .arg(format!("{}/v1", up.http()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{said}\n{complained}\n{}",
        up.log()
    );
    // A script that ends early has checked nothing.
    assert!(said.ends_with("all good\n"), "{said}");
}
