//! The command line. Numbers are parsed wide: whether a value is legal is the server's to say, so
//! that every client hears the same sentence.
use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use proto::v1::{self, SizePolicy};

use crate::{
    admin::DrainArgs,
    check::CheckArgs,
    context::{ClusterArgs, ConfigCommand},
    events::EventsArgs,
    explain::ExplainArgs,
    get::{DescribeArgs, GetArgs},
    kv::Kv,
    plan::PlanArgs,
    secure::Proof,
    top::TopArgs,
};

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   failed, or a check failed
  2   bad command line
  64  bad input or configuration; the message names the field
  69  the server cannot be reached, or has nobody to do the work";

/// Generate images with Omni and administer it.
///
/// Data goes to stdout, talk to stderr.
#[derive(Debug, Parser)]
#[command(name = "omnictl", version, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    #[command(flatten)]
    pub(crate) proof: Proof,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Turn a prompt into a PNG.
    Generate(GenerateArgs),
    /// Change a picture as a prompt says.
    Edit(EditArgs),
    /// List members, pools, requests, prefixes or plans.
    Get(GetArgs),
    /// Show everything about one of them, and what has happened to it.
    Describe(DescribeArgs),
    /// Show the cluster at a glance, again and again.
    Top(TopArgs),
    /// Show what has happened in the cluster.
    Events(EventsArgs),
    /// Show why a request went where it went, and where its time went.
    Explain(ExplainArgs),
    /// Show the time of a request as a tree.
    Trace(ExplainArgs),
    /// Stop requests at their next step.
    Cancel {
        /// Request ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Keep new work from members; what they have goes on.
    Cordon {
        /// Member ids, as `omnictl get members` shows them.
        #[arg(required = true)]
        members: Vec<String>,
    },
    /// Let members have new work again.
    Uncordon {
        /// Member ids.
        #[arg(required = true)]
        members: Vec<String>,
    },
    /// Ask a member to finish its work and leave.
    Drain(DrainArgs),
    /// Look at the pools of prefixes and their cache.
    #[command(subcommand)]
    Kv(Kv),
    /// Check this machine and the cluster; exits 1 when something is not as it must be.
    Check(CheckArgs),
    /// Show which ways of spreading a model over GPUs fit, and what they would cost.
    Plan(PlanArgs),
    /// Let a policy decide about a trace of requests; this is `omni simulate`.
    #[command(disable_help_flag = true)]
    Simulate(Passed),
    /// Measure this machine; this is `omni bench`.
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Say which cluster commands are for.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Show the version of this program and of the server.
    Version {
        /// Do not ask the server.
        #[arg(long)]
        client: bool,
        #[arg(short, long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Print a completion script.
    Completions { shell: Shell },
    /// Print the manual page, or write that of every command.
    Man {
        /// Directory for one file a command.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// Everything after the command goes to the other program as it is.
#[derive(Debug, Args)]
pub(crate) struct Passed {
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    pub(crate) arguments: Vec<OsString>,
}

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct EditArgs {
    /// The picture to change, PNG, JPEG, WebP or GIF.
    pub(crate) picture: PathBuf,
    #[command(flatten)]
    pub(crate) rest: GenerateArgs,
}

impl EditArgs {
    /// The same wish as one of `generate`.
    pub(crate) fn into_generate(self) -> GenerateArgs {
        let mut args = self.rest;
        args.image.insert(0, self.picture);
        args
    }
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// What to draw.
    pub(crate) prompt: String,
    /// A picture to draw from, PNG, JPEG, WebP or GIF; may be given up to three times.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    /// What the model writes before it draws. Default: the model's.
    #[arg(long, value_enum)]
    pub(crate) mode: Option<Mode>,
    /// Output size as WIDTHxHEIGHT in pixels, or auto: the model names one. Default: that of the first
    /// picture, or without any the model's square size.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) size: String,
    /// What to do with a size the model does not have: refuse it or take the nearest aspect ratio.
    #[arg(long, value_enum, default_value_t = Policy::Exact)]
    pub(crate) size_policy: Policy,
    /// Denoising steps. Default: the model's.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) steps: Option<i32>,
    /// Seed of the noise. Default: drawn by the server and reported.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Classifier-free guidance scale; 0 and 1 turn it off. Default: the model's.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) guidance: Option<f64>,
    /// Prompt template, pretrain or instruct. Default: the model's.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) template: String,
    /// Text before the user's turn.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) system_prompt: String,
    /// Model name. Default: the one served.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) model: String,
    /// Request id, for `omnictl explain` and safe retries. Default: a fresh one.
    #[arg(long)]
    pub(crate) request_id: Option<String>,
    /// Give up after this many seconds. Default: 600.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: Option<u32>,
    /// File to write; it appears whole or not at all.
    #[arg(short, long, default_value = "out.png")]
    pub(crate) output: PathBuf,
    /// Print every event as one JSON line.
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress and no summary.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    Exact,
    Snap,
}

impl From<Policy> for SizePolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Exact => SizePolicy::Exact,
            Policy::Snap => SizePolicy::Snap,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Image,
    Think,
    Recaption,
    ThinkRecaption,
}

impl From<Mode> for v1::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Image => Self::Image,
            Mode::Think => Self::Think,
            Mode::Recaption => Self::Recaption,
            Mode::ThinkRecaption => Self::ThinkRecaption,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generate(extra: &[&str]) -> GenerateArgs {
        let words = ["omnictl", "generate", "a boat"].iter().chain(extra);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Generate(args) => args,
            other => panic!("parsed {other:?}"),
        }
    }

    #[test]
    fn out_of_range_numbers_reach_the_server() {
        assert_eq!(generate(&["--steps=-1"]).steps, Some(-1));
        assert_eq!(generate(&["--steps", "-1"]).steps, Some(-1));
        assert_eq!(
            generate(&["--seed", "9223372036854775808"]).seed,
            Some(1 << 63)
        );
        assert!(generate(&["--guidance", "NaN"]).guidance.unwrap().is_nan());
        assert_eq!(generate(&["--guidance", "-3"]).guidance, Some(-3.0));
        assert_eq!(generate(&["--guidance", "1e9"]).guidance, Some(1e9));
        assert_eq!(generate(&["--size", "1024x"]).size, "1024x");
    }

    #[test]
    fn absent_options_stay_absent() {
        let args = generate(&[]);
        assert_eq!((args.steps, args.seed, args.guidance), (None, None, None));
        assert!(args.size.is_empty() && args.template.is_empty());
    }

    #[test]
    fn an_edit_is_a_generation_from_the_picture_it_names_first() {
        let words = [
            "omnictl",
            "edit",
            "boat.png",
            "make it blue",
            "--image",
            "sea.png",
        ];
        let Command::Edit(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("no edit");
        };
        let args = args.into_generate();
        assert_eq!(args.prompt, "make it blue");
        assert_eq!(
            args.image,
            [PathBuf::from("boat.png"), PathBuf::from("sea.png")]
        );
    }

    #[test]
    fn what_is_passed_on_is_passed_as_it_is() {
        let words = [
            "omnictl",
            "bench",
            "denoise",
            "--help",
            "-x",
            "--endpoint",
            "y",
        ];
        let Command::Bench(passed) = Cli::try_parse_from(words).unwrap().command else {
            panic!("no bench");
        };
        assert_eq!(passed.arguments.len(), 5);
    }

    #[test]
    fn command_tree_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }
}
