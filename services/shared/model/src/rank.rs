//! What one rank of a plan holds of a model, and how it reaches the others.

use std::ops::Range;

use kv::{KvGeometry, KvShard};
use parallel::sp_plan::{BoundSpPlan, ModuleDecl, SpPlan, SpRow};
use parallel::{
    Axis, AxisSet, Collective, HeadShard, LayerShape, Mesh, ModelShape, ParallelError, Plan,
    RankContext, RingPrefix, SequenceShards, TokenOrder, near_even_range,
};

use crate::config::ModelConfig;
use crate::error::ModelError;

/// Module whose input and output the sequence table is about.
const DECODER: &str = "model";

/// The part of a model that one rank of a plan computes.
#[derive(Clone, Debug)]
pub struct RankShard {
    plan: Plan,
    mesh: Mesh,
    rank: usize,
    shape: ModelShape,
    layers: Range<usize>,
    projected: HeadShard,
    attended: Vec<HeadShard>,
    table: BoundSpPlan,
}

/// Size of a group and the place of this rank in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) size: usize,
    pub(crate) index: usize,
}

/// Token order of rows whose keys follow a causal rule.
pub(crate) const CAUSAL_ORDER: TokenOrder = TokenOrder::ZigZag;
/// Token order of a picture's rows: nearly all of their tokens see the same keys.
pub(crate) const PICTURE_ORDER: TokenOrder = TokenOrder::Contiguous;

impl ModelConfig {
    /// What plans must know of this model.
    pub fn shape(&self) -> ModelShape {
        let layers = self.layers.iter().map(|layer| LayerShape {
            experts: layer.experts,
            expert_inner: layer.intermediate,
            shared_inner: layer.shared_intermediate,
        });
        ModelShape {
            hidden: self.hidden_size,
            heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            layers: layers.collect(),
            cfg_distilled: self.cfg_distilled,
        }
    }
}

/// The sequence table of HunyuanImage-3.0: tokens are split where they enter the decoder, gathered where
/// they leave it, and padded on the wire where they do not divide.
pub fn sequence_table() -> SpPlan {
    let row = |input: Option<&str>| SpRow {
        module: DECODER.to_owned(),
        input: input.map(str::to_owned),
        output: input.is_none().then_some(0),
        split_dim: input.map(|_| 0),
        gather_dim: input.is_none().then_some(0),
        expected_dims: 2,
        auto_pad: true,
        text_first: false,
    };
    let rows = [
        Some("hidden_states"),
        Some("rope_cos"),
        Some("rope_sin"),
        None,
    ];
    SpPlan {
        rows: rows.into_iter().map(row).collect(),
    }
}

/// The tensors at the borders of the model's modules, for tables to be bound to.
fn declarations(layers: usize) -> Vec<ModuleDecl> {
    let module = |path: String, inputs: &[&str]| ModuleDecl {
        path,
        inputs: inputs.iter().map(|name| ((*name).to_owned(), 2)).collect(),
        outputs: vec![2],
    };
    let inputs = ["hidden_states", "rope_cos", "rope_sin"];
    let mut all = vec![module(DECODER.to_owned(), &inputs)];
    for layer in 0..layers {
        let path = format!("{DECODER}.layers.{layer}");
        all.push(module(format!("{path}.self_attn"), &inputs));
        all.push(module(format!("{path}.mlp"), &inputs[..1]));
        all.push(module(path, &inputs));
    }
    all
}

impl RankShard {
    /// The part of `rank` under `plan`.
    ///
    /// # Errors
    /// `Config` naming `plan` when it does not fit the model, or the rank is not one of it.
    pub fn new(config: &ModelConfig, plan: &Plan, rank: usize) -> Result<Self, ModelError> {
        Self::build(config, plan, rank, &sequence_table())
            .map_err(|e| ModelError::config("plan", e.to_string()))
    }

