//! Packed attention over keys and values that lie in an arena: segments, grouped heads, a prefix in place.
//!
//! Heads of 128 elements with 4 query heads for each KV head run on the tensor cores; any other size up to 256
//! runs on a plain kernel. The tables of a step are made once, for all layers. A query's bits depend on
//! its own keys only.

use std::sync::Arc;

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::attention_tiles::{Cut, Extent, GpuAttnRow, KEY_TILE, OP, WORDS, tables};
use super::device::Gpu;
use super::error::{Result, argument};
use super::launch::{Grid, aligned, int, launch};
use super::map::TensorMap;
use super::tensor::{GpuTensor, GpuType, bytes_of};
use crate::Segment;
use crate::cpu::rope::AttnHeads;
use crate::error::KernelError;

/// The one head size and group that the fast kernel is made for.
const FAST_DIM: usize = 128;
const FAST_GROUP: usize = 4;
/// Warpgroups of a block that multiply, and tokens of each (with 4 heads: the 64 rows of its products).
const CONSUMERS: usize = 2;
const CONSUMER_TOKENS: usize = 16;
/// Half a head: rows of 128 bytes, as the swizzle has them.
const PANEL: usize = 64;
/// Slots of the ring of key and value tiles.
const SLOTS: usize = 4;
/// Tokens of a tile of the plain kernel, and the largest head it takes.
const PLAIN_TOKENS: usize = 8;
const PLAIN_DIM: usize = 256;
const PLAIN_THREADS: u32 = 256;

/// What the lanes of a warp have of a part: 64 numbers of the output and 4 of the sums each.
const PART_FLOATS: usize = 32 * (64 + 4);
/// Queries that a warpgroup has and awaits.
const QUERY_BUFFERS: usize = 2;
/// Queries of a block's tile, or its outputs.
const TILE_BYTES: usize = CONSUMERS * CONSUMER_TOKENS * FAST_GROUP * FAST_DIM * 2;
/// Queries, ring, outputs on their way; a pair of barriers of each slot and each buffer of queries; the tile of
/// each such buffer.
const SHARED_BYTES: usize = (QUERY_BUFFERS + 1) * TILE_BYTES
    + SLOTS * KEY_TILE * FAST_DIM * 2
    + 2 * (SLOTS + CONSUMERS * QUERY_BUFFERS) * size_of::<u64>()
    + CONSUMERS * QUERY_BUFFERS * size_of::<i32>();

/// How the keys of a plan are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Whole,
    Partial,
    Parts,
}

/// Who attends to what in a step, on the device; the same for every layer. Calls of a plan are in stream order: the
/// blocks of a call count its tiles in it.
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    tables: GpuTensor,
    pub(super) heads: AttnHeads,
    pub(super) extent: Extent,
    /// Outputs and sums of parts of tiles, while a call runs.
    parts: GpuTensor,
    rows: usize,
    pub(super) tiles: usize,
    /// With those that `tiles` has in parts.
    all_tiles: usize,
    /// Slots of keys that a part has.
    part_slots: usize,
    pub(super) tokens: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    out: u64,
    lse: u64,
    rows: u64,
    tiles: u64,
    scheduler: u64,
    again: u64,
    sums: u64,
    parts: u64,
    tile_count: i32,
    all_tiles: i32,
    part_slots: i32,
    layer: i32,
    query_heads: i32,
    scale: f32,
}

// SAFETY: the layout of `Arguments` in `cuda/attention_blocks.cuh`.
unsafe impl DeviceRepr for Arguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct PlainArguments {
    q: u64,
    arena: u64,
    out: u64,
    lse: u64,
    rows: u64,
    tiles: u64,
    q_stride: i32,
    token_stride: i32,
    dim: i32,
    group: i32,
    query_heads: i32,
    layer: i32,
    scale: f32,
    padding: i32,
}

// SAFETY: the layout of `GenericArguments` in `cuda/attention_generic.cu`.
unsafe impl DeviceRepr for PlainArguments {}

fn fast(heads: AttnHeads) -> bool {
    heads.dim == FAST_DIM && heads.group() == FAST_GROUP
}

