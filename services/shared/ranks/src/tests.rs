use std::{sync::Arc, thread, time::Duration};

use super::*;
use parallel::{
    Axis, AxisSet, Collective, MAX_IN_FLIGHT, Mesh, Op, ParallelError, collective::threads,
    conformance, wire,
};

/// Long enough never to be reached by a healthy group.
const PATIENT: Duration = Duration::from_secs(60);

fn options(transport: Transport, timeout: Duration) -> JoinOptions {
    JoinOptions {
        interface: (transport == Transport::Tcp).then(|| "lo".into()),
        ..JoinOptions::new(transport, timeout, base::clock::now)
    }
}

/// Runs `body` as every rank of a world, each in its thread; results in rank order.
fn on_all<T: Send>(
    mesh: Mesh,
    options: &JoinOptions,
    body: impl Fn(UcxWorld) -> T + Sync,
) -> Vec<T> {
    let directory = tempfile::tempdir().unwrap();
    let meeting = FileRendezvous::new(&directory, base::clock::now);
    thread::scope(|scope| {
        let (body, meeting) = (&body, &meeting);
        let join = |rank| UcxWorld::join(mesh, rank, options, meeting).unwrap();
        let threads: Vec<_> = (0..mesh.ranks())
            .map(|rank| scope.spawn(move || body(join(rank))))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn line(size: usize) -> Mesh {
    Mesh::new([1, 1, 1, 1, size]).unwrap()
}

/// As above, in the one group of all ranks.
fn in_a_group<T: Send>(size: usize, body: impl Fn(UcxGroup) -> T + Sync) -> Vec<T> {
    let options = options(Transport::Shm, PATIENT);
    on_all(line(size), &options, |w| {
        body(w.group(AxisSet::ALL).unwrap())
    })
}

#[test]
fn ucx_conforms_over_shared_memory_at_every_size() {
    for size in [1, 2, 3, 4] {
        for outcome in in_a_group(size, |g| conformance::healthy(&g)) {
            assert_eq!(outcome, Ok(()), "{size} ranks");
        }
    }
}

#[test]
fn ucx_conforms_over_tcp() {
    let outcomes = on_all(line(3), &options(Transport::Tcp, PATIENT), |world| {
        let group = world.group(AxisSet::ALL).unwrap();
        let outcome = conformance::healthy(&group);
        let peer = (world.rank() + 1) % 3;
        (outcome, world.transports(peer).unwrap())
    });
    for outcome in outcomes {
        assert_eq!(outcome, (Ok(()), vec!["tcp".to_owned()]));
    }
}

#[test]
fn ucx_fails_as_one() {
    for size in [2, 3] {
        for (name, case) in conformance::BREAKING {
            // Only the absent rank is waited for at all.
            let timeout = if name.contains("never comes") {
                Duration::from_millis(100)
            } else {
                PATIENT
            };
            let outcomes = on_all(line(size), &options(Transport::Shm, timeout), |world| {
                case(&world.group(AxisSet::ALL).unwrap())
            });
            for outcome in outcomes {
                assert_eq!(outcome, Ok(()), "{name}, {size} ranks");
            }
        }
    }
}

#[test]
fn long_buffers_have_the_bits_of_the_threads_backend() {
    // 4 MiB and a bit: nothing divides evenly, everything is announced before it is sent.
    const ELEMENTS: usize = (1 << 20) + 5;
    let work = |g: &dyn Collective| {
        let data = conformance::input(77, g.index(), ELEMENTS);
        let sum = g.all_reduce(data.clone()).unwrap();
        let all = g.all_to_all(data[..ELEMENTS / 3 * 3].to_vec()).unwrap();
        let (sum, all) = (sum.wait().unwrap(), all.wait().unwrap());
        g.barrier().unwrap().wait().unwrap();
        (sum, all, g.traffic())
    };
    let expected: Vec<_> = thread::scope(|scope| {
        let ends = threads::group(3, PATIENT).unwrap();
        let ranks: Vec<_> = ends
            .into_iter()
            .map(|g| scope.spawn(move || work(&g)))
            .collect();
        ranks.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for transport in [Transport::Shm, Transport::Tcp] {
        let got = on_all(line(3), &options(transport, PATIENT), |world| {
            work(&world.group(AxisSet::ALL).unwrap())
        });
        assert!(got == expected, "{transport}");
    }
}

#[test]
fn a_rank_that_leaves_ends_the_wait_at_once() {
    let errors = in_a_group(3, |g| {
        if g.rank() == 2 {
            return None;
        }
        Some(g.barrier().unwrap().wait().unwrap_err().to_string())
    });
    let left = Some("rank 2 left before barrier".to_owned());
    assert_eq!(errors, [left.clone(), left, None]);
}

#[test]
fn what_a_rank_gave_before_it_left_still_counts() {
    in_a_group(2, |g| {
        // Long enough to be fetched by the receiver, which takes its time.
        let elements = 1 << 20;
        if g.rank() == 0 {
            drop(g.all_reduce(vec![1.0; elements]).unwrap());
            g.send(1, vec![7.0; elements]).unwrap();
            return;
        }
        thread::sleep(Duration::from_millis(100));
        let sum = g.all_reduce(vec![2.0; elements]).unwrap();
        assert_eq!(sum.wait().unwrap(), vec![3.0; elements]);
        assert_eq!(g.recv(0).unwrap().wait().unwrap(), vec![7.0; elements]);
        assert!(g.recv(0).unwrap().wait().is_err());
    });
}

#[test]
fn an_abort_crosses_groups_and_names_the_global_rank() {
    let mesh = Mesh::new([1, 2, 1, 1, 2]).unwrap();
    let aborted = ParallelError::Aborted {
        rank: 3,
        reason: "no memory".into(),
    };
    let errors = on_all(mesh, &options(Transport::Shm, PATIENT), |world| {
        let tp = world.group(Axis::Tp.into()).unwrap();
        let cfg = world.group(Axis::Cfg.into()).unwrap();
        if world.rank() == 3 {
            cfg.abort("no memory");
        }
        // Ranks 0 and 1 have no group with rank 3 in which they wait.
        let waited = tp.recv(1 - tp.index()).unwrap().wait().unwrap_err();
        assert_eq!(tp.send(0, vec![]).unwrap_err(), waited);
        let late = world.group(AxisSet::ALL).unwrap();
        assert_eq!(late.barrier().unwrap().wait().unwrap_err(), waited);
        cfg.abort("second");
        assert_eq!(cfg.barrier().unwrap().wait().unwrap_err(), waited);
        waited
    });
    assert_eq!(errors, [(); 4].map(|()| aborted.clone()));
}

#[test]
fn groups_along_an_axis_hold_the_ranks_of_the_mesh() {
    let mesh = Mesh::new([1, 2, 1, 1, 2]).unwrap();
    let cases = [
        (AxisSet::from(Axis::Tp), [1.0, 1.0, 5.0, 5.0]),
        (AxisSet::from(Axis::Cfg), [2.0, 4.0, 2.0, 4.0]),
        (AxisSet::ALL, [6.0; 4]),
        (AxisSet::EMPTY, [0.0, 1.0, 2.0, 3.0]),
    ];
    on_all(mesh, &options(Transport::Shm, PATIENT), |world| {
        for (axes, expected) in cases {
            let group = world.group(axes).unwrap();
            let sum = group.all_reduce(vec![group.rank() as f32]).unwrap();
            assert_eq!(sum.wait().unwrap(), [expected[group.rank()]], "{axes}");
        }
    });
}

#[test]
fn groups_made_in_different_orders_are_found_out() {
    let mesh = Mesh::new([1, 2, 1, 1, 2]).unwrap();
    let errors = on_all(mesh, &options(Transport::Shm, PATIENT), |world| {
        let axes = [AxisSet::from(Axis::Tp), AxisSet::ALL];
        let group = world.group(axes[world.rank() % 2]).unwrap();
        group.barrier().unwrap().wait().unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("made group 0 along"), "{error}");
    }
}

#[test]
fn a_rank_with_another_mesh_does_not_join() {
    let directory = tempfile::tempdir().unwrap();
    let meeting = FileRendezvous::new(&directory, base::clock::now);
    let options = options(Transport::Shm, PATIENT);
    let join = |rank: usize| {
        let mesh = [line(2), Mesh::new([1, 2, 1, 1, 1]).unwrap()][rank];
        UcxWorld::join(mesh, rank, &options, &meeting).map(drop)
    };
    let errors = thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        [join(0), other.join().unwrap()]
    });
    for (rank, error) in errors.into_iter().enumerate() {
        assert_eq!(error, Err(ParallelError::OtherWorld { rank: 1 - rank }));
    }
}

#[test]
fn operations_in_flight_are_bounded() {
    let done = std::sync::Barrier::new(2);
    in_a_group(2, |g| {
        if g.rank() == 1 {
            done.wait();
            return;
        }
        let pending: Vec<_> = (0..MAX_IN_FLIGHT).map(|_| g.barrier().unwrap()).collect();
        let error = g.barrier().unwrap_err().to_string();
        assert_eq!(
            error,
            "barrier would be operation 1025 in flight, at most 1024 may be"
        );
        drop(pending);
        assert!(g.barrier().is_ok());
        for _ in 0..MAX_IN_FLIGHT {
            g.send(1, vec![]).unwrap();
        }
        assert!(g.send(1, vec![]).is_err());
        done.wait();
    });
}

#[test]
fn a_buffer_that_is_taken_makes_room_for_another() {
    in_a_group(2, |g| {
        let peer = 1 - g.rank();
        for round in 0..3 * MAX_IN_FLIGHT {
            g.send(peer, vec![round as f32]).unwrap();
            assert_eq!(g.recv(peer).unwrap().wait().unwrap(), [round as f32]);
            // The news that a buffer was taken may come after the next one.
            g.send(g.rank(), vec![0.5]).unwrap();
            assert_eq!(g.recv(g.rank()).unwrap().wait().unwrap(), [0.5]);
        }
    });
}

#[test]
fn a_group_whose_ranks_are_late_holds_up_no_other() {
    let mesh = line(2);
    for transport in [Transport::Shm, Transport::Tcp] {
        on_all(mesh, &options(transport, PATIENT), |world| {
            let large = world.group(AxisSet::ALL).unwrap();
            let small = world.group(AxisSet::ALL).unwrap();
            let data = vec![1.0; 1 << 20];
            // Rank 1 enters this last, so everything else happens under it.
            let early = (world.rank() == 0).then(|| large.all_reduce(data.clone()).unwrap());
            for _ in 0..100 {
                let sum = small.all_reduce(vec![1.0; 8]).unwrap().wait().unwrap();
                assert_eq!(sum, [2.0; 8]);
            }
            let pending = early.unwrap_or_else(|| large.all_reduce(data).unwrap());
            assert_eq!(pending.wait().unwrap(), vec![2.0; 1 << 20]);
        });
    }
}

#[test]
fn messages_carry_one_header_each_and_payload_is_counted_apart() {
    let counts = in_a_group(2, |g| {
        for _ in 0..10 {
            g.all_reduce(vec![1.0; 100]).unwrap().wait().unwrap();
        }
        g.barrier().unwrap().wait().unwrap();
        let moved = g.traffic().by_kind[Op::AllReduce.kind()];
        let predicted = wire::moved(Op::AllReduce, 2, g.index(), 100);
        assert_eq!(moved.sent, 10 * predicted.sent);
        g.headers()
    });
    for headers in counts {
        // Ten times a part and a sum, and the barrier; hello, signs of life and goodbyes besides.
        assert!(headers.sent >= 21, "{headers:?}");
        let fixed = headers.sent * message::HEADER_BYTES as u64;
        assert_eq!(headers.bytes.sent, fixed, "{headers:?}");
    }
}

#[test]
fn a_context_takes_its_groups_from_a_world() {
    let plan = parallel::Plan {
        tp: 2,
        ..parallel::Plan::default()
    };
    let mesh = plan.mesh().unwrap();
    on_all(mesh, &options(Transport::Shm, PATIENT), |world| {
        let mut join = |axes| Ok(Arc::new(world.group(axes)?) as Arc<dyn Collective>);
        let device = parallel::Device::Cpu;
        let context =
            parallel::RankContext::connect(&plan, world.rank(), device, &mut join).unwrap();
        assert_eq!(context.rank(), world.rank());
    });
}
