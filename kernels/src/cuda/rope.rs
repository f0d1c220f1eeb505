//! The fused projection split into queries, keys and values: rotation, norm of each head, keys and values written
//! where they stay.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::device::Gpu;
use super::error::{Result, argument, shape};
use super::launch::{Grid, aligned, int, launch};
use super::tensor::{GpuTensor, GpuType, bytes_of};
use crate::cpu::rope::AttnHeads;
use crate::error::KernelError;

const OP: &str = "qkv_rope_norm_write";
const THREADS: u32 = 128;
/// What a block may have of shared memory without asking.
const MAX_SHARED_BYTES: usize = 48 << 10;
/// Words of a slot on the device.
const SLOT_WORDS: usize = 4;

/// Where the keys and values of one token lie in an arena of rows of one head's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    /// Row of key head 0 at layer 0.
    pub first: u32,
    /// Rows from a head to the next.
    pub per_head: u32,
    /// Rows from a layer to the next.
    pub per_layer: u32,
    /// Rows from a key to its value.
    pub to_value: u32,
}

impl KvSlot {
    /// The last row of `kv_heads` heads and `layers` layers.
    pub(super) fn last(&self, kv_heads: usize, layers: usize) -> usize {
        let heads = kv_heads
            .saturating_sub(1)
            .saturating_mul(self.per_head as usize);
        let layers = layers
            .saturating_sub(1)
            .saturating_mul(self.per_layer as usize);
        (self.first as usize + self.to_value as usize)
            .saturating_add(heads)
            .saturating_add(layers)
    }
}

/// The slots of the packed tokens of a step, on the device. Checked against their arena when made.
#[derive(Clone, Debug)]
pub struct KvSlots {
    slots: GpuTensor,
    kv_heads: usize,
    layers: usize,
    arena_rows: usize,
}

impl KvSlots {
    /// Uploads slots for `kv_heads` heads and `layers` layers in an arena of `arena_rows` rows.
    ///
    /// # Errors
    /// `Argument` when a slot reaches behind the arena; those of [`GpuTensor::new`].
    pub fn new(
        gpu: &Arc<Gpu>,
        slots: &[KvSlot],
        kv_heads: usize,
        layers: usize,
        arena_rows: usize,
    ) -> Result<Self> {
        let last = slots.iter().map(|s| s.last(kv_heads, layers)).max();
        if let Some(last) = last.filter(|last| *last >= arena_rows) {
            return Err(KernelError::Bounds {
                op: "KvSlots::new",
                what: "row of a slot",
                value: last,
                limit: arena_rows,
            }
            .into());
        }
        let words: Vec<[u32; SLOT_WORDS]> = slots
            .iter()
            .map(|s| [s.first, s.per_head, s.per_layer, s.to_value])
            .collect();
        let dims = [slots.len(), SLOT_WORDS];
        let tensor = GpuTensor::new(gpu, &dims, GpuType::I32, "slots of keys and values")?;
        tensor.write_bytes(bytes_of(&words))?;
        Ok(Self {
            slots: tensor,
            kv_heads,
            layers,
            arena_rows,
        })
    }

    /// Tokens it has slots of.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.slots.dim(0)
    }
}

/// What [`qkv_rope_norm_write`] reads.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a> {
    /// bf16 `[tokens, (q + 2 kv) * dim]`, grouped per key head: its query heads, its key, its value.
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
    /// What queries are multiplied by before they are rounded: `scale * log2(e)` for attention, which then
    /// has nothing left to multiply.
    pub q_scale: f32,
    /// `dim` is 16, 32, 64, 128 or 256.
    pub heads: AttnHeads,
    /// Layer of the slots that is written.
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
    slots: u64,
    q: u64,
    arena: u64,
    layer: u32,
    tokens: i32,
    q_heads: i32,
    kv_heads: i32,
    eps: f32,
    q_scale: f32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for Arguments {}

