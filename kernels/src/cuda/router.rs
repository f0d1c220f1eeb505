//! The router of a mixture of experts: logits in fp32 accuracy, softmax, the largest of them.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::device::Gpu;
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::map::TensorMap;
use super::tensor::{GpuTensor, GpuType};
use crate::error::KernelError;

const OP: &str = "route";
const FILE: &str = "router";
/// bf16 terms of an fp32 weight.
const TERMS: usize = 3;
/// Parts of the inner dimension that are summed apart, always.
const HALVES: usize = 2;
/// Elements of the inner dimension that the tensor cores sum in one go. The sums of a half's pieces are added in
/// order, by the product where there are many tokens and by the choice where few: with the same bits.
const PIECE: usize = 256;
/// Most tokens whose pieces are computed apart, to have work for every multiprocessor.
const FEW_TOKENS: usize = 512;
/// Most experts.
const MAX_EXPERTS: usize = 256;
/// Widest token.
const MAX_WIDTH: usize = 8192;
/// Most choices of a token.
const MAX_TOP_K: usize = 32;
/// Tokens and experts of one block of the product, and elements of the inner dimension of one stage.
const BLOCK: [usize; 3] = [128, 64, 64];
/// Threads of the product: a producer and two consumer warpgroups.
const LOGIT_THREADS: u32 = 384;
/// Stages in shared memory: the tokens and the three terms of the experts, and room for their alignment.
const LOGIT_SHARED: usize = 5 * (BLOCK[0] + TERMS * BLOCK[1]) * BLOCK[2] * 2 + 1024;
/// Threads of the split.
const SPLIT_THREADS: u32 = 256;
/// Threads of the choice.
const TOP_K_THREADS: u32 = 512;
/// Experts and choices that the fast choice is made for.
const FAST_CHOICE: (usize, usize) = (64, 8);

/// Router weights, prepared for the tensor cores: `[experts, width]` as the sum of three bf16 terms.
#[derive(Clone, Debug)]
pub struct RouterWeight {
    terms: GpuTensor,
}

impl RouterWeight {
    /// Splits F32 weights `[experts, width]`: at most 256 experts, `width` a multiple of 8 up to 8192.
    ///
    /// # Errors
    /// `Argument` naming what does not fit; those of [`GpuTensor::new`].
    pub fn new(weight: &GpuTensor) -> Result<Self> {
        const OP: &str = "RouterWeight::new";
        weight.expect(OP, "weight", &[usize::MAX, usize::MAX], GpuType::F32)?;
        let (experts, width) = (weight.dim(0), weight.dim(1));
        let fits = (1..=MAX_EXPERTS).contains(&experts) && (1..=MAX_WIDTH).contains(&width);
        if !fits || !width.is_multiple_of(8) {
            let expected = "[1 to 256, a multiple of 8 up to 8192]";
            return Err(shape(OP, "weight", expected, weight.shape()));
        }
        let gpu = weight.gpu();
        let dims = [TERMS, experts, width];
        let terms = GpuTensor::new(gpu, &dims, GpuType::Bf16, "router weights")?;
        let kernel = gpu.kernel(FILE, "router_split", 0)?;
        let (from, to, count) = (weight.address(), terms.address(), (experts * width) as u64);
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(&from).arg(&to).arg(&count);
        let config = LaunchConfig {
            grid_dim: (gpu.multiprocessors(), 1, 1),
            block_dim: (SPLIT_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: arguments are those of `router_split`: `count` weights, three times as many terms.
        unsafe { launch.launch(config) }?;
        Ok(Self { terms })
    }

    /// The terms, bf16 `[3, experts, width]`.
    pub(super) fn terms(&self) -> &GpuTensor {
        &self.terms
    }

    /// Number of experts.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.terms.dim(1)
    }

    /// Width of a token.
    #[must_use]
    pub fn width(&self) -> usize {
        self.terms.dim(2)
    }
}

/// Which experts each token uses, on the device. Made once for the most tokens of a step.
#[derive(Clone, Debug)]
pub struct GpuRouting {
    /// I32 `[most tokens, top_k]`, in descending probability; the lower index first among equals.
    experts: GpuTensor,
    /// F32 `[most tokens, top_k]`.
    gates: GpuTensor,
    /// F32, partial sums of the logits.
    logits: GpuTensor,
    /// I32, choices of each expert by each block of tokens.
    counts: GpuTensor,
    tokens: usize,
    count: usize,
}

impl GpuRouting {
    /// Room for `tokens` tokens that choose `top_k` of `experts`.
    ///
    /// # Errors
    /// `Argument` for sizes that no router has; those of [`GpuTensor::new`].
    pub fn new(gpu: &Arc<Gpu>, tokens: usize, experts: usize, top_k: usize) -> Result<Self> {
        if experts == 0 || experts > MAX_EXPERTS || top_k == 0 || top_k > MAX_TOP_K.min(experts) {
            let reason =
                "must be 1 to 32, and no more than the experts, of which there are at most 256";
            return Err(argument(OP, "top_k", reason));
        }
        int(OP, "tokens", tokens.saturating_mul(top_k + 1))?;
        let few = tokens.min(FEW_TOKENS) * MAX_WIDTH / PIECE;
        let logits = experts * few.max(HALVES * tokens);
        let make = |dims: &[usize], dtype| GpuTensor::new(gpu, dims, dtype, "routing");
        Ok(Self {
            experts: make(&[tokens, top_k], GpuType::I32)?,
            gates: make(&[tokens, top_k], GpuType::F32)?,
            logits: make(&[logits], GpuType::F32)?,
            counts: make(&[most_blocks(tokens), experts], GpuType::I32)?,
            tokens: 0,
            count: experts,
        })
    }

