//! Chunks from the mapped pool to the memory of their receiver, each copy checked: what others write to the pool
//! meanwhile cannot slip in between. Large parts are split over threads.
use std::ops::Range;

use kv::{Manifest, ReadPlan};

use super::read::Store;
use crate::local::Mapped;
use crate::{TransferError, limits};

/// A whole chunk and its place.
struct Run<'a> {
    chunk: usize,
    out: &'a mut [u8],
}

/// Copies the part that `plan` describes to `out`, which has its size.
pub(super) fn part(
    manifest: &Manifest,
    plan: &ReadPlan,
    slot: &Mapped,
    out: &mut [u8],
) -> Result<(), TransferError> {
    let threads = threads(out.len());
    if threads > 1
        && let Some(runs) = whole_runs(plan, out)
    {
        return in_parallel(manifest, slot, (runs, threads));
    }
    let mut held = None;
    let mut chunk = vec![];
    plan.scatter(|entry, inside, to| {
        let index = plan.chunks()[entry];
        let run = &mut out[to..to + inside.len()];
        if inside == (0..plan.chunk(index).len()) {
            // A whole chunk goes straight to its place and is checked there.
            return take(manifest, slot, index, run);
        }
        if held != Some(entry) {
            chunk.resize(plan.chunk(index).len(), 0);
            take(manifest, slot, index, &mut chunk)?;
            held = Some(entry);
        }
        run.copy_from_slice(&chunk[inside]);
        Ok(())
    })
}

/// Whether the part is whole chunks that follow each other, so that it can be copied entry by entry.
pub(super) fn is_streamable(plan: &ReadPlan) -> bool {
    let mut next = 0;
    let whole = plan.scatter(|entry, inside, to| {
        let whole = inside == (0..plan.chunk(plan.chunks()[entry]).len()) && to == next;
        next = to + inside.len();
        whole.then_some(()).ok_or(())
    });
    whole.is_ok()
}

/// Copies the entries `entries` of a part that [`is_streamable`]; their checksums must be known.
pub(super) fn entries(
    manifest: &Manifest,
    plan: &ReadPlan,
    slot: &Mapped,
    (out, entries): (&mut [u8], Range<usize>),
) -> Result<(), TransferError> {
    let runs = whole_runs(plan, out).unwrap_or_default();
    let runs: Vec<Run<'_>> = runs
        .into_iter()
        .skip(entries.start)
        .take(entries.len())
        .collect();
    let bytes = runs.iter().map(|run| run.out.len()).sum();
    in_parallel(manifest, slot, (runs, threads(bytes)))
}

fn threads(bytes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let useful = bytes / limits::COPY_BYTES_PER_THREAD;
    useful.min(cores).clamp(1, limits::MAX_COPY_THREADS)
}

/// The part as whole chunks that follow each other in `out`; none where it is anything else.
fn whole_runs<'a>(plan: &ReadPlan, out: &'a mut [u8]) -> Option<Vec<Run<'a>>> {
    let mut places: Vec<(usize, Range<usize>)> = vec![];
    let mut next = 0;
    plan.scatter(|entry, inside, to| {
        let index = plan.chunks()[entry];
        let whole = inside == (0..plan.chunk(index).len()) && to == next;
        next = to + inside.len();
        places.push((index, to..next));
        whole.then_some(()).ok_or(())
    })
    .ok()?;
    let mut rest = out;
    let mut runs = Vec::with_capacity(places.len());
    for (chunk, place) in places {
        let (out, behind) = rest.split_at_mut(place.len());
        runs.push(Run { chunk, out });
        rest = behind;
    }
    Some(runs)
}

fn in_parallel(
    manifest: &Manifest,
    slot: &Mapped,
    (mut runs, threads): (Vec<Run<'_>>, usize),
) -> Result<(), TransferError> {
    let each = runs.len().div_ceil(threads).max(1);
    let first = each.min(runs.len());
    std::thread::scope(|scope| {
        let work = |runs: &mut [Run<'_>]| {
            let one = |run: &mut Run<'_>| take(manifest, slot, run.chunk, run.out);
            runs.iter_mut().try_for_each(one)
        };
        let (own, others) = runs.split_at_mut(first);
        let others: Vec<_> = others
            .chunks_mut(each)
            .map(|runs| scope.spawn(move || work(runs)))
            .collect();
        let mut done = work(own);
        for thread in others {
            let ended = thread.join().unwrap_or(Err(TransferError::Stopped));
            done = done.and(ended);
        }
        done
    })
}

/// Copies what is in a store to its places in the part.
pub(super) fn store(plan: &ReadPlan, store: &Store, out: &mut [u8]) {
    let first = store.entries.start;
    plan.scatter_within(store.entries.clone(), |entry, inside, to| {
        let at = plan.stored(first, entry).start;
        out[to..to + inside.len()]
            .copy_from_slice(&store.bytes[at + inside.start..at + inside.end]);
    });
}

/// Copies one chunk and checks what was copied on the way.
pub(super) fn take(
    manifest: &Manifest,
    slot: &Mapped,
    index: usize,
    chunk: &mut [u8],
) -> Result<(), TransferError> {
    let start = kv::chunk_range(index, slot.bytes(), manifest.chunk_bytes).start;
    let mut first = None;
    for _ in 0..limits::MAX_CHUNK_READS {
        let Some(crc) = slot.read_crc32c(start, chunk) else {
            return Err(TransferError::invalid("bytes", "reach past the slot"));
        };
        match manifest.verify_chunk_crc(index, crc) {
            Ok(()) => return Ok(()),
            Err(error) => first = Some(error),
        }
    }
    let reads = limits::MAX_CHUNK_READS;
    Err(
        first.map_or(TransferError::Stopped, |first| TransferError::DataLoss {
            chunks: 1,
            reads,
            first,
        }),
    )
}
