//! `demo-caches`: what step caches of a model save and what they cost. Draws prompts with each cache, in turns, and
//! prints a JSON line for each picture and one for each cache: whether a checker finds in the picture what was
//! asked for, how near the final latents are to those of the first cache, and how many times faster the steps were.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use integration_tests::demo::{DemoPrompt, DemoSet, SEED, Studio, checkpoint_dir};
use integration_tests::scene::{judge, read};
use model::StepCache;
use serde_json::json;

type Failure = Box<dyn std::error::Error>;

const USAGE: &str =
    "usage: demo-caches --step-cache CACHE... [--prompts FILE] [--every K] [--from N] [--count N] \
[--steps N] [--seed N] [--model DIR] [--latents]
  --step-cache CACHE  as of omni dit-worker; the others are held against the first, usually off
  --prompts FILE      a list in the form of prompts_eval.json (default: that one)
  --every K           only every K-th prompt (default 1)
  --from N            beginning with prompt N (default 0)
  --count N           at most N prompts
  --steps N           denoising steps (default: the model's)
  --latents           decode and judge nothing";

struct Options {
    caches: Vec<String>,
    prompts: Option<PathBuf>,
    every: usize,
    from: usize,
    count: usize,
    steps: Option<usize>,
    seed: u64,
    model: PathBuf,
    latents: bool,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            caches: Vec::new(),
            prompts: None,
            every: 1,
            from: 0,
            count: usize::MAX,
            steps: None,
            seed: SEED,
            model: checkpoint_dir(),
            latents: false,
        };
        while let Some(flag) = args.next() {
            if flag == "--latents" {
                options.latents = true;
                continue;
            }
            let value = args.next().ok_or(format!("{flag} needs a value"))?;
            let number = || {
                let parsed = value.parse::<usize>();
                parsed.map_err(|e| format!("{flag}: {e}"))
            };
            match flag.as_str() {
                "--step-cache" => options.caches.push(value),
                "--prompts" => options.prompts = Some(value.into()),
                "--model" => options.model = value.into(),
                "--every" => options.every = number()?.max(1),
                "--from" => options.from = number()?,
                "--count" => options.count = number()?,
                "--steps" => options.steps = Some(number()?),
                "--seed" => options.seed = number()? as u64,
                _ => return Err(format!("`{flag}` is unknown")),
            }
        }
        match options.caches.is_empty() {
            true => Err("--step-cache is missing".to_owned()),
            false => Ok(options),
        }
    }
}

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1))
        .map_err(|message| format!("{message}\n{USAGE}").into())
        .and_then(|options| compare(&options));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One prompt with one cache.
struct Drawn {
    latents: Vec<f32>,
    /// Of its steps.
    ms: f64,
    /// The same in processor time, which other programs disturb less.
    cpu_ms: f64,
    skipped: Vec<usize>,
    /// What the checker says.
    wrong: Option<String>,
}

/// All prompts with one cache.
#[derive(Default)]
struct Sums {
    pictures: usize,
    right: usize,
    saved: usize,
    ms: f64,
    cpu_ms: f64,
    cosines: Vec<f64>,
    ratios: Vec<f64>,
    cpu_ratios: Vec<f64>,
}

fn compare(options: &Options) -> Result<(), Failure> {
    let mut studio = Studio::open(&options.model, options.seed)?;
    if let Some(steps) = options.steps {
        studio = studio.stepping(steps);
    }
    let mut caches: Vec<(&str, StepCache)> = Vec::new();
    for text in &options.caches {
        let cache = text.parse::<StepCache>()?.of_model(&options.model)?;
        caches.push((text, cache));
    }
    let set = match &options.prompts {
        Some(path) => DemoSet::read(path)?,
        None => DemoSet::load()?,
    };
    let prompts = set.prompts.iter().skip(options.from);
    let mut sums: Vec<Sums> = caches.iter().map(|_| Sums::default()).collect();
    for entry in prompts.step_by(options.every).take(options.count) {
        let mut plain = None;
        for ((text, cache), sums) in caches.iter().zip(&mut sums) {
            studio.save(cache.clone());
            let drawn = draw(&studio, entry, !options.latents)?;
            let off = plain.get_or_insert(((drawn.ms, drawn.cpu_ms), drawn.latents.clone()));
            let near = cosine(&drawn.latents, &off.1);
            say(&json!({
                "id": entry.id, "cache": text, "wrong": drawn.wrong, "cosine": near,
                "ms": drawn.ms, "cpu_ms": drawn.cpu_ms, "skipped": drawn.skipped,
            }))?;
            sums.note(&drawn, near, off.0);
        }
    }
    for ((text, _), sums) in caches.iter().zip(&mut sums) {
        say(&sums.told(text, !options.latents))?;
    }
    Ok(())
}

fn draw(studio: &Studio, entry: &DemoPrompt, judged: bool) -> Result<Drawn, Failure> {
    let job = studio.job(&entry.prompt, None, studio.wanted(entry)?)?;
    let mut job = job;
    let (start, cpu) = (base::clock::now(), cpu_ms()?);
    let mut skipped = Vec::new();
    while !job.is_done() {
        if !job.runs_decoder() {
            skipped.push(job.step());
        }
        studio.step(&mut job)?;
    }
    let (ms, cpu_ms) = (base::clock::millis_since(start), cpu_ms()? - cpu);
    let wrong = match judged {
        true => judge(&read(&studio.decode(&job)?), &entry.expect),
        false => None,
    };
    Ok(Drawn {
        latents: job.latents()?.data().to_vec(),
        ms,
        cpu_ms,
        skipped,
        wrong,
    })
}

impl Sums {
    fn note(&mut self, drawn: &Drawn, cosine: f64, (ms, cpu_ms): (f64, f64)) {
        self.pictures += 1;
        self.right += usize::from(drawn.wrong.is_none());
        self.saved += drawn.skipped.len();
        self.ms += drawn.ms;
        self.cpu_ms += drawn.cpu_ms;
        self.cosines.push(cosine);
        self.ratios.push(ms / drawn.ms);
        self.cpu_ratios.push(cpu_ms / drawn.cpu_ms);
    }

    fn told(&mut self, cache: &str, judged: bool) -> serde_json::Value {
        self.ratios.sort_by(f64::total_cmp);
        self.cpu_ratios.sort_by(f64::total_cmp);
        let mean = self.cosines.iter().sum::<f64>() / self.cosines.len().max(1) as f64;
        json!({
            "cache": cache,
            "pictures": self.pictures,
            "right": judged.then_some(self.right),
            "saved": self.saved,
            "cosine": mean,
            "least_cosine": self.cosines.iter().copied().fold(1.0, f64::min),
            "ms": self.ms,
            "cpu_ms": self.cpu_ms,
            "times_faster": self.ratios.get(self.ratios.len() / 2),
            "times_less_cpu": self.cpu_ratios.get(self.cpu_ratios.len() / 2),
        })
    }
}

/// Processor time of all threads of this process so far, as Linux counts it.
fn cpu_ms() -> Result<f64, Failure> {
    let mut sum = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let nanoseconds = text.split_whitespace().next().unwrap_or("0");
        sum += nanoseconds.parse::<f64>()? / 1e6;
    }
    Ok(sum)
}

fn say(line: &serde_json::Value) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}")?;
    Ok(())
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE)
}
