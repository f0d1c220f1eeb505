//! `omnictl` as a user meets it: exit codes, messages, files; alone and against a fake router.
#![allow(clippy::unwrap_used)]

mod fake;
mod offline;
mod online;
mod operate;
mod plan;
mod scene;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::OnceLock,
    time::Duration,
};

use tokio::process::Command;

/// Longest any command of these tests may take.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);

fn omnictl_path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| integration_tests::binary("omnictl").unwrap())
}

/// `omnictl` with a clean environment for the variables it reads.
fn omnictl(arguments: &[&str]) -> Command {
    let mut command = Command::new(omnictl_path());
    command
        .args(arguments)
        .env_remove("OMNI_ENDPOINT")
        .env("OMNICTL_CONFIG", "/nonexistent/omnictl.toml")
        .kill_on_drop(true);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a finished command left behind.
struct Finished {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

async fn finish(mut command: Command) -> Finished {
    let output = tokio::time::timeout(COMMAND_DEADLINE, command.output())
        .await
        .unwrap()
        .unwrap();
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn file_names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
