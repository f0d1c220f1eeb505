//! `omnictl check`: whether this machine and the cluster are as they must be, before something fails because they
//! are not. Every check says what it found and, if that is wrong, what to do.
mod local;
mod remote;
mod weights;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;

use crate::{error::CliError, text::Console};

/// How the findings are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    Text,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// This machine alone: no server is asked.
    #[arg(long)]
    local: bool,
    /// Checkpoint directory whose files must be whole.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Members of etcd that must be healthy, HOST:PORT.
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Ports that must be free, or taken by Omni.
    #[arg(long, value_name = "PORT", value_delimiter = ',', default_values_t = [7600, 7680, 7601, 7602, 7603])]
    ports: Vec<u16>,
    /// GPUs that must be there.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpus: usize,
    /// An RDMA port must be up, and memory may be pinned.
    #[arg(long)]
    rdma: bool,
    #[arg(short, long, value_enum, default_value_t = Form::Text)]
    output: Form,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Ok,
    Failed,
    /// It says nothing: nobody asked for it, or what it needs is not there.
    Skipped,
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    check: &'static str,
    outcome: Outcome,
    found: String,
    /// What to do; empty unless it failed.
    hint: String,
}

fn ok(check: &'static str, found: impl Into<String>) -> Finding {
    Finding {
        check,
        outcome: Outcome::Ok,
        found: found.into(),
        hint: String::new(),
    }
}

fn failed(check: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding {
        check,
        outcome: Outcome::Failed,
        found: found.into(),
        hint: hint.into(),
    }
}

fn skipped(check: &'static str, found: impl Into<String>) -> Finding {
    Finding {
        outcome: Outcome::Skipped,
        ..ok(check, found)
    }
}

/// Runs the command.
pub(crate) async fn run(
    endpoint: &str,
    args: CheckArgs,
    console: &Console,
) -> Result<(), CliError> {
    let mut findings = vec![];
    let mut ours = false;
    if !args.local {
        let (found, answers) = remote::cluster(endpoint).await;
        ours = answers;
        findings.extend(found);
    }
    findings.extend(args.ports.iter().map(|&port| local::port(port, ours)));
    findings.push(remote::etcd(&args.etcd).await);
    findings.push(local::gpus(args.gpus));
    findings.push(local::transports().await);
    findings.push(local::shared_memory());
    findings.push(local::rdma(args.rdma));
    findings.push(local::pinned_memory(args.rdma));
    findings.push(local::open_files());
    findings.push(weights::check(args.model.as_deref()));

    let failures = findings
        .iter()
        .filter(|f| f.outcome == Outcome::Failed)
        .count();
    match args.output {
        Form::Json => console.json(&json!({"failed": failures, "checks": findings}))?,
        Form::Text => console.raw(text(&findings).as_bytes())?,
    }
    match failures {
        0 => Ok(()),
        failures => Err(CliError::Checks(failures)),
    }
}

fn text(findings: &[Finding]) -> String {
    let width = findings
        .iter()
        .map(|f| f.check.chars().count())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for finding in findings {
        let mark = match finding.outcome {
            Outcome::Ok => '✓',
            Outcome::Failed => '×',
            Outcome::Skipped => '–',
        };
        out += &format!("{mark} {:<width$}  {}\n", finding.check, finding.found);
        if !finding.hint.is_empty() {
            out += &format!("  {:<width$}  {}\n", "", finding.hint);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_has_its_mark_and_a_failure_its_hint() {
        let all = [
            ok("clock", "2 ms apart"),
            failed("registry", "is away", "look at etcd"),
            skipped("weights", "no --model"),
        ];
        let expected = "\
✓ clock     2 ms apart
× registry  is away
            look at etcd
– weights   no --model
";
        assert_eq!(text(&all), expected);
    }
}
