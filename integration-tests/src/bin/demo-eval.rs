//! `demo-eval`: draws the held-out prompts with the demo model, in this process, and scores the pictures.
//!
//! Prints a table of scores per category (or JSON) and every failure, and writes a sheet of the pictures.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use integration_tests::demo::{
    DemoPrompt, DemoSet, SEED, Studio, checkpoint_dir, contact_sheet, encode_png, psnr,
};
use integration_tests::scene::{draw, judge, read};
use model::{DenoiseJob, RgbImage, StepCache};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

const USAGE: &str =
    "usage: demo-eval [--every K] [--from N] [--mode base|instruct|ratio|recaption|edit|vae]... \
[--seed N] [--model DIR] [--out DIR] [--steps N] [--step-cache CACHE] [--json]
  --every K   only every K-th entry of the list (default 1)
  --from N    beginning with entry N (default 0)
  --mode M    may be given more than once (default: all)
  --steps N   denoising steps (default: the model's)
  --step-cache CACHE  how steps are saved, as of omni dit-worker (default off)
  --out DIR   where the sheets of pictures go (default: the current directory)";

const MODES: [&str; 6] = ["base", "instruct", "ratio", "recaption", "edit", "vae"];
/// Pictures denoised in one packed pass.
const PACKED: usize = 4;
/// Most pictures of a sheet, and how many stand in a row.
const SHEET: (usize, usize) = (24, 6);

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            let _ = writeln!(std::io::stderr(), "{message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match evaluate(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    every: usize,
    from: usize,
    modes: Vec<String>,
    seed: u64,
    model: PathBuf,
    out: PathBuf,
    json: bool,
    cache: StepCache,
    steps: Option<usize>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            every: 1,
            from: 0,
            modes: Vec::new(),
            seed: SEED,
            model: checkpoint_dir(),
            out: PathBuf::from("."),
            json: false,
            cache: StepCache::Off,
            steps: None,
        };
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("{flag} needs a value"));
            match flag.as_str() {
                "--json" => options.json = true,
                "--model" => options.model = value()?.into(),
                "--steps" => {
                    let steps = value()?.parse().map_err(|e| format!("--steps: {e}"))?;
                    options.steps = Some(steps);
                }
                "--step-cache" => {
                    options.cache = value()?.parse().map_err(|e| format!("{e}"))?;
                }
                "--out" => options.out = value()?.into(),
                "--seed" => {
                    options.seed = value()?.parse().map_err(|e| format!("--seed: {e}"))?;
                }
                "--from" => {
                    options.from = value()?.parse().map_err(|e| format!("--from: {e}"))?;
                }
                "--every" => {
                    options.every = value()?.parse().map_err(|e| format!("--every: {e}"))?;
                    if options.every == 0 {
                        return Err("--every: 0 is not above 0".into());
                    }
                }
                "--mode" => {
                    let mode = value()?;
                    if !MODES.contains(&mode.as_str()) {
                        return Err(format!("--mode: `{mode}` is unknown"));
                    }
                    options.modes.push(mode);
                }
                _ => return Err(format!("`{flag}` is unknown")),
            }
        }
        if options.modes.is_empty() {
            options.modes = MODES.map(str::to_owned).to_vec();
        }
        Ok(options)
    }
}

impl Options {
    fn chosen<T: Clone>(&self, entries: &[T]) -> Vec<T> {
        let entries = entries.iter().skip(self.from);
        entries.step_by(self.every).cloned().collect()
    }
}

/// What came of the entries of one mode.
#[derive(Default)]
struct Scores {
    /// Right and all, by category.
    counts: BTreeMap<String, (usize, usize)>,
    /// Entry, prompt and what is wrong.
    failures: Vec<[String; 3]>,
}

