//! Matrix products against weights packed once.
//!
//! `out[t, n] = init[n] + sum_k a[t, k] * w[n, k]`, each element one chain of fused multiply-adds in
//! ascending `k`. Blocking and threads only choose which elements are computed together, so a row's
//! result is the same bits in any batch, on any number of threads.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::simd::tile::{self, KC, PANEL, STRIDE, Tile};
use super::workspace::scratch;
use super::{par, recycle::Recycled};
use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Rows packed at a time: `MC * STRIDE` elements (a quarter megabyte) stay in the second-level cache.
const MC: usize = 240;

/// Columns of the only panel of a narrow weight.
const NARROW: usize = PANEL / 2;

/// Where the rows of the left operand come from.
pub(crate) trait RowSource: Sync {
    /// Writes columns `k` of row `row` to `out`, which has as many elements.
    fn copy_row(&self, row: usize, k: Range<usize>, out: &mut [f32]);
}

/// Rows of a row-major matrix with `k` columns.
pub(crate) struct Dense<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) k: usize,
}

impl RowSource for Dense<'_> {
    #[inline]
    fn copy_row(&self, row: usize, k: Range<usize>, out: &mut [f32]) {
        out.copy_from_slice(&self.data[row * self.k + k.start..row * self.k + k.end]);
    }
}

/// Rows of a row-major matrix in the order of a list.
pub(crate) struct Gathered<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) k: usize,
    pub(crate) rows: &'a [u32],
}

impl RowSource for Gathered<'_> {
    #[inline]
    fn copy_row(&self, row: usize, k: Range<usize>, out: &mut [f32]) {
        let at = self.rows[row] as usize * self.k;
        out.copy_from_slice(&self.data[at + k.start..at + k.end]);
    }
}

#[derive(Clone)]
enum Panels {
    F32(Vec<[f32; PANEL]>),
    Bf16(Vec<[bf16; PANEL]>),
    /// At most 16 columns.
    Narrow(Vec<[f32; NARROW]>),
}

/// A `[N, K]` weight in panels of 32 columns of its transpose: `[panel][k][column]`, zero padded.
/// A bf16 weight stays bf16 in memory and is widened (exactly) in registers.
#[derive(Clone)]
pub(crate) struct Packed {
    panels: Panels,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Packed {
    /// Packs `w`, whose element `(n, k)` is at `n * order.len() + order[k]` where `order` is given, else
    /// at `n * K + k`.
    pub(crate) fn new(w: &Tensor, n: usize, k: usize, order: Option<&[usize]>) -> Result<Self> {
        let panels = match w.dtype() {
            _ if n <= NARROW => Panels::Narrow(pack(w.to_f32().as_f32()?, n, k, order)),
            DType::F32 => Panels::F32(pack(w.as_f32()?, n, k, order)),
            DType::Bf16 => Panels::Bf16(pack(w.as_bf16()?, n, k, order)),
        };
        Ok(Self { panels, n, k })
    }

    pub(crate) fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(p) => size_of_val(p.as_slice()),
            Panels::Bf16(p) => size_of_val(p.as_slice()),
            Panels::Narrow(p) => size_of_val(p.as_slice()),
        }
    }
}

impl Packed {
    /// The weight as it was given, `[N, K]`; narrow ones come back in f32. Only for one that was packed
    /// without an order.
    pub(crate) fn unpack(&self) -> Result<Tensor> {
        let shape = [self.n, self.k];
        match &self.panels {
            Panels::F32(p) => Tensor::from_f32(&shape, unpack(p, self.n, self.k)),
            Panels::Bf16(p) => Tensor::from_bf16(&shape, unpack(p, self.n, self.k)),
            Panels::Narrow(p) => Tensor::from_f32(&shape, unpack(p, self.n, self.k)),
        }
    }
}

fn unpack<T: Copy, const W: usize>(panels: &[[T; W]], n: usize, k: usize) -> Vec<T> {
    let rows = (0..n).flat_map(|row| (0..k).map(move |i| (row, i)));
    rows.map(|(row, i)| panels[row / W * k + i][row % W])
        .collect()
}

fn pack<T: Copy + Default, const W: usize>(
    w: &[T],
    n: usize,
    k: usize,
    order: Option<&[usize]>,
) -> Vec<[T; W]> {
    let mut panels = vec![[T::default(); W]; n.div_ceil(W) * k];
    for (row, w) in w.chunks_exact(k.max(1)).enumerate().take(n) {
        let panel = &mut panels[row / W * k..][..k];
        for (i, p) in panel.iter_mut().enumerate() {
            p[row % W] = w[order.map_or(i, |o| o[i])];
        }
    }
    panels
}

/// What the sums start from.
#[derive(Clone, Copy)]
pub(crate) enum Init<'a> {
    Zero,
    /// One value per column.
    Bias(&'a [f32]),
}

