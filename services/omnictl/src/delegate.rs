//! Commands that are those of the server's own program: `omnictl bench` is `omni bench`.
use std::{
    env, ffi::OsString, os::unix::process::CommandExt as _, path::PathBuf, process::Command,
};

use crate::error::CliError;

/// Names the program.
const VARIABLE: &str = "OMNI_BIN";

/// `omni`: the named one, else the one beside this program, else the one on the path.
pub(crate) fn omni() -> PathBuf {
    if let Some(named) = env::var_os(VARIABLE).filter(|name| !name.is_empty()) {
        return named.into();
    }
    let beside = env::current_exe()
        .ok()
        .map(|own| own.with_file_name("omni"));
    let beside = beside.filter(|path| path.is_file());
    beside.unwrap_or_else(|| "omni".into())
}

/// Becomes `omni WORD ARGUMENTS`; returns only when it cannot.
pub(crate) fn run(word: &str, arguments: &[OsString]) -> CliError {
    let program = omni();
    let source = Command::new(&program).arg(word).args(arguments).exec();
    CliError::Program {
        program,
        variable: VARIABLE,
        source,
    }
}
