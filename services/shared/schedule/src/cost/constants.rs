//! The constants of one model on one machine under one plan.
use parallel::{Axis, Plan, cost::Machine};
use serde::{Deserialize, Serialize};

use super::Load;
use crate::ScheduleError;

/// Bytes of an activation, and of a cached key or value.
const ACTIVATION_BYTES: f64 = 2.0;
/// Tokens in the step that the rate of experts was measured with (two rows of 1024x1024); that rate contains
/// the time in which their weights are read, which is accounted for apart here.
const MEASURED_TOKENS: f64 = 8194.0;
/// Times a residual vector passes through memory in a layer besides matrix products.
const STREAM_PASSES: f64 = 12.0;
/// Seconds of a step that nothing in it explains (launches, sampling). Assumed.
const FIXED_SECONDS: f64 = 2e-3;
/// Seconds of each row that its tokens do not explain (its segments, its guidance). Assumed.
const ROW_SECONDS: f64 = 0.2e-3;

/// Sizes of a model that a step's time depends on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelNumbers {
    /// Decoder layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Routed experts of a layer.
    pub experts: u32,
    /// Experts of one token.
    pub top_k: u32,
    /// Inner width of an expert.
    pub expert_inner: u32,
    /// Inner width of the shared expert; 0: none.
    pub shared_inner: u32,
    /// Pixels of an image token along each side.
    pub pixels_per_token: u32,
    /// Special tokens of a row that a step computes.
    pub specials: u32,
    /// Prefix tokens of a picture that is edited, by image token of it.
    pub edit_prefix_share: f64,
    /// Operations of decoding one image token.
    pub decode_flops_per_token: f64,
}

/// Seconds, by what they are spent on. Those of an H200 come from [`Constants::derive`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Of every step.
    pub fixed_s: f64,
    /// Of each row.
    pub per_row_s: f64,
    /// Of each query token: all that is linear in it.
    pub per_token_s: f64,
    /// Of each pair of a query and a key.
    pub per_pair_s: f64,
    /// Of reading the weights that every token uses.
    pub dense_read_s: f64,
    /// Of reading all routed experts; fewer are read when few tokens choose.
    pub experts_read_s: f64,
    /// Experts that one token leaves unread, as a share of all.
    pub untouched_share: f64,
    /// Of copying in the layers that do not fit into GPU memory, while the others compute.
    pub stream_s: f64,
    /// Of decoding one image token.
    pub decode_token_s: f64,
}

impl Constants {
    /// Seconds of a step that holds `load`; 0 of an empty one.
    pub fn step(&self, load: Load) -> f64 {
        if load.rows <= 0.0 {
            return 0.0;
        }
        let touched = 1.0 - self.untouched_share.powf(load.tokens);
        let once = self.fixed_s + self.dense_read_s + self.experts_read_s * touched;
        (once + self.marginal(load)).max(self.stream_s)
    }

    /// Seconds of `load` itself, without what is paid once a step.
    pub fn marginal(&self, load: Load) -> f64 {
        self.per_row_s * load.rows + self.per_token_s * load.tokens + self.per_pair_s * load.pairs
    }

    /// Seconds of decoding a picture of `image_tokens`.
    pub fn decode(&self, image_tokens: u32) -> f64 {
        self.decode_token_s * f64::from(image_tokens)
    }

    /// Seconds of computing the keys and values of `prefix` tokens for `rows` rows, on a machine of this kind.
    pub fn prefill(&self, rows: u32, prefix: u32) -> f64 {
        self.step(Load::from(super::Rows {
            rows,
            tokens: prefix,
            prefix: 0,
        }))
    }

