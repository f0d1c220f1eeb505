//! Steps that reuse what earlier steps computed instead of running the decoder. Off unless asked for.
//!
//! Which steps those are depends on the schedule alone, so every rank knows it without a word, and each row
//! of a batch has its own. The patch embedding and the final layer run in every step.

use std::path::Path;
use std::str::FromStr;

use kernels::{Tensor, add_scaled};

use super::bands::low_band;
use super::job::TimeVectors;
use crate::config::read_bounded;
use crate::error::ModelError;
use crate::scheduler::MAX_STEPS;
use crate::squares::polynomial;

/// Name of the file with a model's rescale polynomial, in its checkpoint directory: a JSON list of numbers,
/// the constant first.
pub const TEA_FILE: &str = "teacache.json";
/// Largest accepted file.
const MAX_FILE_BYTES: u64 = 1 << 16;

/// Largest order of a Taylor series.
const MAX_ORDER: usize = 4;
/// Most coefficients of a rescale polynomial.
pub const MAX_COEFFICIENTS: usize = 8;

/// How a job saves steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum StepCache {
    /// Every step runs the decoder.
    #[default]
    Off,
    /// Hidden states go on along their Taylor series.
    Taylor(Taylor),
    /// A step whose time has hardly moved adds the last change through the decoder again, or what that is on its
    /// way to.
    Tea(Tea),
}

/// The model's own cache (HunyuanImage-3.0 specification, Taylor cache).
#[derive(Clone, Debug, PartialEq)]
pub struct Taylor {
    /// One step in so many runs the decoder.
    pub interval: usize,
    /// Order of the series for slow changes along the tokens, below a tenth of the highest frequency.
    pub low_order: usize,
    /// Order for the others.
    pub high_order: usize,
    /// Steps at the start that always run the decoder; at least 1.
    pub first: usize,
    /// Steps at the end that do.
    pub last: usize,
}

impl Default for Taylor {
    fn default() -> Self {
        Self {
            interval: 5,
            low_order: 2,
            high_order: 2,
            first: 3,
            last: 1,
        }
    }
}

/// Skips by the distance that the time-modulated embedding has moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Tea {
    /// Rescaled distance from which a step runs the decoder again.
    pub threshold: f64,
    /// Polynomial from the relative change of the modulation to that of the hidden states, constant first.
    pub coefficients: Vec<f64>,
    /// Steps at the start that always run the decoder; at least 1.
    pub first: usize,
    /// Steps at the end that do; at least 1.
    pub last: usize,
    /// 0: the last change through the decoder is added again; 1: it goes on in a line, 2: in a parabola.
    pub order: usize,
}

impl Default for Tea {
    fn default() -> Self {
        Self {
            threshold: 0.15,
            coefficients: Vec::new(),
            first: 1,
            last: 1,
            order: 0,
        }
    }
}

impl Tea {
    /// The polynomial that comes closest to what was seen: relative changes of the modulation and of the
    /// change through the decoder, from one step to the next.
    ///
    /// # Errors
    /// `InvalidArgument` when the points do not determine a polynomial of `degree`.
    pub fn fit(points: &[(f64, f64)], degree: usize) -> Result<Vec<f64>, ModelError> {
        let bad = |what: &str| ModelError::invalid("points", what);
        if degree >= MAX_COEFFICIENTS {
            return Err(bad("the degree is too high"));
        }
        polynomial(points, degree).ok_or_else(|| bad("they do not determine the polynomial"))
    }

    /// The expected relative change of the hidden states.
    pub fn rescaled(&self, change: f64) -> f64 {
        let terms = self.coefficients.iter().rev();
        terms.fold(0.0, |sum, c| sum * change + c).max(0.0)
    }
}

impl FromStr for StepCache {
    type Err = ModelError;

