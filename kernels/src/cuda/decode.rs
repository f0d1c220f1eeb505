//! Products of few tokens with many weights, for decoding text: at most 32 tokens, one a row, through kernels that
//! serve one steady stream of weights. A token's bits depend on its own values only.
//!
//! Activations are 16-bit: f16 beside e4m3 weights, bf16 beside bf16 ones. Inner values of experts are stored in
//! f16 after division by 16, and everything in f16 saturates.

use cudarc::driver::DeviceRepr;

use super::decode_rows::{DecodeRouting, TABLE_BYTES};
use super::early::{Start, launch_at};
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int};
use super::tensor::{GpuTensor, GpuType};

/// Most tokens of a pass (`kMostTokens` of `cuda/decode.cuh`).
pub const DECODE_TOKENS: usize = 32;

const ANY: usize = usize::MAX;
/// The kernels' constants: warps that multiply; rows of a tile; bytes between the rows of a
/// slot of the ring.
const WARPS: usize = 8;
const MULTIPLYING: u32 = 32 * WARPS as u32;
/// Threads beside those that multiply: a warp that copies, in a warpgroup where registers change hands.
const COPYING: [u32; 2] = [32, 128];
const TILE_ROWS: usize = 16;
const ROW_GAP: usize = 64;
/// Bytes of a weight row that a stage has of short rows: all.
const SHORT_BYTES: usize = 1024;
/// Bytes of one row that the stages of a longer row have in all, about.
const RING_STAGES: usize = 12_288;
/// Tokens of one instruction; a block has one or two times as many.
const COLUMNS: usize = 8;

/// Matrices `[groups, n, k]` in bf16, or in e4m3 with a scale for each of their rows.
#[derive(Clone, Copy, Debug)]
pub struct DecodeWeights<'a> {
    /// The matrices.
    pub data: &'a GpuTensor,
    /// F32 `[groups, n]`, with e4m3.
    pub scales: Option<&'a GpuTensor>,
}

/// How long the rows of a matrix are, to the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    /// At most [`SHORT_BYTES`].
    Short,
    /// Of the released sizes.
    Released,
    Half,
    Quarter,
}

/// The products of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeProduct {
    /// Of every token with one matrix.
    Dense,
    /// First halves of experts, with SwiGLU.
    GateUp,
    /// Second halves of experts.
    Down,
}

impl DecodeProduct {
    /// Whether there is a kernel for rows of `k` weights of this type: short ones, and those of the released sizes.
    #[must_use]
    pub fn takes(self, k: usize, weights: GpuType) -> bool {
        self.row(k, weights).is_some()
    }

    /// What there is a kernel for: short rows, those of the released sizes, and the parts of these that two and four
    /// ranks have.
    fn row(self, k: usize, weights: GpuType) -> Option<Row> {
        let bytes = k * weights.bytes();
        let pieces = (k * GpuType::Bf16.bytes()).is_multiple_of(16) && bytes.is_multiple_of(16);
        let cut = |parts: usize| self != Self::GateUp && k * parts == self.released_k();
        match k {
            0 => None,
            _ if !pieces => None,
            _ if bytes <= SHORT_BYTES => Some(Row::Short),
            _ if k == self.released_k() => Some(Row::Released),
            _ if cut(2) => Some(Row::Half),
            _ if cut(4) => Some(Row::Quarter),
            _ => None,
        }
    }

    /// Of the released sizes.
    fn released_k(self) -> usize {
        if self == Self::Down { 3072 } else { 4096 }
    }

    /// Bytes of the ring (`Ring` of `cuda/decode_product.cuh`): a stage is all of a row, or for rows of the released
    /// sizes in bf16 one of two; rows are apart unless a stage is one piece of memory.
    fn ring_bytes(self, row: Row, k: usize, weights: GpuType) -> usize {
        let halves = row == Row::Released && weights == GpuType::Bf16;
        let (stage, slots) = match row {
            Row::Short => (SHORT_BYTES, 10),
            _ => {
                let stage = k * weights.bytes() / if halves { 2 } else { 1 };
                (stage, RING_STAGES / stage)
            }
        };
        let whole = row != Row::Short && !halves;
        slots * TILE_ROWS * (stage + if whole { 0 } else { ROW_GAP })
    }

