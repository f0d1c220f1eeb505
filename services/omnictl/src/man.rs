//! `omnictl man`: manual pages, made of the same descriptions as the help.
use std::{fs, path::Path};

use clap::CommandFactory as _;

use crate::{args::Cli, error::CliError, text::Console};

/// Prints the page of the whole, or writes one file a command to `dir`.
pub(crate) fn run(dir: Option<&Path>, console: &Console) -> Result<(), CliError> {
    let Some(dir) = dir else {
        let mut page = Vec::new();
        let made = clap_mangen::Man::new(Cli::command()).render(&mut page);
        made.map_err(|source| CliError::Io {
            what: "make the page",
            source,
        })?;
        return console.raw(&page);
    };
    let refused = |source: std::io::Error| CliError::Output {
        path: dir.to_owned(),
        reason: source.to_string(),
    };
    fs::create_dir_all(dir).map_err(refused)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(refused)
}
