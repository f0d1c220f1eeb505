//! The demo model, judged by what its pictures show: the checker itself, a fixed part of the held-out
//! prompts, and the files of the checkpoint. `demo-eval` runs all of the list.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod checker;
mod drawing;
mod files;
mod served;
mod writing;

use std::sync::OnceLock;

use integration_tests::demo::{DemoSet, SEED, Studio, checkpoint_dir};

/// The held-out list.
fn set() -> &'static DemoSet {
    static SET: OnceLock<DemoSet> = OnceLock::new();
    SET.get_or_init(|| DemoSet::load().unwrap())
}

/// The shipped checkpoint with its defaults.
fn studio() -> &'static Studio {
    static STUDIO: OnceLock<Studio> = OnceLock::new();
    STUDIO.get_or_init(|| Studio::open(&checkpoint_dir(), SEED).unwrap())
}

/// Fails with every failure listed when fewer than `share` of `all` are right.
fn assert_share(what: &str, wrong: &[String], all: usize, share: f64) {
    let right = all - wrong.len();
    println!("{what}: {right} of {all}");
    assert!(
        right as f64 >= share * all as f64,
        "{what}: {right} of {all} are right:\n{}",
        wrong.join("\n")
    );
}