    /// File and name of the kernel, of 8 or 16 tokens a block.
    fn kernel(self, weights: GpuType, row: Row, wide: bool) -> (&'static str, &'static str) {
        let eight = weights == GpuType::E4m3;
        let names = match (self, row, eight) {
            (Self::Dense, Row::Released, true) => ["decode_fp8_dense_8", "decode_fp8_dense_16"],
            (Self::Dense, Row::Half, true) => {
                ["decode_fp8_dense_half_8", "decode_fp8_dense_half_16"]
            }
            (Self::Dense, Row::Quarter | Row::Short, true) => {
                ["decode_fp8_dense_short_8", "decode_fp8_dense_short_16"]
            }
            (Self::GateUp, Row::Short, true) => {
                ["decode_fp8_gate_up_short_8", "decode_fp8_gate_up_short_16"]
            }
            (Self::GateUp, _, true) => ["decode_fp8_gate_up_8", "decode_fp8_gate_up_16"],
            (Self::Down, Row::Released, true) => ["decode_fp8_down_8", "decode_fp8_down_16"],
            (Self::Down, Row::Half, true) => ["decode_fp8_down_half_8", "decode_fp8_down_half_16"],
            (Self::Down, Row::Quarter | Row::Short, true) => {
                ["decode_fp8_down_short_8", "decode_fp8_down_short_16"]
            }
            (Self::Dense, Row::Released, false) => ["decode_bf16_dense_8", "decode_bf16_dense_16"],
            (Self::Dense, Row::Half, false) => {
                ["decode_bf16_dense_half_8", "decode_bf16_dense_half_16"]
            }
            (Self::Dense, Row::Quarter, false) => [
                "decode_bf16_dense_quarter_8",
                "decode_bf16_dense_quarter_16",
            ],
            (Self::Dense, Row::Short, false) => {
                ["decode_bf16_dense_short_8", "decode_bf16_dense_short_16"]
            }
            (Self::GateUp, Row::Short, false) => [
                "decode_bf16_gate_up_short_8",
                "decode_bf16_gate_up_short_16",
            ],
            (Self::GateUp, _, false) => ["decode_bf16_gate_up_8", "decode_bf16_gate_up_16"],
            (Self::Down, Row::Released, false) => ["decode_bf16_down_8", "decode_bf16_down_16"],
            (Self::Down, Row::Half, false) => {
                ["decode_bf16_down_half_8", "decode_bf16_down_half_16"]
            }
            (Self::Down, Row::Quarter, false) => {
                ["decode_bf16_down_quarter_8", "decode_bf16_down_quarter_16"]
            }
            (Self::Down, Row::Short, false) => {
                ["decode_bf16_down_short_8", "decode_bf16_down_short_16"]
            }
        };
        let file = if eight { "decode_fp8" } else { "decode_bf16" };
        (file, names[usize::from(wide)])
    }
}

/// The 16-bit type of activations beside weights of this type.
#[must_use]
pub fn decode_activation(weights: GpuType) -> GpuType {
    if weights == GpuType::E4m3 {
        GpuType::F16
    } else {
        GpuType::Bf16
    }
}

/// Most tokens that one expert gets in one go, of a pass of `tokens`.
pub(super) fn job_tokens(tokens: usize) -> usize {
    if tokens <= COLUMNS {
        COLUMNS
    } else {
        2 * COLUMNS
    }
}

/// `out = input . w^T`: F32 `[tokens, n]` of 16-bit `[tokens, k]` and `w [1, n, k]`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn decode_dense(
    out: &GpuTensor,
    input: &GpuTensor,
    w: DecodeWeights<'_>,
    start: Start,
) -> Result<()> {
    const OP: &str = "decode_dense";
    let tokens = input.shape().first().copied().unwrap_or(0);
    let (n, k) = weights(OP, w, 1)?;
    input.expect(OP, "input", &[tokens, k], decode_activation(w.data.dtype()))?;
    out.expect(OP, "out", &[tokens, n], GpuType::F32)?;
    run(
        DecodeProduct::Dense,
        OP,
        (out, input),
        w,
        (None, tokens),
        start,
    )
}

/// First halves of the experts of every token, with SwiGLU: rows of `inner` are choices (token, then place), then
/// the tokens of the shared expert; its width is half of n. `w [experts (+ 1), n, k]`, `h` 16-bit `[tokens, k]`.
///
/// # Errors
/// Those of [`decode_dense`].
pub fn decode_gate_up(
    inner: &GpuTensor,
    h: &GpuTensor,
    w: DecodeWeights<'_>,
    routing: &DecodeRouting,
    start: Start,
) -> Result<()> {
    const OP: &str = "decode_gate_up";
    let (n, k) = weights(OP, w, routing.groups())?;
    if !n.is_multiple_of(2 * 8) {
        return Err(shape(
            OP,
            "w",
            "halves of a multiple of 8 features",
            w.data.shape(),
        ));
    }
    let kind = decode_activation(w.data.dtype());
    h.expect(OP, "h", &[routing.tokens(), k], kind)?;
    inner.expect(OP, "inner", &[routing.rows(), n / 2], kind)?;
    let of = (Some(routing), routing.tokens());
    run(DecodeProduct::GateUp, OP, (inner, h), w, of, start)
}

