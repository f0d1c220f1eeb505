//! What one GPU of a plan holds of a model, and what travels in a layer.

use std::ops::Range;

use parallel::{Axis, Plan, SharedExpert, even_range, gate_up_rows};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::RankShard;

/// How a layer attends under a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attention {
    /// Own tokens see keys that are all here.
    Own,
    /// Norms travel to all ranks, each attends with its heads, sums travel back (`tp`).
    Heads,
    /// Projections travel from tokens to heads, results back (`ulysses`).
    Turned,
    /// Keys and values travel (`ring`).
    Ring,
}

/// What a layer exchanges between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) attention: Attention,
    /// Whether experts, or their inner widths, are spread over the ranks.
    pub(crate) spread: bool,
    /// Whether the shared expert is cut like the others, so that every rank has a part of it for all tokens.
    pub(crate) shared_cut: bool,
}

impl Flow {
    /// Nothing travels.
    pub(crate) const ALONE: Self = Self {
        attention: Attention::Own,
        spread: false,
        shared_cut: false,
    };
}

/// Which part of a matrix `[out, in]` a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MatrixCut {
    Whole,
    Rows(Vec<Range<usize>>),
    /// Part `index` of `parts` equal ones.
    Columns {
        parts: usize,
        index: usize,
    },
}

/// The part of a model that one GPU of a plan computes.
#[derive(Clone, Debug)]
pub struct GpuShare {
    shard: RankShard,
    rank: usize,
    axis: Option<Axis>,
    flow: Flow,
}

impl GpuShare {
    /// The part of `rank` under `plan`.
    ///
    /// # Errors
    /// `Config` naming `plan` when it does not fit the model, `Unimplemented` for a plan that no GPU engine
    /// runs: of several axes, or with a sharded prefix.
    pub fn new(config: &ModelConfig, plan: &Plan, rank: usize) -> Result<Self, ModelError> {
        let shard = RankShard::new(config, plan, rank)?;
        let refused = |what: &str| {
            let message = format!("plan {plan} on gpus: {what}");
            Err(ModelError::Unimplemented(message))
        };
        let used: Vec<Axis> = Axis::ALL
            .into_iter()
            .filter(|axis| shard.place(*axis).size > 1)
            .collect();
        if used.len() > 1 {
            return refused("more than one axis of several ranks");
        }
        if shard.shards_prefix() {
            return refused("a prefix that is sharded over the ring");
        }
        let axis = used.first().copied();
        let over_experts = shard.place(plan.ep).size > 1;
        let tp = axis == Some(Axis::Tp);
        let shared = config
            .layers
            .iter()
            .any(|l| l.shared_intermediate.is_some());
        let split = tp && shared && plan.shared_expert == SharedExpert::Split;
        if split && over_experts {
            return refused("whole experts beside a shared one that is split");
        }
        if tp && shared && !split && !over_experts {
            return refused("experts that are split beside a shared one that is not");
        }
        if tp && shard.projected().kv_copies > 1 {
            return refused("more tensor ranks than kv heads");
        }
        let attention = match axis {
            Some(Axis::Tp) => Attention::Heads,
            Some(Axis::Ulysses) => Attention::Turned,
            Some(Axis::Ring) => Attention::Ring,
            _ => Attention::Own,
        };
        Ok(Self {
            shard,
            rank,
            axis,
            flow: Flow {
                attention,
                spread: over_experts || tp,
                shared_cut: tp && !over_experts,
            },
        })
    }

    /// Whether text is read and written under this plan: on one GPU, or with every matrix cut (`tp`).
    ///
    /// # Errors
    /// `Unimplemented` for any other plan.
    pub fn writes_text(&self) -> Result<(), ModelError> {
        let cut = self.flow.attention == Attention::Heads && self.flow.shared_cut;
        if self.ranks() == 1 || cut {
            return Ok(());
        }
        let plan = self.shard.plan();
        Err(ModelError::Unimplemented(format!(
            "plan {plan} on gpus: text is written on one gpu, or under tp with experts that are split"
        )))
    }

    /// Ranks of the plan.
    pub fn ranks(&self) -> usize {
        self.axis.map_or(1, |axis| self.shard.place(axis).size)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Its part as the plan says it, for prefixes.
    pub fn shard(&self) -> &RankShard {
        &self.shard
    }

    pub(crate) fn flow(&self) -> Flow {
        self.flow
    }

    /// Whether each rank has other rows of a picture, whole ones.
    pub(crate) fn cuts_rows(&self) -> bool {
        self.axis == Some(Axis::Cfg)
    }

    /// Whether layers are dealt to ranks.
    pub(crate) fn is_staged(&self) -> bool {
        self.axis == Some(Axis::Pp)
    }

    /// Query and KV heads that this rank projects.
    pub(crate) fn projected(&self) -> (usize, usize) {
        let heads = self.shard.projected();
        (heads.q.len(), heads.kv.len())
    }

    /// Query and KV heads that this rank attends with.
    pub(crate) fn attended(&self) -> (usize, usize) {
        let place = self.shard.place(Axis::Ulysses);
        let heads = &self.shard.attended()[place.index];
        (heads.q.len(), heads.kv.len())
    }

    /// Routed experts that this rank has, of `experts`.
    pub(crate) fn experts(&self, experts: usize) -> Result<Range<usize>, ModelError> {
        let place = self.shard.place(self.shard.plan().ep);
        Ok(even_range(experts, place.size, place.index)?)
    }

    /// Rows of the vocabulary that this rank multiplies: an equal part, or all where there is none that kernels take.
    pub(crate) fn vocabulary(&self, vocab: usize) -> Range<usize> {
        let ranks = self.ranks();
        if self.flow.attention != Attention::Heads || !vocab.is_multiple_of(8 * ranks) {
            return 0..vocab;
        }
        let each = vocab / ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// Inner width of an expert's part here.
    pub(crate) fn inner(&self, whole: usize) -> usize {
        if self.flow.shared_cut {
            whole / self.ranks()
        } else {
            whole
        }
    }

    pub(crate) fn qkv(&self) -> MatrixCut {
        if self.flow.attention == Attention::Heads {
            let shape = self.shard.shape();
            return MatrixCut::Rows(self.shard.projected().qkv_rows(shape));
        }
        MatrixCut::Whole
    }

    pub(crate) fn output(&self) -> MatrixCut {
        self.columns(self.flow.attention == Attention::Heads)
    }

    /// Of the stored inner width `inner`.
    pub(crate) fn gate_up(&self, inner: usize) -> Result<MatrixCut, ModelError> {
        if self.flow.shared_cut {
            let rows = gate_up_rows(inner, self.ranks(), self.rank)?;
            return Ok(MatrixCut::Rows(rows.to_vec()));
        }
        Ok(MatrixCut::Whole)
    }

    pub(crate) fn down(&self) -> MatrixCut {
        self.columns(self.flow.shared_cut)
    }

    fn columns(&self, cut: bool) -> MatrixCut {
        if cut {
            return MatrixCut::Columns {
                parts: self.ranks(),
                index: self.rank,
            };
        }
        MatrixCut::Whole
    }
}
