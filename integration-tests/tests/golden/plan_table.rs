//! What was seen of plans, as the table of the README.

use std::path::Path;

use parallel::{Axis, Plan};

/// What a run was about: the columns of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Text to image; the tokens of a row divide over the ranks.
    Divides,
    /// Text to image; they do not.
    T2i,
    /// Behind a conditioning image.
    Edit,
    /// Sizes of their own, in the same batch as all others.
    Mixed,
    /// Keys and values of the prefixes.
    Prefill,
}

const MODES: [(Mode, &str); 5] = [
    (Mode::Divides, "text to image, tokens divide"),
    (Mode::T2i, "tokens do not divide"),
    (Mode::Edit, "edit"),
    (Mode::Mixed, "mixed sizes in one batch"),
    (Mode::Prefill, "prefill"),
];

/// Lines of the README that the table lies between.
const MARKS: [&str; 2] = ["<!-- plans: begin -->", "<!-- plans: end -->"];
/// Set to any value, it makes the test write the table instead of comparing it.
const UPDATE: &str = "OMNI_UPDATE_README";

/// The worst relative difference of one plan in each mode.
pub(crate) struct Outcome {
    plan: Plan,
    worst: [Option<f32>; MODES.len()],
}

impl Outcome {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            plan,
            worst: [None; MODES.len()],
        }
    }

    pub(crate) fn record(&mut self, mode: Mode, difference: f32) {
        let at = MODES.iter().position(|(m, _)| *m == mode).unwrap();
        let worst = self.worst[at].get_or_insert(0.0);
        *worst = worst.max(difference);
    }

    /// Every mode; one that was not seen counts as wrong.
    pub(crate) fn modes(&self) -> impl Iterator<Item = (Mode, f32)> {
        let seen = MODES.iter().zip(self.worst);
        seen.map(|((mode, _), worst)| (*mode, worst.unwrap_or(f32::INFINITY)))
    }
}

/// Plans that use the same methods.
struct Line {
    method: String,
    plans: [usize; 4],
    worst: [f32; MODES.len()],
}

#[derive(Default)]
pub(crate) struct Table {
    lines: Vec<Line>,
}

fn method(plan: &Plan) -> String {
    let names = [
        (Axis::Pp, "PP"),
        (Axis::Cfg, "CFG"),
        (Axis::Ring, "Ring"),
        (Axis::Ulysses, "Ulysses"),
        (Axis::Tp, "TP"),
    ];
    let sizes = plan.sizes();
    let used = names.iter().filter(|(axis, _)| sizes[*axis as usize] > 1);
    let mut used: Vec<&str> = used.map(|(_, name)| *name).collect();
    if !plan.ep.is_empty() {
        used.push("EP");
    }
    if used.is_empty() {
        return "one rank".to_owned();
    }
    used.join(" × ")
}

impl Table {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        let method = method(&outcome.plan);
        let at = self.lines.iter().position(|line| line.method == method);
        let at = at.unwrap_or_else(|| {
            self.lines.push(Line {
                method,
                plans: [0; 4],
                worst: [0.0; MODES.len()],
            });
            self.lines.len() - 1
        });
        let line = &mut self.lines[at];
        let ranks: usize = outcome.plan.sizes().iter().product();
        line.plans[ranks.ilog2() as usize] += 1;
        for (worst, (_, seen)) in line.worst.iter_mut().zip(outcome.modes()) {
            *worst = worst.max(seen);
        }
    }

    pub(crate) fn markdown(&self) -> String {
        let columns: Vec<&str> = MODES.iter().map(|(_, name)| *name).collect();
        let mut text = format!(
            "| method | plans on 1, 2, 4, 8 ranks | {} |\n",
            columns.join(" | ")
        );
        text += &"|---".repeat(2 + MODES.len());
        text += "|\n";
        for line in &self.lines {
            let plans = line.plans.map(|n| {
                if n == 0 {
                    "–".to_owned()
                } else {
                    n.to_string()
                }
            });
            let cell = |worst: &f32| {
                if *worst == 0.0 {
                    "same bits"
                } else {
                    "≤ 1e-5"
                }
            };
            let cells: Vec<&str> = line.worst.iter().map(cell).collect();
            text += &format!(
                "| {} | {} | {} |\n",
                line.method,
                plans.join(", "),
                cells.join(" | ")
            );
        }
        text
    }

    /// Compares the table with the README's, or writes it there when asked to.
    pub(crate) fn assert_readme(&self) {
        if std::env::var_os("OMNI_GOLDEN_DIR").is_some() {
            println!("skipped: the README's table is about the committed set");
            return;
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
        let readme = std::fs::read_to_string(&path).unwrap();
        let start = readme
            .find(MARKS[0])
            .expect("README: begin of the plans' table");
        let end = readme
            .find(MARKS[1])
            .expect("README: end of the plans' table");
        let start = start + MARKS[0].len();
        let table = format!("\n{}", self.markdown());
        if std::env::var_os(UPDATE).is_some() {
            let new = format!("{}{table}{}", &readme[..start], &readme[end..]);
            std::fs::write(&path, new).unwrap();
            return;
        }
        assert_eq!(
            &readme[start..end],
            table,
            "the README's table of plans is not what was seen; {UPDATE}=1 writes it"
        );
    }
}
