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

use std::sync::Arc;
use std::time::Instant;

use kernels::cuda::{
    Comm, CommId, CommOptions, Finish, Gpu, GpuTensor, GpuType, Lane, Result, Transfer,
    fill_random, gemm,
};

const ROUNDS: usize = 9;
/// Operations of a round.
const RUN: usize = 10;
const HIDDEN: usize = 4096;
const HEAD: usize = 128;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
/// Thread blocks of groups that work beside a product; none: as many as the library likes.
const BLOCKS: [Option<u32>; 3] = [None, Some(16), Some(8)];
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

/// A product on the compute lane and an operation beside it, which waits for the product before: as in a layer
/// whose tokens come in two halves.
fn beside(comm: &Comm, blocks: Option<u32>, rows: &mut Vec<Row>) -> Result<()> {
    let (gpu, n, tokens) = (comm.gpu(), comm.ranks(), PICTURES[0].1 / comm.ranks());
    let new = |dims: &[usize]| GpuTensor::new(gpu, dims, GpuType::Bf16, "operand");
    let (a, w) = (new(&[tokens, HIDDEN])?, new(&[3 * HIDDEN, HIDDEN])?);
    let out = new(&[tokens, 3 * HIDDEN])?;
    fill_random(&a, 1, 1.0)?;
    fill_random(&w, 2, 0.02)?;
    let heads = Q_HEADS + 2 * KV_HEADS;
    let (from, to) = (
        bf16(comm, &[n, tokens, heads / n * HEAD])?,
        new(&[n, tokens, heads / n * HEAD])?,
    );
    let sum = bf16(comm, &[tokens, HIDDEN])?;
    let limit = blocks.map_or("all".to_owned(), |b| b.to_string());
    let product = || gemm(&out, &a, &w, Finish::Store);
    let exchange = |lane| comm.all_to_all(&from, &to, lane);
    let reduce = |lane| comm.all_reduce(&sum, &sum, lane);
    let both = |operation: &dyn Fn(Lane) -> Result<()>| {
        comm.wait_for(&gpu.mark()?)?;
        operation(Lane::Beside)?;
        product()?;
        // The round ends with both.
        gpu.wait_for(&comm.mark()?)
    };
    let name = |what: &str| format!("{what} ({limit} blocks)");
    let cases: [(&str, Operation<'_>); 5] = [
        ("product", Box::new(product)),
        ("all_to_all", Box::new(|| exchange(Lane::Compute))),
        ("product beside all_to_all", Box::new(|| both(&exchange))),
        ("all_reduce", Box::new(|| reduce(Lane::Compute))),
        ("product beside all_reduce", Box::new(|| both(&reduce))),
    ];
    for (what, operation) in cases {
        rows.push(measure(comm, name(what), 0, &operation)?);
    }
    Ok(())
}

/// Operations with nothing beside them.
fn alone(comm: &Comm, rows: &mut Vec<Row>) -> Result<()> {
    for (side, tokens) in PICTURES {
        sums(comm, tokens, side, rows)?;
        moves(comm, tokens, side, rows)?;
    }
    let small = bf16(comm, &[1, HIDDEN])?;
    let one: Operation<'_> = Box::new(|| comm.all_reduce(&small, &small, Lane::Compute));
    let name = format!("all_reduce [1, {HIDDEN}]");
    rows.push(measure(comm, name, small.bytes(), &one)?);
    Ok(())
}

/// Runs `work` on every rank of a new group, as threads, and prints its rows.
fn table(
    gpus: &[Arc<Gpu>],
    blocks: Option<u32>,
    work: impl Fn(&Comm, &mut Vec<Row>) -> Result<()> + Sync,
) -> Result<()> {
    let (ranks, id) = (gpus.len(), CommId::new()?);
    let options = CommOptions {
        blocks,
        ..CommOptions::default()
    };
    let run = |rank: usize| {
        let comm = Comm::join(&gpus[rank], &id, rank, ranks, &options)?;
        let mut rows = Vec::new();
        work(&comm, &mut rows)?;
        comm.barrier()?;
        Ok(rows)
    };
    let rows: Result<Vec<Vec<Row>>> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        let ends = threads.into_iter().map(|t| t.join());
        ends.map(|end| end.expect("no rank panicked")).collect()
    });
    print(&rows?);
    Ok(())
}

fn main() -> Result<()> {
    let ranks = Gpu::count()?;
    let version = Comm::library_version()?;
    println!("nccl {version}, {ranks} ranks in one process");
    println!(
        "{:52} {:>9} {:>9} {:>7}",
        "operation", "gpu us", "call us", "GB/s"
    );
    let gpus = (0..ranks).map(Gpu::open).collect::<Result<Vec<_>>>()?;
    table(&gpus, None, alone)?;
    for blocks in BLOCKS {
        table(&gpus, blocks, |comm, rows| beside(comm, blocks, rows))?;
    }
    Ok(())
}

/// The slowest rank of each round; of those, and of the calls, the median.
fn print(tables: &[Vec<Row>]) {
    let median = |mut values: Vec<f32>| {
        values.sort_by(f32::total_cmp);
        values[values.len() / 2]
    };
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
