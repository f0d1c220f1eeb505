//! Where the activations of a pass lie in its memory.

use kernels::AttnHeads;
use kernels::cuda::CODE_COLUMNS;

use super::layout::{LayerDims, WeightType};
use super::share::{Attention, Flow};

/// Alignment of every part, in bytes.
const ALIGNMENT: usize = 1024;
/// Bytes of an element.
const E4M3: usize = 1;
const BF16: usize = 2;
const F32: usize = 4;

/// Tokens of a pass on one rank, and what travels in its layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// First token of this rank among those of the group.
    pub(crate) first: usize,
    /// Tokens whose residual stream is here.
    pub(crate) own: usize,
    /// Tokens of all ranks of the group.
    pub(crate) all: usize,
    pub(crate) ranks: usize,
    /// Whole rows that are gathered at the end of a pass, or pictures that are embedded apart: tokens.
    pub(crate) whole: usize,
    pub(crate) flow: Flow,
}

impl Extent {
    /// A pass that one GPU computes by itself.
    pub(crate) fn alone(tokens: usize) -> Self {
        Self {
            first: 0,
            own: tokens,
            all: tokens,
            ranks: 1,
            whole: 0,
            flow: Flow::ALONE,
        }
    }

    /// Tokens whose heads attend here.
    pub(super) fn attended(&self) -> usize {
        match self.flow.attention {
            Attention::Own | Attention::Ring => self.own,
            Attention::Heads | Attention::Turned => self.all,
        }
    }

    /// Tokens whose norms are here.
    pub(super) fn normed(&self) -> usize {
        if self.flow.spread || self.flow.attention == Attention::Heads {
            self.all
        } else {
            self.own
        }
    }

    /// Tokens that experts here see.
    pub(super) fn routed(&self) -> usize {
        if self.flow.spread { self.all } else { self.own }
    }

    /// Tokens that enter the output projection.
    pub(super) fn mixed(&self) -> usize {
        match self.flow.attention {
            Attention::Heads => self.all,
            _ => self.own,
        }
    }

    /// Tokens that the shared expert sees here.
    pub(super) fn shared(&self) -> std::ops::Range<usize> {
        if self.flow.spread && !self.flow.shared_cut {
            self.first..self.first + self.own
        } else {
            0..self.routed()
        }
    }

    /// Rows of sums that travel.
    pub(super) fn sums(&self) -> usize {
        if self.flow.spread || self.flow.attention == Attention::Heads {
            self.all + (self.ranks - 1) * self.own
        } else {
            0
        }
    }
}

/// Offset of a part, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place(pub(super) usize);

/// Hands out places in the memory.
struct Cursor {
    at: usize,
    /// Whether weights are FP8: rows are then needed in e4m3 too.
    fp8: bool,
}

impl Cursor {
    fn part(&mut self, bytes: usize) -> Place {
        let start = self.at.next_multiple_of(ALIGNMENT);
        self.at = start + bytes;
        Place(start)
    }

    /// A part that only FP8 weights need.
    fn eight(&mut self, bytes: usize) -> Place {
        self.part(if self.fp8 { bytes } else { 0 })
    }
}

/// What lives as long as a layer.
#[derive(Debug)]
pub(super) struct StreamPlaces {
    pub(super) x: Place,
    pub(super) h: Place,
    pub(super) h8: Place,
    pub(super) h8_scales: Place,
    pub(super) sums: Place,
    pub(super) whole: Place,
}

/// What only attention needs.
#[derive(Debug)]
pub(super) struct AttentionPlaces {
    pub(super) qkv: Place,
    pub(super) q: Place,
    pub(super) mixed: Place,
    pub(super) mixed8: Place,
    pub(super) mixed8_scales: Place,
    pub(super) joint: Place,
    pub(super) packed: Place,
    pub(super) heads: Place,
    pub(super) back: Place,
    pub(super) other: Place,
    pub(super) lse: Place,
    pub(super) other_lse: Place,
}

/// What only the experts need.
#[derive(Debug)]
pub(super) struct ExpertPlaces {
    /// Inputs of the first half, then outputs of the second.
    pub(super) rows: Place,
    pub(super) gathered_scales: Place,
    pub(super) inner: Place,
    pub(super) inner_scales: Place,
    pub(super) inner_exponents: Place,
}

