//! Chunks from the mapped pool to the memory of their receiver, each copy checked: what others write to the pool
//! meanwhile cannot slip in between. Large parts are split over threads.
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fabric::Store;
use kv::{Manifest, ReadPlan};

use super::read;
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
    let whole = out.len();
    let threads = threads(whole);
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
            return take(manifest, slot, index, (run, store_for(whole)));
        }
        if held != Some(entry) {
            chunk.resize(plan.chunk(index).len(), 0);
            take(manifest, slot, index, (&mut chunk, Store::Cached))?;
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

/// Copies runs over so many threads, each taking the next one when it is done: one that comes late takes fewer.
fn in_parallel(
    manifest: &Manifest,
    slot: &Mapped,
    (mut runs, threads): (Vec<Run<'_>>, usize),
) -> Result<(), TransferError> {
    let bytes = runs.iter().map(|run| run.out.len()).sum();
    let left = Mutex::new(runs.iter_mut());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(run) = next() {
            take(manifest, slot, run.chunk, (run.out, store_for(bytes)))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for thread in others {
            let ended = thread.join().unwrap_or(Err(TransferError::Stopped));
            done = done.and(ended);
        }
        done
    })
}

fn store_for(bytes: usize) -> Store {
    if bytes >= limits::UNCACHED_COPY_BYTES {
        Store::Past
    } else {
        Store::Cached
    }
}

/// Copies what is in a store to its places in the part.
pub(super) fn store(plan: &ReadPlan, store: &read::Store, out: &mut [u8]) {
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
    (chunk, store): (&mut [u8], Store),
) -> Result<(), TransferError> {
    let start = kv::chunk_range(index, slot.bytes(), manifest.chunk_bytes).start;
    let mut first = None;
    for _ in 0..limits::MAX_CHUNK_READS {
        let Some(crc) = slot.read_crc32c(start, chunk, store) else {
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
