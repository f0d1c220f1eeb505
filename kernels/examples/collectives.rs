//! Measures the operations between GPUs at the sizes of the released model, a thread for each GPU:
//!
//! ```sh
//! cargo run --release -p kernels --features cuda --example collectives
//! ```
//!
//! A row is the median over rounds of the time of an operation, as the slowest rank's GPU saw it, in a run of
//! equal ones; "call" is what the host spent on one; GB/s counts what a rank sends to others.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a command line that measures the host"
)]

use std::sync::Mutex;
use std::time::Instant;

use kernels::cuda::{Comm, CommId, CommOptions, Gpu, GpuTensor, GpuType, Lane, Result, Transfer};

const ROUNDS: usize = 9;
/// Operations of a round.
const RUN: usize = 10;
const HIDDEN: usize = 4096;
const HEAD: usize = 128;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
/// Query tokens of a picture's two rows, by its side in pixels.
const PICTURES: [(usize, usize); 2] = [(1024, 2 * 4097), (2048, 2 * 16_385)];

/// One line of the table.
struct Row {
    name: String,
    /// Bytes a rank sends to others.
    sent: usize,
    /// Per operation, in microseconds: on the GPU and on the host.
    times: Vec<(f32, f32)>,
}

type Operation<'a> = Box<dyn Fn() -> Result<()> + 'a>;

fn bf16(comm: &Comm, dims: &[usize]) -> Result<GpuTensor> {
    let tensor = GpuTensor::new(comm.gpu(), dims, GpuType::Bf16, "operand")?;
    // Small numbers of many bit patterns, so that sums stay finite.
    let bytes: Vec<u8> = (0..tensor.bytes())
        .map(|i| if i % 2 == 1 { 0x3b } else { (i / 2 * 37) as u8 })
        .collect();
    tensor.write_bytes(&bytes)?;
    Ok(tensor)
}

fn rounds(comm: &Comm, operation: &Operation<'_>) -> Result<Vec<(f32, f32)>> {
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        comm.barrier()?;
        let begin = comm.gpu().mark()?;
        let host = Instant::now();
        for _ in 0..RUN {
            operation()?;
        }
        let host = host.elapsed().as_secs_f32() * 1e6 / RUN as f32;
        let end = comm.gpu().mark()?;
        comm.wait()?;
        // The first round connects.
        if round > 0 {
            times.push((end.milliseconds_since(&begin)? * 1e3 / RUN as f32, host));
        }
    }
    Ok(times)
}

fn measure(comm: &Comm, name: String, sent: usize, operation: &Operation<'_>) -> Result<Row> {
    let times = rounds(comm, operation)?;
    Ok(Row { name, sent, times })
}

fn sums(comm: &Comm, tokens: usize, side: usize, rows: &mut Vec<Row>) -> Result<()> {
    let (n, lane) = (comm.ranks(), Lane::Compute);
    let whole = bf16(comm, &[tokens.next_multiple_of(n), HIDDEN])?;
    let part = GpuTensor::new(
        comm.gpu(),
        &[whole.dim(0) / n, HIDDEN],
        GpuType::Bf16,
        "part",
    )?;
    let half = whole.bytes() * (n - 1) / n;
    let name = |what: &str| format!("{side}: {what} [{tokens}, {HIDDEN}]");
    let all_reduce: Operation<'_> = Box::new(|| comm.all_reduce(&whole, &whole, lane));
    rows.push(measure(comm, name("all_reduce"), 2 * half, &all_reduce)?);
    let scatter: Operation<'_> = Box::new(|| comm.reduce_scatter(&whole, &part, lane));
    rows.push(measure(comm, name("reduce_scatter"), half, &scatter)?);
    let gather: Operation<'_> = Box::new(|| comm.all_gather(&part, &whole, lane));
    rows.push(measure(comm, name("all_gather"), half, &gather)?);
    Ok(())
}

