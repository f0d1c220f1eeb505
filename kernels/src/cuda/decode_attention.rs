//! Attention of one token a row, with what comes before it: split of the projection, rotation, head norms and the
//! write of keys and values. Keys are cut among blocks by a row's length alone, so that a row's bits do not
//! depend on others.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::decode::DECODE_TOKENS;
use super::device::Gpu;
use super::early::{Start, launch_at};
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int};
use super::rope::KvSlot;
use super::tensor::{GpuTensor, GpuType, bytes_of};
use crate::cpu::rope::AttnHeads;
use crate::error::KernelError;

const OP: &str = "decode_attention";
const FILE: &str = "decode_attention";
const THREADS: u32 = 128;
/// Keys that a block does at a time, and most parts of a row's keys.
const STEP: usize = 64;
const MOST_PARTS: usize = 32;
/// Blocks of a multiprocessor, one a part, and where blocks have several.
const FEW_BLOCKS: usize = 4;
const MANY_BLOCKS: usize = 2;
/// The head size and group that one block serves whole.
const FAST_DIM: usize = 128;
const FAST_GROUP: usize = 4;
/// Words of a row on the device.
const ROW_WORDS: usize = 8;

/// One row: where its keys and values lie, and how many tokens it has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeRow {
    /// Of token 0.
    pub at: KvSlot,
    /// Earlier tokens.
    pub past: usize,
    /// Tokens there is room for.
    pub room: usize,
}

/// The rows of a pass on the device, and memory for parts of their sums.
#[derive(Clone, Debug)]
pub struct DecodeRows {
    rows: GpuTensor,
    parts: GpuTensor,
    /// I32, zero between kernels.
    arrived: GpuTensor,
    heads: AttnHeads,
    layers: usize,
    arena_rows: usize,
    /// Most parts of a row's keys, and whether all parts have one step.
    most: usize,
    single: bool,
}

/// Query heads that a block serves.
fn served(heads: AttnHeads) -> usize {
    if heads.dim == FAST_DIM && heads.group() == FAST_GROUP {
        FAST_GROUP
    } else {
        1
    }
}

/// The kernel that takes any number of parts and steps.
fn kernel(heads: AttnHeads) -> Option<&'static str> {
    match (heads.dim, served(heads)) {
        (FAST_DIM, FAST_GROUP) => Some("decode_attention_128_4_many"),
        (16, _) => Some("decode_attention_16"),
        (32, _) => Some("decode_attention_32"),
        (64, _) => Some("decode_attention_64"),
        (128, _) => Some("decode_attention_128"),
        _ => None,
    }
}

/// Steps of a part of the keys of a row with `past` earlier tokens.
fn steps(past: usize) -> usize {
    (past / STEP + MOST_PARTS) / MOST_PARTS
}

/// Parts of the keys of a row with `past` earlier tokens, as the kernel cuts them.
fn parts(past: usize) -> usize {
    past / (STEP * steps(past)) + 1
}

impl DecodeRows {
    /// Whether there is a kernel for such heads.
    #[must_use]
    pub fn takes(heads: AttnHeads) -> bool {
        kernel(heads).is_some()
    }

    /// Uploads `rows` for `layers` layers in an arena of `arena_rows` rows. `last` is memory of an earlier pass, which
    /// is used again where it suffices.
    ///
    /// # Errors
    /// `Argument` for none or more than [`DECODE_TOKENS`] rows, a row without room for its token, or one that reaches
    /// behind the arena; those of [`GpuTensor::new`].
    pub fn new(
        gpu: &Arc<Gpu>,
        rows: &[DecodeRow],
        heads: AttnHeads,
        (layers, arena_rows): (usize, usize),
        last: Option<&Self>,
    ) -> Result<Self> {
        if rows.is_empty() || rows.len() > DECODE_TOKENS {
            return Err(argument(OP, "rows", "must be 1 to 32"));
        }
        if rows.iter().any(|row| row.past >= row.room) {
            return Err(argument(OP, "rows", "must have room for one more token"));
        }
        let end = |row: &DecodeRow| row.at.last(heads.kv, layers).saturating_add(row.room);
        let end = rows.iter().map(end).max().unwrap_or(0);
        if end > arena_rows {
            return Err(KernelError::Bounds {
                op: OP,
                what: "rows",
                value: end,
                limit: arena_rows,
            }
            .into());
        }
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let words: Vec<[u32; ROW_WORDS]> = rows
            .iter()
            .map(|row| {
                let at = row.at;
                [
                    at.first,
                    at.per_head,
                    at.per_layer,
                    at.to_value,
                    narrow(row.past),
                    0,
                    0,
                    0,
                ]
            })
            .collect();
        let what = "rows of decoded tokens";
        let table = GpuTensor::new(gpu, &[rows.len(), ROW_WORDS], GpuType::I32, what)?;
        table.write_bytes(bytes_of(&words))?;
        let most = rows.iter().map(|row| parts(row.past)).max().unwrap_or(1);
        let single = rows.iter().all(|row| steps(row.past) == 1);
        let units = heads.q / served(heads);
        let part = served(heads) * (heads.dim + 2);
        let (parts, arrived) = (
            rows.len() * units * MOST_PARTS * part,
            DECODE_TOKENS * units,
        );
        let last =
            last.filter(|last| last.parts.numel() >= parts && last.arrived.numel() == arrived);
        let (parts, arrived) = match last {
            Some(last) => (last.parts.clone(), last.arrived.clone()),
            None => {
                let room = parts.next_power_of_two();
                let parts = GpuTensor::new(gpu, &[room], GpuType::F32, "parts of attention")?;
                let zeros = vec![0; arrived];
                (parts, GpuTensor::from_i32(gpu, &[arrived], &zeros, what)?)
            }
        };
        Ok(Self {
            rows: table,
            parts,
            arrived,
            heads,
            layers,
            arena_rows,
            most,
            single,
        })
    }

