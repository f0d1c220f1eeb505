//! How many weights a model has, and which of them a rank of a plan holds.

use crate::{
    Axis, HeadShard, ModelShape, ParallelError, Plan, SharedExpert, gate_up_rows, near_even_range,
};

/// Width of the sinusoid that every time embedder takes in.
const SINUSOID: usize = 256;
/// Taps of a 3x3 kernel, and of a 3x3x3 kernel.
const TAPS_2D: usize = 9;
const TAPS_3D: usize = 27;
/// Picture channels.
const RGB: usize = 3;

/// Sizes of a model: its decoder, and what turns latents into tokens and back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSizes {
    /// The decoder layers.
    pub shape: ModelShape,
    /// Experts of one token, by layer.
    pub top_k: Vec<usize>,
    /// Whether queries and keys are normalised per head.
    pub qk_norm: bool,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Inner channels of the convolutions before and after the decoder.
    pub stem_inner: usize,
    /// Tokens before the image tokens that a step computes: timestep, guidance, next timestep.
    pub specials: usize,
    /// Pixels of an image token along each side.
    pub pixels_per_token: usize,
    /// The decoding half of the VAE.
    pub vae: VaeSizes,
}

/// Sizes of a VAE decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VaeSizes {
    /// Channels of a latent.
    pub latent: usize,
    /// Channels of each level, the finest first.
    pub channels: Vec<usize>,
    /// Residual blocks of one level.
    pub blocks: usize,
    /// Levels that double width and height.
    pub spatial_levels: usize,
    /// Levels that also double the frames, the coarsest ones.
    pub temporal_levels: usize,
}

/// Weights of one rank, in elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankWeights {
    /// Projections of attention.
    pub attention: u64,
    /// Routed experts.
    pub experts: u64,
    /// Shared experts.
    pub shared: u64,
    /// Norms and routers of the layers.
    pub small: u64,
    /// Token embedding, stem, head and time embedders, on every rank.
    pub ends: u64,
    /// The VAE decoder, on rank 0.
    pub vae: u64,
}

impl RankWeights {
    /// Elements over all parts.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.attention + self.experts + self.shared + self.small + self.ends + self.vae
    }
}

impl ModelSizes {
    /// Weights of layer `layer` on the rank with tensor index `tp` of `plan`.
    pub(super) fn layer(
        &self,
        plan: &Plan,
        tp: usize,
        layer: usize,
    ) -> Result<RankWeights, ParallelError> {
        let (shape, l) = (&self.shape, &self.shape.layers[layer]);
        let (hidden, dim) = (shape.hidden, shape.head_dim);
        let heads = HeadShard::new(shape, plan.tp, tp)?;
        let ep = plan.mesh()?.size_of(plan.ep);
        let over_tp = plan.ep.contains(Axis::Tp);
        let part = |inner: usize, parts: usize| {
            let rows = gate_up_rows(inner, parts, if parts == 1 { 0 } else { tp })?;
            let kept: usize = rows.iter().map(ExactSizeIterator::len).sum();
            // Gate and up, and down, which has half as many columns.
            Ok::<_, ParallelError>((kept + kept / 2) * hidden)
        };
        let splits = if over_tp { 1 } else { plan.tp };
        let shared_parts = match plan.shared_expert {
            SharedExpert::Split => plan.tp,
            SharedExpert::Replicated => 1,
        };
        let norms = 2 * hidden + if self.qk_norm { 2 * dim } else { 0 };
        Ok(RankWeights {
            attention: ((2 * heads.q.len() + 2 * heads.kv.len()) * dim * hidden) as u64,
            experts: (l.experts / ep * part(l.expert_inner, splits)?) as u64,
            shared: part(l.shared_inner.unwrap_or(0), shared_parts)? as u64,
            small: (norms + l.experts * hidden) as u64,
            ..RankWeights::default()
        })
    }