/// Rotates (half-split pairs, fp32) and then normalises the heads of each token; queries go to `q`
/// bf16 `[tokens, q heads, dim]`, keys and values into the rows of `arena` bf16 `[rows, dim]` that `slots` says.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn qkv_rope_norm_write(
    input: &Qkv<'_>,
    slots: &KvSlots,
    q: &GpuTensor,
    arena: &GpuTensor,
) -> Result<()> {
    let name = check(input, slots, q, arena)?;
    let tokens = input.qkv.dim(0);
    if tokens == 0 {
        return Ok(());
    }
    let address = |t: Option<&GpuTensor>| t.map_or(0, GpuTensor::address);
    let arguments = Arguments {
        qkv: input.qkv.address(),
        cosine: input.cos.address(),
        sine: input.sin.address(),
        q_norm: address(input.q_norm),
        k_norm: address(input.k_norm),
        slots: slots.slots.address(),
        q: q.address(),
        arena: arena.address(),
        layer: int(OP, "layer", input.layer)? as u32,
        tokens: int(OP, "qkv", tokens)?,
        q_heads: int(OP, "heads", input.heads.q)?,
        kv_heads: int(OP, "heads", input.heads.kv)?,
        eps: input.eps,
        q_scale: input.q_scale,
    };
    // A token's projection and its two rows of tables pass through shared memory.
    let (row, tables) = (input.heads.width(), 2 * input.heads.dim);
    let shared = row * GpuType::Bf16.bytes() + tables * GpuType::F32.bytes();
    if shared > MAX_SHARED_BYTES {
        return Err(argument(OP, "heads", "are more than shared memory holds"));
    }
    let grid = Grid {
        shared: shared as u32,
        ..Grid::linear(arguments.tokens as u32, THREADS)
    };
    // SAFETY: operands were held against the heads and tokens, the slots against the arena.
    unsafe { launch(q.gpu(), "rope", name, grid, &arguments) }
}

/// The kernel for checked operands.
fn check(
    input: &Qkv<'_>,
    slots: &KvSlots,
    q: &GpuTensor,
    arena: &GpuTensor,
) -> Result<&'static str> {
    let heads = input.heads;
    let name = match heads.dim {
        16 => "qkv_rope_norm_write_16",
        32 => "qkv_rope_norm_write_32",
        64 => "qkv_rope_norm_write_64",
        128 => "qkv_rope_norm_write_128",
        256 => "qkv_rope_norm_write_256",
        _ => {
            return Err(argument(
                OP,
                "heads",
                "need a dim of 16, 32, 64, 128 or 256",
            ));
        }
    };
    if heads.kv == 0 || heads.q == 0 || !heads.q.is_multiple_of(heads.kv) {
        return Err(argument(OP, "heads", "need q a positive multiple of kv"));
    }
    let dim = heads.dim;
    input
        .qkv
        .expect(OP, "qkv", &[usize::MAX, heads.width()], GpuType::Bf16)?;
    let tokens = input.qkv.dim(0);
    input.cos.expect(OP, "cos", &[tokens, dim], GpuType::F32)?;
    input.sin.expect(OP, "sin", &[tokens, dim], GpuType::F32)?;
    for (what, norm) in [("q_norm", input.q_norm), ("k_norm", input.k_norm)] {
        if let Some(norm) = norm {
            norm.expect(OP, what, &[dim], GpuType::Bf16)?;
            aligned(OP, &[(what, norm)])?;
        }
    }
    q.expect(OP, "q", &[tokens, heads.q, dim], GpuType::Bf16)?;
    arena.expect(OP, "arena", &[usize::MAX, dim], GpuType::Bf16)?;
    aligned(
        OP,
        &[
            ("qkv", input.qkv),
            ("cos", input.cos),
            ("sin", input.sin),
            ("q", q),
            ("arena", arena),
        ],
    )?;
    if slots.tokens() != tokens || slots.kv_heads != heads.kv {
        let expected = format!("slots of {tokens} tokens and {} heads", heads.kv);
        return Err(shape(
            OP,
            "slots",
            expected,
            &[slots.tokens(), slots.kv_heads],
        ));
    }
    let limits = [
        ("layer", input.layer, slots.layers),
        ("rows of the slots", slots.arena_rows, arena.dim(0) + 1),
    ];
    match limits.into_iter().find(|(_, value, limit)| value >= limit) {
        None => Ok(name),
        Some((what, value, limit)) => Err(KernelError::Bounds {
            op: OP,
            what,
            value,
            limit,
        }
        .into()),
    }
}
