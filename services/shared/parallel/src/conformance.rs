//! What every backend must do, as one list that each of them runs.
//!
//! A backend starts a fresh group, runs [`healthy`] on every rank of it (threads, processes or
//! hosts), and for each of [`BREAKING`] another fresh group. Inputs follow from rank and case, so
//! each rank checks its own results against the plain definition without seeing the others.

use std::fmt;

use crate::{Collective, Moved, Op, ParallelError, wire};

/// What went wrong, in words, on this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ParallelError> for Failure {
    fn from(error: ParallelError) -> Self {
        Self(error.to_string())
    }
}

/// A case, run by every rank of a group together.
pub type Case = fn(&dyn Collective) -> Result<(), Failure>;

/// Cases after which the group still works.
pub const CASES: [(&str, Case); 12] = [
    ("sums have the bits of a sum in rank order", sums),
    ("a reduce-scatter is a part of the sum", reduce_scatter),
    ("gathered buffers come in rank order", all_gather),
    ("an all-to-all is a transposition", all_to_all),
    (
        "parts of any length, also empty, find their rank",
        all_to_all_v,
    ),
    ("every root can broadcast", broadcast),
    ("a ring shift goes both ways and around", ring_shift),
    ("buffers between two ranks keep their order", send_recv),
    ("results can be waited for in any order", any_order),
    ("a forgotten result does not disturb the next", forgotten),
    (
        "wrong arguments are refused before anything is sent",
        arguments,
    ),
    ("bytes on the wire are the predicted ones", bytes),
];

/// Cases that end the group; each needs a fresh one, of at least two ranks.
pub const BREAKING: [(&str, Case); 4] = [
    ("an abort reaches everybody with rank and reason", abort),
    ("a rank that never comes is named", absent),
    ("different operations are found out", disagree),
    ("different lengths are found out", lengths),
];

/// Lengths tried: empty, one, odd, more than ranks.
const LENGTHS: [usize; 6] = [0, 1, 2, 7, 64, 1001];

/// Runs [`CASES`] on this rank.
///
/// # Errors
/// The first case that fails, and how.
pub fn healthy(group: &dyn Collective) -> Result<(), Failure> {
    for (name, case) in CASES {
        case(group).map_err(|f| Failure(format!("{name}: {f}")))?;
    }
    group.barrier()?.wait()?;
    Ok(())
}

/// Elements whose sum depends on the order of summation.
#[must_use]
pub fn input(case: u64, rank: usize, elements: usize) -> Vec<f32> {
    let mut state = (case << 32) ^ (rank as u64) << 16 ^ elements as u64;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let element = |bits: u64| {
        let mantissa = (bits & 0xffff) as f32 / 65_536.0 - 0.5;
        mantissa * 2_f32.powi(((bits >> 16) % 24) as i32 - 12)
    };
    (0..elements).map(|_| element(next())).collect()
}

/// The plain definition of a sum: rank by rank.
#[must_use]
pub fn summed(case: u64, size: usize, elements: usize) -> Vec<f32> {
    let mut sum = input(case, 0, elements);
    for rank in 1..size {
        for (s, x) in sum.iter_mut().zip(input(case, rank, elements)) {
            *s += x;
        }
    }
    sum
}

fn same(what: impl fmt::Display, got: &[f32], expected: &[f32]) -> Result<(), Failure> {
    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    if bits(got) == bits(expected) {
        return Ok(());
    }
    let at = got
        .iter()
        .zip(expected)
        .position(|(a, b)| a.to_bits() != b.to_bits());
    Err(Failure(format!(
        "{what}: {} elements, {} expected, first difference at {at:?}",
        got.len(),
        expected.len()
    )))
}

fn expect(holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure(what())) }
}

fn sums(g: &dyn Collective) -> Result<(), Failure> {
    for n in LENGTHS {
        let sum = g.all_reduce(input(1, g.index(), n))?.wait()?;
        same(format_args!("{n} elements"), &sum, &summed(1, g.size(), n))?;
    }
    Ok(())
}

fn reduce_scatter(g: &dyn Collective) -> Result<(), Failure> {
    for n in LENGTHS {
        let whole = n * g.size();
        let part = g.reduce_scatter(input(2, g.index(), whole))?.wait()?;
        let own = g.index() * n..(g.index() + 1) * n;
        same(
            format_args!("{n} each"),
            &part,
            &summed(2, g.size(), whole)[own],
        )?;
    }
    Ok(())
}

fn all_gather(g: &dyn Collective) -> Result<(), Failure> {
    for n in LENGTHS {
        let all = g.all_gather(input(3, g.index(), n))?.wait()?;
        let expected: Vec<_> = (0..g.size()).flat_map(|r| input(3, r, n)).collect();
        same(format_args!("{n} each"), &all, &expected)?;
    }
    Ok(())
}