impl Scores {
    fn note(&mut self, category: &str, id: &str, prompt: &str, wrong: Option<String>) {
        let (right, all) = self.counts.entry(category.to_owned()).or_default();
        *all += 1;
        match wrong {
            None => *right += 1,
            Some(wrong) => self.failures.push([id.into(), prompt.into(), wrong]),
        }
    }

    fn note_prompt(&mut self, entry: &DemoPrompt, wrong: Option<String>) {
        self.note(&entry.category, &entry.id, &entry.prompt, wrong);
    }
}

struct Evaluation<'a> {
    studio: Studio,
    set: DemoSet,
    options: &'a Options,
    scores: BTreeMap<String, Scores>,
    spent: Spent,
}

/// What denoising and decoding took.
#[derive(Default)]
struct Spent {
    ms: f64,
    steps: usize,
    saved: usize,
}

impl Spent {
    fn note(&mut self, jobs: &[DenoiseJob], ms: f64) {
        self.ms += ms;
        self.steps += jobs.iter().map(DenoiseJob::steps).sum::<usize>();
        self.saved += jobs.iter().map(DenoiseJob::saved_steps).sum::<usize>();
    }
}

fn evaluate(options: &Options) -> Result<(), Failure> {
    let studio = Studio::open(&options.model, options.seed)?
        .saving(options.cache.clone().of_model(&options.model)?);
    let mut run = Evaluation {
        studio: match options.steps {
            Some(steps) => studio.stepping(steps),
            None => studio,
        },
        set: DemoSet::load()?,
        options,
        scores: BTreeMap::new(),
        spent: Spent::default(),
    };
    for mode in &options.modes {
        match mode.as_str() {
            "base" => run.pictures(false)?,
            "instruct" => run.pictures(true)?,
            "ratio" => run.ratios()?,
            "recaption" => run.recaptions()?,
            "edit" => run.edits()?,
            _ => run.reconstructions()?,
        }
    }
    run.print()
}