    /// `off`, `taylor` or `tea`, the last two with options: `taylor:interval=3,first=2`,
    /// `tea:threshold=0.2,first=4`. A `tea` has no coefficients yet; they belong to a model.
    fn from_str(text: &str) -> Result<Self, ModelError> {
        let (kind, options) = text.split_once(':').unwrap_or((text, ""));
        let bad = |what: String| ModelError::invalid("step_cache", what);
        let mut taylor = Taylor::default();
        let mut tea = Tea::default();
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option
                .split_once('=')
                .ok_or_else(|| bad(format!("{option} has no value")))?;
            let number: f64 = value
                .parse()
                .map_err(|_| bad(format!("{name} must be a number, got {value}")))?;
            let count = number as usize;
            match (kind, name) {
                ("taylor", "interval") => taylor.interval = count,
                ("taylor", "order") => (taylor.low_order, taylor.high_order) = (count, count),
                ("taylor", "low_order") => taylor.low_order = count,
                ("taylor", "high_order") => taylor.high_order = count,
                ("taylor", "first") => taylor.first = count,
                ("taylor", "last") => taylor.last = count,
                ("tea", "threshold") => tea.threshold = number,
                ("tea", "first") => tea.first = count,
                ("tea", "last") => tea.last = count,
                ("tea", "order") => tea.order = count,
                _ => return Err(bad(format!("{kind} has no option {name}"))),
            }
        }
        let cache = match kind {
            "off" => Self::Off,
            "taylor" => Self::Taylor(taylor),
            "tea" => Self::Tea(tea),
            _ => return Err(bad(format!("{kind} is not off, taylor or tea"))),
        };
        cache.check()?;
        Ok(cache)
    }
}

impl StepCache {
    /// Refuses what cannot be meant.
    ///
    /// # Errors
    /// `InvalidArgument` naming `step_cache`.
    pub fn check(&self) -> Result<(), ModelError> {
        let bad = |what: &str| Err(ModelError::invalid("step_cache", what));
        match self {
            Self::Off => Ok(()),
            Self::Taylor(t) if !(1..=MAX_STEPS).contains(&t.interval) => {
                bad("interval must be at least 1")
            }
            Self::Taylor(t) if t.low_order.max(t.high_order) > MAX_ORDER => {
                bad("an order must be at most 4")
            }
            Self::Taylor(Taylor { first: 0, .. }) | Self::Tea(Tea { first: 0, .. }) => {
                bad("the first step always runs")
            }
            Self::Tea(Tea { last: 0, .. }) => bad("the last step always runs"),
            Self::Tea(t) if t.order > MAX_ORDER => bad("an order must be at most 4"),
            Self::Tea(t) if !(t.threshold.is_finite() && t.threshold >= 0.0) => {
                bad("threshold must be at least 0")
            }
            Self::Tea(t) if t.coefficients.len() > MAX_COEFFICIENTS => bad("too many coefficients"),
            Self::Tea(t) if t.coefficients.iter().any(|c| !c.is_finite()) => {
                bad("a coefficient is not finite")
            }
            Self::Taylor(_) | Self::Tea(_) => Ok(()),
        }
    }

    /// The same with the coefficients that stand in a model's checkpoint directory.
    ///
    /// # Errors
    /// `CheckpointFile` when it needs some and there are none, or they are no polynomial.
    pub fn of_model(self, dir: &Path) -> Result<Self, ModelError> {
        let Self::Tea(mut tea) = self else {
            return Ok(self);
        };
        if !dir.join(TEA_FILE).exists() {
            let message = "is missing; `omni calibrate` makes one";
            return Err(ModelError::file(TEA_FILE, message));
        }
        let bytes = read_bounded(dir, TEA_FILE, MAX_FILE_BYTES)?;
        tea.coefficients = serde_json::from_slice(&bytes)
            .map_err(|error| ModelError::file(TEA_FILE, error.to_string()))?;
        let tea = Self::Tea(tea);
        tea.check()?;
        Ok(tea)
    }

    /// Hidden states that it keeps for each token of a job.
    pub fn kept(&self) -> usize {
        match self {
            Self::Off => 0,
            Self::Taylor(t) => t.low_order.max(t.high_order) + 1,
            Self::Tea(t) => t.order + 1,
        }
    }

    /// Which of a job's steps run the decoder.
    pub(super) fn runs(&self, times: &TimeVectors, steps: usize) -> Result<Vec<bool>, ModelError> {
        match self {
            Self::Off => Ok(vec![true; steps]),
            Self::Taylor(t) => Ok(t.runs(steps)),
            Self::Tea(t) => Ok(t.runs(&changes(times, steps)?)),
        }
    }
}

impl Taylor {
    fn runs(&self, steps: usize) -> Vec<bool> {
        let mut since = 0;
        (0..steps)
            .map(|step| {
                since += 1;
                let ends = step < self.first || step + self.last >= steps;
                let runs = ends || since >= self.interval;
                if runs {
                    since = 0;
                }
                runs
            })
            .collect()
    }
}

