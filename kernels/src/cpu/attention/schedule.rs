//! How attention is cut into tiles and spread over threads.
//!
//! It decides who computes what and where the rows go; the arithmetic is in [`super::core`].

use std::ops::Range;

use rayon::prelude::*;

use super::KvPart;
use super::core::{Buffers, Core};
use crate::cpu::par;
use crate::cpu::recycle::Recycled;
use crate::cpu::workspace::{Scratch, scratch};

/// Query rows (queries times query heads of a group) per tile, for heads of up to 64 elements. More
/// rows pack keys less often; fewer leave room for keys in the second-level cache.
const QUERY_ROWS: usize = 384;

/// Sizes of the heads.
#[derive(Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) q: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
}

/// Queries `q` (packed tokens) of one row; query `i` sees its first `visible + step * i` keys.
#[derive(Clone)]
pub(super) struct QueryTile<'a> {
    pub(super) q: Range<usize>,
    pub(super) visible: usize,
    pub(super) step: usize,
    /// Cached keys come first, page after page.
    pub(super) past: &'a [KvPart<'a>],
    /// Keys in `past`.
    pub(super) cached: usize,
    /// Token of the fresh keys that follows the cached ones.
    pub(super) fresh: usize,
}

impl QueryTile<'_> {
    pub(super) fn visible(&self, query: usize) -> usize {
        self.visible + self.step * query
    }

    pub(super) fn most_visible(&self) -> usize {
        self.visible(self.q.len() - 1)
    }
}

impl HeadShape {
    pub(super) fn group(&self) -> usize {
        self.q / self.kv
    }

    /// Queries of a full tile.
    pub(super) fn tile_queries(&self) -> usize {
        let rows = QUERY_ROWS * 64 / self.dim.max(64);
        (rows / self.group()).max(1)
    }

    /// Upper bound of the scratch elements of one call, per thread: the buffers, and the strips of
    /// [`by_head`] for fewer than two tiles per thread.
    pub(super) fn scratch_per_thread(&self) -> usize {
        self.buffer_elements() + 2 * self.tile_queries() * self.q * (self.dim + 1)
    }

    /// Cuts a segment into tiles of nearly equal size.
    pub(super) fn split<'a>(&self, segment: QueryTile<'a>, tiles: &mut Vec<QueryTile<'a>>) {
        let total = segment.q.len();
        if total == 0 {
            return;
        }
        let per_tile = total.div_ceil(total.div_ceil(self.tile_queries()));
        for start in (0..total).step_by(per_tile) {
            let end = (start + per_tile).min(total);
            tiles.push(QueryTile {
                q: segment.q.start + start..segment.q.start + end,
                visible: segment.visible(start),
                ..segment.clone()
            });
        }
    }
}

/// One piece of parallel work: a tile, its KV heads, and the output rows of exactly those heads.
pub(super) struct Task<'a, 'o> {
    pub(super) tile: &'a QueryTile<'a>,
    pub(super) heads: Range<usize>,
    /// `[queries, query heads * dim]`.
    pub(super) out: &'o mut [f32],
    /// `[queries, query heads]`; empty where nobody asks for it.
    pub(super) lse: &'o mut [f32],
}

/// Runs all tiles, each with at least one visible key; no query may be in two. `[T, q * dim]`.
///
/// `lse` is empty or `[T, q]`: then it takes the log of each query's sum of exponentials. Queries of no tile
/// get zeros, and negative infinity in `lse`.
pub(super) fn attend(core: &Core<'_>, mut tiles: Vec<QueryTile<'_>>, lse: &mut [f32]) -> Recycled {
    let shape = core.shape;
    let width = shape.q * shape.dim;
    let mut out = Recycled::stale(core.q.len());
    tiles.sort_by_key(|t| t.q.start);
    fill_gaps(shape, &tiles, &mut out, lse);
    let work: usize = tiles
        .iter()
        .map(|t| t.q.len() * t.most_visible() * width / 4)
        .sum();
    let threads = par::threads(work);
    if threads > 1 && tiles.len() < 2 * threads && shape.kv > 1 {
        by_head(core, &tiles, &mut out, lse);
        return out;
    }
    let mut tasks = whole_rows(shape, &tiles, &mut out, lse);
    if threads > 1 {
        tasks.par_iter_mut().with_max_len(1).for_each_init(
            || Buffers::new(shape),
            |buffers, task| core.run(task, buffers),
        );
    } else {
        let mut buffers = Buffers::new(shape);
        tasks
            .iter_mut()
            .for_each(|task| core.run(task, &mut buffers));
    }
    drop(tasks);
    out
}