impl Evaluation<'_> {
    fn prompts(&self) -> Vec<DemoPrompt> {
        self.options.chosen(&self.set.prompts)
    }

    fn scores(&mut self, name: &str) -> &mut Scores {
        self.scores.entry(name.to_owned()).or_default()
    }

    fn say(&self, name: &str, done: usize, all: usize) {
        let _ = writeln!(std::io::stderr(), "{name}: {done} of {all}");
    }

    fn pictures(&mut self, instruct: bool) -> Result<(), Failure> {
        let name = if instruct { "instruct" } else { "base" };
        let entries = self.prompts();
        let mut drawn: Vec<RgbImage> = Vec::new();
        for chunk in entries.chunks(PACKED) {
            let mut jobs: Vec<DenoiseJob> = Vec::new();
            for entry in chunk {
                jobs.push(match instruct {
                    false => self
                        .studio
                        .job(&entry.prompt, None, self.studio.wanted(entry)?)?,
                    true => self.instruct_job(entry)?,
                });
            }
            let start = base::clock::now();
            let pictures = self.studio.develop(&mut jobs)?;
            self.spent.note(&jobs, base::clock::millis_since(start));
            for (entry, picture) in chunk.iter().zip(pictures) {
                let wrong = judge(&read(&picture), &entry.expect);
                self.scores(name).note_prompt(entry, wrong);
                drawn.push(picture);
            }
            self.say(name, drawn.len(), entries.len());
        }
        self.write_sheet(name, &drawn)
    }

    /// The model thinks, rewrites the prompt, names a size, and draws at that size.
    fn instruct_job(&mut self, entry: &DemoPrompt) -> Result<DenoiseJob, Failure> {
        let written = self.studio.recaption(&entry.prompt)?;
        let wanted = self.studio.wanted(entry)?;
        let wrong = match written.bucket {
            None => Some("no ratio token before the limit".to_owned()),
            Some(got) if got != wanted => Some(format!("{}x{}", got.width, got.height)),
            Some(_) => None,
        };
        self.scores("instruct, ratio token")
            .note_prompt(entry, wrong);
        let bucket = written.bucket.unwrap_or(wanted);
        Ok(self.studio.job(&entry.prompt, Some(&written), bucket)?)
    }

    fn ratios(&mut self) -> Result<(), Failure> {
        for entry in self.prompts() {
            let (got, wanted) = (
                self.studio.ratio(&entry.prompt)?,
                self.studio.wanted(&entry)?,
            );
            let wrong = (got != wanted).then(|| format!("{}x{}", got.width, got.height));
            self.scores("base, ratio token").note_prompt(&entry, wrong);
        }
        Ok(())
    }

    fn recaptions(&mut self) -> Result<(), Failure> {
        for entry in self.prompts() {
            let written = self.studio.recaption(&entry.prompt)?;
            let wrong = entry.missing_in(&written.text);
            self.scores("recaption objects").note_prompt(&entry, wrong);
        }
        Ok(())
    }

    fn edits(&mut self) -> Result<(), Failure> {
        let entries = self.options.chosen(&self.set.edits);
        let mut drawn = Vec::new();
        for chunk in entries.chunks(PACKED) {
            let started: Vec<_> = chunk
                .iter()
                .map(|entry| self.studio.edit(entry))
                .collect::<Result<_, _>>()?;
            let (before, mut jobs): (Vec<_>, Vec<_>) = started.into_iter().unzip();
            let after = self.studio.develop(&mut jobs)?;
            for ((entry, before), after) in chunk.iter().zip(before).zip(after) {
                let wrong = entry.judge(&read(&after));
                self.scores("edit")
                    .note(&entry.category, &entry.id, &entry.prompt, wrong);
                drawn.extend([before, after]);
            }
            self.say("edit", drawn.len() / 2, entries.len());
        }
        self.write_sheet("edit", &drawn)
    }

    /// Ground-truth drawings through the VAE and back; right means 30 dB or more.
    fn reconstructions(&mut self) -> Result<(), Failure> {
        for entry in self.prompts() {
            let before = draw(&entry.scene);
            let decibels = psnr(&before, &self.studio.reconstruct(&before)?);
            let wrong = (decibels < 30.0).then(|| format!("{decibels:.1} dB"));
            self.scores("vae, 30 dB").note_prompt(&entry, wrong);
        }
        Ok(())
    }

    fn write_sheet(&self, name: &str, pictures: &[RgbImage]) -> Result<(), Failure> {
        let shown = &pictures[..pictures.len().min(SHEET.0)];
        let path = self.options.out.join(format!("demo-{name}.png"));
        std::fs::write(path, encode_png(&contact_sheet(shown, SHEET.1))?)?;
        Ok(())
    }

    fn print(&self) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        if self.options.json {
            let modes = self.scores.iter().map(|(name, scores)| {
                let counts: Value = scores
                    .counts
                    .iter()
                    .map(|(category, (right, all))| (category.clone(), json!([right, all])))
                    .collect::<serde_json::Map<_, _>>()
                    .into();
                (
                    name.clone(),
                    json!({"right": counts, "failures": scores.failures}),
                )
            });
            let all: serde_json::Map<_, _> = modes.collect();
            writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
            return Ok(());
        }
        if self.spent.steps > 0 {
            let Spent { ms, steps, saved } = self.spent;
            let step = ms / steps as f64;
            writeln!(
                out,
                "{steps} steps, {saved} of them saved, {step:.1} ms each\n"
            )?;
        }
        writeln!(out, "| mode | category | right | of |\n|---|---|---|---|")?;
        for (name, scores) in &self.scores {
            for (category, (right, all)) in &scores.counts {
                writeln!(out, "| {name} | {category} | {right} | {all} |")?;
            }
        }
        for (name, scores) in &self.scores {
            for [id, prompt, wrong] in &scores.failures {
                writeln!(out, "{name} {id}: \"{prompt}\": {wrong}")?;
            }
        }
        Ok(())
    }
}