impl Tea {
    /// `changes[i]`: of the modulation, from step `i` to `i + 1`.
    fn runs(&self, changes: &[f64]) -> Vec<bool> {
        let mut distance = 0.0;
        let between = changes.iter().enumerate().map(|(i, change)| {
            distance += self.rescaled(*change);
            let ends = i + 1 < self.first || i + self.last >= changes.len();
            let runs = ends || distance >= self.threshold;
            if runs {
                distance = 0.0;
            }
            runs
        });
        std::iter::once(true).chain(between).collect()
    }
}

/// Relative change (L1) of the modulation of the patch embedding from each step to the next.
pub(super) fn changes(times: &TimeVectors, steps: usize) -> Result<Vec<f64>, ModelError> {
    let of = |step: usize| Ok::<_, ModelError>(times.patch.narrow0(2 * step, 2)?.to_f32_vec());
    let mut before = of(0)?;
    let mut all = Vec::with_capacity(steps);
    for step in 1..steps {
        let now = of(step)?;
        all.push(relative(&now, &before));
        before = now;
    }
    Ok(all)
}

/// Sum of absolute differences over the sum of absolute values of `before`.
pub fn relative(now: &[f32], before: &[f32]) -> f64 {
    let moved = now.iter().zip(before).map(|(n, b)| f64::from(n - b).abs());
    let size: f64 = before.iter().map(|b| f64::from(*b).abs()).sum();
    moved.sum::<f64>() / size.max(f64::MIN_POSITIVE)
}

/// What a job keeps of the steps that ran. `[tokens of its rows, hidden]` each.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// Last step that ran.
    step: usize,
    /// The hidden states and their differences by steps, or the change through the decoder.
    kept: Vec<Tensor>,
    /// Relative change of the change through the decoder since the last step that ran, under a threshold of 0.
    moved: Option<f64>,
}

impl History {
    pub(super) fn moved(&self) -> Option<f64> {
        self.moved
    }

    /// After `step` turned `input` into `output`.
    pub(super) fn after(
        &self,
        cache: &StepCache,
        step: usize,
        (input, output): (Option<&Tensor>, &Tensor),
    ) -> Result<Self, ModelError> {
        let mut kept = vec![output.clone()];
        let mut moved = None;
        match cache {
            StepCache::Off => kept.clear(),
            StepCache::Tea(tea) => {
                let input = input.ok_or_else(|| {
                    ModelError::Internal("the last stage has no input to compare with".into())
                })?;
                combine(&mut kept[0], input, -1.0)?;
                // Only a calibration asks.
                let asked = tea.threshold == 0.0;
                if let Some(before) = self.kept.first().filter(|_| asked) {
                    moved = Some(relative(kept[0].as_f32()?, before.as_f32()?));
                }
            }
            StepCache::Taylor(_) => {}
        }
        let gap = (step - self.step) as f32;
        for before in self.kept.iter().take(cache.kept().saturating_sub(1)) {
            let mut next = kept[kept.len() - 1].clone();
            combine(&mut next, before, -1.0)?;
            next.as_f32_mut()?.iter_mut().for_each(|v| *v /= gap);
            kept.push(next);
        }
        Ok(Self { step, kept, moved })
    }

