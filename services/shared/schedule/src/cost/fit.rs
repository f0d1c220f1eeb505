//! Constants from measured steps.
use super::{Constants, Load};
use crate::ScheduleError;

/// What a step's time is taken to be made of, as columns: what is paid once, query tokens, pairs.
const COLUMNS: usize = 3;
const TOKENS: usize = 1;
/// Which columns may be left out: a step costs something for its tokens in any case.
const SUBSETS: [[bool; COLUMNS]; 4] = [
    [true, true, true],
    [true, true, false],
    [false, true, true],
    [false, true, false],
];
/// A pivot below this share of its column's sum says that the samples do not tell columns apart.
const SINGULAR: f64 = 1e-9;

impl Constants {
    /// The constants, none of them below 0, whose predictions of `samples` (what a step held, and its seconds) are off
    /// by the least sum of squares, each as a share of what was measured. What is paid once comes out as
    /// `fixed_s`, whatever it is spent on.
    ///
    /// # Errors
    /// [`ScheduleError`]: samples that are no times, or that do not tell what a token costs.
    pub fn fit(samples: &[(Load, f64)]) -> Result<Self, ScheduleError> {
        let good = |(load, seconds): &(Load, f64)| {
            load.tokens > 0.0 && seconds.is_finite() && *seconds > 0.0
        };
        if samples.is_empty() || !samples.iter().all(good) {
            let reason = "must be steps of some tokens and of some time";
            return Err(ScheduleError::invalid("samples", reason));
        }
        let shares: Vec<[f64; COLUMNS]> = samples
            .iter()
            .map(|(load, seconds)| [1.0, load.tokens, load.pairs].map(|value| value / seconds))
            .collect();
        let found = SUBSETS
            .iter()
            .filter_map(|subset| solved(&shares, subset))
            .filter(|costs| costs.iter().all(|cost| *cost >= 0.0) && costs[TOKENS] > 0.0);
        let best = found.min_by(|a, b| off(&shares, a).total_cmp(&off(&shares, b)));
        let [fixed_s, per_token_s, per_pair_s] = best.ok_or_else(|| {
            let reason = "do not tell what a token costs: steps of more tokens must take longer";
            ScheduleError::invalid("samples", reason)
        })?;
        Ok(Self {
            fixed_s,
            per_row_s: 0.0,
            per_token_s,
            per_pair_s,
            dense_read_s: 0.0,
            experts_read_s: 0.0,
            untouched_share: 1.0,
            stream_s: 0.0,
            decode_token_s: 0.0,
        })
    }
}

/// Sum of squares of predicted over measured, less one.
fn off(shares: &[[f64; COLUMNS]], costs: &[f64; COLUMNS]) -> f64 {
    let one = |row: &[f64; COLUMNS]| {
        let predicted: f64 = row
            .iter()
            .zip(costs)
            .map(|(share, cost)| share * cost)
            .sum();
        (predicted - 1.0).powi(2)
    };
    shares.iter().map(one).sum()
}

/// The least squares of the columns of `subset`, by their normal equations; the others are 0.
fn solved(shares: &[[f64; COLUMNS]], subset: &[bool; COLUMNS]) -> Option<[f64; COLUMNS]> {
    let used: Vec<usize> = (0..COLUMNS).filter(|column| subset[*column]).collect();
    // Columns are of very different sizes, so each is measured by its own sum.
    let scale = |column: usize| shares.iter().map(|row| row[column]).sum::<f64>();
    let at = |row: &[f64; COLUMNS], column: usize| row[column] / scale(column);
    let product = |one: usize, other: usize| -> f64 {
        let products = shares.iter().map(|row| at(row, one) * at(row, other));
        products.sum()
    };
    let line = |one: usize| -> Vec<f64> {
        let right: f64 = shares.iter().map(|row| at(row, one)).sum();
        let left = used.iter().map(|&other| product(one, other));
        left.chain([right]).collect()
    };
    let count = used.len();
    let mut system: Vec<Vec<f64>> = used.iter().map(|&one| line(one)).collect();
    for pivot in 0..count {
        if system[pivot][pivot] < SINGULAR {
            return None;
        }
        let lead = system[pivot].clone();
        for line in system.iter_mut().skip(pivot + 1) {
            let factor = line[pivot] / lead[pivot];
            for (value, above) in line.iter_mut().zip(&lead) {
                *value -= factor * above;
            }
        }
    }
    let mut costs = [0.0; COLUMNS];
    for line in (0..count).rev() {
        let known: f64 = (line + 1..count)
            .map(|at| system[line][at] * costs[used[at]])
            .sum();
        costs[used[line]] = (system[line][count] - known) / system[line][line];
    }
    for &column in &used {
        costs[column] /= scale(column);
    }
    Some(costs)
}