    /// Every constant is a number of seconds.
    ///
    /// # Errors
    /// [`ScheduleError`] otherwise.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let all = [
            self.fixed_s,
            self.per_row_s,
            self.per_token_s,
            self.per_pair_s,
            self.dense_read_s,
            self.experts_read_s,
            self.stream_s,
            self.decode_token_s,
        ];
        let share = (0.0..=1.0).contains(&self.untouched_share);
        if share && all.iter().all(|s| s.is_finite() && *s >= 0.0) && self.per_token_s > 0.0 {
            return Ok(());
        }
        let reason = "must be seconds of 0 or more, per_token_s above 0, untouched_share 0 to 1";
        Err(ScheduleError::invalid("constants", reason))
    }

    /// The constants of `model` on `machine` under `plan`, with `streamed_layers` in host memory.
    ///
    /// Rates are those of [`Machine`], which names where each was measured. The rate of experts was measured
    /// with their weights read in the same time; here that reading is taken out and paid once a step. In a
    /// measured grouped product of the published sizes it stands apart in the same way: 0.86 ms for 64 tokens,
    /// 1.03 ms for 2048.
    ///
    /// # Errors
    /// [`ScheduleError`]: a plan with `pp` or `cfg` is not priced here; sizes that are not positive.
    pub fn derive(
        model: &ModelNumbers,
        machine: &Machine,
        plan: &Plan,
        streamed_layers: u32,
    ) -> Result<Self, ScheduleError> {
        model.check(streamed_layers)?;
        if plan.pp > 1 || plan.cfg > 1 {
            let reason = format!("{plan} has pp or cfg, whose steps are not predicted yet");
            return Err(ScheduleError::invalid("plan", reason));
        }
        let mesh = plan.mesh();
        let mesh = mesh.map_err(|error| ScheduleError::invalid("plan", error.to_string()))?;
        let layers = f64::from(model.layers);
        let bytes = weight_bytes(machine);
        // Tokens are split over the sequence axes, inner widths and heads over tp.
        let ranks = size(plan.ulysses * plan.ring * plan.tp);
        let expert_holders = size(mesh.size_of(plan.ep))
            * if plan.ep.contains(Axis::Tp) {
                1.0
            } else {
                size(plan.tp)
            };
        let read = |weights: f64| weights * bytes / machine.memory_rate;
        let whole_read = read(model.expert_weights());
        let expert_token = 2.0 * model.chosen_weights() / machine.experts;
        let expert_token = expert_token - whole_read / MEASURED_TOKENS;
        let residual =
            STREAM_PASSES * f64::from(model.hidden) * ACTIVATION_BYTES / machine.memory_rate;
        let token = 2.0 * model.dense_weights() / machine.dense + expert_token.max(0.0) + residual;
        let pair = 4.0 * f64::from(model.heads * model.head_dim) / machine.attention;
        let moved = Moved::of(model, machine, plan, size(mesh.size_of(plan.ep)));
        let layer_bytes = (model.expert_weights() + model.dense_weights()) * bytes;
        Ok(Self {
            fixed_s: FIXED_SECONDS + layers * moved.latency,
            per_row_s: ROW_SECONDS,
            per_token_s: layers * (token + moved.per_token) / ranks,
            per_pair_s: layers * pair / ranks,
            dense_read_s: layers * read(model.dense_weights()) / size(plan.tp),
            experts_read_s: layers * whole_read / expert_holders,
            untouched_share: 1.0 - f64::from(model.top_k) / f64::from(model.experts),
            stream_s: f64::from(streamed_layers) * layer_bytes / machine.host_rate,
            decode_token_s: model.decode_flops_per_token / machine.convolution,
        })
    }
}

/// Between ranks, of one layer: seconds of its operations, and of each token of a rank.
#[derive(Default)]
struct Moved {
    latency: f64,
    per_token: f64,
}

