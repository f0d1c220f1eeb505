//! The mixture of experts of one layer on one rank.
//!
//! Experts are whole on the ranks they are spread over, or split by inner width over tensor-parallel ranks.
//! Spread experts get their tokens by an all-to-all and no token is dropped.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use kernels::{
    DType, ExpertWeights, LinearWeight, Routing, Tensor, add_assign, bf16, linear, moe_combine,
    moe_experts, moe_route, swiglu_up_gate,
};
use parallel::eplb::{ExpertMove, Placement};
use parallel::{
    Axis, Collective, ExpertDispatch, SharedExpert, even_range, gate_up_rows, near_even_range,
};

use super::balance::{Balance, Counter};
use super::layer::Pass;
use super::probe::{Probe, Site};
use crate::config::{ModelConfig, MoeConfig};
use crate::error::ModelError;
use crate::rank::{Place, RankShard, group};
use crate::source::Scope;

/// Weights of one rank, prepared for the kernels.
#[derive(Debug)]
pub(super) struct Moe {
    /// Among this rank's layers.
    index: usize,
    top_k: usize,
    renormalise: bool,
    router: LinearWeight,
    /// Changed between steps only.
    bank: RwLock<Bank>,
    /// Choices of each expert by this rank's tokens, where experts are balanced.
    counts: Option<Counter>,
    /// Tensor-parallel ranks, and whether experts are spread over them.
    tp: Place,
    over_tp: bool,
    shared: Option<SharedMlp>,
}

/// The experts of this rank.
#[derive(Debug)]
struct Bank {
    /// By slot.
    experts: ExpertWeights,
    /// Where each expert is, when they are spread over ranks.
    placement: Option<Placement>,
}

#[derive(Debug)]
struct SharedMlp {
    up_gate: LinearWeight,
    down: LinearWeight,
    /// Whether this rank has only a part of the inner width.
    split: bool,
}

/// What a rank keeps of MLPs: which of `ranks` parts of the inner width.
#[derive(Clone, Copy)]
struct Inner {
    parts: usize,
    index: usize,
}

impl Moe {
    /// `index` counts within this rank's layers; `balance` says where experts begin when they will move.
    pub(super) fn load(
        scope: &Scope<'_>,
        config: &ModelConfig,
        rank: &RankShard,
        index: usize,
        balance: Option<&Balance>,
    ) -> Result<Self, ModelError> {
        let moe = &config.layers[rank.layers().start + index];
        let (plan, tp) = (rank.plan(), rank.place(Axis::Tp));
        let over_tp = tp.size > 1 && plan.ep.contains(Axis::Tp);
        let ep = rank.place(plan.ep);
        let placement = match balance.and_then(|balance| balance.placement(index)) {
            None if ep.size > 1 => Some(Placement::contiguous(moe.experts, ep.size)?),
            placement => placement,
        };
        let own: Vec<usize> = match &placement {
            // A slot that no expert was put into holds any; no token is sent to it.
            Some(placement) => {
                let slots = placement.slots()[ep.index].iter();
                slots.map(|expert| expert.unwrap_or_default()).collect()
            }
            None => (0..moe.experts).collect(),
        };
        let inner = Inner {
            parts: if over_tp { 1 } else { tp.size },
            index: if over_tp { 0 } else { tp.index },
        };
        let hidden = config.hidden_size;
        Ok(Self {
            index,
            top_k: moe.top_k,
            renormalise: config.norm_topk_prob,
            router: scope.child("gate.wg").linear(hidden, moe.experts)?,
            bank: RwLock::new(Bank {
                experts: load_experts(&scope.child("experts"), moe, hidden, (&own, inner))?,
                placement,
            }),
            counts: balance.and_then(|balance| balance.counter(index)),
            tp,
            over_tp,
            shared: SharedMlp::load(&scope.child("shared_mlp"), moe, hidden, rank)?,
        })
    }

