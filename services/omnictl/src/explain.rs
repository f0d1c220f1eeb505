//! `omnictl explain` and `omnictl trace`: why a request went where it went, and where its time went.
use std::fmt::Write as _;

use clap::{Args, ValueEnum};
use proto::v1::{Candidate, Placement, RequestRecord, Span};
use serde_json::{Value, json};

use crate::{
    error::CliError,
    get,
    resource::{millis, plain},
    text::Console,
    yaml,
};

/// Characters of a bar.
const BAR: usize = 32;

/// How it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    Text,
    Json,
    Yaml,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Request id, as `omnictl get requests` shows it.
    id: String,
    #[arg(short, long, value_enum, default_value_t = Form::Text)]
    output: Form,
}

async fn record(endpoint: &str, id: &str) -> Result<RequestRecord, CliError> {
    let found = get::records(endpoint, &[id.to_owned()], true).await?;
    Ok(found.into_iter().next().unwrap_or_default())
}

fn print(
    form: Form,
    value: &Value,
    text: impl FnOnce() -> String,
    console: &Console,
) -> Result<(), CliError> {
    match form {
        Form::Text => console.raw(text().as_bytes()),
        Form::Json => console.json(value),
        Form::Yaml => console.raw(yaml::text(value).as_bytes()),
    }
}

/// `omnictl explain`.
pub(crate) async fn explain(
    endpoint: &str,
    args: ExplainArgs,
    console: &Console,
) -> Result<(), CliError> {
    let record = record(endpoint, &args.id).await?;
    print(
        args.output,
        &get::request(&record),
        || explained(&record),
        console,
    )
}

/// `omnictl trace`.
pub(crate) async fn trace(
    endpoint: &str,
    args: ExplainArgs,
    console: &Console,
) -> Result<(), CliError> {
    let record = record(endpoint, &args.id).await?;
    let spans: Value = record.spans.iter().map(span_json).collect();
    let value = json!({
        "id": record.request_id, "total_ms": record.age_ms, "cut": record.cut, "spans": spans,
    });
    print(args.output, &value, || tree(&record), console)
}

pub(crate) fn placement_json(placement: &Placement) -> Value {
    let candidate = |c: &Candidate| {
        let load = c.load.unwrap_or_default();
        json!({
            "member": c.member, "running": load.running, "queued": load.queued,
            "capacity": load.capacity, "under_way": c.under_way,
        })
    };
    let passed = placement.passed_over.iter();
    let passed = passed.map(|p| json!({"reason": p.reason, "members": p.members}));
    json!({
        "stage": placement.stage, "image": placement.image, "member": placement.member,
        "epoch": placement.epoch, "at_ms": placement.at_ms, "attempt": placement.attempt,
        "from_step": placement.from_step, "eligible": placement.eligible,
        "candidates": placement.candidates.iter().map(candidate).collect::<Value>(),
        "passed_over": passed.collect::<Value>(), "outcome": placement.outcome,
    })
}

pub(crate) fn span_json(span: &Span) -> Value {
    json!({
        "id": span.id, "parent": span.parent, "name": span.name, "start_ms": span.start_ms,
        "duration_ms": span.duration_ms, "member": span.member, "detail": span.detail,
    })
}

fn explained(record: &RequestRecord) -> String {
    let item = get::request(record);
    let field = |key: &str| plain(&item[key]);
    let mut out = format!(
        "request {}: {} after {}\n",
        record.request_id,
        field("state"),
        millis(record.age_ms)
    );
    let _ = writeln!(
        out,
        "  asked for   {} x {}, {} steps, seed {}, guidance {}, mode {}, priority {}, prompt of {} characters",
        field("n"),
        field("size"),
        item["steps"]
            .as_str()
            .and_then(|s| s.split('/').nth(1))
            .unwrap_or("-"),
        field("seed"),
        field("guidance"),
        field("mode"),
        field("priority"),
        record.prompt_chars,
    );
    if !record.error.is_empty() {
        let _ = writeln!(out, "  failed      {} ({})", record.error, field("code"));
    }
    if !record.prefixes.is_empty() {
        let short = |id: &String| id.chars().take(12).collect::<String>();
        let ids: Vec<_> = record.prefixes.iter().map(short).collect();
        let tokens = record.prefix_tokens;
        let _ = writeln!(out, "  prefixes    {} ({tokens} tokens)", ids.join(", "));
    }
    out += "why\n";
    for placement in &record.placements {
        out += &why(placement);
    }
    if record.placements.is_empty() {
        out += "  it was placed nowhere\n";
    }
    out += "where the time went\n";
    out += &shares(record);
    if record.cut {
        out += "more happened than the router keeps of one request\n";
    }
    out
}

