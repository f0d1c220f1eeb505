//! Groups of GPUs against sums and moves computed on the host, and what happens when a rank is gone. Ranks are
//! threads, one for each GPU of the machine, or processes.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use half::bf16;
use kernels::cuda::{
    Comm, CommId, CommOptions, CudaError, Gpu, GpuTensor, GpuType, Lane, Transfer,
};

/// Set for the processes that tests start: rank, ranks and token.
const CHILD: &str = "OMNI_TEST_COMM";
const LANES: [Lane; 2] = [Lane::Compute, Lane::Beside];
/// Deadline of groups that are to fail.
const SOON: CommOptions = CommOptions {
    deadline: Duration::from_secs(2),
    blocks: None,
};
/// Deadline of groups that must not need it.
const NEVER: CommOptions = CommOptions {
    deadline: Duration::from_secs(3600),
    blocks: None,
};

/// Runs `work` on every rank of a group that has all GPUs, as threads.
fn on_ranks(work: impl Fn(&Comm) + Sync) {
    let ranks = Gpu::count().unwrap();
    assert!(ranks > 0, "no gpu");
    let id = CommId::new().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let work = &work;
            scope.spawn(move || {
                let gpu = Gpu::open(rank).unwrap();
                let comm = Comm::join(&gpu, &id, rank, ranks, &CommOptions::default()).unwrap();
                work(&comm);
                comm.barrier().unwrap();
            });
        }
    });
}

/// Element `i` of rank `rank`: sums over up to 8 ranks are exact in bf16.
fn value(rank: usize, i: usize) -> f32 {
    ((7 * i + 13 * rank + i / 29) % 31) as f32
}