/// Second halves, times the weight of each choice: F32 `[rows, n]` of what [`decode_gate_up`] made.
///
/// # Errors
/// Those of [`decode_dense`].
pub fn decode_down(
    out: &GpuTensor,
    inner: &GpuTensor,
    w: DecodeWeights<'_>,
    routing: &DecodeRouting,
    start: Start,
) -> Result<()> {
    const OP: &str = "decode_down";
    let (n, k) = weights(OP, w, routing.groups())?;
    inner.expect(
        OP,
        "inner",
        &[routing.rows(), k],
        decode_activation(w.data.dtype()),
    )?;
    out.expect(OP, "out", &[routing.rows(), n], GpuType::F32)?;
    let of = (Some(routing), routing.tokens());
    run(DecodeProduct::Down, OP, (out, inner), w, of, start)
}

/// n and k, after checking the matrices.
fn weights(op: &'static str, w: DecodeWeights<'_>, groups: usize) -> Result<(usize, usize)> {
    let kind = match w.scales {
        Some(_) => GpuType::E4m3,
        None => GpuType::Bf16,
    };
    w.data.expect(op, "w", &[groups, ANY, ANY], kind)?;
    let (n, k) = (w.data.dim(1), w.data.dim(2));
    if let Some(scales) = w.scales {
        scales.expect(op, "w scales", &[groups, n], GpuType::F32)?;
    }
    Ok((n, k))
}

/// Arguments of the kernels, `decode::Arguments` of `cuda/decode_product.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    weights: u64,
    scales: u64,
    input: u64,
    out: u64,
    routing: u64,
    n: i32,
    k: i32,
    tokens: i32,
    top_k: i32,
    shared: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Arguments {}

fn run(
    product: DecodeProduct,
    op: &'static str,
    (out, input): (&GpuTensor, &GpuTensor),
    w: DecodeWeights<'_>,
    (routing, tokens): (Option<&DecodeRouting>, usize),
    start: Start,
) -> Result<()> {
    let (n, k, kind) = (w.data.dim(1), w.data.dim(2), w.data.dtype());
    if tokens == 0 || tokens > DECODE_TOKENS {
        return Err(argument(op, "input", "must be 1 to 32 tokens"));
    }
    if w.scales.is_some() && !n.is_multiple_of(4) {
        return Err(shape(op, "w", "a multiple of 4 features", w.data.shape()));
    }
    let Some(row) = product.row(k, kind).filter(|_| n > 0) else {
        let expected = "rows of at most 1024 bytes, or those of the released sizes or a half or quarter of them, in \
             multiples of 16 bytes";
        return Err(shape(op, "w", expected, w.data.shape()));
    };
    aligned(op, &[("w", w.data), ("input", input), ("out", out)])?;
    let gpu = input.gpu();
    let wide = job_tokens(tokens) > COLUMNS;
    let parts = 2 * WARPS * (job_tokens(tokens) / COLUMNS) * 32 * 16;
    let shared = product.ring_bytes(row, k, kind) + parts + TABLE_BYTES;
    let arguments = Arguments {
        weights: w.data.address(),
        scales: w.scales.map_or(0, GpuTensor::address),
        input: input.address(),
        out: out.address(),
        routing: routing.map_or(0, DecodeRouting::address),
        n: int(op, "w", n)?,
        k: int(op, "w", k)?,
        tokens: int(op, "input", tokens)?,
        top_k: int(op, "routing", routing.map_or(0, DecodeRouting::top_k))?,
        shared: match routing {
            None => 0,
            Some(routing) if routing.shared() => int(op, "routing", routing.groups() - 1)?,
            Some(_) => -1,
        },
    };
    let grid = Grid {
        // Two blocks that share weights have the same ones at a time.
        blocks: ((gpu.multiprocessors() & !1).max(2), 1, 1),
        threads: MULTIPLYING + COPYING[usize::from(wide)],
        shared: u32::try_from(shared).unwrap_or(u32::MAX),
    };
    // SAFETY: addresses are those of tensors whose shapes were checked against each other; experts and rows of the
    // routing were made for these numbers of tokens, choices and experts.
    unsafe {
        launch_at(
            gpu,
            product.kernel(kind, row, wide),
            grid,
            start,
            &arguments,
            None,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_and_small_sizes_have_kernels_and_others_have_none() {
        for (weights, unit) in [(GpuType::E4m3, 16), (GpuType::Bf16, 8)] {
            let dense = DecodeProduct::Dense;
            assert!(dense.takes(4096, weights) && dense.takes(unit, weights));
            assert!(dense.takes(512, weights) && !dense.takes(0, weights));
            assert!(dense.takes(2048, weights) && dense.takes(1024, weights));
            assert!(!dense.takes(4080, weights) && !dense.takes(3072, weights));
            assert!(!dense.takes(unit + 4, weights));
            assert!(!DecodeProduct::GateUp.takes(2048, weights));
            for k in [3072, 1536, 768, 384] {
                assert!(DecodeProduct::Down.takes(k, weights));
            }
            assert!(!DecodeProduct::Down.takes(4096, weights));
        }
    }
}