    /// `normed [own tokens, hidden]` to routed plus shared experts, `[own tokens, hidden]`.
    pub(super) fn forward<P: Probe>(
        &self,
        normed: &Tensor,
        pass: &Pass<'_, '_>,
        probe: &mut P,
    ) -> Result<Tensor, ModelError> {
        let layer = pass.layer(self.index);
        let routing = moe_route(normed, &self.router, self.top_k, self.renormalise)?;
        probe.routing(layer, &routing);
        let shared = |x: &Tensor, probe: &mut P| {
            let out = self.shared.as_ref().map(|s| s.forward(x)).transpose()?;
            if let Some(out) = &out {
                probe.tensor(layer, Site::SharedMlp, out);
            }
            Ok::<_, ModelError>(out)
        };
        let split = self.shared.as_ref().is_some_and(|s| s.split);
        if self.over_tp {
            // Tensor ranks have the same tokens, so each dispatches only its share of them.
            let share = near_even_range(normed.dim(0), self.tp.size, self.tp.index)?;
            let some = normed.narrow0(share.start, share.len())?;
            let mut routed = self.routed(&some, part(&routing, &share), pass)?;
            if let Some(mut all) = split.then(|| shared(normed, probe)).transpose()?.flatten() {
                add_rows(&mut all, &share, &routed)?;
                return pass.sum_over_tp(all);
            }
            if let Some(own) = shared(&some, probe)? {
                add_assign(&mut routed, &own)?;
            }
            return self.gather_shares(&routed, normed.dim(0), pass);
        }
        let mut out = self.routed(normed, routing, pass)?;
        let extra = shared(normed, probe)?;
        let (before, after) = if split { (extra, None) } else { (None, extra) };
        if let Some(partial) = before {
            add_assign(&mut out, &partial)?;
        }
        let mut out = pass.sum_over_tp(out)?;
        if let Some(whole) = after {
            add_assign(&mut out, &whole)?;
        }
        Ok(out)
    }

    /// The routed experts of `x`, wherever they are.
    fn routed(
        &self,
        x: &Tensor,
        routing: Routing,
        pass: &Pass<'_, '_>,
    ) -> Result<Tensor, ModelError> {
        let bank = self.bank.read().unwrap_or_else(PoisonError::into_inner);
        let Some(placement) = &bank.placement else {
            return Ok(moe_experts(x, &routing, &bank.experts)?);
        };
        self.count(&routing.experts);
        let group = group(pass.ctx, pass.rank.plan().ep)?;
        let hidden = x.dim(1);
        let dispatch = ExpertDispatch::new(placement, &routing.experts, self.top_k, hidden, 0)?;
        let work = dispatch.send(group, x.as_f32()?)?.wait()?;
        let count = work.slots.len();
        let rows = Tensor::from_f32(&[count, hidden], work.rows.clone())?;
        // One choice a row of weight one: the expert's output as it is.
        let alone = Routing {
            experts: work.slots.clone(),
            weights: vec![1.0; count],
            logits: Tensor::zeros(&[0, 1])?,
            top_k: 1,
        };
        let computed = moe_experts(&rows, &alone, &bank.experts)?;
        let answers = work.answer(group, computed.as_f32()?)?.wait()?;
        let parts = dispatch.collect(&answers)?;
        let parts = Tensor::from_f32(&[parts.len() / hidden, hidden], parts)?;
        Ok(moe_combine(&parts, dispatch.position(), &routing)?)
    }

    fn count(&self, chosen: &[u32]) {
        if let Some(counts) = &self.counts {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            for expert in chosen {
                if let Some(count) = counts.get_mut(*expert as usize) {
                    *count += 1;
                }
            }
        }
    }

    /// Copies experts to the slots they move to and goes over to `placement`. All ranks of the group call
    /// this with the same moves; nothing is overwritten before every rank has sent what it held.
    pub(super) fn rearrange(
        &self,
        group: &dyn Collective,
        placement: &Placement,
        moves: &[ExpertMove],
    ) -> Result<(), ModelError> {
        let mut bank = self.bank.write().unwrap_or_else(PoisonError::into_inner);
        let old = bank.placement.as_ref();
        let missing = || ModelError::Internal("a move of an expert that is not there".into());
        let mut kept = Vec::new();
        for step in moves.iter().filter(|step| step.from == group.index()) {
            let slots = old.and_then(|old| old.slots().get(step.from));
            let slot = slots.and_then(|s| s.iter().position(|e| *e == Some(step.expert)));
            let held = slot.and_then(|slot| bank.experts.expert(slot));
            let (gate_up, down) = held.ok_or_else(missing)?;
            if step.to == step.from {
                kept.push((gate_up.clone(), down.clone()));
            } else {
                for weight in [gate_up, down] {
                    group.send(step.to, weight.to_tensor()?.to_f32_vec())?;
                }
            }
        }
        let (first, _) = bank.experts.expert(0).ok_or_else(missing)?;
        let dtype = first.to_tensor()?.dtype();
        let (hidden, inner) = (bank.experts.hidden(), bank.experts.intermediate());
        let (mut kept, mut arrived) = (kept.into_iter(), Vec::new());
        for step in moves.iter().filter(|step| step.to == group.index()) {
            let (gate_up, down) = if step.from == step.to {
                kept.next().ok_or_else(missing)?
            } else {
                let receive = |shape: [usize; 2]| {
                    let values = group.recv(step.from)?.wait()?;
                    Ok::<_, ModelError>(LinearWeight::new(&typed(&shape, values, dtype)?, None)?)
                };
                (receive([2 * inner, hidden])?, receive([hidden, inner])?)
            };
            arrived.push((step.slot, gate_up, down));
        }
        for (slot, gate_up, down) in arrived {
            bank.experts.replace(slot, gate_up, down)?;
        }
        bank.placement = Some(placement.clone());
        Ok(())
    }

