//! Mixture of experts: routing and the grouped expert products.

use rayon::prelude::*;

use super::elementwise::swiglu_rows;
use super::gemm::{Dense, Gathered, gemm_serial};
use super::linear::{LinearWeight, linear};
use super::recycle::Recycled;
use super::softmax::softmax_into;
use super::workspace::scratch;
use super::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// Which experts each token uses.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Expert of each (token, slot), `[T * top_k]`; a token's slots are in descending probability.
    pub experts: Vec<u32>,
    /// Weight of each (token, slot), `[T * top_k]`.
    pub weights: Vec<f32>,
    /// Router logits `[T, E]`.
    pub logits: Tensor,
    /// Slots per token.
    pub top_k: usize,
}

/// Chooses `top_k` experts for each row of `x [T, H]` with router `wg [E, H]`.
///
/// HunyuanImage-3.0: logits and softmax over all experts in f32, the `top_k` largest probabilities in
/// descending order (the lower index first among equals), divided by their sum where `renormalise`.
pub fn moe_route(
    x: &Tensor,
    wg: &LinearWeight,
    top_k: usize,
    renormalise: bool,
) -> Result<Routing> {
    const OP: &str = "moe_route";
    let n = wg.n();
    if top_k == 0 || top_k > n {
        return Err(KernelError::Bounds {
            op: OP,
            what: "top_k",
            value: top_k,
            limit: n,
        });
    }
    let logits = linear(x, wg)?;
    let tokens = logits.dim(0);
    let mut p = scratch(tokens * n);
    softmax_into(logits.as_f32()?, &mut p, n);
    let (mut experts, mut weights) = (vec![0; tokens * top_k], vec![0.0; tokens * top_k]);
    let per_piece = tokens.div_ceil(par::pieces(tokens, 4 * n)).max(1);
    experts
        .par_chunks_mut(per_piece * top_k)
        .zip(weights.par_chunks_mut(per_piece * top_k))
        .zip(p.par_chunks(per_piece * n))
        .for_each(|((experts, weights), p)| {
            let slots = experts
                .chunks_exact_mut(top_k)
                .zip(weights.chunks_exact_mut(top_k));
            for (p, (experts, weights)) in p.chunks_exact(n).zip(slots) {
                choose(p, experts, weights);
                if renormalise {
                    let norm = weights.iter().sum::<f32>().max(f32::EPSILON);
                    weights.iter_mut().for_each(|w| *w /= norm);
                }
            }
        });
    Ok(Routing {
        experts,
        weights,
        logits,
        top_k,
    })
}

/// The largest of `p` in descending order, as many as there are slots; the lower index first among equals.
fn choose(p: &[f32], experts: &mut [u32], weights: &mut [f32]) {
    let mut filled = 0;
    for (e, &v) in p.iter().enumerate() {
        let at = weights[..filled]
            .iter()
            .position(|&w| v > w)
            .unwrap_or(filled);
        if at < weights.len() {
            filled = (filled + 1).min(weights.len());
            experts[at..filled].rotate_right(1);
            weights[at..filled].rotate_right(1);
            (experts[at], weights[at]) = (e as u32, v);
        }
    }
}

/// The experts of one layer.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    gate_up: Vec<LinearWeight>,
    down: Vec<LinearWeight>,
}

impl ExpertWeights {
    /// `gate_up[e] [2I, H]` (linear half first, then the gate) and `down[e] [H, I]`, one of each per expert.
    pub fn new(gate_up: Vec<LinearWeight>, down: Vec<LinearWeight>) -> Result<Self> {
        const OP: &str = "expert weights";
        if gate_up.is_empty() || gate_up.len() != down.len() {
            let reason = "must list as many gate_up as down weights, at least one";
            return Err(KernelError::Argument {
                op: OP,
                what: "experts",
                reason,
            });
        }
        let (h, two_i) = (gate_up[0].k(), gate_up[0].n());
        for (g, d) in gate_up.iter().zip(&down) {
            if g.k() != h || g.n() != two_i || two_i % 2 != 0 {
                let expected = format!("[{two_i} (even), {h}]");
                return Err(KernelError::shape(OP, "gate_up", expected, &[g.n(), g.k()]));
            }
            if d.n() != h || d.k() * 2 != two_i {
                let expected = format!("[{h}, {}]", two_i / 2);
                return Err(KernelError::shape(OP, "down", expected, &[d.n(), d.k()]));
            }
        }
        Ok(Self { gate_up, down })
    }

    /// `gate_up` and `down` of one expert.
    #[must_use]
    pub fn expert(&self, index: usize) -> Option<(&LinearWeight, &LinearWeight)> {
        self.gate_up.get(index).zip(self.down.get(index))
    }