impl AttentionPlan {
    /// The plan of `tokens` packed queries, each in exactly one segment, over runs of an `arena`
    /// `[rows, dim]` with `layers` layers.
    ///
    /// # Errors
    /// `Argument` for heads that do not fit, a run outside the arena, segments outside the tokens or their
    /// row's keys, a token that no segment or two have, or a query without a key; those of
    /// [`GpuTensor::new`].
    pub fn new(
        arena: &GpuTensor,
        heads: AttnHeads,
        layers: usize,
        rows: &[GpuAttnRow],
        (segments, tokens): (&[Segment], usize),
    ) -> Result<Self> {
        Self::of_style(arena, heads, layers, rows, (segments, tokens, Style::Whole))
    }

    /// [`AttentionPlan::new`] for attention over some of the keys, whose parts are merged by their `lse`:
    /// segments may see no key (zeros, and an `lse` of negative infinity) and may leave tokens out, whose
    /// outputs are left as they are.
    ///
    /// # Errors
    /// Those of [`AttentionPlan::new`].
    pub fn partial(
        arena: &GpuTensor,
        heads: AttnHeads,
        layers: usize,
        rows: &[GpuAttnRow],
        (segments, tokens): (&[Segment], usize),
    ) -> Result<Self> {
        Self::of_style(
            arena,
            heads,
            layers,
            rows,
            (segments, tokens, Style::Partial),
        )
    }

    /// [`AttentionPlan::new`] for steps of few tokens with many keys, as text is written: where the keys of up to 4
    /// tokens make fewer tiles than there are multiprocessors, several blocks share them. The sums' order is
    /// fixed by the plan, so a plan gives the same bits each time; another batch may give a row others in the
    /// last place.
    ///
    /// # Errors
    /// Those of [`AttentionPlan::new`].
    pub fn in_parts(
        arena: &GpuTensor,
        heads: AttnHeads,
        layers: usize,
        rows: &[GpuAttnRow],
        (segments, tokens): (&[Segment], usize),
    ) -> Result<Self> {
        Self::of_style(arena, heads, layers, rows, (segments, tokens, Style::Parts))
    }

    fn of_style(
        arena: &GpuTensor,
        heads: AttnHeads,
        layers: usize,
        rows: &[GpuAttnRow],
        of: (&[Segment], usize, Style),
    ) -> Result<Self> {
        let extent = Extent::of(arena, heads, layers)?;
        Self::upload(arena.gpu(), heads, extent, rows, of)
    }

    pub(super) fn upload(
        gpu: &Arc<Gpu>,
        heads: AttnHeads,
        extent: Extent,
        rows: &[GpuAttnRow],
        (segments, tokens, style): (&[Segment], usize, Style),
    ) -> Result<Self> {
        if heads.kv == 0 || heads.q == 0 || !heads.q.is_multiple_of(heads.kv) {
            let reason = "need query heads that are a positive multiple of KV heads";
            return Err(argument(OP, "heads", reason));
        }
        if heads.dim == 0 || heads.dim > PLAIN_DIM || !heads.dim.is_multiple_of(8) {
            let reason = "need a size that is a multiple of 8, at most 256";
            return Err(argument(OP, "heads", reason));
        }
        let cut = Cut {
            tokens: if fast(heads) {
                CONSUMERS * CONSUMER_TOKENS
            } else {
                PLAIN_TOKENS
            },
            partial: style == Style::Partial,
            parts: (style == Style::Parts && fast(heads)).then_some(gpu.multiprocessors() as usize),
        };
        let made = tables(heads, extent, rows, segments, (tokens, cut))?;
        let mut words = vec![[0_u32; WORDS]];
        words.extend(&made.rows);
        words.extend(&made.tiles);
        words.extend(&made.whole);
        // For each tile whether it is to be done again, and the list of those.
        let all_tiles = made.tiles.len() + made.whole.len();
        let again = (2 * all_tiles).div_ceil(WORDS);
        words.resize(words.len() + again, [0; WORDS]);
        words.extend(made.sums.chunks(WORDS / 2).map(|sums| {
            let mut entry = [0; WORDS];
            entry[..2 * sums.len()].copy_from_slice(sums.as_flattened());
            entry
        }));
        let dims = [words.len(), WORDS];
        let tables = GpuTensor::new(gpu, &dims, GpuType::I32, "attention plan")?;
        tables.write_bytes(bytes_of(&words))?;
        let dims = [made.sums.len(), PART_FLOATS];
        Ok(Self {
            tables,
            parts: GpuTensor::new(gpu, &dims, GpuType::F32, "parts of attention")?,
            heads,
            extent,
            rows: made.rows.len(),
            tiles: made.tiles.len(),
            all_tiles,
            part_slots: made.part_slots,
            tokens,
        })
    }

