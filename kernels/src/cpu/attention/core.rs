//! The tiles of attention.
//!
//! A tile is a few queries of one segment. For each KV head its query heads are computed together, so
//! keys are packed once for all of them. Keys come in tiles of [`KEYS`] that are aligned to the key index
//! of the row, and every query keeps its own running maximum, sum and output: a query's result depends on
//! its own keys only, not on the tile it falls in.

use std::ops::Range;

use super::schedule::{HeadShape, QueryTile, Task};
use crate::cpu::simd::{
    self,
    tile::{self, KC, PANEL, STRIDE, Tile},
};
use crate::cpu::workspace::{Scratch, scratch};

/// Keys per tile.
const KEYS: usize = 256;
/// Half a panel; the last panel of a head may be this narrow.
const HALF: usize = PANEL / 2;

impl HeadShape {
    /// Columns of the packed values and of the running output: panels of 32, the last perhaps 16.
    fn padded(&self) -> usize {
        self.dim.next_multiple_of(HALF)
    }

    /// Blocks of [`KC`] elements that a head is cut into.
    fn blocks(&self) -> usize {
        self.dim.div_ceil(KC)
    }

    /// Elements of the [`Buffers`] of one thread.
    pub(super) fn buffer_elements(&self) -> usize {
        let rows = self.tile_queries() * self.group();
        rows * (self.blocks() * STRIDE + self.padded() + 2)
            + tile::MAX_ROWS * STRIDE
            + KEYS * (self.dim + self.padded())
    }
}

/// Scratch of one thread; its size depends on the heads only.
pub(super) struct Buffers {
    /// Scaled queries `[block][row][STRIDE]`.
    q: Scratch,
    /// Scores, then probabilities, of the rows of one call: `[row][STRIDE]`.
    p: Scratch,
    /// Running outputs `[row][padded]`.
    o: Scratch,
    /// Running maximum and sum of each row.
    state: Scratch,
    /// Packed keys `[panel of 32 keys][dim][32]`.
    k: Scratch,
    /// Packed values `[panel of columns][key][32 or 16]`.
    v: Scratch,
}

impl Buffers {
    pub(super) fn new(shape: HeadShape) -> Self {
        let rows = shape.tile_queries() * shape.group();
        Self {
            q: scratch(shape.blocks() * rows * STRIDE),
            p: scratch(tile::MAX_ROWS * STRIDE),
            o: scratch(rows * shape.padded()),
            state: scratch(rows * 2),
            k: scratch(KEYS * shape.dim),
            v: scratch(KEYS * shape.padded()),
        }
    }
}

/// Keys and values of one head that lie evenly spaced in memory: key `i` at `k[first + i * stride..]`.
struct Run<'a> {
    k: &'a [f32],
    v: &'a [f32],
    first: usize,
    stride: usize,
    count: usize,
}

/// What all tiles of a call share.
pub(super) struct Core<'a> {
    /// Queries `[T, q, dim]`.
    pub(super) q: &'a [f32],
    /// Fresh keys `[Tk, kv, dim]`.
    pub(super) k: &'a [f32],
    /// Fresh values `[Tk, kv, dim]`.
    pub(super) v: &'a [f32],
    pub(super) shape: HeadShape,
    pub(super) scale: f32,
}

