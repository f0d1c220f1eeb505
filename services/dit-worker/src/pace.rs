//! What a step takes on this worker, measured once the model is loaded and warm.
use base::clock;
use proto::v1::StepCosts;
use schedule::cost::Constants;
use stage::{Ranks, StageError};

use crate::{
    denoiser::{RankJob, weight},
    ledger::sample_job,
};

/// Steps of each size; the quickest counts, as others may have met something else on the machine.
const TRIES: usize = 2;
/// Least share of a small picture's step that its tokens are taken to cost.
const LEAST_SHARE: f64 = 0.01;

/// A step of two rows of one image token against one of the smallest picture: what is paid once, and what for
/// each token. Where layers are read in every step, the first is the time in which they are read.
///
/// # Errors
/// Those of the model.
pub(crate) fn measure(ranks: &Ranks) -> Result<Constants, StageError> {
    let info = ranks.info();
    let cell = info.pixels_per_token;
    let small = info.buckets.iter().min_by_key(|b| b.height * b.width);
    let small = small.ok_or_else(|| StageError::config("model", "has no sizes"))?;
    let (few, least) = quickest(ranks, (cell, cell))?;
    let (many, more) = quickest(ranks, (small.height, small.width))?;
    let apart = many.saturating_sub(few).max(1) as f64;
    let share = LEAST_SHARE * more / many.max(1) as f64;
    let per_token_s = ((more - least) / apart).max(share).max(f64::MIN_POSITIVE);
    let once = (least - per_token_s * few as f64).max(0.0);
    // Where GPUs compute, the host has no decoder; what they copy in is in what was measured.
    let travelling = |model: &std::sync::Arc<model::Model>| model.travelling();
    let mut each = ranks.models().iter().map(travelling);
    let travels = each.any(|travelling| travelling.is_ok_and(|t| t.layers > 0));
    let constants = Constants {
        fixed_s: if travels { 0.0 } else { once },
        stream_s: if travels { least } else { 0.0 },
        per_token_s,
        per_row_s: 0.0,
        per_pair_s: 0.0,
        dense_read_s: 0.0,
        experts_read_s: 0.0,
        untouched_share: 1.0,
        // Pictures are decoded beside the steps.
        decode_token_s: 0.0,
    };
    tracing::info!(?constants, "step times");
    Ok(constants)
}

/// As the router is told.
pub(crate) fn told(constants: &Constants) -> StepCosts {
    StepCosts {
        fixed_s: constants.fixed_s,
        per_row_s: constants.per_row_s,
        per_token_s: constants.per_token_s,
        per_pair_s: constants.per_pair_s,
        dense_read_s: constants.dense_read_s,
        experts_read_s: constants.experts_read_s,
        untouched_share: constants.untouched_share,
        stream_s: constants.stream_s,
        decode_token_s: constants.decode_token_s,
    }
}

/// Query tokens and seconds of the quickest of a few steps.
fn quickest(ranks: &Ranks, size: (usize, usize)) -> Result<(usize, f64), StageError> {
    let (mut tokens, mut least) = (0, f64::INFINITY);
    for _ in 0..TRIES {
        let mut job = sample_job(ranks, size)?;
        tokens = weight(&job).tokens;
        let start = clock::now();
        RankJob::step_together(ranks, std::slice::from_mut(&mut job))?;
        least = least.min(clock::millis_since(start) / 1e3);
    }
    Ok((tokens, least))
}
