//! What comes from other ranks.

use std::sync::atomic::Ordering;

use fabric::Body;

use super::{
    super::{
        limits,
        message::{Cause, Header, Kind},
    },
    State,
};
use parallel::{Op, ParallelError};

impl State<'_> {
    /// The header of a message, from a rank that exists.
    pub(super) fn read<'b>(&mut self, bytes: &'b [u8]) -> Option<(Header, &'b [u8])> {
        self.shared.headers.received(bytes.len());
        let sound =
            |(header, _): &(Header, _)| header.from < self.peers.len() && header.from != self.rank;
        let Some((header, rest)) = Header::decode(bytes).filter(sound) else {
            self.fail(Cause::transport("read a message", "it makes no sense"));
            return None;
        };
        self.peers[header.from].heard = self.now();
        Some((header, rest))
    }

    pub(super) fn control_message(&mut self, bytes: &[u8]) {
        let Some((header, rest)) = self.read(bytes) else {
            return;
        };
        let peer = &mut self.peers[header.from];
        match header.kind {
            Kind::Hello => {
                peer.hello = Some(header.number);
                self.check_joined();
            }
            Kind::Farewell => peer.farewell = true,
            Kind::Fail => {
                let cause = Cause::decode(rest);
                let unreadable = || Cause::Gone { rank: header.from };
                self.adopt(cause.unwrap_or_else(unreadable));
            }
            _ => {}
        }
    }

    pub(super) fn data_message(&mut self, bytes: &[u8], body: Body) {
        let Some((header, _)) = self.read(bytes) else {
            return;
        };
        if header.kind == Kind::Bye {
            let farewell = Header::control(Kind::Farewell, self.rank).encode();
            self.tell(header.from, &farewell);
            self.peers[header.from].bye = true;
            self.departures = true;
            return;
        }
        self.route(header, body);
    }

    /// Takes a message to its group.
    pub(super) fn route(&mut self, header: Header, body: Body) {
        if self.failed {
            return;
        }
        let Some(member) = self.groups.get_mut(&header.group) else {
            if header.group >= self.made {
                self.early.push((header, body));
            }
            if self.early.len() > limits::MAX_EARLY_MESSAGES {
                let bound = limits::MAX_EARLY_MESSAGES;
                let message = format!("more than {bound} for groups that this rank has not made");
                self.fail(Cause::transport("keep messages", message));
            }
            return;
        };
        let expected = member.state.axes;
        let place = member.state.place(header.from);
        let (true, Some(from)) = (header.axes == expected, place) else {
            return self.fail(Cause::Error(ParallelError::GroupsDiffer {
                rank: header.from,
                number: header.group,
                expected,
                got: header.axes,
            }));
        };
        if header.kind == Kind::Taken {
            let less = |n: usize| n.checked_sub(1);
            // A count that is zero already is a peer's mistake, and harmless.
            let _ = member.behind[from].fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
            return;
        }
        self.departures |= header.kind == Kind::Leave;
        let elements = body.elements();
        if matches!(body, Body::Malformed) || elements > limits::MAX_BODY_ELEMENTS {
            let message = format!("a body of rank {} has no legal length", header.from);
            return self.fail(Cause::transport("read a message", message));
        }
        self.with(header.group, |state| state.hear(from, &header, elements));
        if self.failed {
            return;
        }
        match body {
            Body::Here(data) => self.arrived(&header, data),
            Body::Announced(announced) => match announced.receive() {
                Ok(receiving) => self.receives.push((header, receiving)),
                Err(_) => self.broken.push(header.from),
            },
            Body::Malformed => {}
        }
    }

    /// A whole body is here.
    pub(super) fn arrived(&mut self, header: &Header, data: Vec<f32>) {
        if self.failed {
            return;
        }
        let Some(member) = self.groups.get_mut(&header.group) else {
            return;
        };
        let Some(from) = member.state.place(header.from) else {
            return;
        };
        let op = match header.kind {
            Kind::Mail => Op::Recv { from },
            _ => header.op,
        };
        member.payloads.received(op, data.len());
        self.with(header.group, |state| state.arrive(from, header, data));
    }

    /// Ends what UCX has finished.
    pub(super) fn reap(&mut self) -> bool {
        let mut moved = self.data.reap(&mut self.broken);
        moved |= self.control.reap(&mut self.broken);
        let mut at = 0;
        while at < self.receives.len() {
            let Some(result) = self.receives[at].1.poll() else {
                at += 1;
                continue;
            };
            let (header, _) = self.receives.swap_remove(at);
            match result {
                Ok(data) => self.arrived(&header, data),
                Err(_) => self.broken.push(header.from),
            }
            moved = true;
        }
        moved
    }
}