    /// The hidden states that `step` would have.
    pub(super) fn predict(
        &self,
        cache: &StepCache,
        step: usize,
        input: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor, ModelError> {
        let missing = || ModelError::Internal("a skipped step has nothing to go on from".into());
        let last = self.kept.first().ok_or_else(missing)?;
        let mut out = last.clone();
        let ahead = (step - self.step) as f32;
        let mut factor = 1.0;
        match cache {
            StepCache::Off => return Err(missing()),
            StepCache::Tea(_) => {
                combine(&mut out, input.ok_or_else(missing)?, 1.0)?;
                for (order, difference) in self.kept.iter().enumerate().skip(1) {
                    factor *= ahead / order as f32;
                    combine(&mut out, difference, factor)?;
                }
            }
            StepCache::Taylor(taylor) => {
                for (order, difference) in self.kept.iter().enumerate().skip(1) {
                    factor *= ahead / order as f32;
                    let (low, high) = (order <= taylor.low_order, order <= taylor.high_order);
                    if low && high {
                        combine(&mut out, difference, factor)?;
                        continue;
                    }
                    let slow = low_band(difference, rows)?;
                    combine(&mut out, &slow, if low { factor } else { -factor })?;
                    if high {
                        combine(&mut out, difference, factor)?;
                    }
                }
            }
        }
        Ok(out)
    }
}

/// `to += factor · from`.
fn combine(to: &mut Tensor, from: &Tensor, factor: f32) -> Result<(), ModelError> {
    Ok(add_scaled(to, factor, from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(values: &[f32]) -> Tensor {
        Tensor::from_f32(&[values.len(), 1], values.to_vec()).unwrap()
    }

    #[test]
    fn a_taylor_series_of_order_two_continues_a_parabola() {
        let cache: StepCache = "taylor:interval=2,order=2".parse().unwrap();
        let at = |step: usize| {
            let t = step as f32;
            column(&[1.0 + t, t * t, 3.0])
        };
        let mut history = History::default();
        for step in [0, 1, 2] {
            history = history.after(&cache, step, (None, &at(step))).unwrap();
        }
        // Backward differences lag by a step in the first order: exact for the line, short for the parabola.
        let got = history.predict(&cache, 4, None, 1).unwrap().to_f32_vec();
        assert_eq!(got, [5.0, 4.0 + 2.0 * 3.0 + 2.0 * 2.0 / 2.0 * 2.0, 3.0]);
    }

    #[test]
    fn a_tea_of_order_one_goes_on_in_a_line_from_the_input_of_the_step() {
        let cache: StepCache = "tea:order=1".parse().unwrap();
        let through = |step: usize| {
            let (t, input) = (step as f32, column(&[step as f32 * 7.0, 5.0]));
            let mut output = column(&[3.0 * t, 2.0]);
            combine(&mut output, &input, 1.0).unwrap();
            (input, output)
        };
        let mut history = History::default();
        for step in [0, 2] {
            let (input, output) = through(step);
            history = history
                .after(&cache, step, (Some(&input), &output))
                .unwrap();
        }
        let (input, want) = through(5);
        let got = history.predict(&cache, 5, Some(&input), 1).unwrap();
        assert_eq!(got.to_f32_vec(), want.to_f32_vec());
    }

    #[test]
    fn equal_orders_need_no_bands_and_bands_add_up() {
        let values: Vec<f32> = (0..24).map(|i| (i as f32 * 1.3).sin()).collect();
        let (a, b) = (
            column(&values),
            column(&values[..].iter().rev().copied().collect::<Vec<_>>()),
        );
        let predict = |text: &str| {
            let cache: StepCache = text.parse().unwrap();
            let first = History::default().after(&cache, 0, (None, &a)).unwrap();
            let second = first.after(&cache, 1, (None, &b)).unwrap();
            second.predict(&cache, 2, None, 2).unwrap().to_f32_vec()
        };
        let both = predict("taylor:order=1");
        let none = predict("taylor:order=0");
        let low = predict("taylor:low_order=1,high_order=0");
        let high = predict("taylor:low_order=0,high_order=1");
        for i in 0..24 {
            assert!((low[i] + high[i] - none[i] - both[i]).abs() < 1e-5, "{i}");
        }
        assert_ne!(low, none);
    }

    #[test]
    fn the_ends_always_run_and_an_interval_of_one_runs_all() {
        let runs = |text: &str, steps| {
            let Ok(StepCache::Taylor(taylor)) = text.parse() else {
                panic!("{text}")
            };
            taylor.runs(steps)
        };
        assert_eq!(runs("taylor:interval=1", 4), [true; 4]);
        let some = runs("taylor:interval=3,first=2,last=1", 9);
        let want = [true, true, false, false, true, false, false, true, true];
        assert_eq!(some, want);
        let tea = Tea {
            threshold: 0.25,
            coefficients: vec![0.0, 1.0],
            ..Tea::default()
        };
        assert_eq!(
            tea.runs(&[0.1, 0.1, 0.1, 0.3, 0.1]),
            [true, false, false, true, true, true]
        );
        let early = Tea {
            last: 3,
            ..tea.clone()
        };
        assert_eq!(
            early.runs(&[0.1, 0.1, 0.1, 0.1, 0.1]),
            [true, false, false, true, true, true]
        );
        let later = Tea { first: 3, ..tea };
        assert_eq!(
            later.runs(&[0.1, 0.1, 0.1, 0.1, 0.1]),
            [true, true, true, false, false, true]
        );
    }

    #[test]
    fn options_that_cannot_be_meant_are_refused_by_name() {
        for text in [
            "tailor",
            "taylor:interval",
            "taylor:interval=0",
            "taylor:order=9",
            "taylor:threshold=1",
            "taylor:first=0",
            "tea:threshold=-1",
            "tea:threshold=nan",
            "tea:last=0",
            "tea:order=5",
        ] {
            let error = text.parse::<StepCache>().unwrap_err();
            assert!(error.to_string().contains("step_cache"), "{text}: {error}");
        }
    }
}