/// `out[rows, N]`, rows `first ..` of `a`, over the threads of the current pool.
pub(crate) fn gemm(a: &impl RowSource, w: &Packed, init: Init<'_>, rows: usize) -> Recycled {
    let mut out = Recycled::stale(rows * w.n);
    let pieces = par::threads(rows * w.n * w.k / 8);
    if pieces > 1 && rows < pieces * 2 * tile::MAX_ROWS && w.n >= 2 * PANEL {
        by_columns(a, w, init, &mut out);
    } else {
        par::rows(&mut out, w.n, w.n * w.k / 8, |first, out| {
            gemm_serial(a, first, w, init, out)
        });
    }
    out
}

/// Few rows: threads split the columns, and the strips are put together afterwards.
fn by_columns(a: &impl RowSource, w: &Packed, init: Init<'_>, out: &mut [f32]) {
    let rows = out.len() / w.n;
    let panels = w.n.div_ceil(PANEL);
    let pieces = par::pieces(panels, rows * PANEL * w.k / 8);
    let per_piece = panels.div_ceil(pieces);
    let strips: Vec<(Range<usize>, super::workspace::Scratch)> = (0..panels.div_ceil(per_piece))
        .into_par_iter()
        .map(|i| {
            let panels = i * per_piece..((i + 1) * per_piece).min(panels);
            let columns = panels.start * PANEL..(panels.end * PANEL).min(w.n);
            let mut strip = scratch(rows * columns.len());
            block(a, 0, w, panels, init, &mut strip);
            (columns, strip)
        })
        .collect();
    for (columns, strip) in &strips {
        for (out, part) in out
            .chunks_exact_mut(w.n)
            .zip(strip.chunks_exact(columns.len()))
        {
            out[columns.clone()].copy_from_slice(part);
        }
    }
}

/// The same on this thread, into `out`, for as many rows as it holds.
pub(crate) fn gemm_serial(
    a: &impl RowSource,
    first: usize,
    w: &Packed,
    init: Init<'_>,
    out: &mut [f32],
) {
    block(a, first, w, 0..w.n.div_ceil(PANEL), init, out);
}

/// Columns of `panels` for all rows of `out`, whose rows hold exactly those columns.
fn block(
    a: &impl RowSource,
    first: usize,
    w: &Packed,
    panels: Range<usize>,
    init: Init<'_>,
    out: &mut [f32],
) {
    let columns = panels.start * PANEL..(panels.end * PANEL).min(w.n);
    if out.is_empty() || columns.is_empty() {
        return;
    }
    let width = columns.len();
    match init {
        Init::Zero => out.fill(0.0),
        Init::Bias(bias) => {
            for row in out.chunks_exact_mut(width) {
                row.copy_from_slice(&bias[columns.clone()]);
            }
        }
    }
    let rows = out.len() / width;
    // Blocks of nearly equal size, whole tiles each.
    let per_call = tile::rows_per_call();
    let blocks = rows.div_ceil(MC);
    let per_block = rows.div_ceil(blocks).next_multiple_of(per_call);
    let mut packed = scratch(per_block.min(rows) * STRIDE);
    for (i, out) in out.chunks_mut(per_block * width).enumerate() {
        let rows = out.len() / width;
        for k0 in (0..w.k).step_by(KC) {
            let k = k0..(k0 + KC).min(w.k);
            for (r, row) in packed.chunks_exact_mut(STRIDE).take(rows).enumerate() {
                a.copy_row(first + i * per_block + r, k.clone(), &mut row[..k.len()]);
            }
            for panel in panels.clone() {
                let column = panel * PANEL - columns.start;
                let rows = panel * w.k + k.start..panel * w.k + k.end;
                match &w.panels {
                    Panels::F32(p) => panel_product(&packed, &p[rows], out, width, column),
                    Panels::Bf16(p) => panel_product(&packed, &p[rows], out, width, column),
                    Panels::Narrow(p) => panel_product(&packed, &p[rows], out, width, column),
                }
            }
        }
    }
}

/// Adds the product of the packed rows and one panel to columns `column ..` of `out`.
fn panel_product<P: tile::PanelRow>(
    packed: &[f32],
    panel: &[P],
    out: &mut [f32],
    width: usize,
    column: usize,
) {
    let rows = out.len() / width;
    let per_call = tile::rows_per_call();
    let valid = (width - column).min(P::WIDTH);
    for r in (0..rows).step_by(per_call) {
        let a = &packed[r * STRIDE..];
        let count = per_call.min(rows - r);
        if valid == P::WIDTH {
            let data = &mut out[r * width + column..];
            tile::multiply_add(
                a,
                panel,
                Tile {
                    data,
                    stride: width,
                    rows: count,
                    add: true,
                },
            );
            continue;
        }
        // The last panel is narrower than a tile: go through a buffer.
        let mut buffer = [0f32; tile::MAX_ROWS * PANEL];
        for (i, row) in buffer.chunks_exact_mut(P::WIDTH).take(count).enumerate() {
            row[..valid].copy_from_slice(&out[(r + i) * width + column..][..valid]);
        }
        tile::multiply_add(
            a,
            panel,
            Tile {
                data: &mut buffer,
                stride: P::WIDTH,
                rows: count,
                add: true,
            },
        );
        for (i, row) in buffer.chunks_exact(P::WIDTH).take(count).enumerate() {
            out[(r + i) * width + column..][..valid].copy_from_slice(&row[..valid]);
        }
    }
}
