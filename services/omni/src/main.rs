//! The one server binary of Omni: every role, the command that runs all of them on one machine, and
//! the benchmarks. What a role does is in the role's crate; here are only its settings and its life.
#![forbid(unsafe_code)]

mod announce;
mod bench;
mod certs;
mod cli;
mod error;
mod roles;
mod secure;
mod settings;
mod simulate;
mod tune;
mod up;

use std::{io::Write as _, path::Path, process::ExitCode, time::Duration};

use base::{Shutdown, code::EXIT_FAILURE};
use clap::ArgMatches;
use telemetry::{LogFormat, Traces};

use crate::{
    cli::Action,
    error::OmniError,
    settings::{ConfigFile, Role, Settings},
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long what the tasks of a role hold may take to be dropped once the role has ended.
const TEARDOWN_GRACE: Duration = Duration::from_secs(5);
/// How long a process whose parent has died may take to stop cleanly.
const ORPHAN_GRACE: Duration = Duration::from_secs(45);

fn main() -> ExitCode {
    let action = match cli::parse(std::env::args_os()) {
        Ok(action) => action,
        Err(error) => {
            // Help and version come this way too, with exit code 0.
            let _ = error.print();
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    match run(action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "omni: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(action: Action) -> Result<(), OmniError> {
    match action {
        Action::Run {
            role,
            matches,
            config,
            exit_with_parent,
        } => run_role(role, &matches, config.as_deref(), exit_with_parent),
        Action::Show {
            role,
            matches,
            config,
        } => {
            let file = ConfigFile::read(config.as_deref())?;
            let settings = Settings::resolve(role, &matches, &file)?;
            roles::check(role, &settings)?;
            print(&settings.to_string())
        }
        Action::OpenApi => print(&format!("{:#}", router::openapi())),
        Action::BenchDecode(args) => print(&bench::decode(&args)?),
        Action::BenchDenoise(args) => print(&bench::denoise(&args)?),
        Action::BenchAttention(args) => print(&bench::attention(&args)?),
        Action::BenchBalance(args) => print(&bench::balance(&args)?),
        Action::BenchCosts(args) => print(&bench::costs(&args)?),
        Action::BenchMix(args) => print(&bench::mix(&args)?),
        Action::BenchSaving(args) => print(&bench::saving(&args)?),
        Action::BenchOffload(args) => print(&bench::offload(&args)?),
        Action::BenchMoe(args) => print(&bench::moe(&args)?),
        Action::BenchVae(args) => print(&bench::vae(&args)?),
        Action::BenchCollectives(args) => print(&bench::collectives(&args)?),
        Action::BenchTransfer(args) => print(&bench::transfer(&args)?),
        Action::FitPreview(args) => print(&tune::fit_preview(&args)?),
        Action::Calibrate(args) => print(&tune::calibrate(&args)?),
        Action::Simulate(args) => print(&simulate::run(&args)?),
        Action::ApiKey(tenant) => print(&api_key(&tenant)?),
        Action::Certs(args) => print(&certs::run(&args)?),
    }
}

/// A key is shown once; what is kept of it is its digest.
fn api_key(tenant: &str) -> Result<String, OmniError> {
    let chance = base::rng::Source::from_os();
    let random = std::array::from_fn(|_| chance.next_u64());
    let (key, entry) = router::new_key(tenant, &random).map_err(OmniError::Config)?;
    writeln!(std::io::stderr(), "{key}")
        .map_err(|error| OmniError::io("write to standard error", error))?;
    Ok(entry)
}

fn print(text: &str) -> Result<(), OmniError> {
    writeln!(std::io::stdout(), "{}", text.trim_end())
        .map_err(|error| OmniError::io("write to standard output", error))
}

fn run_role(
    role: Role,
    matches: &ArgMatches,
    file: Option<&Path>,
    exit_with_parent: bool,
) -> Result<(), OmniError> {
    let settings = Settings::resolve(role, matches, &ConfigFile::read(file)?)?;
    roles::check(role, &settings)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| OmniError::io("start the runtime", error))?;
    let traces = {
        // The way to a collector lives in the runtime.
        let _inside = runtime.enter();
        start_logs(role, &settings)?
    };
    proto::server::trace_calls(telemetry::trace::call);
    let done = runtime.block_on(async {
        let (shutdown, _listener) =
            Shutdown::on_signals().map_err(|error| OmniError::io("listen for signals", error))?;
        if exit_with_parent {
            watch_parent(shutdown.clone())?;
        }
        Box::pin(roles::run(role, &settings, file, shutdown)).await
    });
    traces.finish();
    // What the tasks hold goes now, not beside the exit handlers: UCX has its own, and a worker that
    // is torn down while they run crashes. Blocking work that is still running has lost its caller;
    // it must not hold the process for longer.
    runtime.shutdown_timeout(TEARDOWN_GRACE);
    done
}

fn start_logs(role: Role, settings: &Settings) -> Result<Traces, OmniError> {
    let format = settings.one_of(
        "log_format",
        &[
            ("auto", LogFormat::Auto),
            ("text", LogFormat::Text),
            ("json", LogFormat::Json),
        ],
    )?;
    let level = settings.text("log_level")?.to_owned();
    let traces = roles::traces(role, settings)?;
    telemetry::init(&telemetry::LogConfig { level, format }, &traces)
        .map_err(|error| OmniError::of(&error))
}

/// Standard input is a pipe that the parent holds open; when it closes, the parent is gone.
fn watch_parent(shutdown: Shutdown) -> Result<(), OmniError> {
    std::thread::Builder::new()
        .name("parent-watch".to_owned())
        .spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            shutdown.trigger();
            std::thread::sleep(ORPHAN_GRACE);
            end_now();
        })
        .map(drop)
        .map_err(|error| OmniError::io("start thread parent-watch", error))
}

// A clean stop has failed and nobody is left to kill this process: one of the two mains decides.
#[allow(clippy::disallowed_methods)]
fn end_now() -> ! {
    std::process::exit(EXIT_FAILURE.into())
}