    fn build(
        config: &ModelConfig,
        plan: &Plan,
        rank: usize,
        table: &SpPlan,
    ) -> Result<Self, ParallelError> {
        let shape = config.shape();
        let mesh = plan.validate(&shape)?;
        let index = |axis: Axis| mesh.index_in(rank, axis.into());
        let (pp, tp) = (index(Axis::Pp)?, index(Axis::Tp)?);
        let ulysses = mesh.size(Axis::Ulysses);
        let under = |u| HeadShard::under_ulysses(&shape, (plan.tp, tp), (ulysses, u));
        let table = table.bind(&declarations(shape.layers.len()))?;
        for (name, found) in [
            ("hidden_states", table.input(DECODER, "hidden_states")),
            ("output 0", table.output(DECODER, 0)),
        ] {
            if found.is_none() {
                return Err(ParallelError::SpPlan {
                    entry: format!("\"{DECODER}\" {name}"),
                    problem: "the decoder runs on shards, so the table must have it".into(),
                });
            }
        }
        Ok(Self {
            plan: *plan,
            mesh,
            rank,
            layers: near_even_range(shape.layers.len(), plan.pp, pp)?,
            projected: HeadShard::new(&shape, plan.tp, tp)?,
            attended: (0..ulysses).map(under).collect::<Result<_, _>>()?,
            shape,
            table,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The sizes of the whole model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Decoder layers of this rank.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// The table that says where sequences are split and gathered.
    pub fn sequence_table(&self) -> &BoundSpPlan {
        &self.table
    }

    /// Heads this rank projects: its tensor-parallel share.
    pub(crate) fn projected(&self) -> &HeadShard {
        &self.projected
    }

    /// Heads each rank of the Ulysses group attends with; part of the projected ones.
    pub(crate) fn attended(&self) -> &[HeadShard] {
        &self.attended
    }

    pub(crate) fn place(&self, axes: impl Into<AxisSet>) -> Place {
        let axes = axes.into();
        Place {
            size: self.mesh.size_of(axes),
            // The rank was found in the mesh when the shard was made.
            index: self.mesh.index_in(self.rank, axes).unwrap_or_default(),
        }
    }

    /// Layers and heads of the keys and values this rank holds.
    pub fn kv_geometry(&self, whole: &KvGeometry) -> KvGeometry {
        let own = &self.attended[self.place(Axis::Ulysses).index];
        KvGeometry {
            layers: self.layers.len(),
            kv_heads: own.kv.len(),
            ..*whole
        }
    }

    /// The part of a prefix of `tokens` tokens that this rank needs to denoise against it.
    ///
    /// # Errors
    /// `Config`, which would be a defect: the plan was checked before.
    pub fn kv_shard(&self, tokens: usize) -> Result<KvShard, ModelError> {
        let own = &self.attended[self.place(Axis::Ulysses).index];
        let ring = self.place(Axis::Ring);
        let ranges = if self.shards_prefix() {
            let shards = SequenceShards::new(tokens, ring.size, 1, CAUSAL_ORDER)?;
            shards.ring_ranges(ring.index).to_vec()
        } else {
            std::iter::once(0..tokens).collect()
        };
        Ok(KvShard {
            layers: self.layers(),
            heads: own.kv.clone(),
            tokens: ranges,
        })
    }

    /// Whether the plan has no other rank.
    pub(crate) fn is_alone(&self) -> bool {
        self.mesh.ranks() == 1
    }

    /// Whether this is the first rank of its expert-parallel group.
    pub fn is_first_of_experts(&self) -> bool {
        self.place(self.plan.ep).index == 0
    }

    /// Whether the ranks of a ring hold different tokens of a prefix.
    pub(crate) fn shards_prefix(&self) -> bool {
        self.plan.ring > 1 && self.plan.ring_prefix == RingPrefix::Sharded
    }

    /// Whether this rank has the first layers, and whether it has the last.
    pub(crate) fn ends(&self) -> (bool, bool) {
        let stage = self.place(Axis::Pp);
        (stage.index == 0, stage.index + 1 == stage.size)
    }

    /// Refuses a context of another plan or rank: its groups would not be those of these weights.
    pub(crate) fn check(&self, ctx: &RankContext) -> Result<(), ModelError> {
        if ctx.rank() == self.rank && *ctx.plan() == self.plan {
            return Ok(());
        }
        Err(ModelError::Internal(format!(
            "rank {} of plan {:?} runs weights of rank {} of plan {:?}",
            ctx.rank(),
            ctx.plan(),
            self.rank,
            self.plan
        )))
    }
}

/// This rank's end of the group along `axes`.
pub(crate) fn group(
    ctx: &RankContext,
    axes: impl Into<AxisSet>,
) -> Result<&dyn Collective, ModelError> {
    ctx.group(axes.into())
        .ok_or_else(|| ModelError::Internal("a rank has no end of a group it needs".into()))
}

/// Passes a result on; a failure that the others cannot know of ends their operations too.
pub(crate) fn agreed<T>(ctx: &RankContext, result: Result<T, ModelError>) -> Result<T, ModelError> {
    if let Err(error) = &result {
        // Bad input is seen by every rank before anything is sent.
        let alone = !matches!(error, ModelError::InvalidArgument { .. });
        if alone {
            ctx.abort(&error.to_string());
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const CHECKPOINT: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../integration-tests/fixtures/golden/model"
    );

    fn build(change: impl Fn(&mut Vec<SpRow>)) -> Result<RankShard, ParallelError> {
        let config = ModelConfig::from_dir(Path::new(CHECKPOINT)).unwrap();
        let mut table = sequence_table();
        change(&mut table.rows);
        let plan = "ulysses=2".parse().unwrap();
        RankShard::build(&config, &plan, 1, &table)
    }

    #[test]
    fn a_sequence_table_that_does_not_fit_the_model_is_refused_when_it_is_opened() {
        type Change = fn(&mut Vec<SpRow>);
        assert!(build(|_| {}).is_ok());
        let changes: [(&str, Change); 4] = [
            ("module", |rows| rows[0].module = "decoder".into()),
            ("input", |rows| rows[0].input = Some("embeddings".into())),
            ("dimensions", |rows| rows[0].expected_dims = 3),
            ("output", |rows| rows.retain(|row| row.output.is_none())),
        ];
        for (what, change) in changes {
            let refused = build(change).map(drop);
            let named = matches!(refused, Err(ParallelError::SpPlan { .. }));
            assert!(named, "{what}: {refused:?}");
        }
    }

    #[test]
    fn a_plan_that_does_not_fit_the_model_is_refused_by_name() {
        let config = ModelConfig::from_dir(Path::new(CHECKPOINT)).unwrap();
        for (plan, rank) in [("tp=3", 0), ("pp=99", 0), ("cfg=3", 0), ("tp=2", 2)] {
            let refused = RankShard::new(&config, &plan.parse().unwrap(), rank).unwrap_err();
            let named = matches!(&refused, ModelError::Config { field, .. } if field == "plan");
            assert!(named, "{plan}, rank {rank}: {refused}");
        }
    }
}
