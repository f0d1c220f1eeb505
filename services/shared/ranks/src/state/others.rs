//! Joining the other ranks, looking after them, parting from them.

use std::{sync::mpsc::SyncSender, time::Instant};

use super::{
    super::{
        limits,
        message::{Cause, Header, Kind},
    },
    Joining, Peer, State,
};
use parallel::{Op, ParallelError};

impl State<'_> {
    pub(super) fn connect(
        &mut self,
        addresses: &[Vec<u8>],
        digest: u64,
        deadline: Instant,
        reply: SyncSender<Result<(), ParallelError>>,
    ) {
        self.digest = digest;
        for rank in self.others() {
            let connected = split(&addresses[rank]).and_then(|(data, control)| {
                self.data.connect(rank, data)?;
                self.control.connect(rank, control)
            });
            if let Err(error) = connected {
                let _ = reply.send(Err(error));
                return;
            }
        }
        self.connected = true;
        let hello = Header {
            number: digest,
            ..Header::control(Kind::Hello, self.rank)
        };
        self.tell_all(&hello.encode());
        self.joining = Some(Joining {
            deadline,
            after: self.options.join_timeout,
            reply,
        });
        self.check_joined();
    }

    pub(super) fn check_joined(&mut self) {
        let Some(joining) = &self.joining else {
            return;
        };
        let hello = |rank: usize| self.peers[rank].hello;
        let other = |&rank: &usize| hello(rank).is_some_and(|digest| digest != self.digest);
        let outcome = if let Some(rank) = self.others().find(other) {
            Err(ParallelError::OtherWorld { rank })
        } else if let Some(rank) = self.others().find(|&rank| hello(rank).is_none()) {
            match self.shared.failure() {
                // A rank is dead.
                Some(cause @ (Cause::Gone { .. } | Cause::Silent { .. })) => {
                    Err(cause.error(Op::Barrier))
                }
                // Whoever reports anything else has joined, so the other greetings are on their way;
                // the failure comes out of the first operation.
                _ if self.now() < joining.deadline => return,
                _ => Err(ParallelError::NotJoined {
                    rank,
                    after: joining.after,
                }),
            }
        } else {
            Ok(())
        };
        // The caller may have given up.
        let _ = joining.reply.send(outcome);
        self.joining = None;
    }

    /// Sends a message to every rank that is still there, beside the payload.
    pub(super) fn tell_all(&mut self, message: &[u8]) {
        for rank in self.others() {
            self.tell(rank, message);
        }
    }

    pub(super) fn tell(&mut self, rank: usize, message: &[u8]) {
        let peer = &self.peers[rank];
        if peer.bye || peer.broken.is_some() {
            return;
        }
        self.shared.headers.sent(message.len());
        if !self.control.send(rank, message, None) {
            self.broken.push(rank);
        }
    }

    /// Says that this rank lives, and looks whether the others do.
    pub(super) fn look_after(&mut self) {
        let now = self.now();
        let pause = now.saturating_duration_since(self.last_turn);
        self.last_turn = now;
        if pause > self.options.dead_after / 2 {
            // This rank itself was held up; what the others said meanwhile is still to be read.
            for peer in &mut self.peers {
                peer.heard = now.min(peer.heard + pause);
            }
        }
        for rank in std::mem::take(&mut self.broken) {
            self.peers[rank].broken.get_or_insert(now);
        }
        if self.connected && now >= self.next_beat {
            self.next_beat = now + self.options.heartbeat;
            let beat = Header::control(Kind::Beat, self.rank).encode();
            self.tell_all(&beat);
        }
        self.check_joined();
        if self.failed {
            return;
        }
        for rank in self.others() {
            let peer = &self.peers[rank];
            if peer.bye {
                continue;
            }
            let after = self.options.dead_after;
            let silent = now.saturating_duration_since(peer.heard) > after;
            if peer.broken.is_some_and(|at| now >= at + limits::LAST_WORDS) {
                self.fail(Cause::Gone { rank });
            } else if silent && peer.hello.is_some() {
                self.fail(Cause::Silent { rank, after });
            }
        }
        self.judge();
    }

    /// Fails when somebody waits for a rank that has left.
    pub(super) fn judge(&mut self) {
        if self.failed || !self.departures {
            return;
        }
        let mut groups = self.groups.values();
        let bereft = groups.find_map(|m| m.state.bereft(|rank| self.gone(rank)));
        if let Some(cause) = bereft {
            self.fail(cause);
        }
    }

    /// Tells everybody that nothing else comes.
    pub(crate) fn say_bye(&mut self) {
        let bye = Header::control(Kind::Bye, self.rank).encode();
        for rank in self.others() {
            if self.connected && !self.peers[rank].bye {
                self.shared.headers.sent(bye.len());
                if !self.data.send(rank, &bye, None) {
                    self.broken.push(rank);
                }
            }
        }
    }

    /// Everybody has read this rank's goodbye, or needs none.
    pub(crate) fn all_said(&self) -> bool {
        let done = |peer: &Peer| peer.farewell || peer.bye || peer.broken.is_some();
        !self.connected || self.others().all(|rank| done(&self.peers[rank]))
    }
}

/// The two worker addresses of a rank.
fn split(blob: &[u8]) -> Result<(&[u8], &[u8]), ParallelError> {
    let parts = blob.split_first_chunk().and_then(|(length, rest)| {
        let length = u32::from_le_bytes(*length) as usize;
        rest.split_at_checked(length)
    });
    let sound = parts.filter(|(data, control)| !data.is_empty() && !control.is_empty());
    sound.ok_or_else(|| ParallelError::Transport {
        what: "read a rank's address",
        message: "it is cut short".into(),
    })
}
