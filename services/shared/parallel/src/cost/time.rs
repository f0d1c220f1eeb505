//! From loads and bytes to seconds.

use super::load::RankLoad;
use super::sizes::ModelSizes;
use super::{ACTIVATION_BYTES, AxisCost, Machine, Work};
use crate::traffic::{GroupTraffic, Predictor, Routes, StepJob, Tally};
use crate::wire::ELEMENT_BYTES;
use crate::{Axis, AxisSet, Op, ParallelError, Plan, near_even_range};

/// Time of one step of a batch.
#[derive(Debug, Clone, Default)]
pub(super) struct StepTime {
    /// Of the whole step.
    pub(super) seconds: f64,
    /// On the busiest stage, without communication.
    pub(super) compute: f64,
    /// By group, of the rank that moves most there.
    pub(super) communication: Vec<AxisCost>,
    /// Share of the pipeline's time in which a stage waits for another.
    pub(super) bubble: f64,
}

/// Seconds of one pass on one rank.
#[derive(Debug, Clone, Copy, Default)]
struct Pass {
    compute: f64,
    /// Of it attention in all layers.
    attention: f64,
    /// What is not hidden behind computing.
    exposed: f64,
}

/// Seconds of `group`'s operations in one step.
fn seconds(group: &GroupTraffic, machine: &Machine) -> f64 {
    let kinds = group.traffic.by_kind.iter().zip(group.operations);
    let of_kind = |(kind, (moved, operations)): (usize, (&crate::Moved, u64))| {
        let bytes = wire_bytes(moved.sent.max(moved.received));
        operations as f64 * machine.link.latency + bytes as f64 / machine.link.rate(kind)
    };
    kinds.enumerate().map(of_kind).sum()
}

/// Bytes in the activations' type of what is counted in the elements of [`crate::wire`].
fn wire_bytes(counted: u64) -> u64 {
    counted / ELEMENT_BYTES * ACTIVATION_BYTES
}

/// Times of every rank of one plan.
pub(super) struct Timing<'a> {
    pub(super) sizes: &'a ModelSizes,
    pub(super) machine: &'a Machine,
    pub(super) work: &'a Work,
    pub(super) plan: Plan,
    /// Jobs of one step.
    pub(super) batch: usize,
}

