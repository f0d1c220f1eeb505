//! What callers ask of the thread.

use std::sync::atomic::Ordering;

use super::{
    super::{
        group_state::{Effects, GroupState, Outgoing},
        message::Kind,
    },
    Command, Member, State,
};
use parallel::Op;

impl State<'_> {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Connect {
                addresses,
                digest,
                deadline,
                reply,
            } => self.connect(&addresses, digest, deadline, reply),
            Command::Group(member) => self.make(member),
            Command::Enter {
                group,
                op,
                input,
                mut waiter,
            } => match self.shared.failure() {
                Some(cause) => waiter.answer(Err(cause.error(op))),
                None => self.with(group, |state| state.enter(op, input, waiter)),
            },
            Command::Post { group, to, data } => self.post(group, to, data),
            Command::Claim {
                group,
                from,
                mut waiter,
            } => match self.shared.failure() {
                Some(cause) => waiter.answer(Err(cause.error(Op::Recv { from }))),
                None => self.with(group, |state| Ok(state.claim(from, waiter))),
            },
            Command::Forget { group, ticket } => {
                if let Some(member) = self.groups.get_mut(&group) {
                    member.state.forget(ticket);
                }
            }
            Command::Expired { group, ticket } => {
                let member = self.groups.get(&group);
                let after = self.options.timeout;
                if let Some(cause) = member.and_then(|m| m.state.expired(ticket, after)) {
                    self.fail(cause);
                }
            }
            Command::Abort => {
                if let Some(cause) = self.shared.failure() {
                    self.fail(cause);
                }
            }
            Command::Leave { group } => self.leave(group),
            Command::Transports { rank, reply } => {
                // The caller may have given up.
                let _ = reply.send(self.data.transports(rank));
            }
        }
    }

    /// Lets an event happen in a group, and does what it leads to.
    pub(super) fn with(&mut self, group: u32, event: impl FnOnce(&mut GroupState) -> Effects) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        match event(&mut member.state) {
            Ok(out) => {
                for outgoing in out {
                    self.send(group, outgoing);
                }
            }
            Err(cause) => self.fail(cause),
        }
    }

    pub(super) fn send(&mut self, group: u32, outgoing: Outgoing) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        let Outgoing { to, header, body } = outgoing;
        if to == member.state.index {
            // A buffer for this rank itself was taken.
            if header.kind == Kind::Taken {
                member.behind[to].fetch_sub(1, Ordering::AcqRel);
            }
            return;
        }
        let rank = member.state.ranks[to];
        if self.peers[rank].bye {
            return;
        }
        if let Some((_, range)) = &body {
            member.payloads.sent(header.op, range.len());
        }
        let bytes = header.encode();
        self.shared.headers.sent(bytes.len());
        if !self.data.send(rank, &bytes, body) {
            self.broken.push(rank);
        }
    }

    pub(super) fn post(&mut self, group: u32, to: usize, data: Vec<f32>) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        let own = member.state.index;
        if to == own {
            self.with(group, |state| Ok(state.keep(data)));
            return;
        }
        let outgoing = member.state.post(to, data);
        self.send(group, outgoing);
    }

    pub(super) fn leave(&mut self, group: u32) {
        let Some(member) = self.groups.get_mut(&group) else {
            return;
        };
        member.open = false;
        if self.failed {
            return;
        }
        for outgoing in member.state.leave() {
            self.send(group, outgoing);
        }
    }

    pub(super) fn make(&mut self, member: Member) {
        let id = member.state.id;
        self.made = id + 1;
        self.groups.insert(id, member);
        // Groups nobody can use any more.
        let idle = |m: &Member| !m.open && !self.busy(m);
        let ended = self.groups.iter().filter(|(_, m)| idle(m));
        for id in ended.map(|(&id, _)| id).collect::<Vec<_>>() {
            self.groups.remove(&id);
        }
        for (header, body) in std::mem::take(&mut self.early) {
            self.route(header, body);
        }
    }
}