fn moves(comm: &Comm, tokens: usize, side: usize, rows: &mut Vec<Row>) -> Result<()> {
    let (n, rank, lane) = (comm.ranks(), comm.rank(), Lane::Compute);
    let own = tokens / n;
    for (what, heads) in [("q, k, v", Q_HEADS + 2 * KV_HEADS), ("out", Q_HEADS)] {
        let from = bf16(comm, &[n, own, heads / n * HEAD])?;
        let to = bf16(comm, from.shape())?;
        let name = format!(
            "{side}: all_to_all of {what} [{n}, {own}, {}]",
            heads / n * HEAD
        );
        let exchange: Operation<'_> = Box::new(|| comm.all_to_all(&from, &to, lane));
        rows.push(measure(comm, name, from.bytes() * (n - 1) / n, &exchange)?);
    }
    // With eight choices nearly every token has an expert on each of a few ranks.
    let (from, to) = (
        bf16(comm, &[n * own, HIDDEN])?,
        bf16(comm, &[n * own, HIDDEN])?,
    );
    let counts = vec![own; n];
    let name = format!("{side}: all_to_all_v of tokens {n} x [{own}, {HIDDEN}]");
    let dispatch: Operation<'_> =
        Box::new(|| comm.all_to_all_v(&from, &counts, &to, &counts, lane));
    rows.push(measure(comm, name, from.bytes() * (n - 1) / n, &dispatch)?);
    let (from, to) = (
        bf16(comm, &[2, own, KV_HEADS * HEAD])?,
        bf16(comm, &[2, own, KV_HEADS * HEAD])?,
    );
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let name = format!(
        "{side}: ring shift of k and v [2, {own}, {}]",
        KV_HEADS * HEAD
    );
    let shift: Operation<'_> = Box::new(|| {
        let there = Transfer::Send {
            to: next,
            tensor: &from,
        };
        let here = Transfer::Receive {
            from: previous,
            tensor: &to,
        };
        comm.exchange(&[there, here], lane)
    });
    rows.push(measure(comm, name, from.bytes(), &shift)?);
    Ok(())
}

fn rank(comm: &Comm) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (side, tokens) in PICTURES {
        sums(comm, tokens, side, &mut rows)?;
        moves(comm, tokens, side, &mut rows)?;
    }
    let small = bf16(comm, &[1, HIDDEN])?;
    let one: Operation<'_> = Box::new(|| comm.all_reduce(&small, &small, Lane::Compute));
    let name = format!("all_reduce [1, {HIDDEN}]");
    rows.push(measure(comm, name, small.bytes(), &one)?);
    Ok(rows)
}

fn main() -> Result<()> {
    let ranks = Gpu::count()?;
    println!(
        "nccl {}, {ranks} ranks in one process",
        Comm::library_version()?
    );
    let id = CommId::new()?;
    let tables = Mutex::new(Vec::new());
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|place| {
                let tables = &tables;
                scope.spawn(move || {
                    let gpu = Gpu::open(place)?;
                    let comm = Comm::join(&gpu, &id, place, ranks, &CommOptions::default())?;
                    let rows = rank(&comm)?;
                    comm.barrier()?;
                    tables.lock().expect("no rank panicked").push(rows);
                    Ok(())
                })
            })
            .collect();
        let join =
            |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().expect("no rank panicked");
        threads.into_iter().map(join).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    print(&tables.into_inner().expect("no rank panicked"));
    Ok(())
}

/// The slowest rank of each round; of those, and of the calls, the median.
fn print(tables: &[Vec<Row>]) {
    let median = |mut values: Vec<f32>| {
        values.sort_by(f32::total_cmp);
        values[values.len() / 2]
    };
    println!(
        "{:52} {:>9} {:>9} {:>7}",
        "operation", "gpu us", "call us", "GB/s"
    );
    for (i, row) in tables[0].iter().enumerate() {
        let worst = |pick: fn(&(f32, f32)) -> f32| {
            let of = |round: usize| {
                tables
                    .iter()
                    .map(|t| pick(&t[i].times[round]))
                    .fold(0.0, f32::max)
            };
            median((0..ROUNDS).map(of).collect())
        };
        let (gpu, host) = (worst(|t| t.0), worst(|t| t.1));
        let rate = row.sent as f32 / gpu / 1e3;
        println!("{:52} {gpu:9.1} {host:9.1} {rate:7.1}", row.name);
    }
}
