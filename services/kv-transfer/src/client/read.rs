//! One store at a time: read, checked, and read again where that is needed.
use std::ops::Range;
use std::time::Duration;

use base::{Deadline, clock};
use kv::{KvError, ReadPlan};

use super::reach::{Place, Reach, blocking};
use super::spare::Spares;
use crate::engine::Part;
use crate::{TransferError, limits};

/// Consecutive entries of a plan, read and checked.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) entries: Range<usize>,
    pub(super) bytes: Vec<u8>,
    /// Chunks that had to be read again.
    pub(super) repaired: usize,
    /// What its checks took.
    pub(super) checked: Duration,
    pub(super) transport: String,
}

/// Reads stores of one slot.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) reach: &'a Reach,
    pub(super) spares: &'a Spares,
    pub(super) place: &'a Place,
    pub(super) plan: &'a ReadPlan,
    pub(super) deadline: Deadline,
}

impl Reader<'_> {
    /// Reads the entries `entries`, whose chunks and checksums are `chunks`. When the connection breaks on the
    /// way, this store is begun again, a bounded number of times; the others are not touched by that.
    pub(super) async fn read(
        self,
        entries: Range<usize>,
        chunks: Vec<(usize, u32)>,
    ) -> Result<Store, TransferError> {
        let (mut resumes, mut pause) = (0, limits::RESUME_PAUSE);
        loop {
            match self.attempt(entries.clone(), &chunks).await {
                Err(TransferError::PeerLost(error)) if resumes < limits::MAX_RESUMES => {
                    resumes += 1;
                    tracing::warn!(%error, resumes, "a connection broke, its chunks are read again");
                    let what = "reading the payload again";
                    let paused = self.deadline.bound(what, tokio::time::sleep(pause)).await;
                    pause = limits::MAX_RESUME_PAUSE.min(pause * 2);
                    paused.map_err(|_| TransferError::Deadline { what })?;
                }
                ended => return ended,
            }
        }
    }

    async fn attempt(
        self,
        entries: Range<usize>,
        chunks: &[(usize, u32)],
    ) -> Result<Store, TransferError> {
        let plan = self.plan;
        let first = entries.start;
        let mut bytes = self.spares.room(plan.store_bytes(entries.clone()))?;
        let reads = plan.reads(entries.clone());
        let mut parts: Vec<Part> = reads
            .into_iter()
            .map(|(from, to)| part(&from, to))
            .collect();
        let (mut repaired, mut checked) = (0, Duration::ZERO);
        let mut worst = None;
        for _ in 0..limits::MAX_CHUNK_READS {
            let read = self.reach.read(self.place, bytes, parts, self.deadline);
            let (buffer, transport) = read.await?;
            let places = entries.clone().map(|entry| plan.stored(first, entry));
            let expected: Vec<(Range<usize>, u32)> = places
                .zip(chunks)
                .map(|(at, &(_, crc))| (at, crc))
                .collect();
            let check = move || {
                let start = clock::now();
                let bad = damaged(&buffer, &expected);
                (bad, clock::now().saturating_duration_since(start), buffer)
            };
            let (bad, took, buffer) = blocking(check).await?;
            checked += took;
            bytes = buffer;
            let Some(&(index, got)) = bad.first() else {
                return Ok(Store {
                    entries,
                    bytes,
                    repaired,
                    checked,
                    transport,
                });
            };
            tracing::warn!(
                chunks = bad.len(),
                "chunks failed their checksum, reading them again"
            );
            let (chunk, expected) = chunks[index];
            let error = KvError::Chunk {
                index: chunk,
                expected,
                got,
            };
            worst = Some((bad.len(), error));
            repaired = bad.len();
            let again = |&(index, _): &(usize, u32)| {
                part(
                    &plan.chunk(chunks[index].0),
                    plan.stored(first, first + index).start,
                )
            };
            parts = bad.iter().map(again).collect();
        }
        let reads = limits::MAX_CHUNK_READS;
        Err(worst.map_or(TransferError::Stopped, |(chunks, first)| {
            TransferError::DataLoss {
                chunks,
                reads,
                first,
            }
        }))
    }
}

fn part(from: &Range<usize>, to: usize) -> Part {
    Part {
        remote: from.start as u64,
        local: to..to + from.len(),
    }
}

/// The entries whose bytes do not match, with what their checksums are.
fn damaged(bytes: &[u8], expected: &[(Range<usize>, u32)]) -> Vec<(usize, u32)> {
    let check = |(index, (at, crc)): (usize, &(Range<usize>, u32))| {
        let got = kv::crc32c(&bytes[at.clone()]);
        (got != *crc).then_some((index, got))
    };
    expected.iter().enumerate().filter_map(check).collect()
}
