//! A measurement under a plan: a thread a GPU, in this process.
use std::{sync::Arc, time::Duration};

use kernels::cuda::{Comm, CommId, CommOptions, Gpu};
use model::{ModelError, gpu::GpuShare};
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

/// What the first rank measured; the first error of any.
pub(super) fn run(bench: &GpuBench<'_>, ranks: usize) -> Result<Value, OmniError> {
    // Whether plan and model go together is known before a GPU is touched.
    let shares: Vec<GpuShare> = (0..ranks)
        .map(|rank| GpuShare::new(&bench.config, &bench.plan, rank))
        .collect::<Result<_, ModelError>>()
        .map_err(model_error)?;
    let id = CommId::new().map_err(gpu_error)?;
    let measured: Vec<Result<Value, OmniError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .into_iter()
            .map(|share| scope.spawn(move || rank(bench, &id, share)))
            .collect();
        let lost = || Err(bad("a rank of the measurement panicked"));
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| lost()))
            .collect()
    });
    let all = measured.into_iter().collect::<Result<Vec<_>, _>>()?;
    all.into_iter()
        .next()
        .ok_or_else(|| bad("a plan without ranks"))
}

fn rank(bench: &GpuBench<'_>, id: &CommId, share: GpuShare) -> Result<Value, OmniError> {
    let gpu = Gpu::open(bench.ordinal + share.rank()).map_err(gpu_error)?;
    let options = CommOptions {
        deadline: PATIENCE,
        blocks: None,
    };
    let (place, ranks) = (share.rank(), share.ranks());
    let comm = Comm::join(&gpu, id, place, ranks, &options).map_err(gpu_error)?;
    measure(bench, Some((share, Arc::new(comm))))
}
