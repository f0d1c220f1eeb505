//! Joining what ranks, or parts of the keys, computed.

use cudarc::driver::DeviceRepr;

use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::permute::Permutation;
use super::tensor::{GpuTensor, GpuType};

const FILE: &str = "merge";
const SUM_THREADS: usize = 512;
const MERGE_THREADS: usize = 256;
/// Elements of one access.
const VECTOR: usize = 8;
/// Threads that share a row's `lse` must lie in one warp.
const WARP: usize = 32;

#[derive(Clone, Copy)]
#[repr(C)]
struct SumArguments {
    rows: u64,
    position: u64,
    gate: u64,
    shared_row: u64,
    out: u64,
    tokens: i32,
    top_k: i32,
    width: i32,
    shared_first: i32,
    shared_count: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for SumArguments {}

#[derive(Clone, Copy)]
#[repr(C)]
struct MergeArguments {
    out: u64,
    lse: u64,
    other: u64,
    other_lse: u64,
    rows: i32,
    dim: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for MergeArguments {}

/// Results of the experts that a rank has.
#[derive(Clone, Copy, Debug)]
pub struct KeptOutputs<'a> {
    /// bf16 `[rows, width]`, at least the rows of the permutation.
    pub rows: &'a GpuTensor,
    /// One made by [`Permutation::keeping`].
    pub permutation: &'a Permutation,
    /// F32 `[tokens, top_k]`: the weight of each choice.
    pub gate: &'a GpuTensor,
}

/// `out[t] = sum of gate[t, k] * row of choice k`, over the choices that this rank has, plus the row of the shared
/// expert where the token has one: the rank's part of a token's result, bf16 `[tokens, width]`. Choices are
/// added in slot order in fp32.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn sum_kept(experts: KeptOutputs<'_>, out: &GpuTensor) -> Result<()> {
    const OP: &str = "sum_kept";
    let position = experts.permutation.position()?;
    let (tokens, top_k) = (position.dim(0), position.dim(1));
    out.expect(OP, "out", &[tokens, usize::MAX], GpuType::Bf16)?;
    let width = out.dim(1);
    let rows = experts.rows;
    rows.expect(OP, "rows", &[usize::MAX, width], GpuType::Bf16)?;
    experts
        .gate
        .expect(OP, "gate", &[tokens, top_k], GpuType::F32)?;
    aligned(OP, &[("rows", rows), ("out", out)])?;
    if !width.is_multiple_of(VECTOR) || rows.dim(0) < experts.permutation.rows() {
        let expected = "rows of the permutation, a multiple of 8 wide";
        return Err(shape(OP, "rows", expected, rows.shape()));
    }
    if tokens == 0 || width == 0 {
        return Ok(());
    }
    let shared = experts.permutation.kept_shared()?;
    let (of, at) = shared.map_or((0..0, 0), |(of, at)| (of, at.address()));
    let arguments = SumArguments {
        rows: rows.address(),
        position: position.address(),
        gate: experts.gate.address(),
        shared_row: at,
        out: out.address(),
        tokens: int(OP, "out", tokens)?,
        top_k: int(OP, "gate", top_k)?,
        width: int(OP, "out", width)?,
        shared_first: int(OP, "shared", of.start)?,
        shared_count: int(OP, "shared", of.len())?,
    };
    let threads = (width / VECTOR).next_multiple_of(WARP).min(SUM_THREADS);
    let grid = Grid::linear(arguments.tokens.unsigned_abs(), threads as u32);
    // SAFETY: the permutation's rows lie within `rows`; all else was held against its tokens.
    unsafe { launch(out.gpu(), FILE, "experts_sum", grid, &arguments) }
}

/// Attention over some of the keys, see `AttentionPlan::partial`.
#[derive(Clone, Copy, Debug)]
pub struct Partial<'a> {
    /// bf16 `[tokens, heads * dim]`.
    pub out: &'a GpuTensor,
    /// F32 `[tokens, heads]`.
    pub lse: &'a GpuTensor,
}

/// Joins attention over other keys to `to`. A part that saw no key of a query has no say, whatever it holds.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn merge_attention(to: Partial<'_>, other: Partial<'_>) -> Result<()> {
    const OP: &str = "merge_attention";
    to.lse
        .expect(OP, "lse", &[usize::MAX, usize::MAX], GpuType::F32)?;
    let (tokens, heads) = (to.lse.dim(0), to.lse.dim(1));
    to.out
        .expect(OP, "out", &[tokens, usize::MAX], GpuType::Bf16)?;
    let width = to.out.dim(1);
    other
        .out
        .expect(OP, "other.out", &[tokens, width], GpuType::Bf16)?;
    other
        .lse
        .expect(OP, "other.lse", &[tokens, heads], GpuType::F32)?;
    aligned(OP, &[("out", to.out), ("other.out", other.out)])?;
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let dim = width / heads;
    let threads = dim / VECTOR;
    if dim * heads != width || !dim.is_multiple_of(VECTOR) || !WARP.is_multiple_of(threads.max(1)) {
        let reason = "needs heads of 8, 16, 32, 64, 128 or 256 elements";
        return Err(argument(OP, "out", reason));
    }
    let arguments = MergeArguments {
        out: to.out.address(),
        lse: to.lse.address(),
        other: other.out.address(),
        other_lse: other.lse.address(),
        rows: int(OP, "lse", tokens * heads)?,
        dim: int(OP, "out", dim)?,
    };
    let blocks = (tokens * heads * threads).div_ceil(MERGE_THREADS);
    let grid = Grid::linear(int(OP, "out", blocks)?.unsigned_abs(), MERGE_THREADS as u32);
    // SAFETY: all four were held against tokens, heads and the size of a head.
    unsafe { launch(to.out.gpu(), FILE, "attention_merge", grid, &arguments) }
}
