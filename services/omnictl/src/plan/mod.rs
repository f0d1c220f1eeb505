//! `omnictl plan`: which ways of spreading a model over GPUs fit, and what they would cost. Nothing is asked of
//! a server.
mod config;
mod show;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::PathBuf;

use base::Failure;
use clap::{Args, ValueEnum, value_parser};
use parallel::cost::{Assessment, Interconnect, Machine, WeightType, Work, assess, candidates};

use crate::{args::Output, error::CliError, text::Console};
use config::Subject;

/// Most image tokens of a picture.
const MAX_IMAGE_TOKENS: usize = 1 << 16;
/// Most prefix tokens of a row.
const MAX_PREFIX: u32 = 1 << 20;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A checkpoint directory, or its config.json; no weights are read.
    #[arg(long, value_name = "CONFIG_OR_DIR")]
    model: PathBuf,
    /// GPUs of the pool.
    #[arg(long, value_parser = value_parser!(u16).range(1..=64))]
    gpus: u16,
    /// Memory of one GPU in GiB.
    #[arg(long, value_name = "GIB", default_value_t = 140, value_parser = value_parser!(u64).range(1..=4096))]
    memory: u64,
    /// What joins the GPUs.
    #[arg(long, value_enum, default_value_t = LinkName::Nvlink)]
    interconnect: LinkName,
    /// Type of the large weights.
    #[arg(long, value_enum, default_value_t = TypeName::Bf16)]
    dtype: TypeName,
    /// Size of a picture as WIDTHxHEIGHT in pixels. Default: the model's square size.
    #[arg(long)]
    size: Option<String>,
    /// Denoising steps. Default: the model's.
    #[arg(long, value_parser = value_parser!(u32).range(1..=200))]
    steps: Option<u32>,
    /// Classifier-free guidance scale; above 1 a picture has two rows. Default: the model's.
    #[arg(long, allow_negative_numbers = true)]
    guidance: Option<f64>,
    /// Prefix tokens of a row: the prompt, and pictures to edit.
    #[arg(long, default_value_t = 256, value_parser = value_parser!(u32).range(0..=i64::from(MAX_PREFIX)))]
    prefix_tokens: u32,
    /// Pictures in the making at any time.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u16).range(1..=256))]
    concurrency: u16,
    /// What to put first.
    #[arg(long, value_enum, default_value_t = SortBy::Throughput)]
    sort_by: SortBy,
    /// Lines of the table.
    #[arg(long, default_value_t = 10, value_parser = value_parser!(u16).range(1..))]
    top: u16,
    /// Of each combination of methods (pipeline, guidance, ring, Ulysses, tensor, groups, offload) the best only.
    #[arg(long)]
    compare: bool,
    /// Every way, with the reason of those that do not fit.
    #[arg(long, conflicts_with = "top")]
    all: bool,
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LinkName {
    Nvlink,
    Pcie,
    Rdma,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TypeName {
    Bf16,
    Fp8,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SortBy {
    /// Most pictures a second.
    Throughput,
    /// The soonest picture.
    Latency,
    /// The least memory.
    Memory,
}

impl SortBy {
    /// Best first; ties by what else matters, then by the smaller groups and the shorter name.
    fn order(self, a: &Assessment, b: &Assessment) -> Ordering {
        let rate = |a: &Assessment, b: &Assessment| {
            b.pictures_per_second.total_cmp(&a.pictures_per_second)
        };
        let time = |a: &Assessment, b: &Assessment| a.picture_seconds.total_cmp(&b.picture_seconds);
        let memory = a.memory.peak().cmp(&b.memory.peak());
        let first = match self {
            Self::Throughput => rate(a, b).then_with(|| time(a, b)).then(memory),
            Self::Latency => time(a, b).then_with(|| rate(a, b)).then(memory),
            Self::Memory => memory.then_with(|| rate(a, b)).then_with(|| time(a, b)),
        };
        let (a, b) = (a.candidate, b.candidate);
        first
            .then(b.replicas.cmp(&a.replicas))
            .then_with(|| a.plan.to_string().cmp(&b.plan.to_string()))
    }
}

/// What was asked for, as numbers.
#[derive(Debug)]
struct Question {
    machine: Machine,
    work: Work,
    width: usize,
    height: usize,
    guidance: f64,
}

impl PlanArgs {
    fn question(&self, subject: &Subject) -> Result<Question, Failure> {
        let sizes = &subject.sizes;
        let (width, height) = match &self.size {
            Some(text) => pixels(text)?,
            None => (subject.base_size, subject.base_size),
        };
        let cell = sizes.pixels_per_token;
        if width % cell != 0 || height % cell != 0 {
            let message = format!("{width}x{height} is no multiple of {cell} pixels each way");
            return Err(Failure::invalid("--size", message));
        }
        let image_tokens = (width / cell).saturating_mul(height / cell);
        if image_tokens > MAX_IMAGE_TOKENS {
            let message = format!("{image_tokens} image tokens, at most {MAX_IMAGE_TOKENS}");
            return Err(Failure::invalid("--size", message));
        }
        let guidance = self.guidance.unwrap_or(subject.guidance);
        if !(0.0..=100.0).contains(&guidance) {
            let message = format!("must be 0 to 100, got {guidance}");
            return Err(Failure::invalid("--guidance", message));
        }
        let steps = self.steps.map_or(subject.steps, |n| n as usize);
        if !(1..=200).contains(&steps) {
            let message = format!("the model's default must be 1 to 200, got {steps}");
            return Err(Failure::invalid("--steps", message));
        }
        let two = guidance > 1.0 && !sizes.shape.cfg_distilled;
        Ok(Question {
            machine: self.machine(),
            work: Work {
                image_tokens,
                rows: if two { 2 } else { 1 },
                prefix: self.prefix_tokens as usize,
                steps,
                concurrency: usize::from(self.concurrency),
            },
            width,
            height,
            guidance,
        })
    }

    fn machine(&self) -> Machine {
        let weights = match self.dtype {
            TypeName::Bf16 => WeightType::Bf16,
            TypeName::Fp8 => WeightType::Fp8,
        };
        let link = match self.interconnect {
            LinkName::Nvlink => Interconnect::NvLink,
            LinkName::Pcie => Interconnect::Pcie,
            LinkName::Rdma => Interconnect::Rdma,
        };
        Machine::h200(self.memory << 30, weights, link)
    }
}

/// `1024x768` as width and height.
fn pixels(text: &str) -> Result<(usize, usize), Failure> {
    let side = |text: &str| text.parse::<usize>().ok().filter(|n| *n > 0);
    let sides = text.split_once('x');
    let sides = sides.and_then(|(w, h)| side(w).zip(side(h)));
    sides.ok_or_else(|| Failure::invalid("--size", format!("`{text}` is not WIDTHxHEIGHT")))
}

/// Answers from the command line and the config alone.
pub(crate) fn run(args: &PlanArgs, console: &Console) -> Result<(), CliError> {
    let subject = Subject::read(&args.model)?;
    let question = args.question(&subject)?;
    let refused = |error: parallel::ParallelError| Failure::invalid("--gpus", error.to_string());
    let mut plans = Vec::new();
    for candidate in candidates(&subject.sizes, usize::from(args.gpus)).map_err(refused)? {
        let got = assess(&subject.sizes, &question.machine, &question.work, candidate);
        plans.push(got.map_err(refused)?);
    }
    let misfits = |a: &Assessment| a.misfit.is_some();
    plans.sort_by(|a, b| {
        let fit = misfits(a).cmp(&misfits(b));
        fit.then_with(|| args.sort_by.order(a, b))
    });
    let found = plans.len();
    let fitting = plans.iter().filter(|a| !misfits(a)).count();
    if args.compare {
        let mut seen = BTreeSet::new();
        plans.retain(|a| seen.insert((misfits(a), methods(a))));
    }
    if !args.all {
        if fitting == 0 {
            return Err(nothing_fits(&plans, args.memory).into());
        }
        let top = if args.compare {
            fitting
        } else {
            usize::from(args.top)
        };
        plans.retain(|a| !misfits(a));
        plans.truncate(top);
    }
    let answer = show::Answer {
        args,
        question: &question,
        plans: &plans,
        found,
        fitting,
    };
    match args.output {
        Output::Json => console.json(&answer.json()),
        Output::Table => console.raw(answer.text().as_bytes()),
    }
}

/// Which methods a way of using the GPUs combines, whatever their sizes.
fn methods(a: &Assessment) -> [bool; 7] {
    let [pp, cfg, ring, ulysses, tp] = a.candidate.plan.sizes().map(|size| size > 1);
    let groups = a.candidate.replicas > 1;
    [pp, cfg, ring, ulysses, tp, groups, a.streamed_layers > 0]
}

/// No plan fits; says which comes nearest.
fn nothing_fits(plans: &[Assessment], memory: u64) -> Failure {
    let nearest = plans.iter().min_by_key(|a| a.memory.peak());
    let nearest = nearest.map_or_else(String::new, |a| {
        let gib = show::gib(a.memory.peak());
        format!("; the nearest, {}, needs {gib} GiB", a.candidate.plan)
    });
    Failure::invalid(
        "--memory",
        format!("no plan fits {memory} GiB a GPU{nearest}"),
    )
}