    /// Puts another expert of the same sizes into a place.
    ///
    /// # Errors
    /// A place that is not there, or weights of other sizes; nothing changes then.
    pub fn replace(
        &mut self,
        index: usize,
        gate_up: LinearWeight,
        down: LinearWeight,
    ) -> Result<()> {
        const OP: &str = "expert weights";
        let limit = self.experts();
        if index >= limit {
            return Err(KernelError::Bounds {
                op: OP,
                what: "expert",
                value: index,
                limit,
            });
        }
        let (h, i) = (self.hidden(), self.intermediate());
        if (gate_up.n(), gate_up.k()) != (2 * i, h) {
            let expected = format!("[{}, {h}]", 2 * i);
            return Err(KernelError::shape(
                OP,
                "gate_up",
                expected,
                &[gate_up.n(), gate_up.k()],
            ));
        }
        if (down.n(), down.k()) != (h, i) {
            let expected = format!("[{h}, {i}]");
            return Err(KernelError::shape(
                OP,
                "down",
                expected,
                &[down.n(), down.k()],
            ));
        }
        (self.gate_up[index], self.down[index]) = (gate_up, down);
        Ok(())
    }

    /// Number of experts.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.gate_up.len()
    }

    /// Hidden width H.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.gate_up[0].k()
    }

    /// Expert width I.
    #[must_use]
    pub fn intermediate(&self) -> usize {
        self.down[0].k()
    }
}

/// Rows of one expert computed together.
const TASK_ROWS: usize = 240;

/// Rows `tokens` of one expert; results go to as many rows of `out`.
struct Task<'a> {
    expert: usize,
    tokens: &'a [u32],
    out: &'a mut [f32],
}

/// `y[t] = sum over slots s of weight[t, s] * down_e(swiglu(gate_up_e(x[t])))`, `e = experts[t, s]`.
///
/// Tokens are grouped by expert, none is dropped. The slots of a token are added in slot order, so a
/// token's result does not depend on the others.
pub fn moe_experts(x: &Tensor, routing: &Routing, experts: &ExpertWeights) -> Result<Tensor> {
    const OP: &str = "moe_experts";
    let hidden = experts.hidden();
    x.expect_shape(OP, "x", &[ANY, hidden])?;
    let data = x.f32_named(OP, "x")?;
    let (tokens, top_k) = (x.dim(0), routing.top_k);
    let slots = tokens * top_k;
    if routing.experts.len() != slots || routing.weights.len() != slots {
        let value = routing.experts.len().min(routing.weights.len());
        return Err(KernelError::Bounds {
            op: OP,
            what: "routing",
            value,
            limit: slots,
        });
    }
    let count = experts.experts();
    if let Some(&e) = routing.experts.iter().find(|&&e| e as usize >= count) {
        return Err(KernelError::Bounds {
            op: OP,
            what: "expert",
            value: e as usize,
            limit: count,
        });
    }
    let order = Order::new(&routing.experts, top_k, count);
    let mut partial = scratch(slots * hidden);
    let mut tasks = order.tasks(&mut partial, hidden);
    let work = slots * hidden * experts.intermediate() * 3 / 8;
    if par::pieces(tasks.len(), work / tasks.len().max(1)) > 1 {
        tasks
            .par_iter_mut()
            .for_each(|task| run_task(task, data, experts));
    } else {
        tasks
            .iter_mut()
            .for_each(|task| run_task(task, data, experts));
    }
    drop(tasks);
    Ok(combine(
        &partial,
        &order.position,
        routing,
        (tokens, hidden),
    ))
}

