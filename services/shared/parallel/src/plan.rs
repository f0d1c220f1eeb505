//! The parallel plan of a pool, as an operator writes it.

mod text;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Axis, AxisSet, MAX_AXIS, Mesh, ModelShape, ParallelError};

/// Rows of classifier-free guidance: conditional and unconditional.
pub const GUIDANCE_ROWS: usize = 2;

/// Sizes of every axis of a pool's mesh, and what experts are spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// Pipeline stages.
    pub pp: usize,
    /// Ranks over guidance rows.
    pub cfg: usize,
    /// Ranks of a ring over the sequence.
    pub ring: usize,
    /// Ranks of the all-to-all over the sequence.
    pub ulysses: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Axes over which whole experts are spread. Axes left out replicate the experts, except `tp`,
    /// which then splits their inner width.
    pub ep: AxisSet,
    /// What `tp` does with the shared expert.
    pub shared_expert: SharedExpert,
    /// What `ring` does with the keys and values of prefixes.
    pub ring_prefix: RingPrefix,
}

/// The shared expert over tensor-parallel ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedExpert {
    /// Each rank has a part of its inner width.
    #[default]
    Split,
    /// Each rank has all of it: more memory, and no sum where experts are spread over `tp`.
    Replicated,
}

/// Prefix keys and values over the ranks of a ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RingPrefix {
    /// Each rank has those of all tokens; only fresh keys travel.
    #[default]
    Replicated,
    /// Each rank has those of its tokens; they travel with the fresh ones in every layer.
    Sharded,
}

/// What a plan demands of a model or a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Query heads divide over `ulysses x tp`.
    Heads,
    /// Query heads divide over KV heads: a property of the model.
    HeadGroups,
    /// KV heads divide over `ulysses x tp`, or it over them, so that each rank needs whole heads.
    KvHeads,
    /// Experts of a layer divide over the axes of `ep`.
    Experts {
        /// The layer.
        layer: usize,
    },
    /// The inner width of the experts of a layer divides over `tp`.
    ExpertInner {
        /// The layer.
        layer: usize,
    },
    /// The inner width of the shared expert of a layer divides over `tp`.
    SharedInner {
        /// The layer.
        layer: usize,
    },
    /// Every pipeline stage has a layer.
    Layers,
    /// Experts are never spread over pipeline stages: a stage needs all experts of its layers.
    ExpertsOverStages,
    /// Guidance has two rows, no more ranks have work.
    GuidanceRows,
    /// The model has guidance distilled into it, so there is one row.
    GuidanceDistilled,
    /// Guidance of at most one has one row.
    GuidanceOff,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heads => f.write_str("it must divide the query heads"),
            Self::HeadGroups => f.write_str("KV heads must divide the query heads"),
            Self::KvHeads => f.write_str("it must divide, or be a multiple of, the KV heads"),
            Self::Experts { layer } => write!(f, "it must divide the experts of layer {layer}"),
            Self::ExpertInner { layer } => {
                write!(f, "it must divide the expert inner width of layer {layer}")
            }
            Self::SharedInner { layer } => {
                write!(f, "it must divide the shared inner width of layer {layer}")
            }
            Self::Layers => f.write_str("it must not exceed the layers"),
            Self::ExpertsOverStages => {
                f.write_str("ep must be a product of cfg, ring, ulysses, tp")
            }
            Self::GuidanceRows => f.write_str("it must not exceed the guidance rows"),
            Self::GuidanceDistilled => {
                f.write_str("guidance is distilled into the model, which needs one row")
            }
            Self::GuidanceOff => f.write_str("it needs the two rows of a guidance above 1"),
        }
    }
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            pp: 1,
            cfg: 1,
            ring: 1,
            ulysses: 1,
            tp: 1,
            ep: AxisSet::EMPTY,
            shared_expert: SharedExpert::Split,
            ring_prefix: RingPrefix::Replicated,
        }
    }
}

/// Refuses with `rule` unless `holds`.
fn demand(
    holds: bool,
    axes: AxisSet,
    rule: Rule,
    plan: (usize, usize),
) -> Result<(), ParallelError> {
    let (size, got) = plan;
    if holds {
        return Ok(());
    }
    Err(ParallelError::Violates {
        axes,
        size,
        rule,
        got,
    })
}

impl Plan {
    /// The sizes in the order of [`Axis::ALL`].
    #[must_use]
    pub fn sizes(&self) -> [usize; 5] {
        [self.pp, self.cfg, self.ring, self.ulysses, self.tp]
    }

    /// The mesh, without any question of a model.
    ///
    /// # Errors
    /// Those of [`Mesh::new`].
    pub fn mesh(&self) -> Result<Mesh, ParallelError> {
        Mesh::new(self.sizes())
    }

    /// This plan with experts over `ranks` ranks: the innermost axes whose product that is.
    ///
    /// # Errors
    /// Those of [`Mesh::new`], and [`ParallelError::EpNotAProduct`].
    pub fn with_ep_ranks(self, ranks: usize) -> Result<Self, ParallelError> {
        let mesh = self.mesh()?;
        // An axis of one rank changes nothing, so it is never named.
        let used = |set: &AxisSet| set.axes().all(|a| mesh.size(a) > 1);
        let ep = AxisSet::EXPERTS
            .subsets()
            .filter(used)
            .find(|&set| mesh.size_of(set) == ranks)
            .ok_or(ParallelError::EpNotAProduct {
                got: ranks,
                sizes: self.sizes(),
            })?;
        Ok(Self { ep, ..self })
    }