fn tensor(comm: &Comm, dims: &[usize], dtype: GpuType, of: impl Fn(usize) -> f32) -> GpuTensor {
    let tensor = GpuTensor::new(comm.gpu(), dims, dtype, "test").unwrap();
    let values = (0..tensor.numel()).map(of);
    let bytes: Vec<u8> = match dtype {
        GpuType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        GpuType::Bf16 => values
            .flat_map(|v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        other => panic!("{other:?} is not filled here"),
    };
    tensor.write_bytes(&bytes).unwrap();
    tensor
}

/// A tensor that no result looks like.
fn poisoned(comm: &Comm, dims: &[usize], dtype: GpuType) -> GpuTensor {
    tensor(comm, dims, dtype, |_| -1.0)
}

/// Runs `op` on a lane, in order after what was written and before what is read.
fn ordered(comm: &Comm, lane: Lane, op: impl FnOnce() -> Result<(), CudaError>) {
    if lane == Lane::Beside {
        comm.wait_for(&comm.gpu().mark().unwrap()).unwrap();
    }
    op().unwrap();
    comm.wait().unwrap();
}

fn sum(ranks: usize, i: usize) -> f32 {
    (0..ranks).map(|rank| value(rank, i)).sum()
}

#[test]
#[ignore = "needs GPUs"]
fn sums_are_those_of_the_host_in_every_type_and_on_both_lanes() {
    on_ranks(|comm| {
        let (rank, ranks) = (comm.rank(), comm.ranks());
        for (dtype, lane) in [GpuType::F32, GpuType::Bf16]
            .into_iter()
            .flat_map(|dtype| LANES.map(|lane| (dtype, lane)))
        {
            for count in [1, 1000, 1 << 20] {
                let whole = tensor(comm, &[ranks, count], dtype, |i| value(rank, i));
                let part = poisoned(comm, &[count], dtype);
                ordered(comm, lane, || comm.reduce_scatter(&whole, &part, lane));
                let want: Vec<f32> = (0..count).map(|i| sum(ranks, rank * count + i)).collect();
                assert!(part.to_f32_vec().unwrap() == want, "reduce_scatter {count}");

                ordered(comm, lane, || comm.all_reduce(&whole, &whole, lane));
                let want: Vec<f32> = (0..ranks * count).map(|i| sum(ranks, i)).collect();
                assert!(whole.to_f32_vec().unwrap() == want, "all_reduce {count}");
            }
        }
    });
}

#[test]
#[ignore = "needs GPUs"]
fn moves_bring_every_element_to_its_place_on_both_lanes() {
    on_ranks(|comm| {
        let (rank, ranks) = (comm.rank(), comm.ranks());
        for lane in LANES {
            for count in [1, 1000, 1 << 20] {
                let input = tensor(comm, &[ranks, count], GpuType::Bf16, |i| value(rank, i));
                let out = poisoned(comm, &[ranks, count], GpuType::Bf16);
                ordered(comm, lane, || comm.all_to_all(&input, &out, lane));
                let from = |i: usize| value(i / count, rank * count + i % count);
                let want: Vec<f32> = (0..ranks * count).map(from).collect();
                assert!(out.to_f32_vec().unwrap() == want, "all_to_all {count}");

                let own = input.narrow0(0, 1).unwrap();
                ordered(comm, lane, || comm.all_gather(&own, &out, lane));
                let want: Vec<f32> = (0..ranks * count)
                    .map(|i| value(i / count, i % count))
                    .collect();
                assert!(out.to_f32_vec().unwrap() == want, "all_gather {count}");

                let root = ranks - 1;
                ordered(comm, lane, || comm.broadcast(&input, root, lane));
                let want: Vec<f32> = (0..ranks * count).map(|i| value(root, i)).collect();
                assert!(input.to_f32_vec().unwrap() == want, "broadcast {count}");
            }
        }
    });
}

#[test]
#[ignore = "needs GPUs"]
fn uneven_parts_arrive_whole_also_empty_ones_and_nothing_else_is_written() {
    // Rows from rank `a` to rank `b`.
    let rows = |a: usize, b: usize| (3 * a + 5 * b) % 7 * 11;
    on_ranks(|comm| {
        let (rank, ranks, width) = (comm.rank(), comm.ranks(), 96);
        let sent: Vec<usize> = (0..ranks).map(|to| rows(rank, to)).collect();
        let received: Vec<usize> = (0..ranks).map(|from| rows(from, rank)).collect();
        let (all, expected) = (sent.iter().sum::<usize>(), received.iter().sum::<usize>());
        for lane in LANES {
            let dims = [all + 2, width];
            let input = tensor(comm, &dims, GpuType::F32, |i| value(rank, i));
            let out = poisoned(comm, &[expected + 3, width], GpuType::F32);
            let run = || comm.all_to_all_v(&input, &sent, &out, &received, lane);
            ordered(comm, lane, run);
            let mut want = Vec::new();
            for from in 0..ranks {
                let before: usize = (0..rank).map(|to| rows(from, to)).sum();
                let start = before * width;
                want.extend((start..start + rows(from, rank) * width).map(|i| value(from, i)));
            }
            want.extend([-1.0].repeat(3 * width));
            assert_eq!(out.to_f32_vec().unwrap(), want);
        }
    });
}

#[test]
#[ignore = "needs GPUs"]
fn a_ring_shift_is_one_exchange_and_the_order_between_lanes_is_kept_without_waiting() {
    on_ranks(|comm| {
        let (rank, ranks, count) = (comm.rank(), comm.ranks(), 300_000);
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let a = tensor(comm, &[count], GpuType::F32, |i| value(rank, i));
        let b = poisoned(comm, &[count], GpuType::F32);
        // Once round the ring and back to the start, on alternating lanes; marks order the lanes.
        for step in 0..2 * ranks {
            let (from, to) = if step % 2 == 0 { (&a, &b) } else { (&b, &a) };
            let lane = LANES[step % 2];
            match lane {
                Lane::Compute => comm.gpu().wait_for(&comm.mark().unwrap()).unwrap(),
                Lane::Beside => comm.wait_for(&comm.gpu().mark().unwrap()).unwrap(),
            }
            let (send, receive) = (
                Transfer::Send {
                    to: next,
                    tensor: from,
                },
                Transfer::Receive {
                    from: previous,
                    tensor: to,
                },
            );
            comm.exchange(&[send, receive], lane).unwrap();
        }
        comm.wait().unwrap();
        let want: Vec<f32> = (0..count).map(|i| value(rank, i)).collect();
        assert!(a.to_f32_vec().unwrap() == want);
    });
}

#[test]
#[ignore = "needs GPUs"]
fn bad_arguments_are_refused_by_name_and_end_nothing() {
    on_ranks(|comm| {
        let ranks = comm.ranks();
        let new = |dims: &[usize], dtype| poisoned(comm, dims, dtype);
        let (x, y) = (new(&[ranks, 4], GpuType::F32), new(&[5], GpuType::F32));
        let half = new(&[ranks, 4], GpuType::Bf16);
        let bytes = GpuTensor::new(comm.gpu(), &[4], GpuType::U8, "test").unwrap();
        let lane = Lane::Compute;
        let counts = vec![1; ranks];
        let too_many = vec![2; ranks];
        let refused = [
            comm.all_reduce(&x, &y, lane),
            comm.all_reduce(&x, &half, lane),
            comm.all_reduce(&bytes, &bytes, lane),
            comm.reduce_scatter(&x, &y, lane),
            comm.all_gather(&x, &y, lane),
            comm.broadcast(&x, ranks, lane),
            comm.send(&x, ranks, lane),
            comm.receive(&x, comm.rank(), lane),
            comm.all_to_all(&x, &half, lane),
            comm.all_to_all_v(&x, &too_many, &x, &counts, lane),
            comm.all_to_all_v(&x, &[], &x, &counts, lane),
        ];
        for (i, result) in refused.into_iter().enumerate() {
            assert!(
                matches!(result, Err(CudaError::Argument(_))),
                "{i}: {result:?}"
            );
        }
        comm.barrier().unwrap();
    });
    let gpu = Gpu::open(0).unwrap();
    let id = CommId::new().unwrap();
    let refused = Comm::join(&gpu, &id, 2, 2, &SOON).unwrap_err();
    assert!(matches!(refused, CudaError::Argument(_)), "{refused}");
}

#[test]
#[ignore = "needs GPUs"]
fn who_waits_in_vain_for_others_to_join_is_told_so() {
    let gpu = Gpu::open(0).unwrap();
    let id = CommId::new().unwrap();
    let late = Comm::join(&gpu, &id, 0, 2, &SOON).unwrap_err();
    assert!(
        matches!(&late, CudaError::GroupEnded { reason } if reason.contains("join")),
        "{late}"
    );
    // The GPU is as good as before.
    let x = GpuTensor::from_f32(&gpu, &[2], &[1.0, 2.0], "test").unwrap();
    assert_eq!(x.to_f32_vec().unwrap(), [1.0, 2.0]);
}

/// A rank in a process of its own; killed when dropped.
struct Rank {
    process: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Rank {
    /// Rank 1 of 2, which does what `script` says.
    fn start(id: &CommId, script: &str) -> Self {
        let hex: String = id.bytes().iter().map(|b| format!("{b:02x}")).collect();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "rank_of_a_child_process",
                "--ignored",
                "--nocapture",
            ])
            .env(CHILD, format!("{script} {hex}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    fn expect(&mut self, word: &str) {
        let mut said = self.lines.by_ref().map(Result::unwrap);
        assert!(said.any(|line| line.ends_with(word)), "it ended");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a promise: what [`Rank`] runs.
#[test]
#[ignore = "run by other tests"]
fn rank_of_a_child_process() {
    let Ok(told) = std::env::var(CHILD) else {
        return;
    };
    let (script, hex) = told.split_once(' ').unwrap();
    let mut id = [0; CommId::BYTES];
    for (i, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
    }
    let gpu = Gpu::open(1).unwrap();
    let comm = Comm::join(&gpu, &CommId::from_bytes(id), 1, 2, &NEVER).unwrap();
    if script != "idle" {
        let x = tensor(&comm, &[1 << 20], GpuType::F32, |i| value(1, i));
        comm.all_reduce(&x, &x, Lane::Compute).unwrap();
        comm.wait().unwrap();
        let want: Vec<f32> = (0..1 << 20).map(|i| sum(2, i)).collect();
        assert!(x.to_f32_vec().unwrap() == want);
    }
    println!("{script} done");
    std::io::stdout().flush().unwrap();
    if script != "once" {
        // Until it is killed.
        let _ = std::io::stdin().lines().next();
    }
}

/// Whether there is a GPU for each process of these tests; says so where there is not.
#[allow(clippy::print_stdout)]
fn two_gpus() -> bool {
    let found = Gpu::count().unwrap();
    if found < 2 {
        println!("skipped: needs two GPUs, found {found}");
    }
    found >= 2
}

/// Rank 0, in this process.
fn first(gpu: &Arc<Gpu>, id: &CommId, options: &CommOptions) -> Comm {
    Comm::join(gpu, id, 0, 2, options).unwrap()
}

fn all_reduce_once(comm: &Comm) -> Result<(), CudaError> {
    let x = tensor(comm, &[1 << 20], GpuType::F32, |i| value(0, i));
    comm.all_reduce(&x, &x, Lane::Compute)?;
    comm.wait()?;
    let want: Vec<f32> = (0..1 << 20).map(|i| sum(2, i)).collect();
    assert!(x.to_f32_vec()? == want);
    Ok(())
}

#[test]
#[ignore = "needs two GPUs"]
fn processes_work_together_like_threads() {
    if !two_gpus() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let id = CommId::new().unwrap();
    let mut other = Rank::start(&id, "once");
    all_reduce_once(&first(&gpu, &id, &CommOptions::default())).unwrap();
    other.expect("done");
    assert!(other.process.wait().unwrap().success());
}

#[test]
#[ignore = "needs two GPUs"]
fn a_rank_that_is_killed_hangs_nobody_before_its_first_operation_or_later() {
    if !two_gpus() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    for script in ["idle", "stay"] {
        let id = CommId::new().unwrap();
        let mut other = Rank::start(&id, script);
        let comm = first(&gpu, &id, &SOON);
        if script == "stay" {
            all_reduce_once(&comm).unwrap();
        }
        other.expect("done");
        drop(other);
        let ended = all_reduce_once(&comm).unwrap_err();
        assert!(matches!(ended, CudaError::GroupEnded { .. }), "{ended}");
        assert_eq!(comm.check().unwrap_err(), ended);
        assert_eq!(all_reduce_once(&comm).unwrap_err(), ended);
        // The GPU goes on.
        gpu.synchronize().unwrap();
        let x = GpuTensor::from_f32(&gpu, &[2], &[1.0, 2.0], "test").unwrap();
        assert_eq!(x.to_f32_vec().unwrap(), [1.0, 2.0]);
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn who_learns_that_a_rank_is_gone_can_release_the_others_at_once() {
    if !two_gpus() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let id = CommId::new().unwrap();
    let mut other = Rank::start(&id, "stay");
    let comm = first(&gpu, &id, &NEVER);
    all_reduce_once(&comm).unwrap();
    other.expect("done");
    drop(other);
    let aborter = comm.aborter();
    let (enqueued, waiting) = mpsc::channel();
    let news = std::thread::spawn(move || {
        waiting.recv().unwrap();
        aborter.abort("rank 1 is gone");
    });
    let x = tensor(&comm, &[1 << 20], GpuType::F32, |i| value(0, i));
    comm.all_reduce(&x, &x, Lane::Compute).unwrap();
    enqueued.send(()).unwrap();
    let ended = comm.wait().unwrap_err();
    let reason = "rank 1 is gone".into();
    assert_eq!(ended, CudaError::GroupEnded { reason });
    news.join().unwrap();
}