    /// Whether the heads are those of the fast kernel.
    #[must_use]
    pub fn on_tensor_cores(&self) -> bool {
        fast(self.heads)
    }

    /// Packed queries it was made for.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Addresses of the scheduler, the rows, the tiles, what is to be done again, and the sums.
    fn addresses(&self) -> [u64; 5] {
        let entry = WORDS * size_of::<u32>();
        let again = (2 * self.all_tiles).div_ceil(WORDS);
        let mut at = self.tables.address();
        [1, self.rows, self.all_tiles, again, 0].map(|entries| {
            let start = at;
            at += (entries * entry) as u64;
            start
        })
    }

    pub(super) fn check(
        &self,
        layer: usize,
        out: &GpuTensor,
        lse: Option<&GpuTensor>,
    ) -> Result<()> {
        if layer >= self.extent.layers {
            let limit = self.extent.layers;
            let what = "layer";
            let value = layer;
            return Err(KernelError::Bounds {
                op: OP,
                what,
                value,
                limit,
            }
            .into());
        }
        let (tokens, heads) = (self.tokens, self.heads);
        out.expect(OP, "out", &[tokens, heads.q * heads.dim], GpuType::Bf16)?;
        if let Some(lse) = lse {
            lse.expect(OP, "lse", &[tokens, heads.q], GpuType::F32)?;
        }
        Ok(())
    }
}

impl Extent {
    fn of(arena: &GpuTensor, heads: AttnHeads, layers: usize) -> Result<Self> {
        arena.expect(OP, "arena", &[usize::MAX, heads.dim], GpuType::Bf16)?;
        let arena_rows = arena.dim(0);
        int(OP, "arena", arena_rows)?;
        Ok(Self {
            arena_rows,
            layers,
            token_stride: 1,
        })
    }
}

/// The factor that makes scores exponents of two; exactly 1 where the queries carry it already.
fn binary(scale: f32) -> f32 {
    let factor = scale * std::f32::consts::LOG2_E;
    if (factor - 1.0).abs() < 4.0 * f32::EPSILON {
        1.0
    } else {
        factor
    }
}

/// Where [`attention`] writes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOut<'a> {
    /// bf16 `[tokens, Hq * D]`.
    pub out: &'a GpuTensor,
    /// `ln(sum(exp(scale * q . k)))` of each query and head, F32 `[tokens, Hq]`, where it is wanted.
    pub lse: Option<&'a GpuTensor>,
}

/// `softmax(scale * q . k) . v` of the packed queries `q` bf16 `[tokens, Hq, D]`, rotated and normed, over the
/// keys and values that `arena` bf16 `[rows, D]` holds of `layer`, as the plan says. Query head `h` reads KV head
/// `h / (Hq / Hkv)`. Softmax is fp32, probabilities are bf16. Padding of the runs is read and must be
/// finite; it has no weight.
///
/// The fast kernel rounds `scale * log2(e) * q` to bf16 once more. It need not where queries were made with that
/// factor before they were rounded: then `scale` is `ln 2`, what is left of it.
///
/// # Errors
/// `Argument` naming the operand that is not the plan's, or what the driver says.
pub fn attention(
    plan: &AttentionPlan,
    to: AttentionOut<'_>,
    q: &GpuTensor,
    (arena, layer): (&GpuTensor, usize),
    scale: f32,
) -> Result<()> {
    let heads = plan.heads;
    plan.check(layer, to.out, to.lse)?;
    q.expect(OP, "q", &[plan.tokens, heads.q, heads.dim], GpuType::Bf16)?;
    arena.expect(
        OP,
        "arena",
        &[plan.extent.arena_rows, heads.dim],
        GpuType::Bf16,
    )?;
    aligned(OP, &[("q", q), ("arena", arena), ("out", to.out)])?;
    if plan.tiles == 0 {
        return Ok(());
    }
    if fast(heads) {
        on_tensor_cores(plan, to, q, (arena, layer), scale)
    } else {
        let plain = Plain {
            q: q.address(),
            q_stride: heads.q * heads.dim,
            arena: arena.address(),
        };
        plain.run(plan, to, layer, scale)
    }
}

