//! Between the products of decoding: sums into the residual stream, norms, and who goes through which expert.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::decode::{DECODE_TOKENS, job_tokens};
use super::decode_parts::{Arrival, PartSum};
use super::device::Gpu;
use super::early::{Start, launch_at};
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::norm::RmsNorm;
use super::router::RouterWeight;
use super::tensor::{GpuTensor, GpuType};

const FILE: &str = "decode_rows";
const ANY: usize = usize::MAX;
/// Most choices of all tokens, bytes of the kernels' `Routing` that products read, and all of them.
const MOST_CHOICES: usize = 256;
pub(super) const TABLE_BYTES: usize = 16 + MOST_CHOICES * (16 + 8 + 4);
const ROUTING_BYTES: usize = TABLE_BYTES + MOST_CHOICES * 4;
/// The widest row, and threads of the kernels.
const MOST_WIDTH: usize = 8192;
/// What the usual kernels take.
const USUAL_WIDTH: usize = 4096;
const USUAL_EXPERTS: usize = 64;
const ENTER_THREADS: u32 = 256;
const ROUTE_THREADS: u32 = 256;
/// Most choices of a token, one a lane; experts of a block, and blocks that fill the device.
const MOST_TOP_K: usize = 32;
const BLOCK_EXPERTS: usize = 16;
const ROUTE_BLOCKS: usize = 128;
const LIKELIEST_THREADS: u32 = 1024;

/// Which experts the tokens of a pass go through, on the device.
#[derive(Clone, Debug)]
pub struct DecodeRouting {
    /// `Routing` of `cuda/decode.cuh`.
    table: GpuTensor,
    /// F32 `[most tokens, experts]`.
    logits: GpuTensor,
    /// I32 `[1 + most tokens]`, zero between kernels.
    arrived: GpuTensor,
    experts: usize,
    top_k: usize,
    shared: bool,
    tokens: usize,
}

impl DecodeRouting {
    /// For passes of up to [`DECODE_TOKENS`] tokens that choose `top_k` of `experts`, and one more that sees all
    /// tokens where `shared`.
    ///
    /// # Errors
    /// `Argument` for more than 256 experts or 32 choices; those of [`GpuTensor::new`].
    pub fn new(gpu: &Arc<Gpu>, experts: usize, top_k: usize, shared: bool) -> Result<Self> {
        const OP: &str = "DecodeRouting::new";
        if experts == 0 || experts > MOST_CHOICES || top_k == 0 || top_k > MOST_TOP_K.min(experts) {
            return Err(argument(
                OP,
                "top_k",
                "must be 1 to 32 of at most 256 experts",
            ));
        }
        let what = "routing of decoded tokens";
        let zeros = [0; 1 + DECODE_TOKENS];
        let arrived = GpuTensor::from_i32(gpu, &[zeros.len()], &zeros, what)?;
        Ok(Self {
            table: GpuTensor::new(gpu, &[ROUTING_BYTES], GpuType::U8, what)?,
            logits: GpuTensor::new(gpu, &[DECODE_TOKENS, experts], GpuType::F32, what)?,
            arrived,
            experts,
            top_k,
            shared,
            tokens: 0,
        })
    }

    /// Tokens of one pass that such a routing takes.
    #[must_use]
    pub fn most_tokens(top_k: usize) -> usize {
        DECODE_TOKENS.min(MOST_CHOICES / top_k.max(1))
    }

    /// The same memory for a pass of `tokens` tokens.
    ///
    /// # Errors
    /// `Argument` for none, or more than there is room for.
    pub fn of_tokens(&self, tokens: usize) -> Result<Self> {
        if tokens == 0 || tokens > Self::most_tokens(self.top_k) {
            let reason = "must be 1 to 32, with at most 256 choices in all";
            return Err(argument("DecodeRouting::of_tokens", "tokens", reason));
        }
        let mut out = self.clone();
        out.tokens = tokens;
        Ok(out)
    }

    pub(super) fn address(&self) -> u64 {
        self.table.address()
    }

    /// Tokens of the pass.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Choices of a token.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Whether one expert sees all tokens.
    #[must_use]
    pub fn shared(&self) -> bool {
        self.shared
    }

