//! Rules, dashboard and autoscaling against the table of metrics.
use std::collections::BTreeSet;

use serde_json::Value;
use telemetry::names::{self, Kind, Metric};

use crate::read;

/// Labels that Prometheus adds to what it scrapes, and the one of histogram buckets.
const ADDED: [&str; 3] = ["namespace", "pod", "le"];

/// A metric in an expression.
#[derive(Debug)]
struct Use<'a> {
    metric: &'static Metric,
    /// What stands behind the name of a histogram: `_bucket`, `_sum`, `_count`.
    suffix: &'a str,
    /// What stands before it.
    before: &'a str,
    /// Labels of its matchers.
    matched: Vec<&'a str>,
}

/// Every metric in `text`, which may hold more than an expression.
fn uses(text: &str) -> Vec<Use<'_>> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let starts = text
        .match_indices("omni_")
        .map(|(at, _)| at)
        .filter(|&at| !text[..at].ends_with(word));
    starts
        .map(|at| {
            let rest = &text[at..];
            let (name, after) = rest.split_at(rest.find(|c| !word(c)).unwrap_or(rest.len()));
            let (metric, suffix) =
                resolve(name).unwrap_or_else(|| panic!("there is no metric {name}"));
            let matched = match after.strip_prefix('{') {
                Some(inner) => labels(&inner[..inner.find("\"}").unwrap_or(0)]),
                None => Vec::new(),
            };
            Use {
                metric,
                suffix,
                before: &text[..at],
                matched,
            }
        })
        .collect()
}

fn resolve(name: &str) -> Option<(&'static Metric, &str)> {
    let find = |name: &str| {
        names::ALL
            .iter()
            .copied()
            .find(|metric| metric.name == name)
    };
    if let Some(metric) = find(name) {
        return Some((metric, ""));
    }
    let at = name.rfind('_')?;
    let metric = find(&name[..at])?;
    let histogram = matches!(metric.kind, Kind::Seconds | Kind::Size);
    let known = ["_bucket", "_sum", "_count"].contains(&&name[at..]);
    (histogram && known).then_some((metric, &name[at..]))
}

/// Label names of `a="x",b=~"y` (no value of ours holds a comma or an equals sign).
fn labels(matchers: &str) -> Vec<&str> {
    let name = |part: &str| part.find(['=', '!']);
    matchers
        .split(',')
        .filter_map(|part| name(part).map(|at| part[..at].trim()))
        .collect()
}

/// Labels of every `by (...)` in `text`.
fn grouped(text: &str) -> Vec<&str> {
    let groups = text.split("by (").skip(1);
    groups
        .flat_map(|group| group[..group.find(')').unwrap()].split(','))
        .map(str::trim)
        .collect()
}

fn known(metric: &Metric, label: &str) -> bool {
    metric.labels.contains(&label) || ADDED.contains(&label)
}

fn check(text: &str) -> BTreeSet<&'static str> {
    let uses = uses(text);
    for one in &uses {
        let name = one.metric.name;
        for label in &one.matched {
            assert!(
                known(one.metric, label),
                "{name} has no label {label}: {text}"
            );
        }
        let window = ["rate(", "increase("]
            .iter()
            .any(|f| one.before.ends_with(f));
        let grows = one.metric.kind == Kind::Counter || !one.suffix.is_empty();
        assert_eq!(
            window, grows,
            "{name}{} is used the wrong way: {text}",
            one.suffix
        );
        let whole = matches!(one.metric.kind, Kind::Seconds | Kind::Size) && one.suffix.is_empty();
        assert!(!whole, "{name} is a histogram: {text}");
    }
    uses.iter().map(|one| one.metric.name).collect()
}

/// Checks an expression, its groups included.
fn check_expression(text: &str) -> BTreeSet<&'static str> {
    let used = check(text);
    assert!(!used.is_empty(), "no metric of ours: {text}");
    for label in grouped(text) {
        let mut metrics = names::ALL
            .iter()
            .filter(|metric| used.contains(metric.name));
        assert!(
            metrics.any(|metric| known(metric, label)),
            "nothing has the label {label}: {text}"
        );
    }
    used
}

/// Panels of the dashboard that show something.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    panels.filter(|panel| panel["type"] != "row")
}

#[test]
fn the_dashboard_shows_only_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&read("files/grafana/omni.json")).unwrap();
    let mut shown = check(dashboard["templating"].to_string().as_str());
    for panel in panels(&dashboard) {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            shown.extend(check_expression(expression));
            let legend = target["legendFormat"].as_str().unwrap();
            for label in legend
                .split("{{")
                .skip(1)
                .map(|part| part.split("}}").next().unwrap())
            {
                assert!(
                    grouped(expression).contains(&label),
                    "{legend}: {expression}"
                );
            }
        }
    }
    assert!(shown.len() >= 20, "only {shown:?}");
}

