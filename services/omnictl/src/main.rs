//! `omnictl`: generates images, administers a cluster and plans one from a terminal. To a cluster it speaks gRPC
//! only, and of models it knows no more than their sizes.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod error;
mod generate;
mod kv;
mod output;
mod plan;
mod progress;
mod requests;
mod secure;
mod text;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use args::{Cli, Command, Get};
use error::CliError;
use text::Console;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" with exit code 0; a bad command line has 2.
            let _ = error.print();
            return ExitCode::from(
                u8::try_from(error.exit_code()).unwrap_or(base::code::EXIT_USAGE),
            );
        }
    };
    let console = Console::new();
    match run(cli, &console) {
        Ok(()) => ExitCode::from(base::code::EXIT_OK),
        Err(error) => {
            console.error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(cli: Cli, console: &Console) -> Result<(), CliError> {
    if let Command::Completions { shell } = cli.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "omnictl", &mut script);
        return console.raw(&script);
    }
    if let Command::Plan(args) = &cli.command {
        return plan::run(args, console);
    }
    cli.secure.install()?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::Io {
            what: "start the runtime",
            source,
        })?
        .block_on(dispatch(&cli.endpoint, cli.command, console))
}

async fn dispatch(endpoint: &str, command: Command, console: &Console) -> Result<(), CliError> {
    match command {
        Command::Generate(args) => generate::run(endpoint, &args, console).await,
        Command::Cancel { id } => requests::cancel(endpoint, id, console).await,
        Command::Get(Get::Request { id, output }) => {
            requests::show(endpoint, id, output, console).await
        }
        Command::Get(Get::Members { output }) => admin::members(endpoint, output, console).await,
        Command::Kv(kv) => kv::run(endpoint, kv, console).await,
        Command::Drain { member } => admin::drain(endpoint, member, console).await,
        Command::Version { client, output } => {
            admin::version(endpoint, client, output, console).await
        }
        // Answered before the runtime starts.
        Command::Completions { .. } | Command::Plan(_) => Ok(()),
    }
}
