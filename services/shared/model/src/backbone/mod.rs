//! The decoder: layers over packed rows, and the embeddings at both of its ends.
//!
//! This module knows tokens, rows, hidden states and ranks. It knows no picture, no timestep and no
//! request.

mod attention;
mod balance;
mod layer;
mod moe;
mod packing;
mod probe;
mod row;
mod travel;

use std::sync::Arc;

use kernels::{LinearWeight, RopeTable, Tensor, embedding, linear, rms_norm};
use parallel::eplb::LayerChange;
use parallel::sp_plan::SpTensor;
use parallel::{Axis, AxisSet, RankContext};

use self::balance::Balance;
pub use self::balance::BalanceOptions;
use self::layer::{Layer, Pass};
use self::packing::Packing;
pub use self::probe::{NoProbe, Probe, Site};
pub use self::row::{Row, RowKv, RowSegment, segments};
use self::travel::{Layers, Moving};
pub use self::travel::{Residency, SLOTS, Travelling};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::{RankShard, group};
use crate::source::{Scope, WeightSource};

/// A large matrix of a layer, whose stored type is that of the others.
const LARGE: &str = "self_attn.qkv_proj.weight";

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The hidden states after the last layer.
    Hidden,
    /// The rows' caches: the last layer stops at its keys and values, since nobody reads its output.
    Cache,
}

/// One rank's decoder layers with the token embedding, and the text head where text is wanted.
#[derive(Debug)]
pub struct Backbone {
    rank: RankShard,
    hidden: usize,
    embedding: Tensor,
    layers: Layers,
    /// Whether layers travel on any rank: a batch goes through the stages whole then, so that it is worth it.
    travels: bool,
    balance: Option<Arc<Balance>>,
    head: Option<TextHead>,
}

/// Final norm and vocabulary projection: text only, never before the image head.
#[derive(Debug)]
struct TextHead {
    norm: Tensor,
    eps: f32,
    projection: LinearWeight,
}

