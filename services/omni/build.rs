//! Tells the binary which commit and profile it was built from.
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../../.git/HEAD");
    println!("cargo::rerun-if-changed=../../.git/logs/HEAD");
    println!("cargo::rerun-if-env-changed=OMNI_GIT_SHA");
    let git = || {
        let output = Command::new("git")
            .args(["rev-parse", "--short=12", "HEAD"])
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let sha = std::env::var("OMNI_GIT_SHA")
        .ok()
        .or_else(git)
        .unwrap_or_else(|| "unknown".into());
    let profile = std::env::var("PROFILE").unwrap_or_else(|_| "unknown".into());
    println!("cargo::rustc-env=OMNI_GIT_SHA={sha}");
    println!("cargo::rustc-env=OMNI_PROFILE={profile}");
}