fn all_to_all(g: &dyn Collective) -> Result<(), Failure> {
    for n in LENGTHS {
        let whole = n * g.size();
        let got = g.all_to_all(input(4, g.index(), whole))?.wait()?;
        let own = g.index() * n..(g.index() + 1) * n;
        let part = |rank| input(4, rank, whole)[own.clone()].to_vec();
        let expected: Vec<_> = (0..g.size()).flat_map(part).collect();
        same(format_args!("{n} each"), &got, &expected)?;
    }
    Ok(())
}

/// Elements from one rank to another: uneven, with empty parts.
fn part_len(from: usize, to: usize) -> usize {
    (from * 5 + to * 3) % 7
}

fn part(from: usize, to: usize) -> Vec<f32> {
    input(500 + to as u64, from, part_len(from, to))
}

fn all_to_all_v(g: &dyn Collective) -> Result<(), Failure> {
    let parts = (0..g.size()).map(|to| part(g.index(), to)).collect();
    let got = g.all_to_all_v(parts)?.wait()?;
    expect(got.len() == g.size(), || format!("{} parts", got.len()))?;
    for (from, got) in got.iter().enumerate() {
        same(format_args!("from {from}"), got, &part(from, g.index()))?;
    }
    Ok(())
}

fn broadcast(g: &dyn Collective) -> Result<(), Failure> {
    for root in 0..g.size() {
        for n in [0, 5] {
            let mine = if g.index() == root { n } else { 0 };
            let got = g.broadcast(root, input(6, root, mine))?.wait()?;
            same(format_args!("from {root}"), &got, &input(6, root, n))?;
        }
    }
    Ok(())
}

fn ring_shift(g: &dyn Collective) -> Result<(), Failure> {
    let size = g.size() as isize;
    for hop in [1, -1, 0, 2, size, -size - 1] {
        // Each rank brings another length.
        let data = |rank: usize| input(7, rank, rank + 3);
        let got = g.ring_shift(hop, data(g.index()))?.wait()?;
        let from = (g.index() as isize - hop).rem_euclid(size) as usize;
        same(format_args!("by {hop}"), &got, &data(from))?;
    }
    Ok(())
}

fn send_recv(g: &dyn Collective) -> Result<(), Failure> {
    let data = |from, to, k: u64| input(800 + k, from * 64 + to, 1 + k as usize);
    for to in 0..g.size() {
        for k in 0..3 {
            g.send(to, data(g.index(), to, k))?;
        }
    }
    for from in (0..g.size()).rev() {
        let pending = [g.recv(from)?, g.recv(from)?, g.recv(from)?];
        // Waited for last to first: the order of the calls counts.
        for (k, pending) in [0, 1, 2].into_iter().zip(pending).rev() {
            let expected = data(from, g.index(), k);
            same(format_args!("{k} from {from}"), &pending.wait()?, &expected)?;
        }
    }
    Ok(())
}

fn any_order(g: &dyn Collective) -> Result<(), Failure> {
    let first = g.all_reduce(input(9, g.index(), 33))?;
    let second = g.all_gather(input(10, g.index(), 4))?;
    let third = g.all_reduce(input(11, g.index(), 5))?;
    same("third", &third.wait()?, &summed(11, g.size(), 5))?;
    same("first", &first.wait()?, &summed(9, g.size(), 33))?;
    let expected: Vec<_> = (0..g.size()).flat_map(|r| input(10, r, 4)).collect();
    same("second", &second.wait()?, &expected)
}

fn forgotten(g: &dyn Collective) -> Result<(), Failure> {
    for _ in 0..3 {
        drop(g.all_reduce(input(12, g.index(), 9))?);
        drop(g.recv(g.index())?);
        g.send(g.index(), vec![1.0])?;
    }
    g.send(g.index(), vec![2.0])?;
    same("next buffer", &g.recv(g.index())?.wait()?, &[2.0])?;
    let sum = g.all_reduce(input(13, g.index(), 9))?.wait()?;
    same("next sum", &sum, &summed(13, g.size(), 9))
}

fn arguments(g: &dyn Collective) -> Result<(), Failure> {
    let size = g.size();
    if size > 1 {
        let odd = || vec![0.0; size + 1];
        expect(g.reduce_scatter(odd()).is_err(), || "odd reduce".into())?;
        expect(g.all_to_all(odd()).is_err(), || "odd all-to-all".into())?;
    }
    let parts = vec![Vec::new(); size + 1];
    expect(g.all_to_all_v(parts).is_err(), || "too many parts".into())?;
    expect(g.broadcast(size, vec![]).is_err(), || "root".into())?;
    expect(g.send(size, vec![]).is_err(), || "send".into())?;
    expect(g.recv(size).is_err(), || "recv".into())
}

