//! `omni simulate`: the router's decisions under a simulated clock, from files alone.
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum, value_parser};
use router::{
    RouterError,
    simulate::{Cluster, Kind, Policy, Report, Trace, generate, offered_load, run as simulate},
};

use crate::error::OmniError;

/// Largest file of a trace or a cluster.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Run a trace of requests on a simulated cluster, or make a trace; needs no server, GPU or weights.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Requests, one JSON object a line.
    #[arg(long, value_name = "FILE", required_unless_present = "generate")]
    trace: Option<PathBuf>,
    /// What they run on (TOML).
    #[arg(long, value_name = "FILE", required_unless_present = "generate")]
    cluster: Option<PathBuf>,
    /// How workers choose what shares a step.
    #[arg(long, value_enum, default_value_t = PolicyName::Cost)]
    policy: PolicyName,
    /// Move the requests of the trace together or apart until they need this share of the cluster's time.
    #[arg(long, value_name = "SHARE")]
    load: Option<f64>,
    /// Seed of what differs from step to step, or of the trace that is made.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// As a table or as JSON.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print a trace of this kind instead.
    #[arg(long, value_enum, value_name = "KIND", conflicts_with_all = ["trace", "cluster", "policy", "load", "output"])]
    generate: Option<KindName>,
    /// Requests of the trace that is made.
    #[arg(long, default_value_t = 600, value_parser = value_parser!(u32).range(1..=100_000), requires = "generate")]
    requests: u32,
    /// Requests a second of the trace that is made.
    #[arg(long, default_value_t = 0.5, requires = "generate")]
    rate: f64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PolicyName {
    /// Where it pays: by predicted time, class and deadline.
    Cost,
    /// The oldest job and those of its shape, to their end.
    FifoSameShape,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Output {
    Table,
    Json,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum KindName {
    /// The model's defaults, evenly.
    Uniform,
    /// The same, in bursts.
    Bursty,
    /// Three sizes, few and many steps, guided or not, some edits.
    Mixed,
    /// Mostly edits.
    Edits,
}

/// What was asked for, as text.
pub(crate) fn run(args: &SimulateArgs) -> Result<String, OmniError> {
    if let Some(kind) = args.generate {
        return made(kind, args);
    }
    let (Some(trace), Some(cluster)) = (&args.trace, &args.cluster) else {
        // The command line requires them.
        let message = "--trace and --cluster must be given";
        return Err(OmniError::Config(message.to_owned()));
    };
    let cluster = read_cluster(cluster)?;
    let trace = read_trace(trace, &cluster, args.load)?;
    let policy = match args.policy {
        PolicyName::Cost => Policy::Cost,
        PolicyName::FifoSameShape => Policy::FifoSameShape,
    };
    let report = simulate(&trace, &cluster, policy, args.seed).map_err(|e| OmniError::of(&e))?;
    shown(&report, args.output)
}

fn made(kind: KindName, args: &SimulateArgs) -> Result<String, OmniError> {
    let kind = match kind {
        KindName::Uniform => Kind::Uniform,
        KindName::Bursty => Kind::Bursty,
        KindName::Mixed => Kind::Mixed,
        KindName::Edits => Kind::Edits,
    };
    let trace = generate(kind, args.requests, args.rate, args.seed);
    let lines = trace.and_then(|trace| trace.to_lines());
    lines.map_err(|error| OmniError::of(&error))
}

fn shown(report: &Report, output: Output) -> Result<String, OmniError> {
    match output {
        Output::Table => Ok(report.table()),
        Output::Json => serde_json::to_string_pretty(report)
            .map_err(|error| OmniError::Config(format!("json: {error}"))),
    }
}

fn read_cluster(path: &Path) -> Result<Cluster, OmniError> {
    let named = |error: String| OmniError::Config(format!("{}: {error}", path.display()));
    let cluster: Cluster = toml::from_str(&read(path)?).map_err(|e| named(e.to_string()))?;
    cluster.check().map_err(|error| named(error.to_string()))?;
    Ok(cluster)
}

fn read_trace(path: &Path, cluster: &Cluster, load: Option<f64>) -> Result<Trace, OmniError> {
    let named = |error: RouterError| OmniError::Config(format!("{}: {error}", path.display()));
    let trace = Trace::parse(&read(path)?).map_err(named)?;
    let Some(load) = load else {
        return Ok(trace);
    };
    if !(0.01..=100.0).contains(&load) {
        let message = format!("--load must be 0.01 to 100, got {load}");
        return Err(OmniError::Config(message));
    }
    let now = offered_load(&trace, cluster).map_err(named)?;
    Ok(trace.stretched(now / load))
}

fn read(path: &Path) -> Result<String, OmniError> {
    let named =
        |error: String| OmniError::Config(format!("cannot read {}: {error}", path.display()));
    let size = std::fs::metadata(path)
        .map_err(|e| named(e.to_string()))?
        .len();
    if size > MAX_FILE_BYTES {
        return Err(named(format!(
            "it has {size} bytes, at most {MAX_FILE_BYTES} are read"
        )));
    }
    std::fs::read_to_string(path).map_err(|error| named(error.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: SimulateArgs,
    }

    const CLUSTERS: [&str; 3] = ["cluster-8-offload", "cluster-8-fp8", "cluster-4-ulysses"];

    fn file(name: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/traces");
        root.join(name).to_str().unwrap().to_owned()
    }

    fn answer(arguments: &[&str]) -> Result<String, OmniError> {
        let words = std::iter::once("simulate").chain(arguments.iter().copied());
        let matches = Line::command().get_matches_from(words);
        run(&Line::from_arg_matches(&matches).unwrap().args)
    }

    fn report(trace: &str, cluster: &str, policy: &str) -> serde_json::Value {
        let (trace, cluster) = (
            file(&format!("{trace}.jsonl")),
            file(&format!("{cluster}.toml")),
        );
        let common = ["--trace", &trace, "--cluster", &cluster, "--load", "0.8"];
        let rest = ["--policy", policy, "-o", "json"];
        let text = answer(&[&common[..], &rest].concat()).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn small_p99(report: &serde_json::Value) -> f64 {
        assert_eq!(report["latency"][3]["name"], "small");
        report["latency"][3]["p99_s"].as_f64().unwrap()
    }

    #[test]
    fn the_committed_traces_are_those_that_are_generated() {
        for (kind, requests, rate) in [
            ("uniform", "300", "0.25"),
            ("bursty", "300", "0.25"),
            ("mixed", "800", "0.7"),
            ("edits", "400", "0.6"),
        ] {
            let made =
                answer(&["--generate", kind, "--requests", requests, "--rate", rate]).unwrap();
            let committed = std::fs::read_to_string(file(&format!("{kind}.jsonl"))).unwrap();
            assert!(made == committed, "{kind}");
        }
    }

    #[test]
    fn equal_files_and_seeds_give_equal_bytes() {
        let (trace, cluster) = (file("mixed.jsonl"), file("cluster-8-fp8.toml"));
        for output in ["table", "json"] {
            let arguments = [
                "--trace",
                &trace,
                "--cluster",
                &cluster,
                "-o",
                output,
                "--seed",
                "3",
            ];
            assert_eq!(answer(&arguments).unwrap(), answer(&arguments).unwrap());
        }
    }

    /// The mixed trace at 80 % load. Where layers are copied in at every step, sharing steps decides what a cluster
    /// can do; where the model is resident both policies keep up, and what differs is who waits.
    #[test]
    fn cost_beats_first_come_first_served_and_starves_no_class() {
        for cluster in CLUSTERS {
            let cost = report("mixed", cluster, "cost");
            let fifo = report("mixed", cluster, "fifo-same-shape");
            let images = |r: &serde_json::Value| r["images_per_s"].as_f64().unwrap();
            let least = if cluster == "cluster-8-offload" {
                1.3
            } else {
                0.99
            };
            let ratio = images(&cost) / images(&fifo);
            assert!(
                ratio >= least,
                "{cluster}: {ratio} times the images a second"
            );
            let p99 = small_p99(&cost) / small_p99(&fifo);
            assert!(p99 <= 0.5, "{cluster}: {p99} of the p99 of small requests");
            assert_eq!(cost["images_done"], cost["images"], "{cluster}");
            for class in &cost["latency"].as_array().unwrap()[..3] {
                assert_eq!(class["done"], class["requests"], "{cluster}: {class}");
            }
        }
    }

    #[test]
    fn every_committed_trace_runs_on_every_committed_cluster() {
        for cluster in CLUSTERS {
            for trace in ["uniform", "bursty", "edits"] {
                let report = report(trace, cluster, "cost");
                assert_eq!(
                    report["images_done"], report["images"],
                    "{trace} on {cluster}"
                );
            }
        }
    }

    #[test]
    fn a_bad_file_is_named() {
        let directory = std::env::temp_dir();
        let missing = directory.join("omni-no-such-file");
        let missing = missing.to_str().unwrap();
        let cluster = file("cluster-8-fp8.toml");
        let error = answer(&["--trace", missing, "--cluster", &cluster]).unwrap_err();
        assert!(
            error.to_string().contains(missing) && error.exit_code() == 64,
            "{error}"
        );
        // A cluster is no trace.
        let error = answer(&["--trace", &cluster, "--cluster", &cluster]).unwrap_err();
        assert!(
            error.to_string().contains("line 1") && error.exit_code() == 64,
            "{error}"
        );
    }
}
