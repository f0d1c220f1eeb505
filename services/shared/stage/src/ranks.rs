//! The ranks of a pool's plan that run in this process: one model part and one thread each.
//!
//! All of them run every piece of work together. When one fails, the others end with it, and the groups are
//! made anew, so that the next piece of work does not inherit the failure.
use std::{
    fmt,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use model::{BalanceOptions, LoadOptions, Model, ModelError, ModelInfo, Parts};
use parallel::{ParallelError, Plan, RankContext, collective::threads};

use crate::{StageError, engine::guard};

/// Longest wait of one rank for another within a step. Ranks of one process do the same work at the same
/// time, so only a defect reaches this.
pub const RANK_PATIENCE: Duration = Duration::from_secs(300);

/// What the ranks of a plan load.
#[derive(Debug, Clone, Copy)]
pub struct RankLoad {
    /// Parts of the model that every rank needs.
    pub parts: Parts,
    /// Those of rank 0, which also does what one rank does alone.
    pub alone: Parts,
    /// The plan.
    pub plan: Plan,
    /// Whether and how experts move between ranks.
    pub balance: BalanceOptions,
}

/// The ranks of one plan.
pub struct Ranks {
    plan: Plan,
    models: Vec<Arc<Model>>,
    /// Taken for the length of a piece of work.
    contexts: Mutex<Vec<RankContext>>,
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks")
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Ranks {
    /// Opens each rank's part of a checkpoint.
    ///
    /// # Errors
    /// `Config` naming `plan` for a mesh that cannot be, `Model` when the checkpoint does not load or the
    /// plan does not fit it.
    pub fn open(dir: &Path, load: RankLoad) -> Result<Self, StageError> {
        let plan = load.plan;
        let contexts = connect(&plan)?;
        let open = |ctx: &RankContext| {
            let options = LoadOptions {
                parts: if ctx.rank() == 0 {
                    load.alone
                } else {
                    load.parts
                },
                plan,
                rank: ctx.rank(),
                balance: load.balance,
                ..LoadOptions::default()
            };
            Ok(Arc::new(Model::open(dir, options)?))
        };
        let models = contexts
            .iter()
            .map(open)
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            plan,
            models,
            contexts: Mutex::new(contexts),
        })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The models in the order of ranks; never empty.
    #[must_use]
    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// The model of rank 0, which has everything that one rank does alone.
    #[must_use]
    pub fn first(&self) -> &Arc<Model> {
        &self.models[0]
    }

    /// What the model says about itself.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        self.first().info()
    }

    /// Runs `work` on every rank at the same time, each with its own input; results in rank order.
    ///
    /// # Errors
    /// The first error that is not merely another rank's, `Panicked` when a rank panics.
    pub fn run<I: Send, T: Send>(
        &self,
        inputs: Vec<I>,
        work: impl Fn(&Model, &RankContext, I) -> Result<T, ModelError> + Sync,
    ) -> Result<Vec<T>, StageError> {
        if inputs.len() != self.models.len() {
            let message = format!("{} inputs for {} ranks", inputs.len(), self.models.len());
            return Err(ModelError::Internal(message).into());
        }
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        let ranks = contexts.iter().zip(&self.models).zip(inputs);
        let one = |((ctx, model), input): ((&RankContext, &Arc<Model>), I)| {
            let done = guard("rank", || work(model, ctx, input));
            if let Err(panic) = &done {
                ctx.abort(&panic.to_string());
            }
            done.and_then(|result| result.map_err(StageError::from))
        };
        let results: Vec<Result<T, StageError>> = if self.models.len() == 1 {
            ranks.map(one).collect()
        } else {
            std::thread::scope(|scope| {
                let one = &one;
                let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || one(rank))).collect();
                let stopped = |_| Err(StageError::EngineStopped { engine: "rank" });
                let ended = threads.into_iter().map(|t| t.join());
                ended.map(|end| end.unwrap_or_else(stopped)).collect()
            })
        };
        if results.iter().any(Result::is_err) && self.models.len() > 1 {
            *contexts = connect(&self.plan)?;
        }
        gathered(results)
    }
}

fn connect(plan: &Plan) -> Result<Vec<RankContext>, StageError> {
    threads::contexts(plan, RANK_PATIENCE).map_err(|e| StageError::config("plan", e.to_string()))
}

/// All results, or the error that explains the others.
fn gathered<T>(results: Vec<Result<T, StageError>>) -> Result<Vec<T>, StageError> {
    let (mut all, mut errors) = (Vec::with_capacity(results.len()), Vec::new());
    for result in results {
        match result {
            Ok(value) => all.push(value),
            Err(error) => errors.push(error),
        }
    }
    let of_another = |error: &StageError| {
        matches!(
            error,
            StageError::Model(ModelError::Ranks(
                ParallelError::Aborted { .. } | ParallelError::Left { .. }
            ))
        )
    };
    errors.sort_by_key(of_another);
    errors.into_iter().next().map_or(Ok(all), Err)
}