    /// Matrices of the experts, the shared one's last.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.experts + usize::from(self.shared)
    }

    /// Rows of the experts' values: a row a choice, then the tokens of the shared expert.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.tokens * (self.top_k + usize::from(self.shared))
    }
}

/// Where the residual stream comes from.
#[derive(Clone, Copy, Debug)]
pub enum DecodeSource<'a> {
    /// Rows `ids` (I32 `[tokens]`, each below the number of rows) of an embedding bf16 `[vocab, width]`.
    Embedding {
        /// The embedding.
        table: &'a GpuTensor,
        /// Numbers of its rows.
        ids: &'a GpuTensor,
    },
    /// bf16 `[tokens, width]` and what experts add: F32 `[rows, width]`, as `decode_down` leaves it.
    Experts {
        /// The stream.
        x: &'a GpuTensor,
        /// Outputs of the experts.
        outputs: &'a GpuTensor,
    },
    /// bf16 `[tokens, width]` and what the experts of all ranks add.
    Parts {
        /// The stream.
        x: &'a GpuTensor,
        /// A sum of [`DecodeParts`](super::DecodeParts).
        sum: &'a PartSum,
    },
}

/// The input of a layer: the residual stream `out` bf16 `[tokens, width]`, and, where there is one, its norm.
#[derive(Clone, Copy, Debug)]
pub struct DecodeEnter<'a> {
    /// What the stream is made of.
    pub source: DecodeSource<'a>,
    /// The stream; not the one it is made of.
    pub out: &'a GpuTensor,
    /// The norm, and where it goes: f16 or bf16 `[tokens, width]`.
    pub norm: Option<(RmsNorm<'a>, &'a GpuTensor)>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct EnterArguments {
    x: u64,
    ids: u64,
    y: u64,
    out: u64,
    weight: u64,
    h: u64,
    arrival: Arrival,
    eps: f32,
    tokens: i32,
    width: i32,
    count: i32,
    by_token: i32,
    by_choice: i32,
    shared: i32,
    half: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for EnterArguments {}

/// 1 for f16, 0 for bf16, after checking `h [tokens, width]`.
fn half(op: &'static str, h: &GpuTensor, dims: &[usize]) -> Result<i32> {
    let kind = match h.dtype() {
        GpuType::F16 => GpuType::F16,
        _ => GpuType::Bf16,
    };
    h.expect(op, "h", dims, kind)?;
    aligned(op, &[("h", h)])?;
    Ok(i32::from(kind == GpuType::F16))
}

fn width_fits(op: &'static str, x: &GpuTensor, width: usize) -> Result<()> {
    if width == 0 || width > MOST_WIDTH || !width.is_multiple_of(8) {
        return Err(shape(
            op,
            "x",
            "a multiple of 8 columns up to 8192",
            x.shape(),
        ));
    }
    Ok(())
}

/// Runs [`DecodeEnter`] for the tokens of `routing`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn decode_enter(enter: DecodeEnter<'_>, routing: &DecodeRouting, start: Start) -> Result<()> {
    const OP: &str = "decode_enter";
    let (tokens, out) = (routing.tokens(), enter.out);
    let (x, ids, y) = match enter.source {
        DecodeSource::Embedding { table, ids } => (table, Some(ids), None),
        DecodeSource::Experts { x, outputs } => (x, None, Some(outputs.clone())),
        DecodeSource::Parts { x, sum } => {
            let all = sum.all();
            let rows = all.reshape(&[all.dim(0) * all.dim(1), all.dim(2)])?;
            (x, None, Some(rows))
        }
    };
    // Rows that are added to a token, and how they lie.
    let (count, by_token, by_choice, shared) = match enter.source {
        DecodeSource::Parts { sum, .. } => (sum.all().dim(0), 1, tokens, false),
        _ => (routing.top_k, routing.top_k, 1, routing.shared),
    };
    let arrival = match enter.source {
        DecodeSource::Parts { sum, .. } => sum.arrival(),
        _ => Arrival::default(),
    };
    x.expect(OP, "x", &[ANY, ANY], GpuType::Bf16)?;
    let width = x.dim(1);
    width_fits(OP, x, width)?;
    out.expect(OP, "out", &[tokens, width], GpuType::Bf16)?;
    aligned(OP, &[("x", x), ("out", out)])?;
    if let Some(ids) = ids {
        ids.expect(OP, "ids", &[tokens], GpuType::I32)?;
    }
    if let Some(y) = &y {
        x.expect(OP, "x", &[tokens, width], GpuType::Bf16)?;
        let rows = tokens * (count + usize::from(shared));
        y.expect(OP, "outputs", &[rows, width], GpuType::F32)?;
        aligned(OP, &[("outputs", y)])?;
    }
    let (mut eps, mut weight, mut h, mut is_half) = (0.0, 0, 0, 0);
    if let Some((norm, to)) = enter.norm {
        norm.weight
            .expect(OP, "norm weight", &[width], GpuType::Bf16)?;
        aligned(OP, &[("norm weight", norm.weight)])?;
        is_half = half(OP, to, &[tokens, width])?;
        (eps, weight, h) = (norm.eps, norm.weight.address(), to.address());
    }
    let arguments = EnterArguments {
        x: x.address(),
        ids: ids.map_or(0, GpuTensor::address),
        y: y.as_ref().map_or(0, GpuTensor::address),
        out: out.address(),
        weight,
        h,
        arrival,
        eps,
        tokens: int(OP, "out", tokens)?,
        width: int(OP, "x", width)?,
        count: int(OP, "routing", count)?,
        by_token: int(OP, "routing", by_token)?,
        by_choice: int(OP, "routing", by_choice)?,
        shared: i32::from(shared),
        half: is_half,
    };
    let grid = Grid::linear(u32::try_from(tokens).unwrap_or(u32::MAX), ENTER_THREADS);
    let name = if width <= USUAL_WIDTH {
        "decode_enter"
    } else {
        "decode_enter_wide"
    };
    let kernel = (FILE, name);
    // SAFETY: shapes were checked against each other; the caller's ids are below the number of rows.
    unsafe { launch_at(out.gpu(), kernel, grid, start, &arguments, None) }
}