/// What one kind of operation moved while `run` ran; everybody is done before and after.
fn measured(
    g: &dyn Collective,
    op: Op,
    run: impl FnOnce() -> Result<(), ParallelError>,
) -> Result<Moved, Failure> {
    g.barrier()?.wait()?;
    let before = g.traffic().by_kind[op.kind()];
    // Nobody starts before all have looked.
    g.barrier()?.wait()?;
    run()?;
    g.barrier()?.wait()?;
    let after = g.traffic().by_kind[op.kind()];
    Ok(Moved {
        sent: after.sent - before.sent,
        received: after.received - before.received,
    })
}

fn bytes(g: &dyn Collective) -> Result<(), Failure> {
    let (size, index) = (g.size(), g.index());
    for n in LENGTHS {
        let whole = n * size;
        let run = |op: Op, n: usize| match op {
            Op::AllReduce => g.all_reduce(vec![1.0; n])?.wait().map(drop),
            Op::ReduceScatter => g.reduce_scatter(vec![1.0; n])?.wait().map(drop),
            Op::AllGather => g.all_gather(vec![1.0; n])?.wait().map(drop),
            Op::AllToAll => g.all_to_all(vec![1.0; n])?.wait().map(drop),
            Op::Broadcast { root } => g.broadcast(root, vec![1.0; n])?.wait().map(drop),
            Op::RingShift { hop } => g.ring_shift(hop as isize, vec![1.0; n])?.wait().map(drop),
            _ => g.barrier()?.wait(),
        };
        for (op, n) in [
            (Op::AllReduce, n),
            (Op::ReduceScatter, whole),
            (Op::AllGather, n),
            (Op::AllToAll, whole),
            (Op::Broadcast { root: size - 1 }, n),
            (Op::RingShift { hop: 1 }, n),
            (Op::Barrier, n),
        ] {
            let got = measured(g, op, || run(op, n))?;
            let predicted = wire::moved(op, size, index, n);
            expect(got == predicted, || {
                format!("{op} of {n}: {got:?}, predicted {predicted:?}")
            })?;
        }
    }
    let counts: Vec<Vec<usize>> = (0..size)
        .map(|from| (0..size).map(|to| part_len(from, to)).collect())
        .collect();
    let got = measured(g, Op::AllToAllV, || {
        let parts = (0..size).map(|to| part(index, to)).collect();
        g.all_to_all_v(parts)?.wait().map(drop)
    })?;
    let predicted = wire::all_to_all_v(&counts, index);
    expect(got == predicted, || {
        format!("all_to_all_v: {got:?}, predicted {predicted:?}")
    })
}

/// Everybody but the last rank waits in a sum; the last one does `instead`.
fn without_last(
    g: &dyn Collective,
    instead: impl FnOnce() -> Result<(), ParallelError>,
) -> Result<Option<ParallelError>, Failure> {
    if g.index() + 1 == g.size() {
        return Ok(instead().err());
    }
    let outcome = g.all_reduce(vec![1.0; 4])?.wait();
    expect(outcome.is_err(), || "a sum without all ranks".into())?;
    Ok(outcome.err())
}

fn abort(g: &dyn Collective) -> Result<(), Failure> {
    let error = without_last(g, || {
        g.abort("out of memory");
        g.barrier()?.wait()
    })?;
    let says = |e: &ParallelError| matches!(e, ParallelError::Aborted { reason, .. } if **reason == *"out of memory");
    expect(error.as_ref().is_some_and(says), || format!("{error:?}"))?;
    let later = g.barrier()?.wait().err();
    expect(later == error, || format!("later: {later:?}"))
}

fn absent(g: &dyn Collective) -> Result<(), Failure> {
    let error = without_last(g, || {
        // It waits for a buffer nobody sends, so it is there but never comes to the sum.
        g.recv(0)?.wait().map(drop)
    })?;
    let timed_out = matches!(error, Some(ParallelError::Timeout { .. }));
    expect(timed_out, || format!("{error:?}"))
}

fn disagree(g: &dyn Collective) -> Result<(), Failure> {
    let error = without_last(g, || g.barrier()?.wait())?;
    let found = matches!(error, Some(ParallelError::Disagree { .. }));
    expect(found, || format!("{error:?}"))
}

fn lengths(g: &dyn Collective) -> Result<(), Failure> {
    let error = without_last(g, || g.all_reduce(vec![1.0; 3])?.wait().map(drop))?;
    let found = matches!(error, Some(ParallelError::Lengths { .. }));
    expect(found, || format!("{error:?}"))
}
