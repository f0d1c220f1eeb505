//! What came of it.
use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use serde::Serialize;

use super::trace::{Request, Trace};
use crate::{
    batching::{Class, Decision},
    cost::Load,
    validate::cost,
};

/// Largest cost, steps x rows x tokens, of a small request: a sixth of a 1024x1024 picture of 50 guided steps.
const SMALL_COST: u64 = 65_536;
/// Pixels of an image token, as far as smallness is concerned.
const SMALL_CELL: u32 = 16;

/// Requests of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// A class, or `small`: at most a sixth of the work of a 1024x1024 picture of 50 guided steps.
    pub name: &'static str,
    /// Requests that came.
    pub requests: u64,
    /// Requests that were answered with all their images.
    pub done: u64,
    /// Median seconds from coming to the last image.
    pub p50_s: f64,
    /// The same, of the slowest hundredth.
    pub p99_s: f64,
    /// The same, of the slowest.
    pub worst_s: f64,
}

/// Requests without an image, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Refusals {
    /// The router's queue was full.
    pub queue_full: u64,
    /// The deadline passed.
    pub deadline: u64,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Name of the cluster.
    pub cluster: String,
    /// Name of the policy.
    pub policy: &'static str,
    /// Seed of what differs from step to step.
    pub seed: u64,
    /// See [`super::offered_load`].
    pub offered_load: f64,
    /// Requests of the trace.
    pub requests: u64,
    /// Images of the trace.
    pub images: u64,
    /// Images of requests that were answered.
    pub images_done: u64,
    /// Seconds until the last request came.
    pub trace_s: f64,
    /// Seconds until the last answer.
    pub end_s: f64,
    /// Images a second, of requests answered before the last one came.
    pub images_per_s: f64,
    /// By class, then the small ones of all classes.
    pub latency: Vec<Group>,
    /// Requests without an image.
    pub refused: Refusals,
    /// Steps that were run.
    pub steps: u64,
    /// Images in a step, on average.
    pub jobs_per_step: f64,
    /// Rows in a step, on average.
    pub rows_per_step: f64,
    /// Query tokens in a step, on average.
    pub tokens_per_step: f64,
    /// Share of the workers' time without work, until the last request came.
    pub idle: f64,
    /// Times a job made room for another.
    pub parked: u64,
    /// Measured over predicted step time at the end, on average over workers.
    pub correction: f64,
}

/// What is counted while time passes.
#[derive(Debug)]
pub(super) struct Tally {
    /// When the last request comes.
    window: Duration,
    end: Duration,
    busy: Duration,
    steps: u64,
    jobs: u64,
    rows: f64,
    tokens: f64,
    parked: u64,
    refused: Refusals,
    images_done: u64,
    images_in_window: u64,
    /// Seconds of answered requests, by group.
    seconds: BTreeMap<&'static str, Vec<f64>>,
}

impl Tally {
    pub(super) fn new(window: Duration) -> Self {
        Self {
            window,
            end: Duration::ZERO,
            busy: Duration::ZERO,
            steps: 0,
            jobs: 0,
            rows: 0.0,
            tokens: 0.0,
            parked: 0,
            refused: Refusals::default(),
            images_done: 0,
            images_in_window: 0,
            seconds: BTreeMap::new(),
        }
    }

    pub(super) fn queue_full(&mut self) {
        self.refused.queue_full += 1;
    }

    pub(super) fn missed(&mut self) {
        self.refused.deadline += 1;
    }

    pub(super) fn decided(&mut self, decision: Decision) {
        if matches!(decision, Decision::Park(_)) {
            self.parked += 1;
        }
    }

    /// A worker is busy for `took` from `now` on.
    pub(super) fn busy(&mut self, now: Duration, took: Duration) {
        self.busy += took.min(self.window.saturating_sub(now));
    }

    pub(super) fn step(&mut self, now: Duration, took: Duration, jobs: usize, load: Load) {
        self.busy(now, took);
        self.steps += 1;
        self.jobs += jobs as u64;
        self.rows += load.rows;
        self.tokens += load.tokens;
    }

    pub(super) fn done(&mut self, request: &Request, now: Duration) {
        let took = now.saturating_sub(request.at()).as_secs_f64();
        for group in groups_of(request) {
            self.seconds.entry(group).or_default().push(took);
        }
        self.end = self.end.max(now);
        self.images_done += u64::from(request.n);
        if now <= self.window {
            self.images_in_window += u64::from(request.n);
        }
    }