impl Moved {
    /// `holders`: ranks that experts are spread over. Shifts of a ring are taken to hide behind attention.
    fn of(model: &ModelNumbers, machine: &Machine, plan: &Plan, holders: f64) -> Self {
        let link = &machine.link;
        let vector = f64::from(model.hidden) * ACTIVATION_BYTES;
        let mut moved = Self::default();
        let mut add = |operations: f64, seconds: f64| {
            moved.latency += operations * link.latency;
            moved.per_token += seconds;
        };
        if plan.tp > 1 {
            // Every rank of tp has all tokens, and the caller divides by it.
            add(2.0, 2.0 * vector * size(plan.tp) / link.reduce);
        }
        if plan.ulysses > 1 {
            let heads = f64::from(2 * model.heads + 2 * model.kv_heads);
            let away = 1.0 - 1.0 / size(plan.ulysses);
            let bytes = heads * f64::from(model.head_dim) * ACTIVATION_BYTES * away;
            add(2.0, bytes / link.all_to_all);
        }
        if plan.ring > 1 {
            add(size(plan.ring) - 1.0, 0.0);
        }
        if holders > 1.0 {
            // A token goes once to each other rank that holds one of its experts, and comes back.
            let other =
                (holders - 1.0) * (1.0 - (1.0 - 1.0 / holders).powf(f64::from(model.top_k)));
            add(2.0, 2.0 * vector * other / link.all_to_all);
        }
        moved
    }
}

impl ModelNumbers {
    fn check(&self, streamed_layers: u32) -> Result<(), ScheduleError> {
        let sizes = [
            self.layers,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.experts,
            self.top_k,
            self.expert_inner,
            self.pixels_per_token,
        ];
        // Far above any model, far below what products of these would overflow.
        let sizes_fit = sizes.iter().all(|n| (1..=1 << 16).contains(n));
        let rest = self.shared_inner <= 1 << 16 && self.specials <= 16;
        let shares = (0.0..=16.0).contains(&self.edit_prefix_share)
            && (0.0..=1e15).contains(&self.decode_flops_per_token);
        if !(sizes_fit && rest && shares) || self.top_k > self.experts {
            let reason = "must have sizes of 1 to 65536, and no more experts a token than experts";
            return Err(ScheduleError::invalid("model", reason));
        }
        if streamed_layers > self.layers {
            let reason = format!("must be at most the model's {} layers", self.layers);
            return Err(ScheduleError::invalid("streamed_layers", reason));
        }
        Ok(())
    }

    /// Weights of a layer that every token uses: projections, shared expert, router.
    fn dense_weights(&self) -> f64 {
        let heads = f64::from(2 * self.heads + 2 * self.kv_heads);
        let hidden = f64::from(self.hidden);
        let inner = 3.0 * f64::from(self.shared_inner);
        hidden * (heads * f64::from(self.head_dim) + inner + f64::from(self.experts))
    }

    /// Weights of one expert.
    fn expert(&self) -> f64 {
        3.0 * f64::from(self.hidden) * f64::from(self.expert_inner)
    }

    /// Weights of all routed experts of a layer.
    fn expert_weights(&self) -> f64 {
        f64::from(self.experts) * self.expert()
    }

    /// Weights of the experts that one token chooses.
    fn chosen_weights(&self) -> f64 {
        f64::from(self.top_k) * self.expert()
    }

    /// Bytes of the keys and values of one prefix token.
    pub fn prefix_token_bytes(&self) -> u64 {
        4 * u64::from(self.layers) * u64::from(self.kv_heads) * u64::from(self.head_dim)
    }

    /// Bytes that computing one query token needs besides weights: four vectors of the residual's width, and for
    /// each choice of an expert its input, its output and the inner width.
    pub fn token_bytes(&self) -> u64 {
        let (hidden, inner) = (u64::from(self.hidden), u64::from(self.expert_inner));
        2 * (4 * hidden + u64::from(self.top_k) * (2 * hidden + 3 * inner))
    }
}

fn weight_bytes(machine: &Machine) -> f64 {
    // One or two.
    machine.weights.bytes() as f64
}

fn size(ranks: usize) -> f64 {
    // Meshes are small.
    ranks as f64
}
