//! `omnictl`: generates images, administers a cluster and plans one from a terminal. To a cluster it speaks gRPC
//! only, and of models it knows no more than their sizes.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod check;
mod context;
mod delegate;
mod error;
mod events;
mod explain;
mod generate;
mod get;
mod kv;
mod man;
mod output;
mod plan;
mod progress;
mod requests;
mod resource;
mod secure;
mod text;
mod top;
mod yaml;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use args::{Cli, Command};
use error::CliError;
use secure::Proof;
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
    // What needs neither server nor runtime.
    let command = match cli.command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "omnictl", &mut script);
            return console.raw(&script);
        }
        Command::Man { dir } => return man::run(dir.as_deref(), console),
        Command::Plan(args) => return plan::run(&args, console),
        Command::Simulate(passed) => return Err(delegate::run("simulate", &passed.arguments)),
        Command::Bench(passed) => return Err(delegate::run("bench", &passed.arguments)),
        Command::Config(command) => return context::run(command, cli.proof, console),
        command => command,
    };
    let (endpoint, known) = match cli.cluster.resolve() {
        Ok(cluster) => (Ok(cluster.endpoint), cluster.proof),
        Err(error) => (Err(error), Proof::default()),
    };
    cli.proof.over(known).install()?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::Io {
            what: "start the runtime",
            source,
        })?
        .block_on(dispatch(endpoint, command, console))
}

async fn dispatch(
    endpoint: Result<String, CliError>,
    command: Command,
    console: &Console,
) -> Result<(), CliError> {
    if let Command::Version { client, output } = command {
        return admin::version(endpoint, client, output, console).await;
    }
    let endpoint = &endpoint?;
    match command {
        Command::Generate(args) => generate::run(endpoint, &args, console).await,
        Command::Edit(args) => generate::run(endpoint, &args.into_generate(), console).await,
        Command::Get(args) => get::get(endpoint, args, console).await,
        Command::Describe(args) => get::describe(endpoint, args, console).await,
        Command::Top(args) => top::run(endpoint, args, console).await,
        Command::Events(args) => events::run(endpoint, args, console).await,
        Command::Explain(args) => explain::explain(endpoint, args, console).await,
        Command::Trace(args) => explain::trace(endpoint, args, console).await,
        Command::Cancel { ids } => requests::cancel(endpoint, ids, console).await,
        Command::Cordon { members } => admin::cordon(endpoint, members, true, console).await,
        Command::Uncordon { members } => admin::cordon(endpoint, members, false, console).await,
        Command::Drain(args) => admin::drain(endpoint, args, console).await,
        Command::Kv(kv) => kv::run(endpoint, kv, console).await,
        Command::Check(args) => check::run(endpoint, args, console).await,
        // Answered before.
        Command::Version { .. }
        | Command::Completions { .. }
        | Command::Man { .. }
        | Command::Plan(_)
        | Command::Simulate(_)
        | Command::Bench(_)
        | Command::Config(_) => Ok(()),
    }
}
