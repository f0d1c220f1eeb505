//! Rows in e4m3 whose scales become known after their codes.

use cudarc::driver::DeviceRepr;

use super::error::Result;
use super::launch::{Grid, aligned, int, launch};
use super::norm::E4m3Rows;
use super::tensor::{GpuTensor, GpuType};

/// Columns that share an exponent (`CODE_COLUMNS` of the kernels).
pub const CODE_COLUMNS: usize = 64;
/// A row each.
const THREADS: usize = 128;

/// Where a product leaves e4m3 rows.
#[derive(Clone, Copy, Debug)]
pub struct SwiGluCodes<'a> {
    /// The rows.
    pub rows: E4m3Rows<'a>,
    /// U8 `[rows, columns / 64 rounded up]`: for the time until all columns of a row are there.
    pub exponents: &'a GpuTensor,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    codes: u64,
    exponents: u64,
    scales: u64,
    count: u64,
    rows: i32,
    width: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for Arguments {}

/// Gives each of the first `count` I32 `[1]` rows its scale, that of the largest exponent of its blocks, and brings codes
/// of blocks with a smaller one to it.
pub(super) fn settle_codes(out: SwiGluCodes<'_>, count: &GpuTensor) -> Result<()> {
    const OP: &str = "settle_codes";
    let codes = out.rows.codes;
    let (rows, width) = (codes.dim(0), codes.dim(1));
    out.rows
        .scales
        .expect(OP, "out.scales", &[rows], GpuType::F32)?;
    aligned(OP, &[("out.exponents", out.exponents)])?;
    let arguments = Arguments {
        codes: codes.address(),
        exponents: out.exponents.address(),
        scales: out.rows.scales.address(),
        count: count.address(),
        rows: int(OP, "out.codes", rows)?,
        width: int(OP, "out.codes", width)?,
    };
    if rows == 0 {
        return Ok(());
    }
    let grid = Grid::linear(rows.div_ceil(THREADS) as u32, THREADS as u32);
    // SAFETY: the product before has held codes and exponents against each other, scales were just now.
    unsafe { launch(codes.gpu(), "codes", "codes_settle", grid, &arguments) }
}
