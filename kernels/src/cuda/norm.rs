//! RMS norm of rows, alone or behind what adds to the residual stream, in bf16 and in e4m3.
//!
//! Statistics are fp32; the normalised value is rounded to bf16 before the weight is multiplied, as
//! HunyuanImage-3.0 does. A row's bits do not depend on the other rows of the call.

use cudarc::driver::DeviceRepr;

use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::tensor::{GpuTensor, GpuType};

const FILE: &str = "norm";
/// Choices of a token that the fast kernel is made for.
const USUAL_TOP_K: usize = 8;
/// Elements of one 16-byte access.
const VECTOR: usize = 8;
/// The widest row.
const MAX_WIDTH: usize = 8192;

/// What happens to a row before its norm.
#[derive(Clone, Copy)]
enum Kind {
    Plain { codes_only: bool },
    Add,
    Combine { top_k: usize },
}

/// A compiled kernel: name, threads of a block, rows of a block.
type Kernel = (&'static str, u32, usize);

/// The kernel for rows of `width` elements, up to 8192.
fn kernel(kind: Kind, width: usize) -> Kernel {
    let class = match width {
        ..=256 => 0,
        257..=2048 => 1,
        2049..4096 => 2,
        4096 => 3,
        _ => 4,
    };
    match kind {
        Kind::Plain { codes_only: true } if width == 4096 => ("rms_norm_codes_4096", 128, 1),
        Kind::Plain { .. } => [
            ("rms_norm_256", 256, 8),
            ("rms_norm_2048", 256, 1),
            ("rms_norm_4096", 128, 1),
            ("rms_norm_is_4096", 256, 1),
            ("rms_norm_8192", 512, 1),
        ][class],
        Kind::Add => [
            ("add_rms_norm_256", 256, 8),
            ("add_rms_norm_2048", 256, 1),
            ("add_rms_norm_4096", 128, 1),
            ("add_rms_norm_is_4096", 256, 1),
            ("add_rms_norm_8192", 512, 1),
        ][class],
        Kind::Combine { top_k: USUAL_TOP_K } => [
            ("combine_top8_256", 256, 8),
            ("combine_top8_2048", 256, 1),
            ("combine_top8_4096", 512, 1),
            ("combine_top8_is_4096", 512, 1),
            ("combine_top8_8192", 512, 1),
        ][class],
        Kind::Combine { .. } => [
            ("combine_256", 256, 8),
            ("combine_2048", 256, 1),
            ("combine_4096", 512, 1),
            ("combine_is_4096", 512, 1),
            ("combine_8192", 512, 1),
        ][class],
    }
}

/// The norm's parameters.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// bf16 `[width]`.
    pub weight: &'a GpuTensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rows in e4m3, one scale a row: value = code * scale, scale = largest magnitude / 448.
#[derive(Clone, Copy, Debug)]
pub struct E4m3Rows<'a> {
    /// E4m3 `[rows, width]`.
    pub codes: &'a GpuTensor,
    /// F32 `[rows]`.
    pub scales: &'a GpuTensor,
}

/// Where normalised rows go; either or both. The codes are those of the rows in bf16.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormOutput<'a> {
    /// bf16 `[rows, width]`.
    pub rows: Option<&'a GpuTensor>,
    /// The same rows in e4m3.
    pub e4m3: Option<E4m3Rows<'a>>,
}

/// Results of experts on their way back to the tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertOutputs<'a> {
    /// bf16 `[rows, width]`, a row a choice, in any order.
    pub rows: &'a GpuTensor,
    /// I32 `[tokens, top_k]`: the row of each choice; entries must be below the number of rows.
    pub position: &'a GpuTensor,
    /// F32 `[tokens, top_k]`: the weight of each choice.
    pub gate: &'a GpuTensor,
    /// First row of the shared expert, which has one row a token in token order and weight 1.
    pub shared: Option<usize>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    x: u64,
    y: u64,
    position: u64,
    gate: u64,
    top_k: i32,
    shared: i32,
    weight: u64,
    eps: f32,
    h: u64,
    code: u64,
    scale: u64,
    tokens: i32,
    width: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for Arguments {}

/// `out = rms(x) * weight` over the last dimension of bf16 `x [tokens, width]`, `width` a multiple of 8 (of 16
/// with e4m3) up to 8192.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn rms_norm(x: &GpuTensor, norm: RmsNorm<'_>, out: NormOutput<'_>) -> Result<()> {
    let codes_only = out.rows.is_none();
    Call::new("rms_norm", x, Some(norm), out)?.run(Kind::Plain { codes_only })
}

/// `x += y`, then `out = rms(x) * weight`; all bf16 `[tokens, width]`.
///
/// # Errors
/// Those of [`rms_norm`].
pub fn add_rms_norm(
    x: &GpuTensor,
    y: &GpuTensor,
    norm: RmsNorm<'_>,
    out: NormOutput<'_>,
) -> Result<()> {
    const OP: &str = "add_rms_norm";
    let mut call = Call::new(OP, x, Some(norm), out)?;
    y.expect(OP, "y", x.shape(), GpuType::Bf16)?;
    aligned(OP, &[("y", y)])?;
    call.arguments.y = y.address();
    call.run(Kind::Add)
}

