//! The command line: one subcommand a role, built from the table of settings, plus the tools.
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches as _, value_parser};

use crate::{
    bench::{
        AttentionArgs, BalanceArgs, CollectivesArgs, CostsArgs, DecodeArgs, DenoiseArgs, MixArgs,
        MoeArgs, OffloadArgs, SavingArgs, TransferArgs, VaeArgs,
    },
    certs::CertsArgs,
    settings::{self, Role},
    simulate::SimulateArgs,
    tune::TuneArgs,
};

/// Exit codes, as the help says them.
const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 bad command line, 64 bad configuration, \
    model or input, 69 another process cannot be reached.\n\
    Settings come from the flag, else the environment variable, else the file of --config \
    (TOML, one section a role), else the default.";

/// What was asked for.
#[derive(Debug)]
pub(crate) enum Action {
    /// Run a role, or all of them.
    Run {
        role: Role,
        matches: ArgMatches,
        config: Option<PathBuf>,
        exit_with_parent: bool,
    },
    /// Print a role's settings and where each came from.
    Show {
        role: Role,
        matches: ArgMatches,
        config: Option<PathBuf>,
    },
    /// Print the OpenAPI document of the HTTP API.
    OpenApi,
    /// Measure the denoiser.
    BenchDenoise(DenoiseArgs),
    /// Measure text decoding on a GPU.
    BenchDecode(DecodeArgs),
    /// Measure the memory of attention.
    BenchAttention(AttentionArgs),
    /// Measure steps whose layers are read from the checkpoint.
    BenchOffload(OffloadArgs),
    /// Measure the products of the experts on a GPU.
    BenchMoe(MoeArgs),
    /// Measure the VAE on a GPU.
    BenchVae(VaeArgs),
    /// Measure the exchange between GPUs.
    BenchCollectives(CollectivesArgs),
    /// Measure what moving experts does.
    BenchBalance(BalanceArgs),
    /// Measure a packed step of two sizes.
    BenchMix(MixArgs),
    /// Measure what steps cost.
    BenchCosts(CostsArgs),
    /// Measure step caches.
    BenchSaving(SavingArgs),
    /// Measure how fast prefixes move.
    BenchTransfer(TransferArgs),
    /// Fit the colours of cheap previews.
    FitPreview(TuneArgs),
    /// Fit the rescale polynomial of the tea cache.
    Calibrate(TuneArgs),
    /// Run a trace on a simulated cluster.
    Simulate(SimulateArgs),
    /// Make an API key for a tenant.
    ApiKey(String),
    /// Make an authority and certificates.
    Certs(CertsArgs),
}

/// Version, commit and profile, as `--version` shows them.
pub(crate) fn version() -> String {
    format!(
        "{} ({}, {})",
        env!("CARGO_PKG_VERSION"),
        env!("OMNI_GIT_SHA"),
        env!("OMNI_PROFILE")
    )
}

/// The whole command line.
pub(crate) fn command() -> Command {
    let root = Command::new("omni")
        .about("Serve HunyuanImage-3.0 as separate stages")
        .version(version())
        .after_help(EXIT_CODES)
        .max_term_width(100)
        .subcommand_required(true)
        .arg_required_else_help(true);
    let root = Role::ALL.into_iter().fold(root, |root, role| {
        let command = settings::command(role).arg(config_file());
        root.subcommand(command.arg(exit_with_parent()))
    });
    root.subcommand(Command::new("openapi").about("Print the OpenAPI document of the HTTP API"))
        .subcommand(
            Command::new("bench")
                .about("Measure this machine; prints JSON")
                .subcommand_required(true)
                .subcommand(DenoiseArgs::augment_args(Command::new("denoise")))
                .subcommand(DecodeArgs::augment_args(Command::new("decode")))
                .subcommand(AttentionArgs::augment_args(Command::new("attention")))
                .subcommand(BalanceArgs::augment_args(Command::new("balance")))
                .subcommand(CostsArgs::augment_args(Command::new("costs")))
                .subcommand(MixArgs::augment_args(Command::new("mix")))
                .subcommand(SavingArgs::augment_args(Command::new("saving")))
                .subcommand(OffloadArgs::augment_args(Command::new("offload")))
                .subcommand(MoeArgs::augment_args(Command::new("moe")))
                .subcommand(VaeArgs::augment_args(Command::new("vae")))
                .subcommand(CollectivesArgs::augment_args(Command::new("collectives")))
                .subcommand(TransferArgs::augment_args(Command::new("transfer"))),
        )
        .subcommand(TuneArgs::augment_args(
            Command::new("fit-preview").about("Fit the colours of cheap previews to a model's VAE"),
        ))
        .subcommand(TuneArgs::augment_args(
            Command::new("calibrate").about("Fit the tea cache's polynomial to a model"),
        ))
        .subcommand(SimulateArgs::augment_args(Command::new("simulate")))
        .subcommand(
            Command::new("api-key")
                .about("Make an API key: the key on standard error, its entry for api_keys on standard output")
                .arg(Arg::new("tenant").required(true).value_name("TENANT").help("Whose key it is")),
        )
        .subcommand(CertsArgs::augment_args(Command::new("certs")))
        .subcommand(
            Command::new("config")
                .about("Look at settings")
                .subcommand_required(true)
                .subcommand(
                    Role::ALL.into_iter().fold(
                        Command::new("show")
                            .about("Print the settings of a role and where each came from")
                            .subcommand_required(true),
                        |show, role| show.subcommand(settings::command(role).arg(config_file())),
                    ),
                ),
        )
}