    /// The kernel and its grid: few parts have a block each, of many a block has several while the next ones travel.
    fn launch(&self, gpu: &Gpu) -> Result<(&'static str, Grid)> {
        let heads = self.heads;
        let no_kernel = || shape(OP, "heads", "16, 32, 64 or 128 elements", &[heads.dim]);
        let many = kernel(heads).ok_or_else(no_kernel)?;
        let (units, device) = (heads.q / served(heads), gpu.multiprocessors() as usize);
        let rows = units * self.count();
        let fast = served(heads) == FAST_GROUP;
        let few = fast && self.single && rows * self.most <= FEW_BLOCKS * device;
        let (name, blocks, shared) = if few {
            ("decode_attention_128_4", self.most, 0)
        } else {
            let each = (MANY_BLOCKS * device / rows).clamp(1, self.most);
            // Three slots of keys and values, 16 elements of a head in a piece of each thread.
            (many, each, 3 * 2 * (heads.dim / 16) * THREADS as usize * 16)
        };
        let wide = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let grid = Grid {
            blocks: (wide(blocks), wide(units), wide(self.count())),
            threads: THREADS,
            shared: wide(shared),
        };
        Ok((name, grid))
    }

    /// Rows it has.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rows.dim(0)
    }
}

/// What [`decode_attention`] reads.
#[derive(Clone, Copy, Debug)]
pub struct DecodeAttention<'a> {
    /// F32 `[tokens, (q + 2 kv) * dim]`, grouped per key head: its query heads, its key, its value. Rounded to bf16.
    pub qkv: &'a GpuTensor,
    /// F32 `[tokens, dim]`.
    pub cos: &'a GpuTensor,
    /// F32 `[tokens, dim]`.
    pub sin: &'a GpuTensor,
    /// bf16 `[dim]`; queries are not normalised without.
    pub q_norm: Option<&'a GpuTensor>,
    /// bf16 `[dim]`; keys are not normalised without.
    pub k_norm: Option<&'a GpuTensor>,
    /// Added to the mean square of a head.
    pub eps: f32,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Layer of the rows.
    pub layer: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    qkv: u64,
    cosine: u64,
    sine: u64,
    q_norm: u64,
    k_norm: u64,
    rows: u64,
    arena: u64,
    out: u64,
    parts: u64,
    arrived: u64,
    layer: i32,
    kv_heads: i32,
    group: i32,
    eps: f32,
    q_scale: f32,
    half: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Arguments {}

/// Attention of one token of each row over its keys in `arena [rows, dim]`, bf16, and its own, which are written there;
/// `out` f16 or bf16 `[tokens, q * dim]`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn decode_attention(
    of: DecodeAttention<'_>,
    rows: &DecodeRows,
    arena: &GpuTensor,
    out: &GpuTensor,
    start: Start,
) -> Result<()> {
    let (tokens, heads) = (rows.count(), rows.heads);
    let width = (heads.q + 2 * heads.kv) * heads.dim;
    of.qkv.expect(OP, "qkv", &[tokens, width], GpuType::F32)?;
    of.cos
        .expect(OP, "cos", &[tokens, heads.dim], GpuType::F32)?;
    of.sin
        .expect(OP, "sin", &[tokens, heads.dim], GpuType::F32)?;
    for norm in [of.q_norm, of.k_norm].into_iter().flatten() {
        norm.expect(OP, "head norm", &[heads.dim], GpuType::Bf16)?;
    }
    arena.expect(OP, "arena", &[rows.arena_rows, heads.dim], GpuType::Bf16)?;
    let kind = match out.dtype() {
        GpuType::F16 => GpuType::F16,
        _ => GpuType::Bf16,
    };
    out.expect(OP, "out", &[tokens, heads.q * heads.dim], kind)?;
    if of.layer >= rows.layers {
        return Err(argument(OP, "layer", "is not one of the rows' layers"));
    }
    aligned(OP, &[("arena", arena), ("out", out)])?;
    let (name, grid) = rows.launch(out.gpu())?;
    let arguments = Arguments {
        qkv: of.qkv.address(),
        cosine: of.cos.address(),
        sine: of.sin.address(),
        q_norm: of.q_norm.map_or(0, GpuTensor::address),
        k_norm: of.k_norm.map_or(0, GpuTensor::address),
        rows: rows.rows.address(),
        arena: arena.address(),
        out: out.address(),
        parts: rows.parts.address(),
        arrived: rows.arrived.address(),
        layer: int(OP, "layer", of.layer)?,
        kv_heads: int(OP, "heads", heads.kv)?,
        group: int(OP, "heads", heads.group())?,
        eps: of.eps,
        q_scale: of.scale * std::f32::consts::LOG2_E,
        half: i32::from(kind == GpuType::F16),
    };
    // SAFETY: rows were checked against the arena when they were made, and the other shapes here.
    unsafe { launch_at(out.gpu(), (FILE, name), grid, start, &arguments, None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rows_parts_cover_its_keys_and_are_few() {
        for past in 0..40_000 {
            let (count, steps) = (parts(past), steps(past));
            assert!((1..=MOST_PARTS).contains(&count), "{past}: {count}");
            assert!(
                count * steps * STEP > past && (count - 1) * steps * STEP <= past,
                "{past}"
            );
        }
    }
}
