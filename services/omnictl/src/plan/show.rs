//! The answer of `plan` as a table or as JSON.
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use parallel::cost::{Assessment, Misfit};
use serde::Serialize;

use super::{PlanArgs, Question};

/// What to show.
pub(super) struct Answer<'a> {
    pub(super) args: &'a PlanArgs,
    pub(super) question: &'a Question,
    /// Best first.
    pub(super) plans: &'a [Assessment],
    /// Ways there are, and those of them that fit.
    pub(super) found: usize,
    pub(super) fitting: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct AnswerView<'a> {
    gpus: u16,
    memory_bytes_per_gpu: u64,
    interconnect: String,
    dtype: String,
    width: usize,
    height: usize,
    image_tokens: usize,
    prefix_tokens: usize,
    rows: usize,
    steps: usize,
    guidance: f64,
    concurrency: usize,
    ways: usize,
    fitting: usize,
    plans: Vec<PlanView<'a>>,
}

#[derive(Debug, Serialize)]
struct PlanView<'a> {
    /// As `omni --plan` takes it.
    plan: String,
    peak_bytes_per_gpu: u64,
    #[serde(flatten)]
    assessment: &'a Assessment,
}

/// Bytes as GiB with one decimal.
pub(super) fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e3)
}

/// The name of a choice as the command line spells it.
fn spelled(value: &impl clap::ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |v| v.get_name().to_owned())
}

impl Answer<'_> {
    pub(super) fn json(&self) -> AnswerView<'_> {
        let (work, question) = (&self.question.work, self.question);
        AnswerView {
            gpus: self.args.gpus,
            memory_bytes_per_gpu: question.machine.memory,
            interconnect: spelled(&self.args.interconnect),
            dtype: spelled(&self.args.dtype),
            width: question.width,
            height: question.height,
            image_tokens: work.image_tokens,
            prefix_tokens: work.prefix,
            rows: work.rows,
            steps: work.steps,
            guidance: question.guidance,
            concurrency: work.concurrency,
            ways: self.found,
            fitting: self.fitting,
            plans: self
                .plans
                .iter()
                .map(|assessment| PlanView {
                    plan: assessment.candidate.plan.to_string(),
                    peak_bytes_per_gpu: assessment.memory.peak(),
                    assessment,
                })
                .collect(),
        }
    }

    pub(super) fn text(&self) -> String {
        let (work, question) = (&self.question.work, self.question);
        let mut text = format!(
            "{} x {} GiB, {}, {} weights; {}x{}, {} steps, {} row{} of {} + {} tokens, {} at a time\n\n",
            self.args.gpus,
            self.args.memory,
            spelled(&self.args.interconnect),
            spelled(&self.args.dtype),
            question.width,
            question.height,
            work.steps,
            work.rows,
            if work.rows == 1 { "" } else { "s" },
            work.prefix,
            work.image_tokens,
            work.concurrency,
        );
        for line in self.table().lines() {
            let _ = writeln!(text, "{}", line.trim_end());
        }
        let shown = self.plans.len();
        let _ = writeln!(
            text,
            "\n{shown} of {} ways to use the GPUs, {} of which fit. GiB of the fullest GPU; ms of a step.",
            self.found, self.fitting
        );
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(NOTHING);
        let mut head = vec![
            "GROUPS",
            "PLAN",
            "OFFLOAD",
            "WEIGHTS",
            "KV",
            "PEAK",
            "COMPUTE",
            "COMM",
            "SENT MB",
            "BUBBLE",
            "STEP",
            "S/PICTURE",
            "PICTURES/S",
        ];
        if self.args.all {
            head.push("FITS");
        }
        table.set_header(head);
        for plan in self.plans {
            table.add_row(self.line(plan));
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            if (3..=12).contains(&index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    fn line(&self, plan: &Assessment) -> Vec<String> {
        let (candidate, memory) = (plan.candidate, &plan.memory);
        let sent: u64 = plan.communication.iter().map(|c| c.sent).sum();
        let seconds = plan
            .communication
            .iter()
            .fold(0.0, |sum, c| sum + c.seconds);
        let mut line = vec![
            format!("{}x", candidate.replicas),
            candidate.plan.to_string(),
            match plan.streamed_layers {
                0 => "-".to_owned(),
                n => format!("{n} layers"),
            },
            gib(memory.weights),
            format!("{:.2}", memory.prefixes as f64 / f64::from(1 << 30)),
            gib(memory.peak()),
            milliseconds(plan.compute_seconds),
            milliseconds(seconds),
            format!("{:.1}", sent as f64 / 1e6),
            format!("{:.0}%", plan.bubble * 100.0),
            milliseconds(plan.step_seconds),
            format!("{:.2}", plan.picture_seconds),
            format!("{:.3}", plan.pictures_per_second),
        ];
        if self.args.all {
            line.push(match plan.misfit {
                None => "yes".to_owned(),
                Some(Misfit::Memory { needed, there }) => {
                    format!("no: needs {} GiB of {}", gib(needed), gib(there))
                }
                Some(other) => format!("no: {other}"),
            });
        }
        line
    }
}
