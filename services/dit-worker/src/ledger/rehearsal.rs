//! The ledger held against a process that does what it foresees.
use std::sync::Arc;

use model::{JobOptions, JobSpec, Latents, PrefixKv, StepCache};
use stage::{Ranks, StageError};

use super::{Costs, GUIDANCE, filled, peak_bytes, reset_peak};
use crate::{
    denoiser::{NewsPlan, RankJob},
    order::Order,
};

/// What the ledger said, and what was seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rehearsal {
    /// Resident before any request, in bytes.
    pub resident: u64,
    /// The most that the ledger expected, in bytes.
    pub predicted: u64,
    /// The most that was resident, in bytes.
    pub peak: u64,
}

/// The requests of a rehearsal, all alike.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// How many run at once.
    pub requests: usize,
    /// Pixels down and across.
    pub size: (usize, usize),
    /// Tokens of each prefix.
    pub prefix: u32,
    /// Steps of each.
    pub steps: usize,
}

impl Load {
    fn order(&self) -> Order {
        let handle = proto::v1::PrefixHandle {
            tokens: self.prefix,
            ..Default::default()
        };
        Order {
            request_id: String::new(),
            height: self.size.0,
            width: self.size.1,
            steps: self.steps,
            guidance: GUIDANCE,
            seed: 0,
            cond: handle.clone(),
            uncond: Some(handle),
            output: None,
            epoch: 0,
            transfer_timeout: None,
            resume: None,
            news: NewsPlan::default(),
            class: crate::batch::Class::Standard,
            due: None,
            arrived: base::clock::now(),
        }
    }

    fn job(&self, ranks: &Ranks, seed: u64) -> Result<RankJob, StageError> {
        let (kv, tokens) = (ranks.info().kv, self.prefix as usize);
        let prefix = || {
            let values = filled(kv.elements_per_token() * tokens);
            Ok::<_, StageError>(Arc::new(PrefixKv::new(kv, tokens, values)?))
        };
        let spec = JobSpec {
            height: self.size.0,
            width: self.size.1,
            steps: self.steps,
            guidance: GUIDANCE,
            seed,
            cond: Some(prefix()?),
            uncond: Some(prefix()?),
        };
        RankJob::new(ranks, &spec, &JobOptions::default(), NewsPlan::default())
    }
}

/// Runs guided requests of several kinds in one batch, for as many steps as the least have, while a picture of the
/// largest size is decoded, and holds the ledger against it.
///
/// # Errors
/// Those of the model, and of reading what is resident.
pub fn rehearse(ranks: &Ranks, loads: &[Load]) -> Result<Rehearsal, StageError> {
    let costs = Costs::measure(ranks, &StepCache::Off)?;
    let grid = |load: &Load| (load.size.0 / costs.cell, load.size.1 / costs.cell);
    let grids = loads.iter().map(grid);
    let grid = grids.max_by_key(|grid| grid.0 * grid.1).unwrap_or((1, 1));
    let fixed = costs.step.at(0) + costs.decoding(grid.0 * grid.1);
    let each = loads
        .iter()
        .map(|load| load.requests as u64 * costs.job(&load.order()));
    let predicted = costs.resident + fixed + each.sum::<u64>();
    reset_peak()?;
    let mut jobs = Vec::new();
    for load in loads {
        for seed in 0..load.requests as u64 {
            jobs.push(load.job(ranks, seed)?);
        }
    }
    let steps = loads.iter().map(|load| load.steps).min().unwrap_or(0);
    std::thread::scope(|scope| {
        let decoding = scope.spawn(move || {
            let channels = ranks.first().config().vae.latent_channels;
            let values = filled(channels * grid.0 * grid.1);
            let latents = Latents::new(channels, grid.0, grid.1, values)?;
            ranks.decode(&latents)?;
            Ok::<_, StageError>(())
        });
        for _ in 0..steps {
            RankJob::step_together(ranks, &mut jobs)?;
        }
        let stopped = |_| StageError::EngineStopped { engine: "decode" };
        decoding.join().map_err(stopped)?
    })?;
    Ok(Rehearsal {
        resident: costs.resident,
        predicted,
        peak: peak_bytes()?,
    })
}
