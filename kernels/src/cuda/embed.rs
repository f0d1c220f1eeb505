//! Around the layers: rows moved by index, the code of scalars, latents as the stem sees them.

use std::sync::Arc;

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::device::Gpu;
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::tensor::{GpuTensor, GpuType};
use crate::error::KernelError;

const FILE: &str = "embed";
const THREADS: u32 = 256;
/// Bytes of one access.
const CHUNK: usize = 16;
/// Period base of the code of scalars; fixed by the architecture.
const MAX_PERIOD: f64 = 10_000.0;

#[derive(Clone, Copy)]
#[repr(C)]
struct CopyArguments {
    from: u64,
    to: u64,
    from_index: u64,
    to_index: u64,
    from_rows: i64,
    to_rows: i64,
    rows: i32,
    chunks: i32,
    threads_per_row: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for CopyArguments {}

/// Which rows of a tensor of `rows` rows; checked when made, then used in any number of steps.
#[derive(Clone, Debug)]
pub struct RowIndex {
    index: GpuTensor,
    rows: usize,
}

impl RowIndex {
    /// Uploads `index`, whose entries are below `rows`.
    ///
    /// # Errors
    /// `Argument` for an entry of `rows` or more; those of [`GpuTensor::new`].
    pub fn new(gpu: &Arc<Gpu>, index: &[u32], rows: usize) -> Result<Self> {
        const OP: &str = "RowIndex::new";
        if let Some(&bad) = index.iter().find(|&&i| i as usize >= rows) {
            return Err(KernelError::Bounds {
                op: OP,
                what: "index",
                value: bad as usize,
                limit: rows,
            }
            .into());
        }
        int(OP, "rows", rows)?;
        let signed: Vec<i32> = index.iter().map(|&i| i as i32).collect();
        Ok(Self {
            index: GpuTensor::from_i32(gpu, &[index.len()], &signed, "indices of rows")?,
            rows,
        })
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index.dim(0)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `to[i] = from[index[i]]`: `from [rows, width]`, `to [entries, width]`, of one type and rows of whole 16 bytes.
/// With a table of token embeddings and the tokens' ids this is their embedding.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn gather_rows(from: &GpuTensor, index: &RowIndex, to: &GpuTensor) -> Result<()> {
    const OP: &str = "gather_rows";
    let (rows, entries) = (index.rows, index.len());
    from.expect(OP, "from", &[rows, usize::MAX], from.dtype())?;
    to.expect(OP, "to", &[entries, from.dim(1)], from.dtype())?;
    copy(OP, from, Some(index), to, None)
}

/// `to[index[i]] = from[i]`: `from [entries, width]`, `to [rows, width]`; other rows stay. No entry may appear
/// twice.
///
/// # Errors
/// Those of [`gather_rows`].
pub fn scatter_rows(from: &GpuTensor, index: &RowIndex, to: &GpuTensor) -> Result<()> {
    const OP: &str = "scatter_rows";
    let (rows, entries) = (index.rows, index.len());
    from.expect(OP, "from", &[entries, usize::MAX], from.dtype())?;
    to.expect(OP, "to", &[rows, from.dim(1)], from.dtype())?;
    copy(OP, from, None, to, Some(index))
}

/// `to[target[i]] = from[source[i]]`, the two at once.
///
/// # Errors
/// Those of [`gather_rows`], and index lists of different lengths.
pub fn move_rows(
    from: &GpuTensor,
    source: &RowIndex,
    to: &GpuTensor,
    target: &RowIndex,
) -> Result<()> {
    const OP: &str = "move_rows";
    from.expect(OP, "from", &[source.rows, usize::MAX], from.dtype())?;
    to.expect(OP, "to", &[target.rows, from.dim(1)], from.dtype())?;
    if source.len() != target.len() {
        let expected = format!("{} entries", source.len());
        return Err(shape(OP, "target", expected, &[target.len()]));
    }
    copy(OP, from, Some(source), to, Some(target))
}

fn copy(
    op: &'static str,
    from: &GpuTensor,
    source: Option<&RowIndex>,
    to: &GpuTensor,
    target: Option<&RowIndex>,
) -> Result<()> {
    let bytes = from.dim(1) * from.dtype().bytes();
    if !bytes.is_multiple_of(CHUNK) || bytes == 0 {
        return Err(argument(op, "from", "needs rows of whole 16 bytes"));
    }
    aligned(op, &[("from", from), ("to", to)])?;
    let entries = source.or(target).map_or(0, RowIndex::len);
    if entries == 0 {
        return Ok(());
    }
    let chunks = int(op, "from", bytes / CHUNK)?;
    // Two chunks a thread where a row has as many; small rows share a block.
    let each = (chunks as u32).div_ceil(2).next_power_of_two().min(THREADS);
    let address = |index: Option<&RowIndex>| index.map_or(0, |i| i.index.address());
    let arguments = CopyArguments {
        from: from.address(),
        to: to.address(),
        from_index: address(source),
        to_index: address(target),
        from_rows: from.dim(0) as i64,
        to_rows: to.dim(0) as i64,
        rows: int(op, "index", entries)?,
        chunks,
        threads_per_row: each as i32,
    };
    let grid = Grid::linear((entries as u32).div_ceil(THREADS / each), THREADS);
    // SAFETY: rows have equal widths; indices were held against the number of rows.
    unsafe { launch(to.gpu(), FILE, "copy_rows", grid, &arguments) }
}

/// `out[s] = [cos(t f_0) .., sin(t f_0) ..]` of scalar `t = scalars[s]`, `f_i = 10000^(-i / half)`: `scalars` F32
/// `[n]`, `out` F32 or bf16 `[n, 2 half]`. Computed in fp32. HunyuanImage-3.0: scalar embedding, 256 wide.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn scalar_code(scalars: &GpuTensor, out: &GpuTensor) -> Result<()> {
    const OP: &str = "scalar_code";
    scalars.expect(OP, "scalars", &[usize::MAX], GpuType::F32)?;
    let count = scalars.dim(0);
    let name = match out.dtype() {
        GpuType::F32 => "scalar_code_f32",
        GpuType::Bf16 => "scalar_code_bf16",
        _ => return Err(shape(OP, "out", "f32 or bf16 elements", out.shape())),
    };
    out.expect(OP, "out", &[count, usize::MAX], out.dtype())?;
    let half = out.dim(1) / 2;
    if half == 0 || !out.dim(1).is_multiple_of(2) {
        return Err(shape(OP, "out", "[scalars, an even number]", out.shape()));
    }
    let total = int(OP, "out", out.numel())?;
    if count == 0 {
        return Ok(());
    }
    let (rows, columns) = (int(OP, "scalars", count)?, int(OP, "out", half)?);
    let (from, to, decay) = (scalars.address(), out.address(), -MAX_PERIOD.ln() as f32);
    let gpu = out.gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch
        .arg(&from)
        .arg(&to)
        .arg(&rows)
        .arg(&columns)
        .arg(&decay);
    let config = LaunchConfig {
        grid_dim: ((total as u32 / 2).div_ceil(THREADS), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: arguments are those of the kernel, which writes `rows` times two halves.
    unsafe { launch.launch(config) }?;
    Ok(())
}

/// F32 elements rounded to bf16; equal shapes. The first convolution reads latents like this.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn narrow_to_bf16(from: &GpuTensor, to: &GpuTensor) -> Result<()> {
    const OP: &str = "narrow_to_bf16";
    from.expect(OP, "from", from.shape(), GpuType::F32)?;
    to.expect(OP, "to", from.shape(), GpuType::Bf16)?;
    aligned(OP, &[("from", from), ("to", to)])?;
    let count = from.numel() as u64;
    if count == 0 {
        return Ok(());
    }
    let gpu = to.gpu();
    let kernel = gpu.kernel(FILE, "narrow_to_bf16", 0)?;
    let (source, target) = (from.address(), to.address());
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&source).arg(&target).arg(&count);
    let most = u64::from(gpu.multiprocessors()) * 8;
    let blocks = count.div_ceil(u64::from(THREADS) * 4).min(most);
    let config = LaunchConfig {
        grid_dim: (u32::try_from(blocks).unwrap_or(1), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: both have `count` elements.
    unsafe { launch.launch(config) }?;
    Ok(())
}
