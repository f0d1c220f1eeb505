//! What was built: filled in by the binaries, shown by `--version`, logs and AdminService.

/// Version, commit and profile of a binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildInfo {
    /// Semantic version of the workspace.
    pub version: String,
    /// Commit the binary was built from; "unknown" outside a checkout.
    pub git_sha: String,
    /// Cargo profile.
    pub profile: String,
}

impl Default for BuildInfo {
    fn default() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git_sha: "unknown".to_owned(),
            profile: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            }
            .to_owned(),
        }
    }
}
