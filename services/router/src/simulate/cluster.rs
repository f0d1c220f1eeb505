//! What a trace is run on.
use parallel::{
    Plan,
    cost::{Interconnect, Machine, WeightType},
};
use serde::Deserialize;

use crate::{
    RouterError, admission,
    batching::{self, cost::Rules},
    cost::{Constants, ModelNumbers},
};

/// Most workers of a simulated cluster.
const MAX_WORKERS: u32 = 4096;
/// Memory of a card, in GiB, above which a figure must be a mistake.
const MAX_GIB: f64 = 4096.0;
/// GPU memory that the cost model asks for and this use of it does not look at.
const UNUSED_MEMORY: u64 = 0;

/// Equal workers and their bounds.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// For the report.
    pub name: String,
    /// Groups of GPUs that run one plan each.
    pub workers: u32,
    /// The plan of each, as in `omnictl plan`.
    pub plan: String,
    /// Type of the large weights.
    pub dtype: WeightType,
    /// What joins the GPUs of a worker.
    pub interconnect: Interconnect,
    /// Decoder layers that stay in host memory.
    #[serde(default)]
    pub streamed_layers: u32,
    /// The model.
    pub model: ModelNumbers,
    /// Bounds of a worker.
    pub step: StepBounds,
    /// Bounds of the router; default: those of a router.
    #[serde(default)]
    pub admission: AdmissionBounds,
    /// When batching pays.
    #[serde(default)]
    pub rules: Rules,
    /// What really happens.
    #[serde(default)]
    pub truth: Truth,
    /// Measured constants, instead of those that are derived.
    pub constants: Option<Constants>,
}

/// Bounds of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepBounds {
    /// Most rows in one step.
    pub max_rows: u64,
    /// Most query tokens in one step.
    pub max_tokens: u64,
    /// GiB of each GPU for prefixes and for the tokens of a step.
    pub free_gib: f64,
}

/// Bounds of the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdmissionBounds {
    /// Requests dispatched at once.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
}

impl Default for AdmissionBounds {
    fn default() -> Self {
        let limits = admission::Limits::default();
        Self {
            max_running: limits.max_running,
            max_queued: limits.max_queued,
        }
    }
}

/// How steps really go, which policies do not know.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Truth {
    /// Times what the constants say.
    pub scale: f64,
    /// Largest share by which one step differs from another, either way, evenly spread.
    pub jitter: f64,
}

impl Default for Truth {
    fn default() -> Self {
        Self {
            scale: 1.0,
            jitter: 0.03,
        }
    }
}

impl Cluster {
    /// Everything is within bounds.
    ///
    /// # Errors
    /// [`RouterError::Invalid`] names the first field that is not.
    pub fn check(&self) -> Result<(), RouterError> {
        let bound = |holds: bool, field, reason: &str| {
            if holds {
                return Ok(());
            }
            Err(RouterError::invalid(field, reason))
        };
        let workers = (1..=MAX_WORKERS).contains(&self.workers);
        bound(workers, "workers", "must be 1 to 4096")?;
        bound(self.step.max_rows > 0, "step.max_rows", "must be above 0")?;
        bound(
            self.step.max_tokens > 0,
            "step.max_tokens",
            "must be above 0",
        )?;
        let memory = self.step.free_gib > 0.0 && self.step.free_gib <= MAX_GIB;
        bound(memory, "step.free_gib", "must be above 0 and at most 4096")?;
        let running = self.admission.max_running > 0;
        bound(running, "admission.max_running", "must be above 0")?;
        let share = |x: f64| (0.0..=1.0).contains(&x);
        bound(share(self.rules.pay), "rules.pay", "must be 0 to 1")?;
        bound(
            share(self.rules.overhead),
            "rules.overhead",
            "must be 0 to 1",
        )?;
        let seconds = |x: f64| x > 0.0 && x <= 1e6;
        let rules = &self.rules;
        for (field, value) in [
            ("rules.class_s", rules.class_s),
            ("rules.class_stretch", rules.class_stretch),
            ("rules.overdue_s", rules.overdue_s),
        ] {
            bound((0.0..=1e6).contains(&value), field, "must be 0 to 1e6")?;
        }
        for (field, value) in [("rules.stretch", rules.stretch), ("rules.late", rules.late)] {
            bound(seconds(value), field, "must be above 0 and at most 1e6")?;
        }
        let scale = (0.1..=10.0).contains(&self.truth.scale);
        bound(scale, "truth.scale", "must be 0.1 to 10")?;
        let jitter = (0.0..=0.5).contains(&self.truth.jitter);
        bound(jitter, "truth.jitter", "must be 0 to 0.5")?;
        self.constants().map(drop)
    }

    /// What the policies believe a step costs.
    ///
    /// # Errors
    /// [`RouterError::Invalid`]: a plan or sizes that cannot be priced.
    pub fn constants(&self) -> Result<Constants, RouterError> {
        let constants = match self.constants {
            Some(constants) => constants,
            None => {
                let machine = Machine::h200(UNUSED_MEMORY, self.dtype, self.interconnect);
                Constants::derive(&self.model, &machine, &self.plan()?, self.streamed_layers)?
            }
        };
        constants.check()?;
        Ok(constants)
    }

    fn plan(&self) -> Result<Plan, RouterError> {
        let plan = self.plan.parse::<Plan>();
        plan.map_err(|error| RouterError::invalid("plan", error.to_string()))
    }

    /// Bounds of a worker's steps.
    ///
    /// # Errors
    /// [`RouterError::Invalid`]: no plan.
    pub(super) fn limits(&self) -> Result<batching::Limits, RouterError> {
        let ranks: usize = self.plan()?.sizes().iter().product();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most 4096 GiB
        let bytes = (self.step.free_gib * f64::from(1 << 30)) as u64;
        Ok(batching::Limits {
            max_rows: self.step.max_rows,
            max_tokens: self.step.max_tokens,
            // Prefixes and tokens are taken to spread evenly over the ranks.
            max_bytes: bytes.saturating_mul(ranks as u64),
            token_bytes: self.model.token_bytes(),
        })
    }

    /// Bounds of the router.
    pub(super) fn admission(&self) -> admission::Limits {
        admission::Limits {
            max_running: self.admission.max_running,
            max_queued: self.admission.max_queued,
            max_cost: u64::MAX,
            ..admission::Limits::default()
        }
    }
}
