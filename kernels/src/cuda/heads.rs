//! Full attention within one sequence whose queries, keys and values are one fused projection with small heads, as the
//! vision transformer has them, on the tensor cores.
//!
//! The kernel there has heads of 128 elements and four query heads for each key head. Smaller heads get zeros behind
//! them, and four tokens of one head, which see the same keys, take the places of four query heads.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::attention::{AttentionOut, AttentionPlan, attention};
use super::attention_tiles::{GpuAttnRow, KEY_TILE, KvRun};
use super::device::Gpu;
use super::error::{Result, argument};
use super::launch::{Grid, aligned, int, launch};
use super::rope::KvSlot;
use super::tensor::{GpuTensor, GpuType};
use crate::cpu::rope::AttnHeads;
use crate::{Segment, SegmentKind};

const OP: &str = "WholeAttention";
const FILE: &str = "heads";
/// Elements of a head and query heads of a key head in the kernel.
const DIM: usize = 128;
const GROUP: usize = 4;
const THREADS: u32 = 256;
/// Blocks of a multiprocessor.
const BLOCKS: u32 = 8;

/// Attention of so many tokens, and its memory. Calls are in stream order.
#[derive(Debug)]
pub struct WholeAttention {
    plan: AttentionPlan,
    heads: usize,
    dim: usize,
    tokens: usize,
    keys: usize,
    /// Tokens of a head of the arena.
    room: usize,
    /// bf16 `[groups, 4 heads, 128]`.
    q: GpuTensor,
    /// bf16 `[2 heads room, 128]`.
    arena: GpuTensor,
    /// bf16 `[groups, 4 heads 128]`.
    out: GpuTensor,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SplitArguments {
    sums: u64,
    bias: u64,
    q: u64,
    arena: u64,
    tokens: i32,
    groups: i32,
    room: i32,
    heads: i32,
    dim: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for SplitArguments {}

#[derive(Clone, Copy)]
#[repr(C)]
struct JoinArguments {
    from: u64,
    to: u64,
    tokens: i32,
    heads: i32,
    dim: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for JoinArguments {}

impl WholeAttention {
    /// For `tokens` tokens with `heads` heads of `dim` elements, which all see the first `keys` of them.
    ///
    /// # Errors
    /// `Argument` for heads of more than 128 elements, or keys that are none or more than the tokens; those of
    /// [`AttentionPlan::new`].
    pub fn new(
        gpu: &Arc<Gpu>,
        (heads, dim): (usize, usize),
        (tokens, keys): (usize, usize),
    ) -> Result<Self> {
        if heads == 0 || dim == 0 || dim > DIM {
            return Err(argument(OP, "heads", "must have 1 to 128 elements each"));
        }
        if keys == 0 || keys > tokens {
            return Err(argument(OP, "keys", "must be some of the tokens"));
        }
        let (groups, room) = (tokens.div_ceil(GROUP), tokens.next_multiple_of(KEY_TILE));
        let what = "attention of a picture";
        let new = |dims: &[usize]| GpuTensor::new(gpu, dims, GpuType::Bf16, what);
        let arena = new(&[2 * heads * room, DIM])?;
        let at = KvSlot {
            first: 0,
            per_head: int(OP, "tokens", room)?.unsigned_abs(),
            per_layer: 0,
            to_value: int(OP, "tokens", heads * room)?.unsigned_abs(),
        };
        let row = GpuAttnRow {
            prefix: None,
            fresh: KvRun { at, tokens: keys },
        };
        let all = Segment {
            row: 0,
            q: 0..groups,
            kind: SegmentKind::Full,
            q_pos: 0,
            keys,
        };
        let shape = AttnHeads {
            q: GROUP * heads,
            kv: heads,
            dim: DIM,
        };
        Ok(Self {
            plan: AttentionPlan::new(&arena, shape, 1, &[row], (&[all], groups))?,
            heads,
            dim,
            tokens,
            keys,
            room,
            q: new(&[groups, GROUP * heads, DIM])?,
            out: new(&[groups, GROUP * heads * DIM])?,
            arena,
        })
    }

    /// Tokens, and how many of them are seen.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.tokens, self.keys)
    }

    /// `out` bf16 `[tokens, heads dim]` of `sums` F32 `[tokens, 3 heads dim]` (queries, keys, values, each head by head)
    /// plus `bias` F32 `[3 heads dim]`.
    ///
    /// # Errors
    /// `Argument` naming the operand that does not fit, or what the driver says.
    pub fn run(
        &self,
        out: &GpuTensor,
        (sums, bias): (&GpuTensor, Option<&GpuTensor>),
        scale: f32,
    ) -> Result<()> {
        let width = self.heads * self.dim;
        sums.expect(OP, "sums", &[self.tokens, 3 * width], GpuType::F32)?;
        out.expect(OP, "out", &[self.tokens, width], GpuType::Bf16)?;
        if let Some(bias) = bias {
            bias.expect(OP, "bias", &[3 * width], GpuType::F32)?;
        }
        aligned(OP, &[("sums", sums), ("out", out)])?;
        let split = SplitArguments {
            sums: sums.address(),
            bias: bias.map_or(0, GpuTensor::address),
            q: self.q.address(),
            arena: self.arena.address(),
            tokens: int(OP, "sums", self.tokens)?,
            groups: int(OP, "sums", self.q.dim(0))?,
            room: int(OP, "sums", self.room)?,
            heads: int(OP, "sums", self.heads)?,
            dim: int(OP, "sums", self.dim)?,
        };
        let gpu = out.gpu();
        let grid = Grid::linear(gpu.multiprocessors() * BLOCKS, THREADS);
        // SAFETY: operands were held against the numbers of tokens, heads and elements, and so was this memory.
        unsafe { launch(gpu, FILE, "split_heads", grid, &split) }?;
        let to = AttentionOut {
            out: &self.out,
            lse: None,
        };
        attention(&self.plan, to, &self.q, (&self.arena, 0), scale)?;
        let join = JoinArguments {
            from: self.out.address(),
            to: out.address(),
            tokens: split.tokens,
            heads: split.heads,
            dim: split.dim,
        };
        // SAFETY: likewise.
        unsafe { launch(gpu, FILE, "join_heads", grid, &join) }
    }
}
