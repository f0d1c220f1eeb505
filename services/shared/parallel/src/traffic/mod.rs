//! How many bytes each rank of a plan moves in one pass of the model, exactly and as a pure function.
//!
//! A pass is one denoising step of packed jobs, or one prefill. The prediction follows the operations that
//! model code runs on a rank context, with the byte counts of [`crate::wire`], so what
//! [`crate::RankContext::traffic`] counts afterwards is the same, group by group and kind by kind. That the
//! two never part is tested where the model is.

mod dispatch;
mod pass;
mod tally;

use crate::{Axis, AxisSet, Mesh, ModelShape, Op, ParallelError, Plan, TokenOrder};
use dispatch::Dispatch;
use pass::PassRow;
pub use tally::{GroupTraffic, Tally};

/// One job of a denoising step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepJob {
    /// Fresh tokens of each of its rows: special tokens and image tokens.
    pub tokens: usize,
    /// Prefix tokens of each of its rows, the conditional one first; two under guidance, else one.
    pub prefixes: Vec<usize>,
    /// Elements of its latents.
    pub latents: usize,
}

/// Which experts tokens go to.
#[derive(Debug, Clone, Copy)]
pub enum Routes<'a> {
    /// The choices of a pass. `experts[layer][row]` has `top_k[layer]` experts for each fresh token of the
    /// row; rows are those of all jobs one after the other, over all ranks.
    Known {
        /// Choices of every token.
        experts: &'a [Vec<Vec<u32>>],
        /// Choices of one token, by layer.
        top_k: &'a [usize],
    },
    /// Every set of `top_k` experts is equally likely; counts are expectations, rounded up. For planning.
    Uniform {
        /// Choices of one token, by layer.
        top_k: &'a [usize],
    },
}

impl Routes<'_> {
    fn top_k(&self) -> &[usize] {
        match self {
            Self::Known { top_k, .. } | Self::Uniform { top_k } => top_k,
        }
    }
}

/// Predicts what the ranks of one plan move, experts lying as they do when nothing balances them
/// ([`crate::eplb::Placement::contiguous`]).
#[derive(Debug, Clone)]
pub struct Predictor<'a> {
    pub(crate) shape: &'a ModelShape,
    pub(crate) plan: Plan,
    pub(crate) mesh: Mesh,
    routes: Routes<'a>,
}

impl<'a> Predictor<'a> {
    /// A predictor for `plan`, whose tokens go where `routes` says.
    ///
    /// # Errors
    /// Those of [`Plan::validate`], and [`ParallelError::Mismatch`] when `routes` has not one entry a layer.
    pub fn new(
        shape: &'a ModelShape,
        plan: &Plan,
        routes: Routes<'a>,
    ) -> Result<Self, ParallelError> {
        let layers = shape.layers.len();
        let mut given = vec![("top_k of layers", routes.top_k().len())];
        if let Routes::Known { experts, .. } = routes {
            given.push(("experts of layers", experts.len()));
        }
        for (field, got) in given {
            if got != layers {
                return Err(ParallelError::Mismatch {
                    field,
                    expected: layers,
                    got,
                });
            }
        }
        Ok(Self {
            shape,
            plan: *plan,
            mesh: plan.validate(shape)?,
            routes,
        })
    }

    /// What `rank` moves in one denoising step of packed `jobs`.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`], and [`ParallelError::Mismatch`] when a job has not a row for each
    /// guidance rank or a token has not its choices.
    pub fn step(&self, rank: usize, jobs: &[StepJob]) -> Result<Tally, ParallelError> {
        let mut tally = Tally::new(&self.plan)?;
        let at = self.mesh.coordinates(rank)?;
        let rows = |cfg: usize| step_rows(&self.plan, jobs, cfg);
        self.layers(rank, &rows, true, &mut tally)?;
        let stage = at[Axis::Pp as usize];
        let latents = || jobs.iter().map(|job| job.latents);
        if stage + 1 == self.plan.pp && self.plan.cfg > 1 {
            tally.add(Axis::Cfg.into(), Op::AllGather, rank, latents().sum())?;
        }
        if self.plan.pp > 1 {
            for elements in latents() {
                if stage + 1 == self.plan.pp {
                    tally.add(Axis::Pp.into(), Op::Send { to: 0 }, rank, elements)?;
                } else if stage == 0 {
                    let from = self.plan.pp - 1;
                    tally.add(Axis::Pp.into(), Op::Recv { from }, rank, elements)?;
                }
            }
        }
        Ok(tally)
    }