/// What the output projection adds to the stream.
#[derive(Clone, Copy, Debug)]
pub enum DecodeAdded<'a> {
    /// F32 `[tokens, width]`.
    Whole(&'a GpuTensor),
    /// The parts of all ranks.
    Parts(&'a PartSum),
}

impl<'a> DecodeAdded<'a> {
    /// The parts of `[tokens, width]`, how many there are, and when they come.
    fn parts(self, op: &'static str, dims: &[usize]) -> Result<(&'a GpuTensor, usize, Arrival)> {
        match self {
            Self::Whole(add) => {
                add.expect(op, "add", dims, GpuType::F32)?;
                Ok((add, 1, Arrival::default()))
            }
            Self::Parts(sum) => {
                let all = sum.all();
                all.expect(op, "add", &[all.dim(0), dims[0], dims[1]], GpuType::F32)?;
                Ok((all, all.dim(0), sum.arrival()))
            }
        }
    }
}

/// What follows attention: the sum into the stream, its norm, and the choice of experts.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRoute<'a> {
    /// bf16 `[tokens, width]`.
    pub x: &'a GpuTensor,
    /// The output projection.
    pub add: DecodeAdded<'a>,
    /// `x + add`; not `x`.
    pub out: &'a GpuTensor,
    /// Of `out`.
    pub norm: RmsNorm<'a>,
    /// f16 or bf16 `[tokens, width]`: the norm.
    pub h: &'a GpuTensor,
    /// Of the routing's experts.
    pub router: &'a RouterWeight,
    /// Whether the weights of a token's choices are made to sum to one.
    pub renormalise: bool,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RouteArguments {
    x: u64,
    y: u64,
    out: u64,
    weight: u64,
    h: u64,
    router: u64,
    logits: u64,
    arrived: u64,
    routing: u64,
    arrival: Arrival,
    eps: f32,
    parts: i32,
    tokens: i32,
    width: i32,
    experts: i32,
    top_k: i32,
    renormalise: i32,
    columns: i32,
    half: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for RouteArguments {}

/// Runs [`DecodeRoute`] and leaves the choices in `routing`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn decode_route(route: DecodeRoute<'_>, routing: &DecodeRouting, start: Start) -> Result<()> {
    const OP: &str = "decode_route";
    let (tokens, x) = (routing.tokens(), route.x);
    x.expect(OP, "x", &[tokens, ANY], GpuType::Bf16)?;
    let width = x.dim(1);
    width_fits(OP, x, width)?;
    let dims = [tokens, width];
    let (add, parts, arrival) = route.add.parts(OP, &dims)?;
    route.out.expect(OP, "out", &dims, GpuType::Bf16)?;
    let weight = route.norm.weight;
    weight.expect(OP, "norm weight", &[width], GpuType::Bf16)?;
    let is_half = half(OP, route.h, &dims)?;
    let router = route.router.terms();
    router.expect(OP, "router", &[3, routing.experts, width], GpuType::Bf16)?;
    aligned(
        OP,
        &[
            ("x", x),
            ("add", add),
            ("out", route.out),
            ("norm weight", weight),
            ("router", router),
        ],
    )?;
    if x.address() == route.out.address() {
        return Err(argument(OP, "out", "must not be x"));
    }
    let arguments = RouteArguments {
        x: x.address(),
        y: add.address(),
        out: route.out.address(),
        weight: weight.address(),
        h: route.h.address(),
        router: router.address(),
        logits: routing.logits.address(),
        arrived: routing.arrived.address(),
        routing: routing.address(),
        arrival,
        eps: route.norm.eps,
        parts: int(OP, "add", parts)?,
        tokens: int(OP, "x", tokens)?,
        width: int(OP, "x", width)?,
        experts: int(OP, "router", routing.experts)?,
        top_k: int(OP, "routing", routing.top_k)?,
        renormalise: i32::from(route.renormalise),
        columns: int(OP, "routing", job_tokens(tokens))?,
        half: is_half,
    };
    let each = (tokens * routing.experts / ROUTE_BLOCKS).clamp(1, BLOCK_EXPERTS);
    let of = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let grid = Grid {
        blocks: (of(tokens), of(routing.experts.div_ceil(each)), 1),
        threads: ROUTE_THREADS,
        shared: 0,
    };
    let each = int(OP, "router", each)?;
    let usual = width <= USUAL_WIDTH && routing.experts <= USUAL_EXPERTS;
    let kernel = (
        FILE,
        if usual {
            "decode_route"
        } else {
            "decode_route_wide"
        },
    );
    // SAFETY: shapes were checked against each other and against the routing's.
    unsafe { launch_at(x.gpu(), kernel, grid, start, &arguments, Some(&each)) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LikeliestArguments {
    logits: u64,
    out: u64,
    width: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for LikeliestArguments {}

/// The number of the largest of each row of F32 `[rows, width]`, the first among equals: I32 `[rows]`.
///
/// # Errors
/// `Argument` for another type or empty rows; those of [`GpuTensor::new`].
pub fn likeliest(logits: &GpuTensor) -> Result<GpuTensor> {
    const OP: &str = "likeliest";
    logits.expect(OP, "logits", &[ANY, ANY], GpuType::F32)?;
    let (rows, width) = (logits.dim(0), logits.dim(1));
    if width == 0 {
        return Err(shape(OP, "logits", "rows with elements", logits.shape()));
    }
    let out = GpuTensor::new(logits.gpu(), &[rows], GpuType::I32, "likeliest tokens")?;
    if rows == 0 {
        return Ok(out);
    }
    let arguments = LikeliestArguments {
        logits: logits.address(),
        out: out.address(),
        width: int(OP, "logits", width)?,
    };
    let grid = Grid::linear(u32::try_from(rows).unwrap_or(u32::MAX), LIKELIEST_THREADS);
    // SAFETY: a block a row of what was checked.
    unsafe { launch(logits.gpu(), FILE, "decode_likeliest", grid, &arguments) }?;
    Ok(out)
}
