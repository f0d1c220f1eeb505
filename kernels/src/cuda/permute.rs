//! Tokens to the rows of their experts, decided and moved on the device: no wait for the host in a step.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::device::Gpu;
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::norm::E4m3Rows;
use super::router::{GpuRouting, block_tokens};
use super::tensor::{GpuTensor, GpuType};
use crate::error::KernelError;

const FILE: &str = "permute";
const POSITION_THREADS: u32 = 512;
/// A warp copies a row.
const GATHER_THREADS: u32 = 32;
const KEEP_THREADS: u32 = 256;
/// Bytes of one access.
const CHUNK: usize = 16;
/// Most bytes of a row: it passes through shared memory.
const MAX_ROW_BYTES: usize = 32 << 10;

/// The rows of all choices, sorted by expert and then by token. Made once for the most tokens of a step.
#[derive(Clone, Debug)]
pub struct Permutation {
    /// I32 `[experts + 1]`, or `[experts + 2]` with the shared expert.
    offsets: GpuTensor,
    /// I32 `[most tokens, top_k]`.
    position: GpuTensor,
    tokens: usize,
    experts: usize,
    shared: bool,
    kept: Option<Kept>,
}

/// The part of a permutation that one rank has.
#[derive(Clone, Debug)]
struct Kept {
    /// I32 `[experts + 1]`, or `[experts + 2]` where some tokens have a row of the shared expert.
    offsets: GpuTensor,
    experts: Range<usize>,
    shared: Range<usize>,
}

impl Permutation {
    /// Room for `tokens` tokens with `top_k` choices each. With `shared`, one more group holds every token once,
    /// behind the others.
    ///
    /// # Errors
    /// `Argument` for more rows than 32 bits count; those of [`GpuTensor::new`].
    pub fn new(
        gpu: &Arc<Gpu>,
        tokens: usize,
        experts: usize,
        top_k: usize,
        shared: bool,
    ) -> Result<Self> {
        int(
            "Permutation::new",
            "tokens",
            tokens.saturating_mul(top_k + 1),
        )?;
        let make = |dims: &[usize]| GpuTensor::new(gpu, dims, GpuType::I32, "permutation");
        Ok(Self {
            offsets: make(&[experts + 1 + usize::from(shared)])?,
            position: make(&[tokens, top_k])?,
            tokens: 0,
            experts,
            shared,
            kept: None,
        })
    }

    /// Keeps `experts` alone, and the shared expert for `shared` tokens behind them: for a rank that has no
    /// others. [`permute`] then counts rows among the kept ones, and choices of other experts have row -1.
    ///
    /// # Errors
    /// `Argument` for experts or tokens that are not there, or a shared expert in its place among all;
    /// those of [`GpuTensor::new`].
    pub fn keeping(self, experts: Range<usize>, shared: Range<usize>) -> Result<Self> {
        const OP: &str = "Permutation::keeping";
        let fits = experts.start < experts.end && experts.end <= self.experts && !self.shared;
        if !fits || shared.start > shared.end || shared.end > self.position.dim(0) {
            return Err(argument(OP, "experts", "are not those of the permutation"));
        }
        let groups = experts.len() + usize::from(!shared.is_empty());
        let gpu = self.offsets.gpu();
        let offsets = GpuTensor::new(gpu, &[groups + 1], GpuType::I32, "permutation")?;
        Ok(Self {
            kept: Some(Kept {
                offsets,
                experts,
                shared,
            }),
            ..self
        })
    }

    /// Tokens with a row of the shared expert, and where its first row is said, I32 `[1]`; `None` where the
    /// permutation keeps no shared expert.
    ///
    /// # Errors
    /// None in practice: the view always fits.
    pub fn kept_shared(&self) -> Result<Option<(Range<usize>, GpuTensor)>> {
        let some = self.kept.as_ref().filter(|kept| !kept.shared.is_empty());
        some.map(|kept| {
            let at = kept.offsets.narrow0(kept.experts.len(), 1)?;
            Ok((kept.shared.clone(), at))
        })
        .transpose()
    }

    /// The end of the last group, I32 `[1]`.
    ///
    /// # Errors
    /// None in practice: the view always fits.
    pub fn end(&self) -> Result<GpuTensor> {
        let offsets = self.offsets();
        offsets.narrow0(offsets.dim(0) - 1, 1)
    }

