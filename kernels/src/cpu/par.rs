//! Splitting work over threads without changing a result.

use rayon::prelude::*;

/// A task shorter than this many elementary operations (about 20 microseconds) is not worth a thread.
const MIN_WORK: usize = 1 << 17;

/// Threads worth using for `work` elementary operations in all.
pub(crate) fn threads(work: usize) -> usize {
    (work / MIN_WORK).min(rayon::current_num_threads()).max(1)
}

/// Number of pieces for `items` items of `work_per_item` elementary operations each.
pub(crate) fn pieces(items: usize, work_per_item: usize) -> usize {
    threads(items.saturating_mul(work_per_item))
        .min(items)
        .max(1)
}

/// Calls `f(first_row, rows)` on disjoint pieces of `out`, each a whole number of rows of `row` elements.
///
/// The pieces depend on the number of threads, so `f` must compute each row on its own.
pub(crate) fn rows(
    out: &mut [f32],
    row: usize,
    work_per_row: usize,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    if out.is_empty() || row == 0 {
        return;
    }
    let count = out.len() / row;
    let pieces = pieces(count, work_per_row);
    if pieces == 1 {
        return f(0, out);
    }
    let per_piece = count.div_ceil(pieces);
    out.par_chunks_mut(per_piece * row)
        .enumerate()
        .for_each(|(i, rows)| f(i * per_piece, rows));
}
