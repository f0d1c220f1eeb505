//! Matrix products on the tensor cores: dense, grouped by expert, and in 8-bit floats.
//!
//! `out [rows, n] = a [rows, k] . w [n, k]^T`, weights as checkpoints store them, fp32 accumulation. A row's
//! result depends on that row alone: sums run along k in one order, whatever else is in the call.
//!
//! The kernels of one [`Gpu`](super::Gpu) share a counter of work, so products run one after another: all on its
//! one stream.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::error::{Result, argument, shape};
use super::launch::{aligned, int};
use super::map::TensorMap;
use super::norm::E4m3Rows;
use super::tensor::{GpuTensor, GpuType};

/// Any size of a dimension.
const ANY: usize = usize::MAX;
/// Threads of a block: a copying warpgroup and two that multiply.
const THREADS: u32 = 384;
/// Bytes along k of a stage of the copies.
const STAGE_K_BYTES: usize = 128;
/// Rows of a box of `a`: those of one warpgroup.
const BOX_ROWS: usize = 64;
/// Rows of a box of `out`: those of one warp.
const OUT_BOX_ROWS: usize = 16;
/// Rows of a tile of `a`.
const TILE_ROWS: usize = 128;
/// Groups whose offsets a block can hold (`MAX_GROUPS` of the kernel).
const MAX_GROUPS: usize = 128;
/// Shared memory for the exchange before the store, and for aligning the stages.
const STAGING_BYTES: usize = 32 << 10;
const ALIGN_BYTES: usize = 1 << 10;
/// What the copy engine wants a row to be a multiple of, in bytes.
const ROW_BYTES: usize = 16;

/// What follows a product, in the registers that hold it; one rounding at the end.
#[derive(Clone, Copy, Debug)]
pub enum Finish<'a> {
    /// Nothing; `out [rows, n]`, bf16 or (dense bf16 products only) F32.
    Store,
    /// HunyuanImage-3.0: the first half of the n features, linear, times SiLU of the second half;
    /// `out [rows, n / 2]`, bf16.
    SwiGlu,
    /// Plus this, bf16 `[rows, n]`; it may be `out`.
    Add(&'a GpuTensor),
}

/// `out = finish(a . w^T)` with `a [rows, k]` and `w [n, k]` in bf16; k and n (n / 2 with SwiGLU) are
/// multiples of 8.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn gemm(out: &GpuTensor, a: &GpuTensor, w: &GpuTensor, finish: Finish<'_>) -> Result<()> {
    const OP: &str = "gemm";
    w.expect(OP, "w", &[ANY, ANY], GpuType::Bf16)?;
    let w = w.reshape(&[1, w.dim(0), w.dim(1)])?;
    Product {
        op: OP,
        out,
        a,
        w: &w,
        offsets: None,
        scales: None,
        finish,
    }
    .run()
}

/// Grouped: rows `offsets[g]..offsets[g + 1]` of `a [rows, k]` are multiplied by `w[g]` of `w [groups, n, k]`.
///
/// `offsets [groups + 1]` I32 ascend from 0 to at most `rows` and stay on the device; groups may be empty, and
/// rows of `out` that belong to no group are not written. At most 128 groups.
///
/// # Errors
/// Those of [`gemm`].
pub fn grouped_gemm(
    out: &GpuTensor,
    a: &GpuTensor,
    w: &GpuTensor,
    offsets: &GpuTensor,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "grouped_gemm";
    w.expect(OP, "w", &[ANY, ANY, ANY], GpuType::Bf16)?;
    Product {
        op: OP,
        out,
        a,
        w,
        offsets: Some(offsets),
        scales: None,
        finish,
    }
    .run()
}

/// [`gemm`] of 8-bit floats with one scale for each row of both; `out` is bf16, k is a multiple of 16.
/// [`quantize_rows`](super::quantize_rows) makes both operands.
///
/// # Errors
/// Those of [`gemm`].
pub fn gemm_fp8(
    out: &GpuTensor,
    a: E4m3Rows<'_>,
    w: E4m3Rows<'_>,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "gemm_fp8";
    w.codes.expect(OP, "w", &[ANY, ANY], GpuType::E4m3)?;
    w.scales
        .expect(OP, "w scales", &[w.codes.dim(0)], GpuType::F32)?;
    let (n, k) = (w.codes.dim(0), w.codes.dim(1));
    let (values, scales) = (w.codes.reshape(&[1, n, k])?, w.scales.reshape(&[1, n])?);
    let scales = Some((a.scales, &scales));
    Product {
        op: OP,
        out,
        a: a.codes,
        w: &values,
        offsets: None,
        scales,
        finish,
    }
    .run()
}

