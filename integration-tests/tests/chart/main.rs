//! What the chart says about the binary is true: the settings it may render, and the metrics that its rules, its dashboard
//! and its autoscaling read. Rendering itself is tested by `deploy/chart-test`.
#![allow(clippy::unwrap_used)]

mod binary;
mod metrics;

use std::{fs, path::PathBuf};

fn path(below_chart: &str) -> PathBuf {
    integration_tests::workspace_root()
        .join("helm/omni")
        .join(below_chart)
}

fn read(below_chart: &str) -> String {
    fs::read_to_string(path(below_chart)).unwrap()
}