impl Timing<'_> {
    /// Rows of a step on one guidance rank.
    pub(super) fn rows(&self) -> usize {
        self.batch * (self.work.rows / self.plan.cfg).max(1)
    }

    /// Passes of a step: each row is one where there are several stages.
    fn passes(&self) -> usize {
        if self.plan.pp > 1 { self.rows() } else { 1 }
    }

    /// Load of `rank` in one pass.
    pub(super) fn load(&self, rank: usize) -> Result<RankLoad<'_>, ParallelError> {
        let rows = self.rows() / self.passes();
        RankLoad::new(self.sizes, &self.plan, rank, self.work, rows)
    }

    /// What every rank moves in one step.
    fn traffic(&self) -> Result<Vec<Tally>, ParallelError> {
        let job = StepJob {
            tokens: self.sizes.specials + self.work.image_tokens,
            prefixes: vec![self.work.prefix; self.work.rows],
            latents: self.work.image_tokens * self.sizes.vae.latent,
        };
        let jobs = vec![job; self.batch];
        let routes = Routes::Uniform {
            top_k: &self.sizes.top_k,
        };
        let predictor = Predictor::new(&self.sizes.shape, &self.plan, routes)?;
        let ranks = 0..self.plan.mesh()?.ranks();
        ranks.map(|rank| predictor.step(rank, &jobs)).collect()
    }

    /// One pass of `rank`; what moves in the step is spread over its passes.
    fn pass(&self, rank: usize, tally: &Tally) -> Result<Pass, ParallelError> {
        let (load, mut pass) = (self.load(rank)?, Pass::default());
        let stage = self.plan.mesh()?.coordinates(rank)?[Axis::Pp as usize];
        let mut last = None;
        for layer in near_even_range(self.sizes.shape.layers.len(), self.plan.pp, stage)? {
            let alike = (self.sizes.shape.layers[layer], self.sizes.top_k[layer]);
            let (all, attention) = match last {
                Some((seen, seconds)) if seen == alike => seconds,
                _ => load.layer(self.machine, layer)?,
            };
            last = Some((alike, (all, attention)));
            pass.compute += all;
            pass.attention += attention;
        }
        let passes = self.passes() as f64;
        let ring = self.plan.ring as f64;
        // A ring's keys travel while those at hand are used, which is so in all rounds but the last.
        let hidden = passes * pass.attention * (ring - 1.0) / ring;
        let mut moving = 0.0;
        for group in tally.groups() {
            moving += match group.axes {
                axes if axes == AxisSet::from(Axis::Pp) && stage == 0 => 0.0,
                axes if axes == AxisSet::from(Axis::Ring) => self.ring(group, hidden),
                _ => seconds(group, self.machine),
            };
        }
        pass.exposed = moving / passes;
        Ok(pass)
    }

    /// Seconds along the ring that are not hidden; only its shifts overlap anything.
    fn ring(&self, group: &GroupTraffic, hidden: f64) -> f64 {
        let shift = Op::RingShift { hop: 1 }.kind();
        let (mut shifts, mut rest) = (group.clone(), group.clone());
        for kind in 0..Op::KINDS {
            let other = if kind == shift {
                &mut rest
            } else {
                &mut shifts
            };
            other.traffic.by_kind[kind] = crate::Moved::default();
            other.operations[kind] = 0;
        }
        (seconds(&shifts, self.machine) - hidden).max(0.0) + seconds(&rest, self.machine)
    }

    /// One step of the batch.
    pub(super) fn step(&self) -> Result<StepTime, ParallelError> {
        let (mesh, tallies) = (self.plan.mesh()?, self.traffic()?);
        let mut stages = vec![Pass::default(); self.plan.pp];
        for (rank, tally) in tallies.iter().enumerate() {
            let pass = self.pass(rank, tally)?;
            let stage = &mut stages[mesh.coordinates(rank)?[Axis::Pp as usize]];
            // A stage is as slow as its slowest rank, in each respect.
            stage.compute = stage.compute.max(pass.compute);
            stage.exposed = stage.exposed.max(pass.exposed);
        }
        let each = |pass: &Pass| pass.compute + pass.exposed;
        let fill: f64 = stages.iter().map(each).sum();
        let slowest = stages.iter().map(each).fold(0.0, f64::max);
        let passes = self.passes() as f64;
        let pipeline = fill + (passes - 1.0) * slowest;
        let ends = self.ends();
        let hop = self.hop();
        let busiest = stages.iter().map(|s| s.compute).fold(0.0, f64::max);
        Ok(StepTime {
            seconds: ends + pipeline + hop,
            compute: ends + passes * busiest,
            communication: self.by_axes(&tallies),
            bubble: 1.0 - passes * fill / (self.plan.pp as f64 * pipeline),
        })
    }

    /// Stem and head, which every rank of the first and last stage computes for all its rows.
    fn ends(&self) -> f64 {
        let image = 2.0 * self.work.image_tokens as f64;
        let stem = self.batch * self.sizes.stem_macs();
        let head = self.rows() * self.sizes.head_macs();
        image * (stem + head) as f64 / self.machine.convolution
    }

    /// New latents on their way from the last stage to the first.
    fn hop(&self) -> f64 {
        if self.plan.pp == 1 {
            return 0.0;
        }
        let latents = (self.work.image_tokens * self.sizes.vae.latent) as f64;
        let link = &self.machine.link;
        let bytes = latents * ACTIVATION_BYTES as f64;
        self.batch as f64 * (link.latency + bytes / link.point_to_point)
    }

    /// The largest bytes and seconds of any rank, group by group.
    fn by_axes(&self, tallies: &[Tally]) -> Vec<AxisCost> {
        let mut all: Vec<AxisCost> = Vec::new();
        for group in tallies.iter().flat_map(Tally::groups) {
            let (sent, seconds) = (group.traffic.total().sent, seconds(group, self.machine));
            let sent = wire_bytes(sent);
            match all.iter_mut().find(|cost| cost.axes == group.axes) {
                Some(cost) => {
                    cost.sent = cost.sent.max(sent);
                    cost.seconds = cost.seconds.max(seconds);
                }
                None => all.push(AxisCost {
                    axes: group.axes,
                    sent,
                    seconds,
                }),
            }
        }
        all
    }
}