/// `x[t] += sum over k of gate[t, k] * rows[position[t, k]] (+ shared row)`, then the norm of the new `x` where one
/// is given. The choices are added in slot order in fp32, then the shared row, then `x`, and rounded once.
///
/// # Errors
/// Those of [`rms_norm`].
pub fn combine(
    x: &GpuTensor,
    experts: ExpertOutputs<'_>,
    norm: Option<RmsNorm<'_>>,
    out: NormOutput<'_>,
) -> Result<()> {
    const OP: &str = "combine";
    if norm.is_none() && (out.rows.is_some() || out.e4m3.is_some()) {
        return Err(argument(OP, "out", "needs a norm"));
    }
    let mut call = Call::new(OP, x, norm, out)?;
    let (tokens, width) = (x.dim(0), x.dim(1));
    experts
        .rows
        .expect(OP, "rows", &[usize::MAX, width], GpuType::Bf16)?;
    aligned(OP, &[("rows", experts.rows)])?;
    let top_k = experts.position.dim(1);
    experts
        .position
        .expect(OP, "position", &[tokens, top_k], GpuType::I32)?;
    experts
        .gate
        .expect(OP, "gate", &[tokens, top_k], GpuType::F32)?;
    let have = experts.rows.dim(0);
    let last = experts
        .shared
        .map_or(0, |first| first.saturating_add(tokens));
    if last > have || top_k == 0 {
        return Err(shape(
            OP,
            "rows",
            format!("at least {last} rows and 1 choice"),
            experts.rows.shape(),
        ));
    }
    int(OP, "rows", have)?;
    call.arguments.y = experts.rows.address();
    call.arguments.position = experts.position.address();
    call.arguments.gate = experts.gate.address();
    call.arguments.top_k = int(OP, "position", top_k)?;
    call.arguments.shared = match experts.shared {
        Some(first) => int(OP, "shared", first)?,
        None => -1,
    };
    call.run(Kind::Combine { top_k })
}

/// The rows of bf16 `x [rows, width]` in e4m3; `width` a multiple of 16 up to 8192.
///
/// # Errors
/// Those of [`rms_norm`].
pub fn quantize_rows(x: &GpuTensor, out: E4m3Rows<'_>) -> Result<()> {
    let out = NormOutput {
        rows: None,
        e4m3: Some(out),
    };
    let codes_only = true;
    Call::new("quantize_rows", x, None, out)?.run(Kind::Plain { codes_only })
}

/// A checked launch.
struct Call<'a> {
    x: &'a GpuTensor,
    arguments: Arguments,
}

impl<'a> Call<'a> {
    fn new(
        op: &'static str,
        x: &'a GpuTensor,
        norm: Option<RmsNorm<'_>>,
        out: NormOutput<'_>,
    ) -> Result<Self> {
        x.expect(op, "x", &[usize::MAX, usize::MAX], GpuType::Bf16)?;
        let (tokens, width) = (x.dim(0), x.dim(1));
        if width == 0 || width > MAX_WIDTH || !width.is_multiple_of(VECTOR) {
            let expected = "[tokens, a multiple of 8 up to 8192]";
            return Err(shape(op, "x", expected, x.shape()));
        }
        aligned(op, &[("x", x)])?;
        let mut arguments = Arguments {
            x: x.address(),
            y: 0,
            position: 0,
            gate: 0,
            top_k: 0,
            shared: -1,
            weight: 0,
            eps: 0.0,
            h: 0,
            code: 0,
            scale: 0,
            tokens: int(op, "x", tokens)?,
            width: int(op, "x", width)?,
        };
        if let Some(norm) = norm {
            norm.weight.expect(op, "weight", &[width], GpuType::Bf16)?;
            aligned(op, &[("weight", norm.weight)])?;
            arguments.weight = norm.weight.address();
            arguments.eps = norm.eps;
        }
        if let Some(rows) = out.rows {
            rows.expect(op, "out.rows", x.shape(), GpuType::Bf16)?;
            aligned(op, &[("out.rows", rows)])?;
            arguments.h = rows.address();
        }
        if let Some(e4m3) = out.e4m3 {
            let (codes, scales) = (e4m3.codes, e4m3.scales);
            codes.expect(op, "out.codes", x.shape(), GpuType::E4m3)?;
            scales.expect(op, "out.scales", &[tokens], GpuType::F32)?;
            aligned(op, &[("out.codes", codes)])?;
            if !width.is_multiple_of(2 * VECTOR) {
                return Err(shape(op, "x", "[tokens, a multiple of 16]", x.shape()));
            }
            arguments.code = codes.address();
            arguments.scale = scales.address();
        }
        Ok(Self { x, arguments })
    }

    fn run(self, kind: Kind) -> Result<()> {
        let (tokens, width) = (self.x.dim(0), self.x.dim(1));
        if tokens == 0 {
            return Ok(());
        }
        let (name, threads, rows) = kernel(kind, width);
        let grid = Grid::linear(tokens.div_ceil(rows) as u32, threads);
        // SAFETY: every operand was held against `tokens` and `width`, which the kernel stays within.
        unsafe { launch(self.x.gpu(), FILE, name, grid, &self.arguments) }
    }
}
