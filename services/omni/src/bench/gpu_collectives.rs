//! What the ranks of a plan exchange, between the GPUs of this machine.
use std::time::Duration;

use kernels::cuda::{
    Comm, CommId, CommOptions, Gpu, GpuTensor, GpuType, Lane, Result, Transfer, fill_random,
};
use serde_json::{Value, json};

use super::{bad, gpu_ops::gpu_error, median};
use crate::error::OmniError;

/// Longest wait of a rank for the others.
const PATIENCE: Duration = Duration::from_secs(60);
/// Operations between two marks.
const RUN: usize = 10;

/// Time of each operation as the slowest rank saw it, of `tokens` bf16 rows in all.
pub(super) fn run(
    gpus: usize,
    (tokens, width): (usize, usize),
    rounds: usize,
) -> std::result::Result<Value, OmniError> {
    let found = Gpu::count().map_err(gpu_error)?;
    if gpus > found {
        return Err(bad(format!("gpus: {gpus} asked for, {found} found")));
    }
    let id = CommId::new().map_err(gpu_error)?;
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let id = &id;
        let rank = |rank| scope.spawn(move || rank_of(id, (rank, gpus), (tokens, width), rounds));
        let threads: Vec<_> = (0..gpus).map(rank).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut tables = Vec::with_capacity(gpus);
    for rank in ranks {
        let table = rank.map_err(|_| bad("a rank of the measurement panicked"))?;
        tables.push(table.map_err(gpu_error)?);
    }
    let one = |index: usize| {
        let worst = tables.iter().map(|t| t[index].us).fold(0.0, f64::max);
        let Row { name, sent, .. } = &tables[0][index];
        json!({"name": name, "us": worst, "gigabytes_per_second_sent": *sent as f64 / worst / 1e3})
    };
    Ok(json!({
        "nccl": Comm::library_version().map_err(gpu_error)?,
        "operations": (0..tables[0].len()).map(one).collect::<Vec<_>>(),
    }))
}

struct Row {
    name: &'static str,
    /// Bytes that a rank sends to others.
    sent: usize,
    us: f64,
}

fn rank_of(
    id: &CommId,
    (rank, ranks): (usize, usize),
    (tokens, width): (usize, usize),
    rounds: usize,
) -> Result<Vec<Row>> {
    let gpu = Gpu::open(rank)?;
    let options = CommOptions {
        deadline: PATIENCE,
        blocks: None,
    };
    let comm = Comm::join(&gpu, id, rank, ranks, &options)?;
    let own = tokens.div_ceil(ranks);
    let new = |rows: usize| -> Result<GpuTensor> {
        let tensor = GpuTensor::new(&gpu, &[rows, width], GpuType::Bf16, "operand")?;
        fill_random(&tensor, rank as u64, 1.0)?;
        Ok(tensor)
    };
    let (all, other, part) = (new(own * ranks)?, new(own * ranks)?, new(own)?);
    let back = new(own)?;
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let lane = Lane::Compute;
    let shift = || {
        let there = Transfer::Send {
            to: next,
            tensor: &part,
        };
        let here = Transfer::Receive {
            from: previous,
            tensor: &back,
        };
        comm.exchange(&[there, here], lane)
    };
    let most = part.bytes() * (ranks - 1);
    type Call<'a> = &'a dyn Fn() -> Result<()>;
    let operations: [(&'static str, usize, Call<'_>); 5] = [
        ("all_reduce", 2 * most, &|| {
            comm.all_reduce(&all, &all, lane)
        }),
        ("reduce_scatter", most, &|| {
            comm.reduce_scatter(&all, &part, lane)
        }),
        ("all_gather", most, &|| comm.all_gather(&part, &all, lane)),
        ("all_to_all", most, &|| comm.all_to_all(&all, &other, lane)),
        ("ring_shift", part.bytes(), &shift),
    ];
    let mut rows = Vec::new();
    for (name, sent, call) in operations {
        let mut times = Vec::with_capacity(rounds);
        // The first round connects.
        for round in 0..=rounds {
            // Sums stay finite.
            fill_random(&all, 1, 1e-3)?;
            comm.barrier()?;
            let begin = gpu.mark()?;
            for _ in 0..RUN {
                call()?;
            }
            let end = gpu.mark()?;
            comm.wait()?;
            if round > 0 {
                times.push(f64::from(end.milliseconds_since(&begin)?) * 1e3 / RUN as f64);
            }
        }
        let us = median(&times);
        rows.push(Row { name, sent, us });
    }
    Ok(rows)
}