#[test]
fn panels_of_the_dashboard_do_not_overlap() {
    let dashboard: Value = serde_json::from_str(&read("files/grafana/omni.json")).unwrap();
    let mut cells = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let side = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(side("x") + side("w") <= 24, "{}", panel["title"]);
        for x in side("x")..side("x") + side("w") {
            for y in side("y")..side("y") + side("h") {
                assert!(cells.insert((x, y)), "{} covers another", panel["title"]);
            }
        }
    }
    let ids: BTreeSet<_> = panels(&dashboard)
        .map(|panel| panel["id"].as_u64())
        .collect();
    assert_eq!(
        ids.len(),
        panels(&dashboard).count(),
        "panel ids are not unique"
    );
}

#[test]
fn rules_read_only_metrics_that_exist() {
    let rules = read("files/alerts/omni.yaml");
    let mut alerts = 0;
    for rule in rules.split("\n      - ").skip(1) {
        let expression = rule.split("expr:").nth(1).unwrap();
        let end = ["\n        for:", "\n        labels:"]
            .iter()
            .filter_map(|key| expression.find(key))
            .min()
            .unwrap_or(expression.len());
        let expression = &expression[..end];
        check_expression(expression);
        let texts = rule.split("$labels.").skip(1);
        for label in texts.map(|text| text.split([' ', '}']).next().unwrap()) {
            assert!(
                grouped(expression).contains(&label),
                "{label} is not in {expression}"
            );
        }
        alerts += usize::from(rule.starts_with("alert:"));
    }
    assert!(alerts >= 9, "only {alerts} alerts were found");
}

#[test]
fn autoscaling_reads_only_metrics_that_exist() {
    let template = read("templates/pools.yaml");
    let (_, query) = template.split_once("query: >-").unwrap();
    let (query, _) = query.split_once("threshold:").unwrap();
    // What helm fills in stands between quotes.
    let mut plain = String::new();
    for part in query.split("{{") {
        plain.push_str(part.split_once("}}").map_or(part, |(_, rest)| rest));
    }
    assert!(check(&plain).len() >= 3, "{plain}");
}

#[test]
fn a_metric_that_does_not_exist_is_noticed() {
    for wrong in [
        "rate(omni_router_request_total[5m])",
        "omni_router_requests_total",
        "rate(omni_router_running[5m])",
        "omni_router_queue_depth{stage=\"x\"}",
        "rate(omni_router_queue_depth_sum[5m])",
        "sum by (stage) (omni_router_queue_depth)",
    ] {
        let caught = std::panic::catch_unwind(|| check_expression(wrong));
        assert!(caught.is_err(), "{wrong}");
    }
}

/// Set to write the table of metrics instead of comparing with it.
const UPDATE: &str = "OMNI_UPDATE_README";
/// The table for people.
const DOCUMENT: &str = "deploy/METRICS.md";

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Seconds => "histogram of seconds",
        Kind::Size => "histogram",
    }
}

#[test]
fn the_document_says_of_every_metric_what_the_table_says() {
    let mut text = "# Metrics\n\nAt `/metrics` of the admin port of every process, in OpenMetrics text. Written by \
        `OMNI_UPDATE_README=1 cargo test -p integration-tests --test chart`.\n\n\
        | metric | kind | labels | what it says |\n|---|---|---|---|\n"
        .to_owned();
    for metric in names::ALL {
        let labels: Vec<_> = metric
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        let labels = if labels.is_empty() {
            "–".to_owned()
        } else {
            labels.join(", ")
        };
        let row = format!(
            "| `{}` | {} | {labels} | {} |\n",
            metric.name,
            kind(metric.kind),
            metric.help
        );
        text.push_str(&row);
    }
    let path = integration_tests::workspace_root().join(DOCUMENT);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "{DOCUMENT} is old: run with {UPDATE}=1");
}

/// Rust sources below `services`, but for the table itself.
fn sources(folder: &std::path::Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && !["target", "tests", "fuzz"].contains(&name) {
            sources(&path, into);
        } else if name.ends_with(".rs") && name != "names.rs" {
            into.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_metric_of_the_table_is_measured_somewhere() {
    let services = integration_tests::workspace_root().join("services");
    let mut text = String::new();
    sources(&services, &mut text);
    let table = std::fs::read_to_string(services.join("shared/telemetry/src/names.rs")).unwrap();
    let names: Vec<_> = table
        .lines()
        .filter(|line| line.contains(" = \"omni_"))
        .collect();
    assert_eq!(names.len(), names::ALL.len(), "the table is read wrongly");
    let idents = names
        .iter()
        .map(|line| line.trim().split(' ').next().unwrap());
    let dead: Vec<_> = idents
        .filter(|ident| !text.contains(&format!("::{ident}")))
        .collect();
    assert!(
        dead.is_empty(),
        "in the table, but never measured: {dead:?}"
    );
}
