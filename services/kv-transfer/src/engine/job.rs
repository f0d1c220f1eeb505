use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use tokio::sync::oneshot;

use super::handle::{Command, Landed, Part};
use crate::{TransferError, limits};
use fabric::{Endpoint, Payload, RemoteKey, Transfer, UcxError};

/// A transfer under way.
#[derive(Debug)]
pub(super) struct Job {
    transfer: Transfer,
    /// Address of the payload's first byte at the peer.
    remote: u64,
    pieces: VecDeque<Part>,
    flush: Flush,
    deadline: Instant,
    /// Taken when the caller has its answer; from then on the job only drains.
    reply: Option<oneshot::Sender<Result<(Payload, Landed), TransferError>>>,
    /// When the connection was cut because operations ran on.
    cut: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flush {
    /// Reads are complete when their operations are.
    NotNeeded,
    /// Writes must be confirmed by the peer.
    Due,
    Posted,
}

/// What a turn of a job came to.
#[derive(Debug)]
pub(super) enum Turn {
    /// Nothing happened.
    Idle,
    /// Something moved.
    Moved,
    /// The connection is unusable: cut it.
    Broken(Rc<Endpoint>),
    /// The job can go: every operation of it has ended.
    Over,
}

impl Job {
    pub(super) fn new(key: &Rc<RemoteKey>, command: Command) -> Option<Self> {
        let Command {
            target,
            payload,
            parts,
            deadline,
            reply,
        } = command;
        let flush = match &payload {
            Payload::Source(_) => Flush::Due,
            Payload::Target(_) => Flush::NotNeeded,
        };
        let pieces = parts.into_iter().flat_map(split).collect();
        match Transfer::new(key, payload) {
            Ok(transfer) => Some(Self {
                transfer,
                remote: target.address,
                pieces,
                flush,
                deadline: deadline.instant(),
                reply: Some(reply),
                cut: None,
            }),
            Err(error) => {
                let _ = reply.send(Err(error.into()));
                None
            }
        }
    }

    /// When this job must be looked at, whatever else happens.
    pub(super) fn next_look(&self) -> Instant {
        match (&self.reply, self.cut) {
            (Some(_), _) => self.deadline,
            (None, None) => self.deadline + limits::DRAIN_GRACE,
            (None, Some(cut)) => cut + limits::LEAK_GRACE,
        }
    }

    /// One turn: reap, then start what fits.
    pub(super) fn turn(&mut self, now: Instant) -> Turn {
        let before = self.transfer.outstanding();
        let moved = match self.advance(now) {
            Ok(moved) => moved,
            Err(error) => {
                self.answer(Err(TransferError::PeerLost(error)));
                return self.broken(now);
            }
        };
        if self.reply.is_none() {
            return self.drain(now, before);
        }
        if moved { Turn::Moved } else { Turn::Idle }
    }

    /// Answers the caller, who may be gone.
    pub(super) fn answer(&mut self, result: Result<(Payload, Landed), TransferError>) {
        self.pieces.clear();
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(result);
        }
    }

    /// True when UCX is done with the memory of this job.
    pub(super) fn is_over(&self) -> bool {
        self.reply.is_none() && self.transfer.outstanding() == 0
    }

    fn advance(&mut self, now: Instant) -> Result<bool, UcxError> {
        let mut moved = self.transfer.reap()? > 0;
        let Some(reply) = &self.reply else {
            return Ok(moved);
        };
        if reply.is_closed() {
            // The caller may give its lease up with its future: what runs must end soon.
            self.deadline = self.deadline.min(now);
            self.answer(Err(TransferError::Stopped));
        } else if now >= self.deadline {
            self.answer(Err(TransferError::Deadline {
                what: "moving the payload",
            }));
        } else {
            moved |= self.start_pieces()?;
            if self.pieces.is_empty() && self.transfer.outstanding() == 0 {
                moved = true;
                self.finish()?;
            }
        }
        Ok(moved)
    }

    /// Starts pieces until the window is full. Copies over shared memory end within the call, so
    /// their number is bounded too: other jobs and the deadline get their turn.
    fn start_pieces(&mut self) -> Result<bool, UcxError> {
        let mut started = 0;
        while started < limits::PIECES_IN_FLIGHT
            && self.transfer.outstanding() < limits::PIECES_IN_FLIGHT
            && let Some(piece) = self.pieces.pop_front()
        {
            let remote = self.remote + piece.remote;
            self.transfer.post(piece.local, remote)?;
            started += 1;
        }
        Ok(started > 0)
    }

    fn finish(&mut self) -> Result<(), UcxError> {
        if self.flush == Flush::Due {
            self.flush = Flush::Posted;
            self.transfer.post_flush()?;
            if self.transfer.outstanding() > 0 {
                return Ok(());
            }
        }
        let transport = self.transfer.key().endpoint().transports()?.join(",");
        let payload = self.transfer.take_payload();
        let result = payload.map(|payload| (payload, Landed { transport }));
        self.answer(result.ok_or(TransferError::Stopped));
        Ok(())
    }

    /// After the answer: waits until UCX lets go of the memory.
    fn drain(&mut self, now: Instant, before: usize) -> Turn {
        if self.transfer.outstanding() == 0 {
            return Turn::Over;
        }
        let late = now >= self.next_look();
        match (late, self.cut) {
            (true, Some(_)) => {
                tracing::warn!("an operation never ended, its memory is leaked");
                Turn::Over
            }
            (true, None) => self.broken(now),
            _ if self.transfer.outstanding() < before => Turn::Moved,
            _ => Turn::Idle,
        }
    }

    fn broken(&mut self, now: Instant) -> Turn {
        self.cut.get_or_insert(now);
        Turn::Broken(Rc::clone(self.transfer.key().endpoint()))
    }
}

/// Cuts a part into pieces.
fn split(part: Part) -> impl Iterator<Item = Part> {
    let Range { start, end } = part.local;
    (start..end)
        .step_by(limits::PIECE_BYTES)
        .map(move |at| Part {
            remote: part.remote + (at - start) as u64,
            local: at..end.min(at.saturating_add(limits::PIECE_BYTES)),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_tile_their_part(
            remote in 0u64..1 << 40, start in 0usize..100_000_000, len in 1usize..100_000_000,
        ) {
            let mut next = start;
            for piece in split(Part { remote, local: start..start + len }) {
                prop_assert_eq!(piece.local.start, next);
                prop_assert_eq!(piece.remote - remote, (next - start) as u64);
                prop_assert!(!piece.local.is_empty() && piece.local.len() <= limits::PIECE_BYTES);
                next = piece.local.end;
            }
            prop_assert_eq!(next, start + len);
        }
    }
}