    /// First row of every group, and the end: I32 `[groups + 1]`. The last group is the shared expert's, if any.
    #[must_use]
    pub fn offsets(&self) -> &GpuTensor {
        self.kept
            .as_ref()
            .map_or(&self.offsets, |kept| &kept.offsets)
    }

    /// Row of each choice, I32 `[tokens, top_k]`.
    ///
    /// # Errors
    /// None in practice: the view always fits.
    pub fn position(&self) -> Result<GpuTensor> {
        self.position.narrow0(0, self.tokens)
    }

    /// Rows of all groups; at most so many of those that are kept.
    #[must_use]
    pub fn rows(&self) -> usize {
        let kept = self.kept.as_ref().map_or(0, |kept| kept.shared.len());
        self.tokens * (self.position.dim(1) + usize::from(self.shared)) + kept
    }

    /// First row of the shared expert.
    #[must_use]
    pub fn shared(&self) -> Option<usize> {
        self.shared.then_some(self.tokens * self.position.dim(1))
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PositionArguments {
    expert: u64,
    counts: u64,
    offsets: u64,
    position: u64,
    token: u64,
    tokens: i32,
    top_k: i32,
    experts: i32,
    tokens_per_block: i32,
    shared: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for PositionArguments {}

#[derive(Clone, Copy)]
#[repr(C)]
struct KeepArguments {
    offsets: u64,
    position: u64,
    kept: u64,
    choices: i32,
    first: i32,
    last: i32,
    shared: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for KeepArguments {}

#[derive(Clone, Copy)]
#[repr(C)]
struct GatherArguments {
    from: u64,
    scale: u64,
    position: u64,
    to: u64,
    to_scale: u64,
    top_k: i32,
    chunks: i32,
    shared: i32,
    kept: u64,
    first: i32,
    count: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for GatherArguments {}

/// Sorts the choices of `routing` by expert, keeping the order of the tokens.
///
/// # Errors
/// `Argument` when `out` was made for other sizes, or what the driver says.
pub fn permute(routing: &GpuRouting, out: &mut Permutation) -> Result<()> {
    const OP: &str = "permute";
    let (tokens, top_k) = (routing.tokens(), routing.top_k());
    if out.experts != routing.experts() || out.position.dim(1) != top_k {
        let expected = format!("{} experts, {top_k} choices", routing.experts());
        let got = [out.experts, out.position.dim(1)];
        return Err(shape(OP, "permutation", expected, &got));
    }
    if tokens > out.position.dim(0) {
        return Err(KernelError::Bounds {
            op: OP,
            what: "tokens",
            value: tokens,
            limit: out.position.dim(0) + 1,
        }
        .into());
    }
    out.tokens = tokens;
    if tokens == 0 {
        let offsets = out.offsets();
        return offsets.write_bytes(&vec![0; offsets.bytes()]);
    }
    let each = block_tokens(tokens);
    let arguments = PositionArguments {
        expert: routing.choices()?.address(),
        counts: routing.counts().address(),
        offsets: out.offsets.address(),
        position: out.position.address(),
        token: 0,
        tokens: int(OP, "tokens", tokens)?,
        top_k: int(OP, "top_k", top_k)?,
        experts: int(OP, "experts", out.experts)?,
        tokens_per_block: int(OP, "tokens", each)?,
        shared: i32::from(out.shared),
    };
    let grid = Grid {
        blocks: (tokens.div_ceil(each) as u32, 1, 1),
        threads: POSITION_THREADS,
        // A bit a token of the block for every expert.
        shared: (out.experts * each / 8) as u32,
    };
    // SAFETY: the routing wrote these tokens with the same blocks; outputs were made for as many.
    unsafe {
        launch(
            out.offsets.gpu(),
            FILE,
            "permute_positions",
            grid,
            &arguments,
        )
    }?;
    keep(out)
}

/// Leaves the rows of the kept experts.
fn keep(out: &Permutation) -> Result<()> {
    const OP: &str = "permute";
    let Some(kept) = &out.kept else {
        return Ok(());
    };
    let choices = out.tokens * out.position.dim(1);
    if kept.shared.end > out.tokens {
        return Err(argument(
            OP,
            "routing",
            "has fewer tokens than the shared expert",
        ));
    }
    let arguments = KeepArguments {
        offsets: out.offsets.address(),
        position: out.position.address(),
        kept: kept.offsets.address(),
        choices: int(OP, "tokens", choices)?,
        first: int(OP, "experts", kept.experts.start)?,
        last: int(OP, "experts", kept.experts.end)?,
        shared: int(OP, "shared", kept.shared.len())?,
    };
    let blocks = choices.div_ceil(KEEP_THREADS as usize);
    let grid = Grid::linear(blocks as u32, KEEP_THREADS);
    // SAFETY: positions of all choices and offsets of all experts were just written; `kept` has an entry for each
    // expert that is kept, their end, and that of the shared one if any.
    unsafe { launch(out.offsets.gpu(), "merge", "experts_keep", grid, &arguments) }
}

/// Copies every token of bf16 `from [tokens, width]` to its rows of `to [rows, width]`, the shared expert's
/// included. `width` is a multiple of 8; `to` has at least the rows of the permutation.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn gather(from: &GpuTensor, permutation: &Permutation, to: &GpuTensor) -> Result<()> {
    run(from, None, permutation, to, None)
}

/// [`gather`] of e4m3 rows and their scales; `width` is a multiple of 16.
///
/// # Errors
/// Those of [`gather`].
pub fn gather_e4m3(from: E4m3Rows<'_>, permutation: &Permutation, to: E4m3Rows<'_>) -> Result<()> {
    let (scales, to_scales) = (Some(from.scales), Some(to.scales));
    run(from.codes, scales, permutation, to.codes, to_scales)
}

fn run(
    from: &GpuTensor,
    scales: Option<&GpuTensor>,
    permutation: &Permutation,
    to: &GpuTensor,
    to_scales: Option<&GpuTensor>,
) -> Result<()> {
    const OP: &str = "gather";
    let tokens = permutation.tokens;
    let dtype = if scales.is_some() {
        GpuType::E4m3
    } else {
        GpuType::Bf16
    };
    from.expect(OP, "from", &[tokens, usize::MAX], dtype)?;
    let width = from.dim(1);
    to.expect(OP, "to", &[usize::MAX, width], dtype)?;
    aligned(OP, &[("from", from), ("to", to)])?;
    let bytes = width * dtype.bytes();
    if !bytes.is_multiple_of(CHUNK) || bytes > MAX_ROW_BYTES {
        let reason = "needs rows of whole 16 bytes, up to 32 KiB";
        return Err(argument(OP, "from", reason));
    }
    let rows = permutation.rows();
    if to.dim(0) < rows {
        return Err(shape(OP, "to", format!("at least {rows} rows"), to.shape()));
    }
    if let (Some(scales), Some(to_scales)) = (scales, to_scales) {
        scales.expect(OP, "scales", &[tokens], GpuType::F32)?;
        to_scales.expect(OP, "to.scales", &[to.dim(0)], GpuType::F32)?;
    }
    if tokens == 0 {
        return Ok(());
    }
    let shared = permutation.shared();
    let kept = permutation.kept.as_ref();
    let again = kept.map_or(0..0, |kept| kept.shared.clone());
    let arguments = GatherArguments {
        from: from.address(),
        scale: scales.map_or(0, GpuTensor::address),
        position: permutation.position.address(),
        to: to.address(),
        to_scale: to_scales.map_or(0, GpuTensor::address),
        top_k: int(OP, "permutation", permutation.position.dim(1))?,
        chunks: int(OP, "from", bytes / CHUNK)?,
        shared: match shared {
            Some(first) => int(OP, "permutation", first)?,
            None => -1,
        },
        kept: kept.map_or(0, |kept| {
            let entry = kept.experts.len() * size_of::<u32>();
            kept.offsets.address() + entry as u64
        }),
        first: int(OP, "permutation", again.start)?,
        count: int(OP, "permutation", again.len())?,
    };
    let grid = Grid {
        shared: bytes as u32,
        ..Grid::linear(tokens as u32, GATHER_THREADS)
    };
    // SAFETY: operands were held against the permutation, whose rows lie below `rows`.
    unsafe { launch(to.gpu(), FILE, "permute_gather", grid, &arguments) }
}
