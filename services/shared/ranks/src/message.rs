//! What ranks write to each other: one fixed header, and the cause of a failure behind it.

use std::{sync::Arc, time::Duration};

use super::limits;
use parallel::{Axis, AxisSet, Op, ParallelError};

/// First byte of every header: the version of this form.
const VERSION: u8 = 1;
/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 36;

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A rank has entered a collective; the body is its part for the receiver.
    Enter,
    /// A finished part of a sum.
    Sum,
    /// A buffer of `send`.
    Mail,
    /// The receiver has taken a buffer of `send`.
    Taken,
    /// A rank has dropped its end of a group; `number` collectives and `elements` buffers were given.
    Leave,
    /// Nothing else comes from this rank, in any group.
    Bye,
    /// First word between two ranks; `number` tells the world apart.
    Hello,
    /// A rank lives.
    Beat,
    /// The world has failed; the cause follows the header.
    Fail,
    /// The answer to [`Self::Bye`].
    Farewell,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Enter,
        Self::Sum,
        Self::Mail,
        Self::Taken,
        Self::Leave,
        Self::Bye,
        Self::Hello,
        Self::Beat,
        Self::Fail,
        Self::Farewell,
    ];
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// The sender, numbered as in the mesh.
    pub(super) from: usize,
    /// The group, numbered in the order of creation.
    pub(super) group: u32,
    /// Axes of the group.
    pub(super) axes: AxisSet,
    pub(super) op: Op,
    /// Number of the operation in its group, or of the buffer between two ranks.
    pub(super) number: u64,
    /// Elements of the sender's whole buffer, of which the body may be a part.
    pub(super) elements: usize,
}

impl Header {
    /// A header that concerns no operation.
    pub(super) fn control(kind: Kind, from: usize) -> Self {
        Self {
            kind,
            from,
            group: 0,
            axes: AxisSet::EMPTY,
            op: Op::Barrier,
            number: 0,
            elements: 0,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        let (op, argument) = op_code(self.op);
        out.extend([VERSION, self.kind as u8, op, bits(self.axes)]);
        out.extend((self.from as u32).to_le_bytes());
        out.extend(self.group.to_le_bytes());
        out.extend(argument.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.number.to_le_bytes());
        out.extend((self.elements as u64).to_le_bytes());
        out
    }

    /// The header at the start of `bytes`, and what follows it.
    pub(super) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = Reader(bytes);
        let [version, kind, op, axes] = rest.array()?;
        if version != VERSION {
            return None;
        }
        let from = rest.u32()? as usize;
        let group = rest.u32()?;
        let argument = rest.u32()?;
        rest.u32()?;
        let header = Self {
            kind: *Kind::ALL.get(usize::from(kind))?,
            from,
            group,
            axes: axes_of(axes)?,
            op: op_of(op, argument)?,
            number: rest.u64()?,
            elements: usize::try_from(rest.u64()?).ok()?,
        };
        Some((header, rest.0))
    }
}

/// Takes numbers off the front of some bytes.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn rank(&mut self) -> Option<usize> {
        self.u32().map(|rank| rank as usize)
    }

    fn op(&mut self) -> Option<Op> {
        let code = self.u8()?;
        op_of(code, self.u32()?)
    }

    fn duration(&mut self) -> Option<Duration> {
        self.u64().map(Duration::from_nanos)
    }

    fn text(&mut self) -> Arc<str> {
        String::from_utf8_lossy(std::mem::take(&mut self.0)).into()
    }
}

/// One bit an axis, outermost lowest.
fn bits(axes: AxisSet) -> u8 {
    axes.axes().fold(0, |bits, axis| bits | 1 << axis as u8)
}

fn axes_of(bits: u8) -> Option<AxisSet> {
    let all = Axis::ALL;
    let chosen = all.iter().filter(|&&axis| bits & 1 << axis as u8 != 0);
    let axes = chosen.fold(AxisSet::EMPTY, |axes, &axis| axes.with(axis));
    (bits >> all.len() == 0).then_some(axes)
}