    /// Tokens of the last [`route`].
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of experts.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.count
    }

    /// Choices of a token.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.experts.dim(1)
    }

    /// Expert of each choice, I32 `[tokens, top_k]`.
    ///
    /// # Errors
    /// None in practice: the view always fits.
    pub fn choices(&self) -> Result<GpuTensor> {
        self.experts.narrow0(0, self.tokens)
    }

    /// Weight of each choice, F32 `[tokens, top_k]`.
    ///
    /// # Errors
    /// None in practice: the view always fits.
    pub fn gates(&self) -> Result<GpuTensor> {
        self.gates.narrow0(0, self.tokens)
    }

    /// Choices of each expert by each block of [`block_tokens`] tokens, I32 `[blocks, experts]`.
    pub(super) fn counts(&self) -> &GpuTensor {
        &self.counts
    }
}

/// Tokens of one block of the choice and of the permutation: more where there are many, so that the table of
/// counts stays small. Results do not depend on it.
pub(super) fn block_tokens(tokens: usize) -> usize {
    const LEAST: usize = 64;
    const MOST: usize = 1024;
    const BLOCKS: usize = 256;
    tokens
        .div_ceil(BLOCKS)
        .next_power_of_two()
        .clamp(LEAST, MOST)
}

/// Most blocks that any number of tokens up to `tokens` has.
fn most_blocks(tokens: usize) -> usize {
    // The number of blocks falls where the block doubles; before that it is at most 256.
    const BLOCKS: usize = 256;
    tokens.div_ceil(block_tokens(tokens)).max(BLOCKS)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LogitArguments {
    logits: u64,
    tokens: i32,
    experts: i32,
    width: i32,
    pieces: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for LogitArguments {}

#[derive(Clone, Copy)]
#[repr(C)]
struct TopKArguments {
    logits: u64,
    part_stride: i64,
    token_stride: i64,
    halves: i32,
    pieces: i32,
    tokens: i32,
    experts: i32,
    top_k: i32,
    renormalise: i32,
    expert: u64,
    weight: u64,
    counts: u64,
    tokens_per_block: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for TopKArguments {}

/// Chooses the experts of each row of bf16 `h [tokens, width]`: logits and softmax over all experts in fp32, the
/// largest probabilities in descending order, divided by their sum where `renormalise`.
///
/// # Errors
/// `Argument` naming what does not fit, or what the driver says.
pub fn route(
    h: &GpuTensor,
    weight: &RouterWeight,
    renormalise: bool,
    out: &mut GpuRouting,
) -> Result<()> {
    let (width, experts) = (weight.width(), weight.experts());
    h.expect(OP, "h", &[usize::MAX, width], GpuType::Bf16)?;
    aligned(OP, &[("h", h)])?;
    let (tokens, room) = (h.dim(0), out.experts.dim(0));
    if experts != out.count {
        let expected = format!("{experts} experts");
        return Err(shape(OP, "routing", expected, &[out.count]));
    }
    if tokens > room {
        return Err(KernelError::Bounds {
            op: OP,
            what: "tokens",
            value: tokens,
            limit: room + 1,
        }
        .into());
    }
    out.tokens = tokens;
    if tokens == 0 {
        return Ok(());
    }
    let pieces = if tokens <= FEW_TOKENS {
        width.div_ceil(PIECE * HALVES)
    } else {
        1
    };
    product(h, weight, out, pieces)?;
    choose(h.gpu(), renormalise, out, pieces)
}

fn product(h: &GpuTensor, weight: &RouterWeight, out: &GpuRouting, pieces: usize) -> Result<()> {
    let (tokens, experts, width) = (h.dim(0), weight.experts(), weight.width());
    let map = |tensor: &GpuTensor, rows: usize, boxed: usize| {
        let row = width * GpuType::Bf16.bytes();
        let boxed = [BLOCK[2], boxed];
        TensorMap::new(tensor, &[width, rows], &[row], &boxed)
    };
    let of_h = map(h, tokens, BLOCK[0])?;
    let of_weight = map(&weight.terms, TERMS * experts, BLOCK[1])?;
    let arguments = LogitArguments {
        logits: out.logits.address(),
        tokens: int(OP, "h", tokens)?,
        experts: int(OP, "weight", experts)?,
        width: int(OP, "weight", width)?,
        pieces: int(OP, "weight", pieces)?,
    };
    let gpu = h.gpu();
    let kernel = gpu.kernel(FILE, "router_logits", LOGIT_SHARED as u32)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&of_h).arg(&of_weight).arg(&arguments);
    let parts = HALVES * pieces;
    let blocks = [tokens.div_ceil(BLOCK[0]), parts, experts.div_ceil(BLOCK[1])];
    let config = LaunchConfig {
        grid_dim: blocks.map(|n| n as u32).into(),
        block_dim: (LOGIT_THREADS, 1, 1),
        shared_mem_bytes: LOGIT_SHARED as u32,
    };
    // SAFETY: arguments are those of `router_logits`; the logits have room for all parts of the tokens.
    unsafe { launch.launch(config) }?;
    Ok(())
}

fn choose(gpu: &Gpu, renormalise: bool, out: &GpuRouting, pieces: usize) -> Result<()> {
    let (tokens, experts, each) = (out.tokens, out.count, block_tokens(out.tokens));
    let arguments = TopKArguments {
        logits: out.logits.address(),
        part_stride: (tokens * experts) as i64,
        token_stride: experts as i64,
        halves: HALVES as i32,
        pieces: int(OP, "pieces", pieces)?,
        tokens: int(OP, "tokens", tokens)?,
        experts: int(OP, "experts", experts)?,
        top_k: int(OP, "top_k", out.top_k())?,
        renormalise: i32::from(renormalise),
        expert: out.experts.address(),
        weight: out.gates.address(),
        counts: out.counts.address(),
        tokens_per_block: int(OP, "tokens", each)?,
    };
    let name = if experts <= FAST_CHOICE.0 && out.top_k() <= FAST_CHOICE.1 {
        "router_top_k_64"
    } else {
        "router_top_k_256"
    };
    let grid = Grid::linear(tokens.div_ceil(each) as u32, TOP_K_THREADS);
    // SAFETY: all outputs have room for the tokens, the counts for their blocks.
    unsafe { launch(gpu, FILE, name, grid, &arguments) }
}
