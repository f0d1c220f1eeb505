use std::{thread, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::{Axis, Collective, conformance};

/// Long enough never to be reached by a healthy group.
const PATIENT: Duration = Duration::from_secs(60);

/// Runs `rank` on every end of a group, each in its thread; results in rank order.
fn on_all<T: Send>(ends: Vec<ThreadGroup>, rank: impl Fn(ThreadGroup) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = ends
            .into_iter()
            .map(|end| scope.spawn(move || rank(end)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn threads_conform_at_every_size() {
    for size in [1, 2, 3, 4, 8] {
        for outcome in on_all(group(size, PATIENT).unwrap(), |g| conformance::healthy(&g)) {
            assert_eq!(outcome, Ok(()), "{size} ranks");
        }
    }
}

#[test]
fn threads_fail_as_one() {
    for size in [2, 3, 8] {
        for (name, case) in conformance::BREAKING {
            // Only the absent rank is waited for at all.
            let timeout = if name.contains("never comes") {
                Duration::from_millis(50)
            } else {
                PATIENT
            };
            for outcome in on_all(group(size, timeout).unwrap(), |g| case(&g)) {
                assert_eq!(outcome, Ok(()), "{name}, {size} ranks");
            }
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let mut ends = group(3, Duration::from_millis(30)).unwrap();
    let absent = ends.remove(1);
    let errors = on_all(ends, |g| g.barrier().unwrap().wait().unwrap_err());
    for error in errors {
        assert_eq!(
            error.to_string(),
            "rank 1 did not reach barrier within 30ms"
        );
    }
    drop(absent);
}

#[test]
fn a_rank_that_leaves_ends_the_wait_at_once() {
    let mut ends = group(3, PATIENT).unwrap();
    let gone = ends.remove(2);
    let waiting: Vec<_> = ends.iter().map(|g| g.barrier().unwrap()).collect();
    drop(gone);
    for pending in waiting {
        let error = pending.wait().unwrap_err().to_string();
        assert_eq!(error, "rank 2 left before barrier");
    }
}

#[test]
fn what_a_rank_gave_before_it_left_still_counts() {
    let mut ends = group(2, PATIENT).unwrap();
    let other = ends.remove(1);
    let gone = ends.remove(0);
    drop(gone.all_reduce(vec![1.0]).unwrap());
    gone.send(1, vec![7.0]).unwrap();
    drop(gone);
    assert_eq!(other.all_reduce(vec![2.0]).unwrap().wait().unwrap(), [3.0]);
    assert_eq!(other.recv(0).unwrap().wait().unwrap(), [7.0]);
    assert!(other.recv(0).unwrap().wait().is_err());
}

#[test]
fn an_abort_crosses_groups_and_names_the_global_rank() {
    let mesh = Mesh::new([1, 2, 1, 1, 2]).unwrap();
    let world = ThreadWorld::new(mesh, PATIENT);
    let tp = world.groups(Axis::Tp.into()).unwrap();
    let cfg = world.groups(Axis::Cfg.into()).unwrap();
    let waiting = tp[0].all_reduce(vec![1.0]).unwrap();
    cfg[3].abort("no memory");
    let aborted = ParallelError::Aborted {
        rank: 3,
        reason: "no memory".into(),
    };
    assert_eq!(waiting.wait().unwrap_err(), aborted);
    assert_eq!(tp[1].send(0, vec![]).unwrap_err(), aborted);
    let late = world.groups(AxisSet::ALL).unwrap();
    assert_eq!(late[2].barrier().unwrap().wait().unwrap_err(), aborted);
    cfg[0].abort("second");
    assert_eq!(cfg[0].barrier().unwrap().wait().unwrap_err(), aborted);
}

#[test]
fn groups_along_an_axis_hold_the_ranks_of_the_mesh() {
    let mesh = Mesh::new([1, 2, 1, 1, 3]).unwrap();
    let world = ThreadWorld::new(mesh, PATIENT);
    for (axes, expected) in [
        (AxisSet::from(Axis::Tp), [3.0, 3.0, 3.0, 12.0, 12.0, 12.0]),
        (AxisSet::from(Axis::Cfg), [3.0, 5.0, 7.0, 3.0, 5.0, 7.0]),
        (AxisSet::ALL, [15.0; 6]),
        (AxisSet::EMPTY, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    ] {
        let sums = on_all(world.groups(axes).unwrap(), |g| {
            g.all_reduce(vec![g.rank() as f32]).unwrap().wait().unwrap()[0]
        });
        assert_eq!(sums, expected, "{axes}");
    }
}

#[test]
fn operations_in_flight_are_bounded() {
    let ends = group(2, PATIENT).unwrap();
    let pending: Vec<_> = (0..crate::MAX_IN_FLIGHT)
        .map(|_| ends[0].barrier().unwrap())
        .collect();
    let error = ends[0].barrier().unwrap_err().to_string();
    assert_eq!(
        error,
        "barrier would be operation 1025 in flight, at most 1024 may be"
    );
    drop(pending);
    assert!(ends[0].barrier().is_ok());
    for _ in 0..crate::MAX_IN_FLIGHT {
        ends[0].send(1, vec![]).unwrap();
    }
    assert!(ends[0].send(1, vec![]).is_err());
}

#[test]
fn a_buffer_whose_receiver_gave_up_is_not_kept() {
    let ends = group(2, PATIENT).unwrap();
    for _ in 0..=crate::MAX_IN_FLIGHT {
        drop(ends[1].recv(0).unwrap());
    }
    // More than a lane holds: each is wanted by nobody.
    for _ in 0..=crate::MAX_IN_FLIGHT {
        ends[0].send(1, vec![1.0]).unwrap();
    }
    ends[0].send(1, vec![2.0]).unwrap();
    assert_eq!(ends[1].recv(0).unwrap().wait().unwrap(), [2.0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any sequence of operations equals the plain definitions, and is predicted to the byte.
    #[test]
    fn any_sequence_of_operations_is_exact(
        size in 1_usize..6, steps in prop::collection::vec((0_usize..4, 0_usize..40), 1..12),
    ) {
        let steps = &steps;
        let outcomes = on_all(group(size, PATIENT).unwrap(), |g| {
            let mut pending = Vec::new();
            for (case, &(kind, n)) in steps.iter().enumerate() {
                let data = |n| conformance::input(case as u64, g.index(), n);
                pending.push(match kind {
                    0 => g.all_reduce(data(n)),
                    1 => g.reduce_scatter(data(n * size)),
                    2 => g.all_gather(data(n)),
                    _ => g.all_to_all(data(n * size)),
                }.unwrap());
            }
            let results: Vec<_> = pending.into_iter().map(|p| p.wait().unwrap()).collect();
            g.barrier().unwrap().wait().unwrap();
            (results, g.traffic().total())
        });
        for (index, (results, traffic)) in outcomes.into_iter().enumerate() {
            let mut predicted = crate::Moved::default();
            for (case, (&(kind, n), got)) in steps.iter().zip(results).enumerate() {
                let case = case as u64;
                let own = index * n..(index + 1) * n;
                let all = |n| (0..size).map(move |r| conformance::input(case, r, n));
                let (op, elements, expected) = match kind {
                    0 => (crate::Op::AllReduce, n, conformance::summed(case, size, n)),
                    1 => {
                        let sum = conformance::summed(case, size, n * size);
                        (crate::Op::ReduceScatter, n * size, sum[own].to_vec())
                    }
                    2 => (crate::Op::AllGather, n, all(n).flatten().collect()),
                    _ => {
                        let parts = all(n * size).flat_map(|x| x[own.clone()].to_vec());
                        (crate::Op::AllToAll, n * size, parts.collect())
                    }
                };
                prop_assert_eq!(got, expected);
                let moved = crate::wire::moved(op, size, index, elements);
                predicted.sent += moved.sent;
                predicted.received += moved.received;
            }
            prop_assert_eq!(traffic, predicted);
        }
    }
}