    /// Checks the plan against a model and turns it into a mesh.
    ///
    /// Token counts need no rule: sequence shards are padded, see [`crate::TokenShards`].
    ///
    /// # Errors
    /// Those of [`Mesh::new`], and [`ParallelError::Violates`] naming the axes and the rule.
    pub fn validate(&self, shape: &ModelShape) -> Result<Mesh, ParallelError> {
        let mesh = self.mesh()?;
        demand_heads(&mesh, shape)?;
        let (pp, layers) = (self.pp, shape.layers.len());
        demand(pp <= layers, Axis::Pp.into(), Rule::Layers, (pp, layers))?;
        let over_stages = self.ep.contains(Axis::Pp);
        let stages = (pp, layers);
        demand(
            !over_stages,
            Axis::Pp.into(),
            Rule::ExpertsOverStages,
            stages,
        )?;
        let ep = mesh.size_of(self.ep);
        let splits = if self.ep.contains(Axis::Tp) {
            1
        } else {
            self.tp
        };
        let tp = AxisSet::from(Axis::Tp);
        for (layer, l) in shape.layers.iter().enumerate() {
            let even = l.experts % ep == 0;
            demand(even, self.ep, Rule::Experts { layer }, (ep, l.experts))?;
            let inner = (splits, l.expert_inner);
            let even = l.expert_inner % splits == 0;
            demand(even, tp, Rule::ExpertInner { layer }, inner)?;
            let inner = l.shared_inner.unwrap_or(0);
            let even = inner % self.tp == 0 || self.shared_expert == SharedExpert::Replicated;
            demand(even, tp, Rule::SharedInner { layer }, (self.tp, inner))?;
        }
        let (cfg, axis) = (self.cfg, AxisSet::from(Axis::Cfg));
        let rows = (cfg, GUIDANCE_ROWS);
        demand(cfg <= GUIDANCE_ROWS, axis, Rule::GuidanceRows, rows)?;
        let two_rows = cfg == 1 || !shape.cfg_distilled;
        demand(two_rows, axis, Rule::GuidanceDistilled, (cfg, 1))?;
        Ok(mesh)
    }

    /// Every plan that runs `shape` on exactly `ranks` ranks; axes of one rank are in no `ep`.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] when there are no ranks or more than [`MAX_AXIS`].
    pub fn legal(shape: &ModelShape, ranks: usize) -> Result<Vec<Self>, ParallelError> {
        crate::error::in_range("ranks", ranks, 1, MAX_AXIS)?;
        let mut open = vec![Self::default()];
        for axis in Axis::ALL {
            let grown = |plan: Self| {
                let left = ranks / plan.sizes().iter().product::<usize>();
                let sizes = (1..=left).filter(move |n| left.is_multiple_of(*n));
                sizes.map(move |n| plan.with_size(axis, n))
            };
            open = open.into_iter().flat_map(grown).collect();
        }
        open.retain(|plan| plan.sizes().iter().product::<usize>() == ranks);
        let mut legal = Vec::new();
        for plan in open {
            let mesh = plan.mesh()?;
            let used = |set: &AxisSet| set.axes().all(|a| mesh.size(a) > 1);
            let spread = AxisSet::EXPERTS.subsets().filter(used);
            let plans = spread.map(|ep| Self { ep, ..plan });
            legal.extend(plans.filter(|plan| plan.validate(shape).is_ok()));
        }
        Ok(legal)
    }

    /// This plan with another size of one axis.
    #[must_use]
    pub fn with_size(mut self, axis: Axis, size: usize) -> Self {
        match axis {
            Axis::Pp => self.pp = size,
            Axis::Cfg => self.cfg = size,
            Axis::Ring => self.ring = size,
            Axis::Ulysses => self.ulysses = size,
            Axis::Tp => self.tp = size,
        }
        self
    }

    /// Checks that a request with this guidance has work for every rank.
    ///
    /// # Errors
    /// [`ParallelError::Violates`] when the plan spreads guidance rows and there is only one.
    pub fn check_guidance(&self, guidance: f64) -> Result<(), ParallelError> {
        let two_rows = self.cfg == 1 || guidance > 1.0;
        demand(two_rows, Axis::Cfg.into(), Rule::GuidanceOff, (self.cfg, 1))
    }

    /// The products of axes along which the ranks of this plan talk, each of more than one rank, in the
    /// order in which every rank joins them.
    ///
    /// # Errors
    /// Those of [`Mesh::new`].
    pub fn groups(&self) -> Result<Vec<AxisSet>, ParallelError> {
        let mesh = self.mesh()?;
        let axes = Axis::ALL.into_iter().map(AxisSet::from);
        let mut groups = Vec::new();
        for set in axes.chain([AxisSet::SEQUENCE, self.ep]) {
            let used = mesh.used(set);
            if !used.is_empty() && !groups.contains(&used) {
                groups.push(used);
            }
        }
        Ok(groups)
    }
}

/// Heads over `tp`, then over `ulysses x tp`, so that the message names the smaller culprit.
fn demand_heads(mesh: &Mesh, shape: &ModelShape) -> Result<(), ParallelError> {
    let (heads, kv) = (shape.heads, shape.kv_heads);
    let grouped = kv > 0 && heads.is_multiple_of(kv) && heads > 0;
    demand(grouped, AxisSet::EMPTY, Rule::HeadGroups, (kv, heads))?;
    for axes in [AxisSet::from(Axis::Tp), AxisSet::HEADS] {
        let parts = mesh.size_of(axes);
        let even = heads.is_multiple_of(parts);
        demand(even, axes, Rule::Heads, (parts, heads))?;
        let whole = kv.is_multiple_of(parts) || parts.is_multiple_of(kv);
        demand(whole, axes, Rule::KvHeads, (parts, kv))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