/// [`grouped_gemm`] of 8-bit floats; k is a multiple of 16. Codes of `w [groups, n, k]`, scales `[groups, n]`.
///
/// # Errors
/// Those of [`gemm`].
pub fn grouped_gemm_fp8(
    out: &GpuTensor,
    a: E4m3Rows<'_>,
    w: E4m3Rows<'_>,
    offsets: &GpuTensor,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "grouped_gemm_fp8";
    w.codes.expect(OP, "w", &[ANY, ANY, ANY], GpuType::E4m3)?;
    let scales = Some((a.scales, w.scales));
    Product {
        op: OP,
        out,
        a: a.codes,
        w: w.codes,
        offsets: Some(offsets),
        scales,
        finish,
    }
    .run()
}

/// Arguments of the kernels, `gemm::Arguments` of `cuda/gemm_epilogue.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    offsets: u64,
    out: u64,
    residual: u64,
    row_scales: u64,
    column_scales: u64,
    groups: i32,
    rows: i32,
    n: i32,
    k: i32,
    columns: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Arguments {}

/// The tiles of a kernel. Sums do not depend on them: a row has the same bits from both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiles {
    /// Rows of `w` of a tile.
    columns: usize,
    stages: usize,
}

const WIDE: Tiles = Tiles {
    columns: 256,
    stages: 4,
};
/// For few rows, where the weights are what takes time: twice as many blocks read them.
const NARROW: Tiles = Tiles {
    columns: 128,
    stages: 6,
};

impl Tiles {
    fn shared_bytes(self) -> usize {
        self.stages * (TILE_ROWS + self.columns) * STAGE_K_BYTES + STAGING_BYTES + ALIGN_BYTES
    }

    /// Wide ones where there is work for all multiprocessors, with more than half a tile of rows in most groups.
    fn choose(rows: usize, n: usize, groups: usize, multiprocessors: u32) -> Self {
        let tiles = rows.div_ceil(TILE_ROWS) * n.div_ceil(WIDE.columns);
        if rows <= BOX_ROWS * groups || tiles < multiprocessors as usize {
            NARROW
        } else {
            WIDE
        }
    }
}

/// One product, with `w [groups, n, k]`.
struct Product<'a> {
    op: &'static str,
    out: &'a GpuTensor,
    a: &'a GpuTensor,
    w: &'a GpuTensor,
    offsets: Option<&'a GpuTensor>,
    /// Of the rows of `a` and of the rows of `w`.
    scales: Option<(&'a GpuTensor, &'a GpuTensor)>,
    finish: Finish<'a>,
}

