//! The golden numbers: every file of the golden set against what this project computes.
//!
//! The set lies in `OMNI_GOLDEN_DIR`, by default in the committed fixtures. No case, shape or count is written
//! down here: the tests walk over whatever the set's own files list, so another set must pass as well.
//! `--nocapture` shows the measured differences.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod back_cond;
mod back_denoise;
mod back_end_to_end;
mod back_prefill;
mod back_support;
mod back_text;
mod back_vae;
mod common;
mod front_buckets;
mod front_checkpoint;
mod front_images;
mod front_layouts;
mod front_manifest;
mod front_requests;
mod front_schedule;
mod plan_processes;
mod plan_runs;
mod plan_table;