impl Core<'_> {
    /// Computes the task's heads, from queries to finished output rows.
    pub(super) fn run(&self, task: &mut Task<'_, '_>, buffers: &mut Buffers) {
        for head in task.heads.clone() {
            self.pack_queries(task.tile, head, buffers);
            for first in (0..task.tile.most_visible()).step_by(KEYS) {
                let count = KEYS.min(task.tile.most_visible() - first);
                self.pack_keys(task.tile, head, first..first + count, buffers);
                let rows = self.rows(task.tile);
                for row in (0..rows).step_by(tile::rows_per_call()) {
                    // A few rows at a time, so that their scores stay in the first-level cache.
                    let block = row..(row + tile::rows_per_call()).min(rows);
                    self.scores(rows, block.clone(), count, buffers);
                    self.soften(task.tile, block.clone(), first, count, buffers);
                    self.values(block, count, buffers);
                }
            }
            self.finish(task, head, buffers);
            if !task.lse.is_empty() {
                self.finish_lse(task, head, buffers);
            }
        }
    }

    fn rows(&self, tile: &QueryTile<'_>) -> usize {
        tile.q.len() * self.shape.group()
    }

    /// Queries times scale, and a fresh running state.
    fn pack_queries(&self, tile: &QueryTile<'_>, head: usize, buffers: &mut Buffers) {
        let HeadShape { q: heads, dim, .. } = self.shape;
        let (group, rows) = (self.shape.group(), self.rows(tile));
        for (i, t) in tile.q.clone().enumerate() {
            let source = &self.q[(t * heads + head * group) * dim..][..group * dim];
            for (g, source) in source.chunks_exact(dim).enumerate() {
                for (block, source) in source.chunks(KC).enumerate() {
                    let row = &mut buffers.q[(block * rows + i * group + g) * STRIDE..];
                    for (o, &v) in row.iter_mut().zip(source) {
                        *o = v * self.scale;
                    }
                }
            }
        }
        buffers.o[..rows * self.shape.padded()].fill(0.0);
        for state in buffers.state[..2 * rows].chunks_exact_mut(2) {
            state.copy_from_slice(&[f32::NEG_INFINITY, 0.0]);
        }
    }

    /// The first of `keys` and as many of those behind it as lie evenly spaced in one place.
    fn run_of<'s>(&'s self, tile: &'s QueryTile<'_>, head: usize, keys: Range<usize>) -> Run<'s> {
        let HeadShape { kv, dim, .. } = self.shape;
        if keys.start < tile.cached {
            let page = tile.past[0].len;
            let (part, within) = (&tile.past[keys.start / page], keys.start % page);
            Run {
                k: part.k,
                v: part.v,
                first: head * part.head_stride + within * part.token_stride,
                stride: part.token_stride,
                count: keys.len().min(part.len - within),
            }
        } else {
            let token = tile.fresh + keys.start - tile.cached;
            Run {
                k: self.k,
                v: self.v,
                first: (token * kv + head) * dim,
                stride: kv * dim,
                count: keys.len(),
            }
        }
    }

    /// Transposes a tile of keys and copies the values, both in panels.
    fn pack_keys(
        &self,
        tile: &QueryTile<'_>,
        head: usize,
        keys: Range<usize>,
        buffers: &mut Buffers,
    ) {
        let dim = self.shape.dim;
        let mut next = 0;
        while next < keys.len() {
            let run = self.run_of(tile, head, keys.start + next..keys.end);
            for i in 0..run.count {
                let (j, at) = (next + i, run.first + i * run.stride);
                let (k, v) = (&run.k[at..at + dim], &run.v[at..at + dim]);
                self.pack_key((j, keys.len()), k, v, buffers);
            }
            next += run.count;
        }
        // Scores of the columns beyond the last key are computed and never read: keep them finite.
        let last = keys.len() % PANEL;
        if last > 0 {
            let panel = &mut buffers.k[keys.len() / PANEL * PANEL * dim..][..PANEL * dim];
            for row in panel.as_chunks_mut::<PANEL>().0 {
                row[last..].fill(0.0);
            }
        }
    }

    /// Key `j` of a tile of `count`, and its value.
    #[inline(always)]
    fn pack_key(&self, (j, count): (usize, usize), k: &[f32], v: &[f32], buffers: &mut Buffers) {
        let dim = self.shape.dim;
        let panel = &mut buffers.k[j / PANEL * PANEL * dim..][..PANEL * dim];
        for (row, &x) in panel.as_chunks_mut::<PANEL>().0.iter_mut().zip(k) {
            row[j % PANEL] = x;
        }
        for (panel, part) in v.chunks(PANEL).enumerate() {
            let width = self.panel_width(panel);
            let at = panel * PANEL * count + j * width;
            let row = &mut buffers.v[at..at + width];
            row[..part.len()].copy_from_slice(part);
            row[part.len()..].fill(0.0);
        }
    }

    fn panel_width(&self, panel: usize) -> usize {
        (self.shape.padded() - panel * PANEL).min(PANEL)
    }

    /// `p[row][key] = q[row] . k[key]` for a block of all `rows`.
    fn scores(&self, rows: usize, block: Range<usize>, count: usize, buffers: &mut Buffers) {
        let dim = self.shape.dim;
        for (panel, keys) in buffers
            .k
            .chunks(PANEL * dim)
            .take(count.div_ceil(PANEL))
            .enumerate()
        {
            let keys = keys.as_chunks::<PANEL>().0;
            for (part, keys) in keys.chunks(KC).enumerate() {
                let q = &buffers.q[(part * rows + block.start) * STRIDE..];
                let data = &mut buffers.p[panel * PANEL..];
                let tile = Tile {
                    data,
                    stride: STRIDE,
                    rows: block.len(),
                    add: part > 0,
                };
                tile::multiply_add(q, keys, tile);
            }
        }
    }

    /// Scores to probabilities relative to the running maximum; rescales the running sum and output.
    fn soften(
        &self,
        tile: &QueryTile<'_>,
        block: Range<usize>,
        first: usize,
        count: usize,
        buffers: &mut Buffers,
    ) {
        let (group, padded) = (self.shape.group(), self.shape.padded());
        let Buffers { p, o, state, .. } = buffers;
        let (o, state) = (
            &mut o[block.start * padded..],
            &mut state[2 * block.start..],
        );
        simd::run(
            #[inline(always)]
            || {
                let rest = o.chunks_exact_mut(padded).zip(state.chunks_exact_mut(2));
                for (row, (p, (o, state))) in block.zip(p.chunks_exact_mut(STRIDE).zip(rest)) {
                    let visible = tile.visible(row / group).saturating_sub(first).min(count);
                    soften_row(&mut p[..count], visible, o, state);
                }
            },
        );
    }

    /// `o[row] += p[row][key] * v[key]`.
    fn values(&self, block: Range<usize>, count: usize, buffers: &mut Buffers) {
        let padded = self.shape.padded();
        for column in (0..padded).step_by(PANEL) {
            let width = self.panel_width(column / PANEL);
            let panel = &buffers.v[column * count..][..width * count];
            let data = &mut buffers.o[block.start * padded + column..];
            let tile = Tile {
                data,
                stride: padded,
                rows: block.len(),
                add: true,
            };
            if width == PANEL {
                tile::multiply_add(&buffers.p, panel.as_chunks::<PANEL>().0, tile);
            } else {
                tile::multiply_add(&buffers.p, panel.as_chunks::<HALF>().0, tile);
            }
        }
    }

    /// Divides by the running sum and writes the rows of the task's output.
    fn finish(&self, task: &mut Task<'_, '_>, head: usize, buffers: &Buffers) {
        let (dim, padded, group) = (self.shape.dim, self.shape.padded(), self.shape.group());
        let out_width = task.heads.len() * group * dim;
        let column = (head - task.heads.start) * group * dim;
        let outputs = buffers
            .o
            .chunks_exact(padded)
            .zip(buffers.state.chunks_exact(2));
        for (row, (o, state)) in outputs.take(self.rows(task.tile)).enumerate() {
            let at = row / group * out_width + column + row % group * dim;
            let inv = 1.0 / state[1];
            for (out, &v) in task.out[at..at + dim].iter_mut().zip(o) {
                *out = v * inv;
            }
        }
    }

    /// Log of the sum of the exponentials of each row's scores; a row of a task sees at least one key.
    fn finish_lse(&self, task: &mut Task<'_, '_>, head: usize, buffers: &Buffers) {
        let group = self.shape.group();
        let (heads, column) = (task.heads.len() * group, (head - task.heads.start) * group);
        let states = buffers.state.chunks_exact(2).take(self.rows(task.tile));
        for (row, state) in states.enumerate() {
            let lse = f64::from(state[0]) + libm::log(f64::from(state[1]));
            task.lse[row / group * heads + column + row % group] = lse as f32;
        }
    }
}

/// One row of [`Core::soften`]: the first `visible` scores count, the others become zero.
#[inline(always)]
fn soften_row(p: &mut [f32], visible: usize, o: &mut [f32], state: &mut [f32]) {
    let (p, hidden) = p.split_at_mut(visible);
    hidden.fill(0.0);
    if p.is_empty() {
        return;
    }
    let old = state[0];
    let tile_max = simd::math::max(p);
    let max = if tile_max > old { tile_max } else { old };
    let sum = simd::math::exp_sum(p, max);
    if max > old {
        // Exactly zero for the first tile, whose old maximum is negative infinity.
        let shrink = simd::math::exp_below(old - max);
        state[0] = max;
        state[1] *= shrink;
        for v in o.iter_mut() {
            *v *= shrink;
        }
    }
    state[1] += sum;
}