    /// Weights that `rank` of `plan` holds to denoise and decode.
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`], and those of shards that the plan does not allow.
    pub fn rank_weights(&self, plan: &Plan, rank: usize) -> Result<RankWeights, ParallelError> {
        let at = plan.mesh()?.coordinates(rank)?;
        let mut sum = RankWeights {
            ends: self.ends(),
            vae: if rank == 0 { self.vae.weights() } else { 0 },
            ..RankWeights::default()
        };
        let stage = at[Axis::Pp as usize];
        for layer in near_even_range(self.shape.layers.len(), plan.pp, stage)? {
            let own = self.layer(plan, at[Axis::Tp as usize], layer)?;
            sum.attention += own.attention;
            sum.experts += own.experts;
            sum.shared += own.shared;
            sum.small += own.small;
        }
        Ok(sum)
    }

    /// Weights of the embedding table, stem, head and time embedders.
    fn ends(&self) -> u64 {
        let (hidden, inner) = (self.shape.hidden, self.stem_inner);
        // Timestep token, stem and head have one each, and so has every further special token.
        let embedders = 2 + self.specials;
        let embedder = SINUSOID * hidden + hidden * hidden + 2 * hidden;
        let stem = inner + block_rest(inner, hidden, hidden);
        let head = self.vae.latent + 2 * inner + block_rest(hidden, inner, hidden);
        let convolutions = self.stem_macs() + self.head_macs();
        (self.vocab * hidden + embedders * embedder + stem + head + convolutions) as u64
    }

    /// Multiplications of the stem for one image token: its convolution weights.
    pub(super) fn stem_macs(&self) -> usize {
        let (hidden, inner) = (self.shape.hidden, self.stem_inner);
        TAPS_2D * self.vae.latent * inner + block_macs(inner, hidden)
    }

    /// Multiplications of the head for one image token.
    pub(super) fn head_macs(&self) -> usize {
        let (hidden, inner) = (self.shape.hidden, self.stem_inner);
        TAPS_2D * self.vae.latent * inner + block_macs(hidden, inner)
    }
}

/// Convolutions of an adaptive residual block: two of 3x3, and the skip where the widths differ.
fn block_macs(input: usize, output: usize) -> usize {
    let skip = if input == output { 0 } else { input * output };
    TAPS_2D * (input * output + output * output) + skip
}

/// The block's other weights: two norms, biases, and the modulation by a vector of width `time`.
fn block_rest(input: usize, output: usize, time: usize) -> usize {
    let skip_bias = if input == output { 0 } else { output };
    2 * input + 2 * output + 2 * output + skip_bias + 2 * output * (time + 1)
}

/// One group of like convolutions of the VAE decoder, at one resolution.
struct Convolutions {
    /// Weights without biases.
    weights: usize,
    /// Places each is applied to, per latent place.
    places: usize,
    /// Largest number of channels, per place.
    channels: usize,
}

impl VaeSizes {
    /// Levels of the decoder from the coarsest, with frames and pixels per latent place.
    fn levels(&self) -> Vec<Convolutions> {
        let coarse_first: Vec<usize> = self.channels.iter().rev().copied().collect();
        let (mut places, mut all) = (1, Vec::new());
        for (level, &width) in coarse_first.iter().enumerate() {
            let mut weights = 2 * self.blocks * TAPS_3D * width * width;
            let mut channels = width;
            if level == 0 {
                // Entry, and the middle: two blocks and an attention of four projections.
                weights += TAPS_3D * self.latent * width;
                weights += 4 * TAPS_3D * width * width + 4 * width * width;
            }
            let cells = match level {
                l if l < self.temporal_levels => 8,
                l if l < self.spatial_levels => 4,
                _ => 1,
            };
            if level < self.spatial_levels {
                let next = coarse_first.get(level + 1).map_or(0, |c| c * cells);
                weights += TAPS_3D * width * next;
                channels = channels.max(next);
            } else {
                weights += TAPS_3D * width * RGB;
            }
            all.push(Convolutions {
                weights,
                places,
                channels,
            });
            places *= cells;
        }
        all
    }

    /// Weights of the decoder, biases and norms included.
    #[must_use]
    pub fn weights(&self) -> u64 {
        let convolutions: usize = self.levels().iter().map(|l| l.weights).sum();
        let coarse_first: Vec<usize> = self.channels.iter().rev().copied().collect();
        // A block has two norms of two vectors and two biases.
        let block = |width: usize| 6 * width;
        let mut vectors = 0;
        for (level, &width) in coarse_first.iter().enumerate() {
            vectors += self.blocks * block(width);
            if level < self.spatial_levels {
                let cells = if level < self.temporal_levels { 8 } else { 4 };
                vectors += coarse_first.get(level + 1).map_or(0, |c| c * cells);
            }
        }
        let coarsest = coarse_first.first().copied().unwrap_or(0);
        let finest = coarse_first.last().copied().unwrap_or(0);
        // Entry bias, the middle's blocks and attention (norm and four biases), the last norm and bias.
        vectors += coarsest + 2 * block(coarsest) + 6 * coarsest + 2 * finest + RGB;
        (convolutions + vectors) as u64
    }

    /// Operations of decoding `places` latent places, a multiplication and an addition counted as two.
    pub(super) fn decode_flops(&self, places: usize) -> f64 {
        let levels = self.levels();
        let macs = levels.iter().map(|l| l.weights as f64 * l.places as f64);
        2.0 * macs.sum::<f64>() * places as f64
    }

    /// Elements of the largest tensor while decoding `places` latent places.
    pub(super) fn peak_elements(&self, places: usize) -> u64 {
        let levels = self.levels();
        let largest = levels.iter().map(|l| l.channels * l.places).max();
        (largest.unwrap_or(0) * places) as u64
    }
}