/// Number and argument of an operation. Groups have at most `MAX_RANKS` ranks: arguments fit.
fn op_code(op: Op) -> (u8, u32) {
    let argument = match op {
        Op::Broadcast { root: n }
        | Op::RingShift { hop: n }
        | Op::Send { to: n }
        | Op::Recv { from: n } => n as u32,
        _ => 0,
    };
    (op.kind() as u8, argument)
}

fn op_of(code: u8, argument: u32) -> Option<Op> {
    let n = argument as usize;
    let all = [
        Op::AllReduce,
        Op::ReduceScatter,
        Op::AllGather,
        Op::AllToAll,
        Op::AllToAllV,
        Op::Broadcast { root: n },
        Op::RingShift { hop: n },
        Op::Barrier,
        Op::Send { to: n },
        Op::Recv { from: n },
    ];
    all.get(usize::from(code)).copied()
}

/// Why a world has failed. Ranks are numbered as in the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// The same error for every operation.
    Error(ParallelError),
    /// The connection to a rank is gone.
    Gone { rank: usize },
    /// A rank has been silent for too long.
    Silent { rank: usize, after: Duration },
}

impl Cause {
    /// What an operation that was waiting, or is called later, is told.
    pub(super) fn error(&self, op: Op) -> ParallelError {
        match self {
            Self::Error(error) => error.clone(),
            Self::Gone { rank } => ParallelError::Left { op, rank: *rank },
            Self::Silent { rank, after } => ParallelError::Timeout {
                op,
                missing: *rank,
                after: *after,
            },
        }
    }