/// One decision: where, why there, what came of it.
fn why(placement: &Placement) -> String {
    let phase = match placement.stage.as_str() {
        "dit-worker" => format!("image {} to", placement.image),
        _ => "prefill to".to_owned(),
    };
    let mut out = format!(
        "  {:>9}  {phase} {}: ",
        millis(placement.at_ms),
        placement.member
    );
    let load = |c: &Candidate| {
        let load = c.load.unwrap_or_default();
        let reported = format!("{}+{}/{}", load.running, load.queued, load.capacity);
        match c.under_way {
            0 => reported,
            ours => format!("{reported}, {ours} of ours"),
        }
    };
    let others: Vec<_> = placement
        .candidates
        .iter()
        .filter(|candidate| candidate.member != placement.member)
        .map(|candidate| format!("{} {}", candidate.member, load(candidate)))
        .collect();
    let own = placement
        .candidates
        .iter()
        .find(|c| c.member == placement.member);
    let own = own.map_or_else(|| "-".to_owned(), load);
    if placement.eligible <= 1 {
        let _ = write!(out, "the only one that could ({own})");
    } else {
        let _ = write!(
            out,
            "least loaded of {} ({own}; then {})",
            placement.eligible,
            others.join(", ")
        );
    }
    for passed in &placement.passed_over {
        let _ = write!(out, "; {} {}", passed.members, passed.reason);
    }
    if placement.attempt > 1 {
        let _ = write!(out, "; attempt {}", placement.attempt);
    }
    if placement.from_step > 0 {
        let _ = write!(out, ", on from step {}", placement.from_step);
    }
    let outcome = match placement.outcome.as_str() {
        "" => "under way",
        outcome => outcome,
    };
    let _ = writeln!(out, "\n             {outcome}");
    out
}

/// What each phase took, and its share of the whole.
fn shares(record: &RequestRecord) -> String {
    let mut out = String::new();
    let total = record.age_ms.max(f64::MIN_POSITIVE);
    let mut line = |name: &str, ms: f64, note: &str| {
        let share = 100.0 * ms / total;
        let _ = writeln!(out, "  {name:<10} {:>9}  {share:>3.0} %{note}", millis(ms));
    };
    let Some(t) = &record.timings else {
        for span in record.spans.iter().filter(|span| span.parent == 0) {
            line(&span.name, span.duration_ms, "");
        }
        return out;
    };
    let carried = format!("  {} bytes over {}", t.transfer_bytes, t.transport);
    let phases = [
        ("queue", t.queue_ms, ""),
        ("prefill", t.prefill_ms, ""),
        ("transfer", t.transfer_ms, carried.as_str()),
        ("denoise", t.denoise_ms, ""),
        ("decode", t.decode_ms, ""),
    ];
    let known: f64 = phases.iter().map(|(_, ms, _)| ms).sum();
    for (name, ms, note) in phases {
        line(name, ms, note);
    }
    line(
        "the rest",
        (t.total_ms - known).max(0.0),
        "  on the way, and waiting in the stages",
    );
    line("total", t.total_ms, "");
    out
}

/// Spans as a tree, each with its place in the whole.
fn tree(record: &RequestRecord) -> String {
    let total = record.age_ms.max(f64::MIN_POSITIVE);
    let root = format!("request {}", record.request_id);
    let mut rows = vec![(root, 0.0, record.age_ms, String::new())];
    branch(record, 0, "", &mut rows);
    let width = rows
        .iter()
        .map(|(name, ..)| name.chars().count())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for (name, start, length, note) in rows {
        let pad = " ".repeat(width - name.chars().count());
        let line = format!(
            "{name}{pad}  {:>9}  {}  {note}",
            millis(length),
            bar(start / total, length / total)
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    if record.cut {
        out += "more happened than the router keeps of one request\n";
    }
    out
}

fn branch(
    record: &RequestRecord,
    parent: u32,
    indent: &str,
    rows: &mut Vec<(String, f64, f64, String)>,
) {
    let children: Vec<_> = record
        .spans
        .iter()
        .filter(|span| span.parent == parent)
        .collect();
    for (index, span) in children.iter().enumerate() {
        let last = index + 1 == children.len();
        let (knot, below) = if last {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        let note = match (span.member.as_str(), span.detail.as_str()) {
            (member, "") => member.to_owned(),
            ("", detail) => detail.to_owned(),
            (member, detail) => format!("{member}: {detail}"),
        };
        rows.push((
            format!("{indent}{knot}{}", span.name),
            span.start_ms,
            span.duration_ms,
            note,
        ));
        // Numbers of spans grow: a span is never below itself.
        if span.id > parent {
            branch(record, span.id, &format!("{indent}{below}"), rows);
        }
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss
)] // 0 to BAR
fn bar(start: f64, length: f64) -> String {
    let cells = BAR as f64;
    let from = ((start * cells) as usize).min(BAR - 1);
    let filled = ((length * cells).round() as usize).clamp(1, BAR - from);
    let (before, after) = (" ".repeat(from), " ".repeat(BAR - from - filled));
    format!("|{before}{}{after}|", "█".repeat(filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_stays_within_its_frame() {
        for (start, length) in [
            (0.0, 1.0),
            (0.5, 0.25),
            (0.999, 5.0),
            (2.0, 0.0),
            (0.0, 0.0),
            (f64::NAN, 1.0),
        ] {
            let bar = bar(start, length);
            assert_eq!(bar.chars().count(), BAR + 2, "{start} {length}");
            assert!(bar.contains('█'));
        }
    }

    #[test]
    fn spans_that_name_a_wrong_parent_end_the_tree_and_do_not_hang_it() {
        let span = |id, parent| Span {
            id,
            parent,
            name: format!("s{id}"),
            ..Span::default()
        };
        let record = RequestRecord {
            spans: vec![span(1, 0), span(2, 1), span(1, 2)],
            age_ms: 1.0,
            ..RequestRecord::default()
        };
        assert!(tree(&record).lines().count() >= 3);
    }
}
