//! Many threads read a checkpoint at once, into a bounded ring of buffers that their consumer hands out.
//!
//! Chunks are read in any order and consumed in that of the plan. Memory is the consumer's slots and one small
//! block a reader for values that are converted or gathered on the way.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use half::bf16;
use kernels::DType;

use super::parts::{Chunk, Part, Run, plan, width};
use super::{Checkpoint, StoredType};
use crate::error::ModelError;

/// Values that are converted or gathered are read in blocks of about so many bytes.
const BLOCK_BYTES: usize = 1 << 20;

/// Who takes the chunks, and owns the memory they are read into.
pub trait ChunkSink {
    /// A buffer.
    type Slot: AsMut<[u8]> + Send;

    /// All buffers, of one size, to begin with.
    ///
    /// # Errors
    /// Whatever ends the stream.
    fn slots(&mut self) -> Result<Vec<Self::Slot>, ModelError>;

    /// Takes a chunk, in the first `chunk.bytes` bytes of `slot`. Returns a buffer that may be filled again,
    /// this or an earlier one, or none; at least one must always be out.
    ///
    /// # Errors
    /// Whatever ends the stream.
    fn take(&mut self, chunk: &Chunk, slot: Self::Slot) -> Result<Option<Self::Slot>, ModelError>;

    /// Takes back a buffer that is not needed any more, at the end.
    fn keep(&mut self, slot: Self::Slot);
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Chunks handed over.
    pub chunks: usize,
    /// Their size.
    pub bytes: u64,
}

/// What readers and consumer share.
struct Board<S> {
    /// To be filled.
    free: Vec<S>,
    /// First chunk that nobody reads yet.
    next: usize,
    /// Readers at work.
    reading: usize,
    /// Filled, by chunk.
    filled: BTreeMap<usize, S>,
    /// Why everyone stops.
    failure: Option<ModelError>,
    /// Everyone stops.
    over: bool,
}

struct Ring<S> {
    board: Mutex<Board<S>>,
    changed: Condvar,
}

/// Says that a reader stopped, also when it panics: nobody waits for it then.
struct Reader<'a, S>(&'a Ring<S>);

impl<S> Drop for Reader<'_, S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let failure = ModelError::Internal("a reader of the checkpoint panicked".into());
            self.0.stop(Some(failure));
        }
    }
}

/// Stops the readers however the consumer ends.
struct Consumer<'a, S>(&'a Ring<S>);

impl<S> Drop for Consumer<'_, S> {
    fn drop(&mut self) {
        self.0.stop(None);
    }
}

