//! How long a step takes. Pure: what the rows of a step hold comes in, seconds come out.
//!
//! `max(fixed + weights that are read whoever is in the step + what each job adds, layers that are copied in)`.
//! The first two are paid once a step, which is why sharing steps pays for small pictures, and hardly for large
//! ones; the last is a floor under every step of a model that does not fit into GPU memory.
//!
//! [`Constants`] are derived from a model's sizes, a machine's measured rates and a plan; [`Correction`]
//! follows what is really measured.
mod constants;
mod correction;
mod fit;

use std::{iter::Sum, ops::Add};

use serde::{Deserialize, Serialize};

pub use constants::{Constants, ModelNumbers};
pub use correction::{Correction, RATIO_BOUNDS};

/// The rows of one job in a step; all rows of a job are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Two under guidance, else one.
    pub rows: u32,
    /// Query tokens of one row: image tokens and the special ones.
    pub tokens: u32,
    /// Prefix tokens of one row.
    pub prefix: u32,
}

/// What a step holds. Loads of jobs add up to that of their step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Rows.
    pub rows: f64,
    /// Query tokens of all rows.
    pub tokens: f64,
    /// Pairs of a query and a key that it sees, over all rows.
    pub pairs: f64,
}

impl From<Rows> for Load {
    fn from(job: Rows) -> Self {
        let (rows, tokens) = (f64::from(job.rows), f64::from(job.tokens));
        Self {
            rows,
            tokens: rows * tokens,
            pairs: rows * tokens * (tokens + f64::from(job.prefix)),
        }
    }
}

impl Add for Load {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            tokens: self.tokens + other.tokens,
            pairs: self.pairs + other.pairs,
        }
    }
}

impl Sum for Load {
    fn sum<I: Iterator<Item = Self>>(loads: I) -> Self {
        loads.fold(Self::default(), Add::add)
    }
}

/// Constants and how far off they have been lately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Predictor {
    /// What the machine is expected to do.
    pub constants: Constants,
    /// What it was seen to do.
    pub correction: Correction,
}

impl Predictor {
    /// Nothing has been measured yet.
    pub fn new(constants: Constants) -> Self {
        Self {
            constants,
            correction: Correction::default(),
        }
    }

    /// Seconds of a step that holds `load`; 0 of an empty one.
    pub fn step(&self, load: Load) -> f64 {
        self.correction.apply(self.constants.step(load))
    }

    /// Seconds that `load` adds to a step which other jobs pay the fixed part of.
    pub fn marginal(&self, load: Load) -> f64 {
        self.correction.apply(self.constants.marginal(load))
    }

    /// A step that held `load` took `seconds`.
    pub fn observe(&mut self, load: Load, seconds: f64) {
        self.correction.observe(self.constants.step(load), seconds);
    }
}

#[cfg(test)]
pub(crate) mod tests;