impl Product<'_> {
    fn run(&self) -> Result<()> {
        let arguments = self.checked()?;
        if arguments.rows == 0 || arguments.columns == 0 {
            return Ok(());
        }
        let gpu = self.a.gpu();
        let (rows, n, groups) = (self.a.dim(0), self.w.dim(1), self.w.dim(0));
        let tiles = Tiles::choose(rows, n, groups, gpu.multiprocessors());
        let (file, name) = self.kernel(tiles)?;
        let a = map(self.a, BOX_ROWS)?;
        let w = map(self.w, tiles.columns / 2)?;
        let out = match self.out.dtype() {
            GpuType::Bf16 => map(self.out, OUT_BOX_ROWS)?,
            // Stored without the copy engine.
            _ => a,
        };
        let shared = u32::try_from(tiles.shared_bytes()).unwrap_or(u32::MAX);
        let function = gpu.kernel(file, name, shared)?;
        let config = LaunchConfig {
            // Blocks work in pairs.
            grid_dim: (gpu.multiprocessors() & !1, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: shared,
        };
        let mut launch = gpu.stream().launch_builder(&function);
        launch.arg(&a).arg(&w).arg(&out).arg(&arguments);
        // SAFETY: the maps and addresses are those of tensors whose shapes were checked against each other;
        // offsets beyond `rows` would be the caller's breach of the documented contract, and are cut by the
        // kernel.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    /// File and name of the kernel.
    fn kernel(&self, tiles: Tiles) -> Result<(&'static str, &'static str)> {
        let float = self.out.dtype() == GpuType::F32;
        let (file, [wide, narrow]) = match (self.scales.is_some(), self.finish, float) {
            (false, Finish::Store, false) => ("gemm_bf16", ["gemm_bf16", "gemm_bf16_narrow"]),
            (false, Finish::Store, true) => {
                ("gemm_bf16", ["gemm_bf16_float", "gemm_bf16_float_narrow"])
            }
            (false, Finish::SwiGlu, false) => {
                ("gemm_bf16", ["gemm_bf16_swiglu", "gemm_bf16_swiglu_narrow"])
            }
            (false, Finish::Add(_), false) => {
                ("gemm_bf16", ["gemm_bf16_add", "gemm_bf16_add_narrow"])
            }
            (true, Finish::Store, false) => ("gemm_fp8", ["gemm_fp8", "gemm_fp8_narrow"]),
            (true, Finish::SwiGlu, false) => {
                ("gemm_fp8", ["gemm_fp8_swiglu", "gemm_fp8_swiglu_narrow"])
            }
            (true, Finish::Add(_), false) => ("gemm_fp8", ["gemm_fp8_add", "gemm_fp8_add_narrow"]),
            _ => return Err(argument(self.op, "out", "must be bf16 for this product")),
        };
        Ok((file, if tiles == WIDE { wide } else { narrow }))
    }

    /// Everything that could be wrong, before anything is launched.
    fn checked(&self) -> Result<Arguments> {
        let op = self.op;
        let (groups, n, k) = (self.w.dim(0), self.w.dim(1), self.w.dim(2));
        self.a.expect(op, "a", &[ANY, k], self.w.dtype())?;
        let rows = self.a.dim(0);
        let columns = match self.finish {
            Finish::SwiGlu if !n.is_multiple_of(2) => {
                return Err(shape(op, "w", "an even number of features", self.w.shape()));
            }
            Finish::SwiGlu => n / 2,
            Finish::Store | Finish::Add(_) => n,
        };
        let out_type = match self.out.dtype() {
            GpuType::F32 => GpuType::F32,
            _ => GpuType::Bf16,
        };
        self.out.expect(op, "out", &[rows, columns], out_type)?;
        if !columns.is_multiple_of(8) {
            let expected = "a multiple of 8 columns of out";
            return Err(shape(op, "w", expected, self.w.shape()));
        }
        if k == 0 || !(k * self.w.dtype().bytes()).is_multiple_of(ROW_BYTES) {
            let expected = "rows of a multiple of 16 bytes";
            return Err(shape(op, "w", expected, self.w.shape()));
        }
        if groups == 0 || groups > MAX_GROUPS {
            return Err(shape(op, "w", "1 to 128 groups", self.w.shape()));
        }
        int(op, "w", groups * n)?;
        aligned(op, &[("out", self.out)])?;
        let mut arguments = Arguments {
            offsets: 0,
            out: self.out.address(),
            residual: 0,
            row_scales: 0,
            column_scales: 0,
            groups: int(op, "w", groups)?,
            rows: int(op, "a", rows)?,
            n: int(op, "w", n)?,
            k: int(op, "w", k)?,
            columns: int(op, "w", columns)?,
        };
        if let Some(offsets) = self.offsets {
            offsets.expect(op, "offsets", &[groups + 1], GpuType::I32)?;
            arguments.offsets = offsets.address();
        }
        if let Finish::Add(residual) = self.finish {
            residual.expect(op, "residual", &[rows, n], GpuType::Bf16)?;
            aligned(op, &[("residual", residual)])?;
            arguments.residual = residual.address();
        }
        if let Some((of_rows, of_columns)) = self.scales {
            of_rows.expect(op, "a scales", &[rows], GpuType::F32)?;
            of_columns.expect(op, "w scales", &[groups, n], GpuType::F32)?;
            arguments.row_scales = of_rows.address();
            aligned(op, &[("w scales", of_columns)])?;
            arguments.column_scales = of_columns.address();
        }
        Ok(arguments)
    }
}

/// A tensor seen as rows of its last dimension, copied in boxes of `box_rows` rows of 128 bytes.
fn map(tensor: &GpuTensor, box_rows: usize) -> Result<TensorMap> {
    let bytes = tensor.dtype().bytes();
    let k = tensor.shape().last().copied().unwrap_or(1);
    let rows = tensor.numel() / k;
    let boxed = [STAGE_K_BYTES / bytes, box_rows];
    TensorMap::new(tensor, &[k, rows], &[k * bytes], &boxed)
}