    /// What `rank` moves when empty caches are filled with rows of `tokens` tokens each, packed. The last
    /// layer stops at its keys and values. Every guidance rank fills all rows.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn fill(&self, rank: usize, tokens: &[usize]) -> Result<Tally, ParallelError> {
        let mut tally = Tally::new(&self.plan)?;
        let rows = |_: usize| {
            let rows = tokens.iter().enumerate().map(|(number, &tokens)| PassRow {
                number,
                tokens,
                past: 0,
                order: TokenOrder::ZigZag,
            });
            Ok(rows.collect())
        };
        self.layers(rank, &rows, false, &mut tally)?;
        Ok(tally)
    }

    /// The rows through the layers of all stages, each by itself where there are several.
    fn layers(
        &self,
        rank: usize,
        rows: &dyn Fn(usize) -> Result<Vec<PassRow>, ParallelError>,
        hidden: bool,
        tally: &mut Tally,
    ) -> Result<(), ParallelError> {
        self.mesh.coordinates(rank)?;
        let by_cfg: Vec<Vec<PassRow>> = (0..self.plan.cfg).map(rows).collect::<Result<_, _>>()?;
        let together = if self.plan.pp == 1 {
            by_cfg[0].len().max(1)
        } else {
            1
        };
        let mut last: Option<(Vec<(usize, usize)>, Tally)> = None;
        for first in (0..by_cfg[0].len()).step_by(together) {
            let pass = |rows: &Vec<PassRow>| rows[first..first + together].to_vec();
            let packs: Vec<Vec<PassRow>> = by_cfg.iter().map(pass).collect();
            // Where only counts matter, rows of the same sizes move the same.
            let sizes: Vec<_> = packs.iter().flatten().map(|r| (r.tokens, r.past)).collect();
            let counted = matches!(self.routes, Routes::Uniform { .. });
            let known = last.as_ref().filter(|(seen, _)| counted && *seen == sizes);
            if let Some((_, one)) = known {
                tally.add_all(one);
                continue;
            }
            let mut one = Tally::new(&self.plan)?;
            let dispatch = Dispatch::new(self, &self.routes, rank, &packs)?;
            self.pass(rank, &packs, &dispatch, hidden, &mut one)?;
            tally.add_all(&one);
            last = Some((sizes, one));
        }
        Ok(())
    }

    /// The ranks of `rank`'s group along `axes`.
    pub(crate) fn group(&self, rank: usize, axes: AxisSet) -> Result<Vec<usize>, ParallelError> {
        Ok(self.mesh.group(rank, axes)?.ranks)
    }
}

/// The rows that guidance rank `cfg` computes in a step.
fn step_rows(plan: &Plan, jobs: &[StepJob], cfg: usize) -> Result<Vec<PassRow>, ParallelError> {
    let (mut rows, mut number) = (Vec::new(), 0);
    for job in jobs {
        if plan.cfg > 1 && job.prefixes.len() != plan.cfg {
            return Err(ParallelError::Mismatch {
                field: "rows of a job",
                expected: plan.cfg,
                got: job.prefixes.len(),
            });
        }
        for (row, &past) in job.prefixes.iter().enumerate() {
            if plan.cfg == 1 || row == cfg {
                rows.push(PassRow {
                    number: number + row,
                    tokens: job.tokens,
                    past,
                    order: TokenOrder::Contiguous,
                });
            }
        }
        number += job.prefixes.len();
    }
    Ok(rows)
}

#[cfg(test)]
mod tests;
