//! Checks and launches of the products.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::codes::CODE_COLUMNS;
use super::error::{Result, argument, shape};
use super::launch::{aligned, int};
use super::map::TensorMap;
use super::tensor::{GpuTensor, GpuType};

/// Any size of a dimension.
pub(super) const ANY: usize = usize::MAX;
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

/// Arguments of the kernels, `gemm::Arguments` of `cuda/gemm_epilogue.cuh`.
#[derive(Clone, Copy, Default)]
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
    exponents: u64,
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

/// What follows a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum After<'a> {
    Store,
    Add(&'a GpuTensor),
    SwiGlu,
    /// SwiGLU in e4m3, with these exponents.
    Codes(&'a GpuTensor),
}

impl After<'_> {
    fn halves(self) -> bool {
        matches!(self, Self::SwiGlu | Self::Codes(_))
    }
}

/// One product, with `w [groups, n, k]`.
pub(super) struct Product<'a> {
    pub(super) op: &'static str,
    pub(super) out: &'a GpuTensor,
    pub(super) a: &'a GpuTensor,
    pub(super) w: &'a GpuTensor,
    pub(super) offsets: Option<&'a GpuTensor>,
    /// Of the rows of `a` and of the rows of `w`.
    pub(super) scales: Option<(&'a GpuTensor, &'a GpuTensor)>,
    pub(super) finish: After<'a>,
}

impl Product<'_> {
    pub(super) fn run(&self) -> Result<()> {
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
            // Stored without the copy engine.
            GpuType::F32 => a,
            _ => map(self.out, OUT_BOX_ROWS)?,
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
            (false, After::Store, false) => ("gemm_bf16", ["gemm_bf16", "gemm_bf16_narrow"]),
            (false, After::Store, true) => {
                ("gemm_bf16", ["gemm_bf16_float", "gemm_bf16_float_narrow"])
            }
            (false, After::SwiGlu, false) => {
                ("gemm_bf16", ["gemm_bf16_swiglu", "gemm_bf16_swiglu_narrow"])
            }
            (false, After::Add(_), false) => {
                ("gemm_bf16", ["gemm_bf16_add", "gemm_bf16_add_narrow"])
            }
            (true, After::Store, false) => ("gemm_fp8", ["gemm_fp8", "gemm_fp8_narrow"]),
            (true, After::Codes(_), false) => {
                ("gemm_fp8", ["gemm_fp8_codes", "gemm_fp8_codes_narrow"])
            }
            (true, After::Add(_), false) => ("gemm_fp8", ["gemm_fp8_add", "gemm_fp8_add_narrow"]),
            (true, After::SwiGlu, _) => {
                let reason = "of 8-bit floats goes out as such: grouped_swiglu_fp8";
                return Err(argument(self.op, "finish", reason));
            }
            _ => return Err(argument(self.op, "out", "must be bf16 for this product")),
        };
        Ok((file, if tiles == WIDE { wide } else { narrow }))
    }

    /// Everything that could be wrong, before anything is launched.
    fn checked(&self) -> Result<Arguments> {
        let op = self.op;
        let (groups, n, k) = (self.w.dim(0), self.w.dim(1), self.w.dim(2));
        self.a.expect(op, "a", &[ANY, k], self.w.dtype())?;
        let (columns, rows) = (self.columns()?, self.rows()?);
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
            out: self.out.address(),
            groups: int(op, "w", groups)?,
            rows: int(op, "a", rows)?,
            n: int(op, "w", n)?,
            k: int(op, "w", k)?,
            columns: int(op, "w", columns)?,
            ..Arguments::default()
        };
        if let Some(offsets) = self.offsets {
            offsets.expect(op, "offsets", &[groups + 1], GpuType::I32)?;
            arguments.offsets = offsets.address();
        }
        match self.finish {
            After::Add(residual) => {
                residual.expect(op, "residual", &[rows, n], GpuType::Bf16)?;
                aligned(op, &[("residual", residual)])?;
                arguments.residual = residual.address();
            }
            After::Codes(exponents) => {
                let blocks = columns.div_ceil(CODE_COLUMNS);
                exponents.expect(op, "exponents", &[rows, blocks], GpuType::U8)?;
                arguments.exponents = exponents.address();
            }
            After::Store | After::SwiGlu => {}
        }
        if let Some((of_rows, of_columns)) = self.scales {
            of_rows.expect(op, "a scales", &[self.a.dim(0)], GpuType::F32)?;
            of_columns.expect(op, "w scales", &[groups, n], GpuType::F32)?;
            arguments.row_scales = of_rows.address();
            aligned(op, &[("w scales", of_columns)])?;
            arguments.column_scales = of_columns.address();
        }
        Ok(arguments)
    }

    /// Columns of `out`, which has rows of whole 16 bytes.
    fn columns(&self) -> Result<usize> {
        let (op, n) = (self.op, self.w.dim(1));
        if self.finish.halves() && !n.is_multiple_of(2) {
            return Err(shape(op, "w", "an even number of features", self.w.shape()));
        }
        let columns = if self.finish.halves() { n / 2 } else { n };
        let each = if matches!(self.finish, After::Codes(_)) {
            16
        } else {
            8
        };
        if !columns.is_multiple_of(each) {
            let expected = format!("a multiple of {each} columns of out");
            return Err(shape(op, "w", expected, self.w.shape()));
        }
        Ok(columns)
    }

    /// Rows of `a` and `out`.
    fn rows(&self) -> Result<usize> {
        let dtype = match (self.finish, self.out.dtype()) {
            (After::Codes(_), _) => GpuType::E4m3,
            (_, GpuType::F32) => GpuType::F32,
            _ => GpuType::Bf16,
        };
        let rows = self.a.dim(0);
        self.out
            .expect(self.op, "out", &[rows, self.columns()?], dtype)?;
        Ok(rows)
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