fn config_file() -> Arg {
    Arg::new("config")
        .long("config")
        .env("OMNI_CONFIG")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help("Settings file (TOML)")
}

fn exit_with_parent() -> Arg {
    Arg::new("exit_with_parent")
        .long("exit-with-parent")
        .action(ArgAction::SetTrue)
        .help("Stop when standard input closes, as it does when the parent process ends")
}

/// Parses the process's arguments.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = std::ffi::OsString>,
) -> Result<Action, clap::Error> {
    let mut matches = command().try_get_matches_from(arguments)?;
    let action = match matches.remove_subcommand() {
        Some((name, matches)) if name == "bench" => bench(&matches)?,
        Some((name, _)) if name == "openapi" => Action::OpenApi,
        Some((name, matches)) if name == "fit-preview" => {
            Action::FitPreview(TuneArgs::from_arg_matches(&matches)?)
        }
        Some((name, matches)) if name == "calibrate" => {
            Action::Calibrate(TuneArgs::from_arg_matches(&matches)?)
        }
        Some((name, matches)) if name == "simulate" => {
            Action::Simulate(SimulateArgs::from_arg_matches(&matches)?)
        }
        Some((name, matches)) if name == "api-key" => Action::ApiKey(
            matches
                .get_one::<String>("tenant")
                .cloned()
                .unwrap_or_default(),
        ),
        Some((name, matches)) if name == "certs" => {
            Action::Certs(CertsArgs::from_arg_matches(&matches)?)
        }
        Some((name, mut matches)) if name == "config" => {
            let show = matches.remove_subcommand().map(|(_, show)| show);
            let (role, matches) = show
                .and_then(|mut show| show.remove_subcommand())
                .and_then(|(name, matches)| Some((role(&name)?, matches)))
                .ok_or_else(missing)?;
            let config = file(&matches);
            Action::Show {
                role,
                matches,
                config,
            }
        }
        Some((name, matches)) => {
            let role = role(&name).ok_or_else(missing)?;
            let exit_with_parent = matches.get_flag("exit_with_parent");
            let config = file(&matches);
            Action::Run {
                role,
                matches,
                config,
                exit_with_parent,
            }
        }
        None => return Err(missing()),
    };
    Ok(action)
}

fn bench(matches: &ArgMatches) -> Result<Action, clap::Error> {
    match matches.subcommand() {
        Some(("denoise", matches)) => Ok(Action::BenchDenoise(DenoiseArgs::from_arg_matches(
            matches,
        )?)),
        Some(("decode", matches)) => {
            Ok(Action::BenchDecode(DecodeArgs::from_arg_matches(matches)?))
        }
        Some(("attention", matches)) => Ok(Action::BenchAttention(
            AttentionArgs::from_arg_matches(matches)?,
        )),
        Some(("balance", matches)) => Ok(Action::BenchBalance(BalanceArgs::from_arg_matches(
            matches,
        )?)),
        Some(("costs", matches)) => Ok(Action::BenchCosts(CostsArgs::from_arg_matches(matches)?)),
        Some(("mix", matches)) => Ok(Action::BenchMix(MixArgs::from_arg_matches(matches)?)),
        Some(("saving", matches)) => {
            Ok(Action::BenchSaving(SavingArgs::from_arg_matches(matches)?))
        }
        Some(("offload", matches)) => Ok(Action::BenchOffload(OffloadArgs::from_arg_matches(
            matches,
        )?)),
        Some(("moe", matches)) => Ok(Action::BenchMoe(MoeArgs::from_arg_matches(matches)?)),
        Some(("vae", matches)) => Ok(Action::BenchVae(VaeArgs::from_arg_matches(matches)?)),
        Some(("collectives", matches)) => Ok(Action::BenchCollectives(
            CollectivesArgs::from_arg_matches(matches)?,
        )),
        Some(("transfer", matches)) => Ok(Action::BenchTransfer(TransferArgs::from_arg_matches(
            matches,
        )?)),
        _ => Err(missing()),
    }
}

fn file(matches: &ArgMatches) -> Option<PathBuf> {
    matches.get_one::<PathBuf>("config").cloned()
}

fn role(name: &str) -> Option<Role> {
    Role::ALL.into_iter().find(|role| role.name() == name)
}

// clap requires the subcommands itself; this is what is left to say if it ever does not.
fn missing() -> clap::Error {
    clap::Error::new(clap::error::ErrorKind::MissingSubcommand).with_cmd(&command())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn version_names_commit_and_profile() {
        let version = version();
        assert!(version.starts_with(env!("CARGO_PKG_VERSION")), "{version}");
        assert!(version.contains('(') && version.ends_with(')'), "{version}");
    }
}