/// `y[t] = sum over slots s of weight[t, s] * parts[position[t * top_k + s]]`; `[T, H]`.
///
/// The end of [`moe_experts`] for expert outputs that were computed elsewhere, in any grouping: `parts`
/// `[T * top_k, H]` holds one unweighted row a slot in any order, `position` `[T * top_k]` says where. The
/// slots of a token are added in slot order, so the bits are those of [`moe_experts`] over all experts.
/// The chosen experts and the logits of `routing` are not read.
///
/// # Errors
/// Shape or type of `parts`, a `routing` of unequal or partial lists, a `position` of another length or
/// beyond `parts`, and two slots with one row.
pub fn moe_combine(parts: &Tensor, position: &[u32], routing: &Routing) -> Result<Tensor> {
    const OP: &str = "moe_combine";
    let slots = routing.weights.len();
    if routing.top_k == 0 || !slots.is_multiple_of(routing.top_k) {
        return Err(KernelError::Argument {
            op: OP,
            what: "routing.weights",
            reason: "must hold top_k, at least 1, weights a token",
        });
    }
    let lengths = [
        ("routing.experts length", routing.experts.len()),
        ("position length", position.len()),
    ];
    if let Some(&(what, value)) = lengths.iter().find(|&&(_, len)| len != slots) {
        return Err(KernelError::Bounds {
            op: OP,
            what,
            value,
            limit: slots,
        });
    }
    parts.expect_shape(OP, "parts", &[slots, ANY])?;
    let data = parts.f32_named(OP, "parts")?;
    let mut used = vec![false; slots];
    for &row in position {
        let Some(used) = used.get_mut(row as usize) else {
            return Err(KernelError::Bounds {
                op: OP,
                what: "position",
                value: row as usize,
                limit: slots,
            });
        };
        if std::mem::replace(used, true) {
            return Err(KernelError::Argument {
                op: OP,
                what: "position",
                reason: "gives one row to two slots",
            });
        }
    }
    let (tokens, hidden) = (slots / routing.top_k, parts.dim(1));
    Ok(combine(data, position, routing, (tokens, hidden)))
}

/// Slots sorted by expert (stable).
struct Order {
    /// First sorted position of each expert, and the end.
    starts: Vec<usize>,
    /// Token at each sorted position.
    tokens: Vec<u32>,
    /// Sorted position of each slot.
    position: Vec<u32>,
}

impl Order {
    fn new(slots: &[u32], top_k: usize, experts: usize) -> Self {
        let mut starts = vec![0usize; experts + 1];
        for &e in slots {
            starts[e as usize + 1] += 1;
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        let mut next = starts.clone();
        let mut tokens = vec![0; slots.len()];
        let position = slots
            .iter()
            .enumerate()
            .map(|(slot, &e)| {
                let at = next[e as usize];
                next[e as usize] += 1;
                tokens[at] = (slot / top_k) as u32;
                at as u32
            })
            .collect();
        Self {
            starts,
            tokens,
            position,
        }
    }

    fn tasks<'a>(&'a self, mut out: &'a mut [f32], hidden: usize) -> Vec<Task<'a>> {
        let mut tasks = Vec::new();
        for (expert, range) in self.starts.windows(2).enumerate() {
            for tokens in self.tokens[range[0]..range[1]].chunks(TASK_ROWS) {
                let (mine, rest) = out.split_at_mut(tokens.len() * hidden);
                out = rest;
                tasks.push(Task {
                    expert,
                    tokens,
                    out: mine,
                });
            }
        }
        tasks
    }
}

fn run_task(task: &mut Task<'_>, x: &[f32], experts: &ExpertWeights) {
    let (gate_up, down) = (&experts.gate_up[task.expert], &experts.down[task.expert]);
    let (rows, half) = (task.tokens.len(), experts.intermediate());
    let mut wide = scratch(rows * 2 * half);
    let gathered = Gathered {
        data: x,
        k: gate_up.k(),
        rows: task.tokens,
    };
    gemm_serial(&gathered, 0, &gate_up.packed, gate_up.init(), &mut wide);
    let mut narrow = scratch(rows * half);
    swiglu_rows(&wide, &mut narrow, half);
    let dense = Dense {
        data: &narrow,
        k: half,
    };
    gemm_serial(&dense, 0, &down.packed, down.init(), task.out);
}

/// Weighted sums of the rows of `partial`, in slot order; `position` names the row of each slot.
fn combine(
    partial: &[f32],
    position: &[u32],
    routing: &Routing,
    (tokens, hidden): (usize, usize),
) -> Tensor {
    let mut out = Recycled::stale(tokens * hidden);
    par::rows(&mut out, hidden, hidden * routing.top_k, |first, out| {
        combine_rows(first, out, partial, position, routing, hidden);
    });
    Tensor::output(&[tokens, hidden], out)
}

/// [`combine`] for the tokens `first ..` of a piece.
fn combine_rows(
    first: usize,
    out: &mut [f32],
    partial: &[f32],
    position: &[u32],
    routing: &Routing,
    hidden: usize,
) {
    let k = routing.top_k;
    simd::run(
        #[inline(always)]
        || {
            for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
                out.fill(0.0);
                for slot in (first + i) * k..(first + i + 1) * k {
                    let part = &partial[position[slot] as usize * hidden..][..hidden];
                    let weight = routing.weights[slot];
                    for (o, &v) in out.iter_mut().zip(part) {
                        *o = weight.mul_add(v, *o);
                    }
                }
            }
        },
    );
}