impl Backbone {
    pub(crate) fn load(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        rank: &RankShard,
        (options, residency): (&BalanceOptions, Residency),
        with_text_head: bool,
    ) -> Result<Self, ModelError> {
        let root = Scope::root(&**source);
        let model = root.child("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let head = with_text_head.then(|| {
            Ok::<_, ModelError>(TextHead {
                norm: model.child("ln_f").f32("weight", &[hidden])?,
                eps: config.rms_norm_eps as f32,
                projection: root.child("lm_head").linear(hidden, vocab)?,
            })
        });
        let own = rank.layers();
        let balance = Balance::new(config, rank, options)?.map(Arc::new);
        let width = source.value_bytes(&format!("model.layers.{}.{LARGE}", own.start));
        let moving = Moving::new(config, rank, (residency, width), options)?;
        let read = {
            let (source, config) = (Arc::clone(source), config.clone());
            let (rank, balance) = (rank.clone(), balance.clone());
            move |index: usize| {
                let layer = rank.layers().start + index;
                let scope = Scope::root(&*source).child("model.layers").child(layer);
                Layer::load(&scope, &config, &rank, layer, balance.as_deref())
            }
        };
        Ok(Self {
            rank: rank.clone(),
            hidden,
            embedding: model.child("wte").tensor("weight", &[vocab, hidden])?,
            layers: Layers::load(own.len(), (moving.layers, moving.bytes), Box::new(read))?,
            travels: moving.anywhere,
            balance,
            head: head.transpose()?,
        })
    }

    /// See [`crate::Model::rebalance`].
    pub(crate) fn rebalance(&self, ctx: &RankContext) -> Result<Vec<LayerChange>, ModelError> {
        self.check(ctx)?;
        let Some(balance) = &self.balance else {
            return Ok(Vec::new());
        };
        let mut changes = balance.end_step(ctx, &self.rank, &self.layers)?;
        for change in &mut changes {
            change.layer += self.rank.layers().start;
        }
        Ok(changes)
    }

    /// See [`crate::Model::imbalance`].
    pub(crate) fn imbalance(&self) -> Vec<f64> {
        let balance = self.balance.as_ref();
        balance.map_or_else(Vec::new, |balance| balance.imbalance())
    }

    /// Refuses a context of another rank, and experts whose places are not known.
    fn check(&self, ctx: &RankContext) -> Result<(), ModelError> {
        self.rank.check(ctx)?;
        self.balance
            .as_ref()
            .map_or(Ok(()), |balance| balance.check())
    }

    /// What is read anew in every pass.
    pub fn travelling(&self) -> Travelling {
        self.layers.travelling()
    }

    /// Token embeddings, `[ids, hidden]`.
    ///
    /// # Errors
    /// `Kernel` when an id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor, ModelError> {
        Ok(embedding(ids, &self.embedding)?)
    }

    /// Runs packed rows through the layers of all pipeline stages. `x` is `[tokens of all rows, hidden]` and
    /// is read on the first stage only; `rope` has one entry for each of these tokens. On the last stage the
    /// result is the raw residual stream of all tokens, without a final norm, when that is the goal.
    ///
    /// Between stages each row goes by itself, so that a stage works on one while the next works on
    /// another; where layers travel the batch stays whole, because a stage reads them once for all its rows.
    ///
    /// # Errors
    /// `Internal` when segments do not cover a row or a cache is full, `Kernel` when shapes disagree,
    /// `Ranks` when another rank fails.
    pub(crate) fn run<P: Probe>(
        &self,
        ctx: &RankContext,
        x: Option<Tensor>,
        (rows, rope): (&mut [Row<'_>], &RopeTable),
        goal: Goal,
        probe: &mut P,
    ) -> Result<Option<Tensor>, ModelError> {
        self.check(ctx)?;
        if self.rank.plan().pp == 1 || self.travels {
            return self.stage(ctx, x, (rows, rope), goal, probe);
        }
        let (mut out, mut at) = (Vec::with_capacity(rows.len()), 0);
        for row in rows.chunks_mut(1) {
            let tokens = row[0].tokens;
            let part = |t: &Tensor| t.narrow0(at, tokens);
            let x = x.as_ref().map(part).transpose()?;
            let rope = RopeTable {
                cos: part(&rope.cos)?,
                sin: part(&rope.sin)?,
            };
            out.extend(self.stage(ctx, x, (row, &rope), goal, probe)?);
            at += tokens;
        }
        let parts: Vec<&Tensor> = out.iter().collect();
        Ok((!parts.is_empty())
            .then(|| Tensor::concat0(&parts))
            .transpose()?)
    }

    /// Rows through the layers of this stage.
    fn stage<P: Probe>(
        &self,
        ctx: &RankContext,
        x: Option<Tensor>,
        (rows, rope): (&mut [Row<'_>], &RopeTable),
        goal: Goal,
        probe: &mut P,
    ) -> Result<Option<Tensor>, ModelError> {
        let packing = Packing::new(rows, &self.rank)?;
        self.check_table(&packing, rope)?;
        let (stage, (first, last)) = (self.rank.place(Axis::Pp), self.rank.ends());
        let mut x = if first {
            let missing = || ModelError::Internal("the first stage got no tokens".into());
            packing.cut(&x.ok_or_else(missing)?)?
        } else {
            let got = group(ctx, Axis::Pp)?.recv(stage.index - 1)?.wait()?;
            let tokens: usize = packing.own_tokens().sum();
            Tensor::from_f32(&[tokens, self.hidden], got)?
        };
        let rope = packing.cut_rope(rope)?;
        let mut pass = Pass {
            ctx,
            rank: &self.rank,
            rows: &mut *rows,
            packing: &packing,
            rope: &rope,
        };
        let cut_short = usize::from(last && goal == Goal::Cache);
        let whole = self.layers.len() - cut_short;
        let mut layers = self.layers.pass();
        for index in 0..whole {
            layers.layer(index)?.forward(&mut x, &mut pass, probe)?;
        }
        for index in whole..self.layers.len() {
            layers.layer(index)?.forward_kv_only(&x, &mut pass, probe)?;
        }
        drop(layers);
        packing.advance(rows);
        if !last {
            group(ctx, Axis::Pp)?.send(stage.index + 1, x.to_f32_vec())?;
            return Ok(None);
        }
        (goal == Goal::Hidden)
            .then(|| self.gather(ctx, x, &packing))
            .transpose()
    }

    /// Holds the shapes of a pass against the sequence table.
    fn check_table(&self, packing: &Packing, rope: &RopeTable) -> Result<(), ModelError> {
        if packing.is_whole() {
            return Ok(());
        }
        let ranks = self.rank.place(AxisSet::SEQUENCE).size;
        for rule in self.rank.sequence_table().rules() {
            let width = match &rule.tensor {
                SpTensor::Input(name) if name.starts_with("rope") => rope.cos.dim(1),
                _ => self.hidden,
            };
            for shards in packing.shards() {
                rule.split(&[shards.tokens(), width], 0, ranks)?;
            }
        }
        Ok(())
    }

    /// The hidden states of all tokens, from the ranks of the sequence group.
    fn gather(
        &self,
        ctx: &RankContext,
        own: Tensor,
        packing: &Packing,
    ) -> Result<Tensor, ModelError> {
        if packing.is_whole() {
            return Ok(own);
        }
        let (mut padded, mut at) = (Vec::new(), 0);
        for (tokens, shards) in packing.own_tokens().zip(packing.shards()) {
            let next = at + tokens * self.hidden;
            let end = padded.len() + shards.piece() * self.hidden;
            padded.extend_from_slice(&own.as_f32()?[at..next]);
            padded.resize(end, 0.0);
            at = next;
        }
        let each = padded.len();
        let got = group(ctx, AxisSet::SEQUENCE)?.all_gather(padded)?.wait()?;
        let (mut all, mut base) = (Vec::new(), 0);
        for shards in packing.shards() {
            let size = shards.piece() * self.hidden;
            let parts: Vec<&[f32]> = (0..shards.ring() * packing.ulysses().size)
                .map(|rank| &got[rank * each + base..rank * each + base + size])
                .collect();
            all.extend(shards.sp_gather(&parts, self.hidden)?);
            base += size;
        }
        Ok(Tensor::from_f32(
            &[all.len() / self.hidden, self.hidden],
            all,
        )?)
    }

    /// Final norm of hidden states `[tokens, hidden]`.
    ///
    /// # Errors
    /// `Internal` when the model was opened without its text head.
    pub fn final_norm(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        let head = self.head()?;
        Ok(rms_norm(hidden, &head.norm, head.eps)?)
    }

    /// Vocabulary logits `[tokens, vocab]` of normed hidden states.
    ///
    /// # Errors
    /// `Internal` when the model was opened without its text head.
    pub fn logits(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        Ok(linear(normed, &self.head()?.projection)?)
    }

    fn head(&self) -> Result<&TextHead, ModelError> {
        self.head.as_ref().ok_or_else(|| {
            ModelError::Internal("the text head was not loaded (LoadOptions.text)".into())
        })
    }
}