impl<S> Ring<S> {
    fn lock(&self) -> MutexGuard<'_, Board<S>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self, failure: Option<ModelError>) {
        let mut board = self.lock();
        board.over = true;
        if board.failure.is_none() {
            board.failure = failure;
        }
        self.changed.notify_all();
    }

    /// A slot and the next chunk for it; none when all are given out or everyone stops.
    fn job(&self, chunks: usize) -> Option<(usize, S)> {
        let mut board = self.lock();
        loop {
            if board.over || board.next >= chunks {
                return None;
            }
            // Slots go to chunks in order, so the one that is consumed next always has one.
            if let Some(slot) = board.free.pop() {
                board.next += 1;
                board.reading += 1;
                return Some((board.next - 1, slot));
            }
            let waited = self.changed.wait(board);
            board = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self, index: usize, slot: S) {
        let mut board = self.lock();
        board.reading -= 1;
        board.filled.insert(index, slot);
        self.changed.notify_all();
    }

    fn give(&self, slot: S) {
        self.lock().free.push(slot);
        self.changed.notify_all();
    }

    /// Chunk `index`, once it has been read. Readers end by themselves or fail, so this does.
    fn filled(&self, index: usize) -> Result<S, ModelError> {
        let mut board = self.lock();
        loop {
            if let Some(failure) = board.failure.take() {
                return Err(failure);
            }
            if let Some(slot) = board.filled.remove(&index) {
                return Ok(slot);
            }
            if board.next <= index && board.free.is_empty() && board.reading == 0 {
                return Err(ModelError::Internal("a consumer kept all slots".into()));
            }
            let waited = self.changed.wait(board);
            board = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Checkpoint {
    /// Reads `parts` with `readers` threads and hands them to `sink` on this thread, in order, in chunks of at
    /// most one slot. Of a tensor, only the rows that are wanted are read, whole.
    ///
    /// # Errors
    /// Before anything is read: a part that the checkpoint does not have, has in another shape, or in a type
    /// other than F32 and BF16. Then a file that cannot be read or has become shorter, or what the sink says.
    pub fn stream<K: ChunkSink>(
        &self,
        parts: &[Part],
        readers: usize,
        sink: &mut K,
    ) -> Result<Streamed, ModelError> {
        let mut free = sink.slots()?;
        let slot = free.iter_mut().map(|s| s.as_mut().len()).min().unwrap_or(0);
        let chunks = plan(self, parts, slot)?;
        let ring = Ring {
            board: Mutex::new(Board {
                free,
                next: 0,
                reading: 0,
                filled: BTreeMap::new(),
                failure: None,
                over: false,
            }),
            changed: Condvar::new(),
        };
        let readers = readers.clamp(1, chunks.len().max(1));
        let streamed = std::thread::scope(|scope| {
            let consumer = Consumer(&ring);
            for _ in 0..readers {
                scope.spawn(|| self.read_chunks(parts, &chunks, &ring));
            }
            let mut streamed = Streamed::default();
            for (index, chunk) in chunks.iter().enumerate() {
                let slot = consumer.0.filled(index)?;
                if let Some(slot) = sink.take(chunk, slot)? {
                    consumer.0.give(slot);
                }
                streamed.chunks += 1;
                streamed.bytes += chunk.bytes as u64;
            }
            Ok(streamed)
        });
        let board = ring.board.into_inner();
        let board = board.unwrap_or_else(PoisonError::into_inner);
        for slot in board.free.into_iter().chain(board.filled.into_values()) {
            sink.keep(slot);
        }
        streamed
    }

    /// One reader.
    fn read_chunks<S: AsMut<[u8]>>(&self, parts: &[Part], chunks: &[Chunk], ring: &Ring<S>) {
        let _guard = Reader(ring);
        let mut scratch = Vec::new();
        while let Some((index, mut slot)) = ring.job(chunks.len()) {
            let chunk = &chunks[index];
            let out = &mut slot.as_mut()[..chunk.bytes];
            match self.read_chunk(&parts[chunk.part], &chunk.runs, out, &mut scratch) {
                Ok(()) => ring.done(index, slot),
                Err(failure) => return ring.stop(Some(failure)),
            }
        }
    }

    /// Reads runs of a part one after the other, in the type that is wanted.
    fn read_chunk(
        &self,
        part: &Part,
        runs: &[Run],
        mut out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let entry = self.checked(&part.name, &part.shape)?;
        let stored = match entry.dtype {
            StoredType::F32 => DType::F32,
            StoredType::Bf16 => DType::Bf16,
            StoredType::Other => return Err(super::unreadable(&part.name)),
        };
        let shard = &self.shards[entry.file];
        let read = |start: usize, to: &mut [u8]| {
            let at = entry.offset + (start * width(stored)) as u64;
            shard.file.read_exact_at(to, at).map_err(|e| {
                let message = format!("{} bytes at {at} cannot be read: {e}", to.len());
                ModelError::file(&shard.name, message)
            })
        };
        for run in runs {
            let (now, rest) = out.split_at_mut(run.rows * run.width * width(part.dtype));
            out = rest;
            if run.rows == 1 && stored == part.dtype {
                read(run.start, now)?;
                continue;
            }
            for (block, to) in blocks(run, stored, now, width(part.dtype)) {
                let span = (block.rows - 1) * block.stride + block.width;
                scratch.resize(span * width(stored), 0);
                read(block.start, scratch)?;
                let from = scratch.chunks(block.stride.max(block.width) * width(stored));
                let rows = to.chunks_exact_mut(block.width * width(part.dtype));
                for (from, to) in from.zip(rows) {
                    convert(&from[..block.width * width(stored)], stored, to, part.dtype);
                }
            }
        }
        Ok(())
    }
}

/// A run in blocks of about [`BLOCK_BYTES`], with the part of `out` that each fills.
fn blocks<'a>(
    run: &Run,
    stored: DType,
    mut out: &'a mut [u8],
    value: usize,
) -> impl Iterator<Item = (Run, &'a mut [u8])> {
    let values = BLOCK_BYTES / width(stored);
    let mut left = *run;
    std::iter::from_fn(move || {
        // Whole stored rows count, of which at least one is read.
        let room = if left.rows == 1 {
            values
        } else {
            (values / left.stride.max(1)).max(1) * left.width
        };
        let head = left.split(room)?;
        let (now, rest) = std::mem::take(&mut out).split_at_mut(head.rows * head.width * value);
        out = rest;
        Some((head, now))
    })
}

/// Little-endian values of one type as another.
fn convert(from: &[u8], stored: DType, to: &mut [u8], wanted: DType) {
    match (stored, wanted) {
        (DType::F32, DType::Bf16) => {
            let (from, to) = (from.as_chunks::<4>().0, to.as_chunks_mut::<2>().0);
            for (from, to) in from.iter().zip(to) {
                *to = bf16::from_f32(f32::from_le_bytes(*from)).to_le_bytes();
            }
        }
        (DType::Bf16, DType::F32) => {
            let (from, to) = (from.as_chunks::<2>().0, to.as_chunks_mut::<4>().0);
            for (from, to) in from.iter().zip(to) {
                *to = bf16::from_le_bytes(*from).to_f32().to_le_bytes();
            }
        }
        (DType::F32, DType::F32) | (DType::Bf16, DType::Bf16) => to.copy_from_slice(from),
    }
}

#[cfg(test)]
mod tests;