/// Elements of `lse` per query: its heads, or nothing where it is not wanted.
fn lse_width(lse: &[f32], heads: usize) -> usize {
    if lse.is_empty() { 0 } else { heads }
}

/// The answer for queries of no tile, which see no key.
fn fill_gaps(shape: HeadShape, tiles: &[QueryTile<'_>], out: &mut [f32], lse: &mut [f32]) {
    let (width, lse_width) = (shape.q * shape.dim, lse_width(lse, shape.q));
    let queries = out.len() / width;
    let mut next = 0;
    let end = std::iter::once(queries..queries);
    for q in tiles.iter().map(|t| t.q.clone()).chain(end) {
        out[next * width..q.start * width].fill(0.0);
        lse[next * lse_width..q.start * lse_width].fill(f32::NEG_INFINITY);
        next = q.end;
    }
}

/// One task a tile, with all heads.
fn whole_rows<'a, 'o>(
    shape: HeadShape,
    tiles: &'a [QueryTile<'a>],
    mut out: &'o mut [f32],
    mut lse: &'o mut [f32],
) -> Vec<Task<'a, 'o>> {
    let (width, lse_width) = (shape.q * shape.dim, lse_width(lse, shape.q));
    let mut next = 0;
    let mut tasks = Vec::with_capacity(tiles.len());
    for tile in tiles {
        let (skip, count) = (tile.q.start - next, tile.q.len());
        next = tile.q.end;
        tasks.push(Task {
            tile,
            heads: 0..shape.kv,
            out: take(&mut out, skip * width, count * width),
            lse: take(&mut lse, skip * lse_width, count * lse_width),
        });
    }
    tasks
}

/// Cuts `count` elements off the front of `rest` after dropping `skip`.
fn take<'o>(rest: &mut &'o mut [f32], skip: usize, count: usize) -> &'o mut [f32] {
    let (_, tail) = std::mem::take(rest).split_at_mut(skip);
    let (mine, tail) = tail.split_at_mut(count);
    *rest = tail;
    mine
}

/// Few tiles: threads split the KV heads too, and the strips are put together afterwards.
fn by_head(core: &Core<'_>, tiles: &[QueryTile<'_>], out: &mut [f32], lse: &mut [f32]) {
    let HeadShape { q: heads, kv, dim } = core.shape;
    let group = core.shape.group();
    let (strip_width, lse_group) = (group * dim, lse_width(lse, group));
    let strips: Vec<Scratch> = (0..tiles.len() * kv)
        .into_par_iter()
        .map(|i| {
            let (tile, head) = (&tiles[i / kv], i % kv);
            let mut strip = scratch(tile.q.len() * (strip_width + lse_group));
            let (out, lse) = strip.split_at_mut(tile.q.len() * strip_width);
            let mut task = Task {
                tile,
                heads: head..head + 1,
                out,
                lse,
            };
            core.run(&mut task, &mut Buffers::new(core.shape));
            strip
        })
        .collect();
    for (i, strip) in strips.iter().enumerate() {
        let (tile, head) = (&tiles[i / kv], i % kv);
        let (parts, lses) = strip.split_at(tile.q.len() * strip_width);
        for (t, part) in tile.q.clone().zip(parts.chunks_exact(strip_width)) {
            out[(t * kv + head) * strip_width..][..strip_width].copy_from_slice(part);
        }
        if lse_group > 0 {
            for (t, part) in tile.q.clone().zip(lses.chunks_exact(group)) {
                lse[t * heads + head * group..][..group].copy_from_slice(part);
            }
        }
    }
}
