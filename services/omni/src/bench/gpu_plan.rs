//! A measurement under a plan: a thread a GPU, in this process.
use std::{sync::Arc, time::Duration};

use kernels::cuda::{Comm, CommId, CommOptions, Gpu};
use model::{
    ModelConfig, ModelError,
    gpu::{GpuGroup, GpuShare},
};
use parallel::Plan;
use serde_json::Value;

use super::{
    bad,
    gpu::{GpuBench, measure},
    gpu_ops::gpu_error,
    model_error,
};
use crate::error::OmniError;

/// Longest wait of a rank for the others; loading is in it.
const PATIENCE: Duration = Duration::from_secs(300);

/// One rank of a plan, and its end of the group.
pub(super) type Rank = (GpuShare, Arc<dyn GpuGroup>);

/// What the first rank measured; the first error of any.
pub(super) fn run(bench: &GpuBench<'_>) -> Result<Value, OmniError> {
    let of = (&bench.config, &bench.plan);
    let all = every(of, bench.ordinal, &|rank| measure(bench, Some(rank)))?;
    all.into_iter()
        .next()
        .ok_or_else(|| bad("a plan without ranks"))
}

/// What `work` gives on every rank of a plan, whose GPUs are those from `ordinal` on; the first error of any.
pub(super) fn every<T: Send>(
    (config, plan): (&ModelConfig, &Plan),
    ordinal: usize,
    work: &(dyn Fn(Rank) -> Result<T, OmniError> + Sync),
) -> Result<Vec<T>, OmniError> {
    let ranks = plan.mesh().map_err(|e| bad(e.to_string()))?.ranks();
    // Whether plan and model go together is known before a GPU is touched.
    let shares: Vec<GpuShare> = (0..ranks)
        .map(|rank| GpuShare::new(config, plan, rank))
        .collect::<Result<_, ModelError>>()
        .map_err(model_error)?;
    let id = CommId::new().map_err(gpu_error)?;
    let done: Vec<Result<T, OmniError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .into_iter()
            .map(|share| scope.spawn(move || work(join(ordinal, &id, share)?)))
            .collect();
        let lost = || Err(bad("a rank of the measurement panicked"));
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| lost()))
            .collect()
    });
    done.into_iter().collect()
}

fn join(ordinal: usize, id: &CommId, share: GpuShare) -> Result<Rank, OmniError> {
    let gpu = Gpu::open(ordinal + share.rank()).map_err(gpu_error)?;
    let options = CommOptions {
        deadline: PATIENCE,
        blocks: None,
    };
    let (place, ranks) = (share.rank(), share.ranks());
    let comm = Comm::join(&gpu, id, place, ranks, &options).map_err(gpu_error)?;
    Ok((share, Arc::new(comm)))
}