/// Places of all parts, and their total.
#[derive(Debug)]
pub(super) struct Offsets {
    pub(super) stream: StreamPlaces,
    pub(super) attention: AttentionPlaces,
    pub(super) experts: ExpertPlaces,
    bytes: usize,
}

/// Everything that sizes depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes<'a> {
    pub(crate) dims: &'a LayerDims,
    /// Heads that attend here.
    pub(crate) heads: AttnHeads,
    pub(crate) weights: WeightType,
}

impl Sizes<'_> {
    /// Columns of the query heads that attend here.
    pub(super) fn head_width(&self) -> usize {
        self.heads.q * self.heads.dim
    }

    pub(super) fn expert_rows(&self, of: &Extent) -> usize {
        self.dims.expert_rows(of.routed(), of.shared().len())
    }

    /// Bytes that a pass needs, without tables (well under one per cent).
    pub(crate) fn bytes(&self, of: &Extent) -> usize {
        self.offsets(of).bytes
    }

    pub(super) fn offsets(&self, of: &Extent) -> Offsets {
        let mut cursor = Cursor {
            at: 0,
            fp8: self.weights == WeightType::Fp8,
        };
        let stream = self.stream(of, &mut cursor);
        // Attention is over before the experts begin: both use one place.
        let both = cursor.at;
        let attention = self.attention(of, &mut cursor);
        let end = std::mem::replace(&mut cursor.at, both);
        let experts = self.experts(of, &mut cursor);
        Offsets {
            stream,
            attention,
            experts,
            bytes: cursor.at.max(end),
        }
    }

    fn stream(&self, of: &Extent, cursor: &mut Cursor) -> StreamPlaces {
        let (hidden, normed) = (self.dims.hidden, of.normed());
        StreamPlaces {
            x: cursor.part(of.own * hidden * BF16),
            h: cursor.part(normed * hidden * BF16),
            h8: cursor.eight(normed * hidden),
            h8_scales: cursor.eight(normed * F32),
            sums: cursor.part(of.sums() * hidden * BF16),
            whole: cursor.part(of.whole * hidden * BF16),
        }
    }

    fn attention(&self, of: &Extent, cursor: &mut Cursor) -> AttentionPlaces {
        let (dims, attended, mixed) = (self.dims, of.attended(), of.mixed());
        let only = |attention: Attention, bytes: usize| {
            let some = of.flow.attention == attention;
            if some { bytes } else { 0 }
        };
        let turned = |bytes| only(Attention::Turned, bytes);
        let ring = |bytes| only(Attention::Ring, bytes);
        AttentionPlaces {
            qkv: cursor.part(attended * self.heads.width() * BF16),
            q: cursor.part(attended * self.head_width() * BF16),
            mixed: cursor.part(mixed * dims.q_width() * BF16),
            mixed8: cursor.eight(mixed * dims.q_width()),
            mixed8_scales: cursor.eight(mixed * F32),
            joint: cursor.part(turned(of.own * dims.qkv_width() * BF16)),
            packed: cursor.part(turned(of.own * dims.qkv_width() * BF16)),
            heads: cursor.part(turned(of.all * self.head_width() * BF16)),
            back: cursor.part(turned(of.own * dims.q_width() * BF16)),
            other: cursor.part(ring(of.own * dims.q_width() * BF16)),
            lse: cursor.part(ring(of.own * self.heads.q * F32)),
            other_lse: cursor.part(ring(of.own * self.heads.q * F32)),
        }
    }

    fn experts(&self, of: &Extent, cursor: &mut Cursor) -> ExpertPlaces {
        let (dims, rows) = (self.dims, self.expert_rows(of));
        ExpertPlaces {
            rows: cursor.part(rows * dims.hidden * BF16),
            gathered_scales: cursor.eight(rows * F32),
            inner: cursor.part(rows * dims.inner * if cursor.fp8 { E4M3 } else { BF16 }),
            inner_scales: cursor.eight(rows * F32),
            inner_exponents: cursor.eight(rows * dims.inner.div_ceil(CODE_COLUMNS)),
        }
    }
}