    /// The rows of all tensor ranks' shares of `tokens` tokens.
    fn gather_shares(
        &self,
        own: &Tensor,
        tokens: usize,
        pass: &Pass<'_, '_>,
    ) -> Result<Tensor, ModelError> {
        let (hidden, longest) = (own.dim(1), tokens.div_ceil(self.tp.size));
        let mut padded = own.to_f32_vec();
        padded.resize(longest * hidden, 0.0);
        let got = group(pass.ctx, Axis::Tp)?.all_gather(padded)?.wait()?;
        let mut all = Vec::with_capacity(tokens * hidden);
        for rank in 0..self.tp.size {
            let count = near_even_range(tokens, self.tp.size, rank)?.len();
            let start = rank * longest * hidden;
            all.extend_from_slice(&got[start..start + count * hidden]);
        }
        Ok(Tensor::from_f32(&[tokens, hidden], all)?)
    }
}

/// Values that came from a weight of type `dtype`, in that type again; exact, since they fitted it before.
fn typed(shape: &[usize], values: Vec<f32>, dtype: DType) -> Result<Tensor, ModelError> {
    Ok(match dtype {
        DType::F32 => Tensor::from_f32(shape, values)?,
        DType::Bf16 => {
            let narrow = values.into_iter().map(bf16::from_f32);
            Tensor::from_bf16(shape, narrow.collect())?
        }
    })
}

/// The choices of tokens `share`.
fn part(routing: &Routing, share: &Range<usize>) -> Routing {
    let choices = share.start * routing.top_k..share.end * routing.top_k;
    Routing {
        experts: routing.experts[choices.clone()].to_vec(),
        weights: routing.weights[choices].to_vec(),
        logits: routing.logits.clone(),
        top_k: routing.top_k,
    }
}

/// Adds `part` to rows `rows` of `all`.
fn add_rows(all: &mut Tensor, rows: &Range<usize>, part: &Tensor) -> Result<(), ModelError> {
    let width = all.dim(1);
    let target = &mut all.as_f32_mut()?[rows.start * width..rows.end * width];
    for (a, b) in target.iter_mut().zip(part.as_f32()?) {
        *a += b;
    }
    Ok(())
}

impl SharedMlp {
    fn load(
        scope: &Scope<'_>,
        moe: &MoeConfig,
        hidden: usize,
        rank: &RankShard,
    ) -> Result<Option<Self>, ModelError> {
        let Some(width) = moe.shared_intermediate else {
            return Ok(None);
        };
        let tp = rank.place(Axis::Tp);
        let split = tp.size > 1 && rank.plan().shared_expert == SharedExpert::Split;
        let inner = Inner {
            parts: if split { tp.size } else { 1 },
            index: if split { tp.index } else { 0 },
        };
        let (up_gate, down) = mlp(scope, hidden, width, inner)?;
        Ok(Some(Self {
            up_gate,
            down,
            split,
        }))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let inner = swiglu_up_gate(&linear(x, &self.up_gate)?)?;
        Ok(linear(&inner, &self.down)?)
    }
}

/// The two weights of a gated MLP of inner width `width`, of which `inner` is kept.
fn mlp(
    scope: &Scope<'_>,
    hidden: usize,
    width: usize,
    inner: Inner,
) -> Result<(LinearWeight, LinearWeight), ModelError> {
    let up_gate = scope.child("gate_and_up_proj");
    let down = scope.child("down_proj");
    let kept = even_range(width, inner.parts, inner.index)?;
    if inner.parts == 1 {
        return Ok((
            up_gate.linear(hidden, 2 * width)?,
            down.linear(width, hidden)?,
        ));
    }
    let rows = gate_up_rows(width, inner.parts, inner.index)?;
    Ok((
        up_gate.linear_rows(hidden, 2 * width, &rows)?,
        down.linear_columns(width, hidden, &kept)?,
    ))
}

fn load_experts(
    scope: &Scope<'_>,
    moe: &MoeConfig,
    hidden: usize,
    (own, inner): (&[usize], Inner),
) -> Result<ExpertWeights, ModelError> {
    let weights = own
        .iter()
        .map(|expert| mlp(&scope.child(expert), hidden, moe.intermediate, inner));
    let (up_gate, down) = weights.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    Ok(ExpertWeights::new(up_gate, down)?)
}