    /// A failure of the transport, or of a peer that breaks the rules.
    pub(super) fn transport(what: &'static str, message: impl Into<Arc<str>>) -> Self {
        Self::Error(ParallelError::Transport {
            what,
            message: message.into(),
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |code: u8, rank: usize| {
            out.push(code);
            out.extend((rank as u32).to_le_bytes());
        };
        match self {
            Self::Gone { rank } => put(0, *rank),
            Self::Silent { rank, after } => {
                put(1, *rank);
                out.extend(nanos(*after));
            }
            Self::Error(ParallelError::Aborted { rank, reason }) => {
                put(2, *rank);
                out.extend(shortened(reason).as_bytes());
            }
            Self::Error(ParallelError::Timeout { op, missing, after }) => {
                put(3, *missing);
                put_op(&mut out, *op);
                out.extend(nanos(*after));
            }
            Self::Error(ParallelError::Left { op, rank }) => {
                put(4, *rank);
                put_op(&mut out, *op);
            }
            Self::Error(ParallelError::Disagree {
                rank,
                expected,
                got,
            }) => {
                put(5, *rank);
                put_op(&mut out, *expected);
                put_op(&mut out, *got);
            }
            Self::Error(ParallelError::Lengths {
                op,
                rank,
                expected,
                got,
            }) => {
                put(6, *rank);
                put_op(&mut out, *op);
                out.extend((*expected as u64).to_le_bytes());
                out.extend((*got as u64).to_le_bytes());
            }
            Self::Error(ParallelError::GroupsDiffer {
                rank,
                number,
                expected,
                got,
            }) => {
                put(8, *rank);
                out.extend(number.to_le_bytes());
                out.extend([bits(*expected), bits(*got)]);
            }
            Self::Error(other) => {
                put(7, 0);
                out.extend(shortened(&other.to_string()).as_bytes());
            }
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let code = from.u8()?;
        let rank = from.rank()?;
        Some(match code {
            0 => Self::Gone { rank },
            1 => Self::Silent {
                rank,
                after: from.duration()?,
            },
            2 => Self::Error(ParallelError::Aborted {
                rank,
                reason: from.text(),
            }),
            3 => Self::Error(ParallelError::Timeout {
                missing: rank,
                op: from.op()?,
                after: from.duration()?,
            }),
            4 => Self::Error(ParallelError::Left {
                rank,
                op: from.op()?,
            }),
            5 => Self::Error(ParallelError::Disagree {
                rank,
                expected: from.op()?,
                got: from.op()?,
            }),
            6 => Self::Error(ParallelError::Lengths {
                rank,
                op: from.op()?,
                expected: usize::try_from(from.u64()?).ok()?,
                got: usize::try_from(from.u64()?).ok()?,
            }),
            7 => Self::transport("another rank failed", from.text()),
            8 => Self::Error(ParallelError::GroupsDiffer {
                rank,
                number: from.u32()?,
                expected: axes_of(from.u8()?)?,
                got: axes_of(from.u8()?)?,
            }),
            _ => return None,
        })
    }
}

fn put_op(out: &mut Vec<u8>, op: Op) {
    let (code, argument) = op_code(op);
    out.push(code);
    out.extend(argument.to_le_bytes());
}

fn nanos(duration: Duration) -> [u8; 8] {
    u64::try_from(duration.as_nanos())
        .unwrap_or(u64::MAX)
        .to_le_bytes()
}

/// As much of `text` as a message carries.
pub(super) fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(limits::MAX_REASON_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ops() -> impl Strategy<Value = Op> {
        (0_u8..Op::KINDS as u8, 0_u32..9).prop_map(|(code, n)| op_of(code, n).unwrap())
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(
            kind in 0_usize..10, op in ops(), from in 0_usize..99, group: u32, bits in 0_u8..32,
            number: u64, elements: u32,
        ) {
            let header = Header {
                kind: Kind::ALL[kind], from, group, axes: axes_of(bits).unwrap(), op,
                number, elements: elements as usize,
            };
            let mut bytes = header.encode();
            prop_assert_eq!(bytes.len(), HEADER_BYTES);
            bytes.push(7);
            prop_assert_eq!(Header::decode(&bytes), Some((header, &[7_u8][..])));
            prop_assert_eq!(Header::decode(&bytes[..HEADER_BYTES - 1]), None);
        }

        #[test]
        fn a_cause_survives_the_wire(
            rank in 0_usize..99, op in ops(), got in ops(), n: u32, text in "[a-zä]{0,90}",
        ) {
            let after = Duration::from_millis(u64::from(n));
            let (expected, elements) = (op, n as usize);
            for cause in [
                Cause::Gone { rank },
                Cause::Silent { rank, after },
                Cause::Error(ParallelError::Aborted { rank, reason: text.as_str().into() }),
                Cause::Error(ParallelError::Timeout { op, missing: rank, after }),
                Cause::Error(ParallelError::Left { op, rank }),
                Cause::Error(ParallelError::Disagree { rank, expected, got }),
                Cause::Error(ParallelError::Lengths { op, rank, expected: elements, got: rank }),
                Cause::Error(ParallelError::GroupsDiffer {
                    rank, number: n, expected: AxisSet::HEADS, got: AxisSet::ALL,
                }),
            ] {
                prop_assert_eq!(Cause::decode(&cause.encode()), Some(cause));
            }
        }

        #[test]
        fn garbage_is_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = (Header::decode(&bytes), Cause::decode(&bytes));
        }
    }

    #[test]
    fn any_other_error_keeps_its_words() {
        let cause = Cause::Error(ParallelError::NotJoined {
            rank: 3,
            after: Duration::from_secs(1),
        });
        let read = Cause::decode(&cause.encode()).unwrap();
        let words = "rank transport: another rank failed: rank 3 did not join within 1s";
        assert_eq!(read.error(Op::Barrier).to_string(), words);
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let text = "ä".repeat(limits::MAX_REASON_BYTES);
        assert_eq!(shortened(&text).len(), limits::MAX_REASON_BYTES / 2 * 2);
        assert_eq!(shortened("short"), "short");
    }
}