fn on_tensor_cores(
    plan: &AttentionPlan,
    to: AttentionOut<'_>,
    q: &GpuTensor,
    (arena, layer): (&GpuTensor, usize),
    scale: f32,
) -> Result<()> {
    let heads = plan.heads;
    let head = FAST_DIM * GpuType::Bf16.bytes();
    let panel = PANEL * GpuType::Bf16.bytes();
    // Columns in two panels, each 128 bytes wide.
    let queries = TensorMap::new(
        q,
        &[PANEL, heads.q, plan.tokens, FAST_DIM / PANEL],
        &[head, heads.q * head, panel],
        &[PANEL, FAST_GROUP, CONSUMER_TOKENS, FAST_DIM / PANEL],
    )?;
    let keys = TensorMap::new(
        arena,
        &[PANEL, arena.dim(0), FAST_DIM / PANEL],
        &[head, panel],
        &[PANEL, KEY_TILE, FAST_DIM / PANEL],
    )?;
    let [scheduler, rows, tiles, again, sums] = plan.addresses();
    let arguments = Arguments {
        out: to.out.address(),
        lse: to.lse.map_or(0, GpuTensor::address),
        rows,
        tiles,
        scheduler,
        again,
        sums,
        parts: plan.parts.address(),
        tile_count: int(OP, "segments", plan.tiles)?,
        all_tiles: int(OP, "segments", plan.all_tiles)?,
        part_slots: int(OP, "segments", plan.part_slots)?,
        layer: int(OP, "layer", layer)?,
        query_heads: int(OP, "heads", heads.q)?,
        scale: binary(scale),
    };
    let gpu = q.gpu();
    let shared = u32::try_from(SHARED_BYTES).unwrap_or(u32::MAX);
    let blocks = gpu
        .multiprocessors()
        .min(u32::try_from(plan.tiles).unwrap_or(u32::MAX));
    let config = LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (128 * (CONSUMERS as u32 + 1), 1, 1),
        shared_mem_bytes: shared,
    };
    // The second kernel does the tiles again that the first could not, usually none.
    let first = if plan.all_tiles > plan.tiles {
        "attention_128_parts"
    } else {
        "attention_128"
    };
    for name in [first, "attention_128_exact"] {
        let kernel = gpu.kernel("attention", name, shared)?;
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(&queries).arg(&keys).arg(&arguments);
        // SAFETY: arguments are those of the kernels; the plan's tables were held against tokens and arena.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}

/// Operands of the plain kernel.
pub(super) struct Plain {
    pub(super) q: u64,
    /// Elements from a token to the next.
    pub(super) q_stride: usize,
    pub(super) arena: u64,
}

impl Plain {
    pub(super) fn run(
        &self,
        plan: &AttentionPlan,
        to: AttentionOut<'_>,
        layer: usize,
        scale: f32,
    ) -> Result<()> {
        let heads = plan.heads;
        let [_, rows, tiles, ..] = plan.addresses();
        let arguments = PlainArguments {
            q: self.q,
            arena: self.arena,
            out: to.out.address(),
            lse: to.lse.map_or(0, GpuTensor::address),
            rows,
            tiles,
            q_stride: int(OP, "q", self.q_stride)?,
            token_stride: int(OP, "arena", plan.extent.token_stride)?,
            dim: int(OP, "heads", heads.dim)?,
            group: int(OP, "heads", heads.group())?,
            query_heads: int(OP, "heads", heads.q)?,
            layer: int(OP, "layer", layer)?,
            scale: binary(scale),
            padding: 0,
        };
        let blocks = u32::try_from(plan.tiles)
            .map_err(|_| argument(OP, "segments", "make more tiles than a grid has blocks"))?;
        let (grid, gpu) = (Grid::linear(blocks, PLAIN_THREADS), to.out.gpu());
        // SAFETY: the layout is the kernel's; the plan's tables were held against tokens and arena.
        unsafe {
            launch(
                gpu,
                "attention_generic",
                "attention_generic",
                grid,
                &arguments,
            )
        }
    }
}