    /// Everything but what only the caller knows.
    #[allow(clippy::cast_precision_loss)] // counts of events
    pub(super) fn report(&mut self, trace: &Trace, workers: u32) -> Report {
        let names = Class::ALL.map(Class::name).into_iter().chain([SMALL]);
        let latency = names.map(|name| self.group(name, trace)).collect();
        let mean = |sum: f64| rounded(sum / (self.steps as f64).max(1.0));
        let window = self.window.as_secs_f64().max(1e-9);
        let images = trace.requests.iter().map(|r| u64::from(r.n));
        Report {
            cluster: String::new(),
            policy: "",
            seed: 0,
            offered_load: 0.0,
            requests: trace.requests.len() as u64,
            images: images.sum(),
            images_done: self.images_done,
            trace_s: rounded(window),
            end_s: rounded(self.end.as_secs_f64()),
            images_per_s: rounded(self.images_in_window as f64 / window),
            latency,
            refused: self.refused,
            steps: self.steps,
            jobs_per_step: mean(self.jobs as f64),
            rows_per_step: mean(self.rows),
            tokens_per_step: mean(self.tokens),
            idle: rounded(1.0 - self.busy.as_secs_f64() / (window * f64::from(workers))),
            parked: self.parked,
            correction: 1.0,
        }
    }

    fn group(&mut self, name: &'static str, trace: &Trace) -> Group {
        let of_group = |request: &&Request| groups_of(request).any(|group| group == name);
        let mut seconds = self.seconds.remove(name).unwrap_or_default();
        seconds.sort_by(f64::total_cmp);
        Group {
            name,
            requests: trace.requests.iter().filter(of_group).count() as u64,
            done: seconds.len() as u64,
            p50_s: percentile(&seconds, 50),
            p99_s: percentile(&seconds, 99),
            worst_s: percentile(&seconds, 100),
        }
    }
}

/// Name of the group of small requests.
const SMALL: &str = "small";

fn groups_of(request: &Request) -> impl Iterator<Item = &'static str> + use<> {
    let tokens = request.image_tokens(SMALL_CELL).map_or(u64::MAX, u64::from);
    let work = cost(tokens, request.steps, request.rows(), 1);
    let small = (work <= SMALL_COST && request.n == 1).then_some(SMALL);
    [request.class.name()].into_iter().chain(small)
}

/// The least of `sorted` that `percent` per cent are not above; 0 of none.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    rounded(sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0))
}

/// Four places, so that reports can be compared as text.
pub(super) fn rounded(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

impl Report {
    /// The report for people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<18}{value}");
        };
        line("cluster", self.cluster.clone());
        line("policy", format!("{}, seed {}", self.policy, self.seed));
        let trace = format!("{} requests, {} images", self.requests, self.images);
        line("trace", format!("{trace} in {:.1} s", self.trace_s));
        line(
            "offered load",
            format!("{:.0} %", self.offered_load * 100.0),
        );
        line("images/s", format!("{:.4}", self.images_per_s));
        line(
            "images done",
            format!("{}, the last at {:.1} s", self.images_done, self.end_s),
        );
        let refused = self.refused;
        let reasons = format!(
            "queue full {}, deadline {}",
            refused.queue_full, refused.deadline
        );
        line("refused", reasons);
        let occupancy = format!(
            "{:.2} images, {:.2} rows",
            self.jobs_per_step, self.rows_per_step
        );
        let steps = format!(
            "{occupancy}, {:.0} tokens; {} steps",
            self.tokens_per_step, self.steps
        );
        line("in a step", steps);
        line("GPU idle", format!("{:.1} %", self.idle * 100.0));
        line("parked", format!("{} times", self.parked));
        line("correction", format!("{:.3}", self.correction));
        let _ = writeln!(
            text,
            "\n{:<14}{:>9}{:>9}{:>11}{:>11}{:>11}",
            "LATENCY", "REQUESTS", "DONE", "P50 S", "P99 S", "WORST S"
        );
        for group in &self.latency {
            let _ = writeln!(
                text,
                "{:<14}{:>9}{:>9}{:>11.2}{:>11.2}{:>11.2}",
                group.name, group.requests, group.done, group.p50_s, group.p99_s, group.worst_s
            );
        }
        text
    }
}
