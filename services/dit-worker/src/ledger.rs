//! What requests take in memory, reserved before they come in.
//!
//! Prefixes, latents, what a job keeps between steps and what a decode takes follow from sizes. What a step
//! takes besides is measured when the worker starts, at two sizes, and is a line in tokens.
mod rehearsal;
mod system;

use std::sync::Arc;

use base::Failure;
use model::{JobOptions, JobSpec, PrefixKv, StepCache, VaeConfig, vae::Tiles};
use stage::{Ranks, StageError};

use crate::{
    denoiser::{NewsPlan, RankJob},
    order::Order,
    places::{Held, Places},
};

pub use rehearsal::{Load, Rehearsal, rehearse};
pub use system::{peak_bytes, reset_peak, resident_bytes};

/// Guidance of the measured pictures.
const GUIDANCE: f64 = 2.0;
/// Activations of a residual block that are there at once: input, first result, its norm, second result.
const DECODE_LIVE: usize = 4;
/// Copies of a picture that is put together of tiles: the tiles of two rows, those that are kept, and itself.
const TILED_COPIES: u64 = 4;
/// Copies on each rank whose tiles travel: its own, and everybody's.
const TILED_SHARED: u64 = 2;
/// Of each lower resolution, buffers that are kept for reuse and find none.
const DECODE_KEPT: usize = 3;

/// What steps and decodes take beyond their buffers, as a share: one that is used again may be larger than what it
/// is used for. Seen: 5 to 8 %.
const REUSE: f64 = 0.06;

/// Bytes that grow with a size.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Line {
    /// Whatever the size.
    pub(crate) base: f64,
    /// For each token or position.
    pub(crate) each: f64,
}

impl Line {
    /// Through two measurements `(size, bytes)`, the smaller size first. Never falls with the size.
    fn through(small: (usize, u64), large: (usize, u64)) -> Self {
        let apart = large.0.saturating_sub(small.0).max(1) as f64;
        let each = large.1.saturating_sub(small.1) as f64 / apart;
        let base = (small.1 as f64 - each * small.0 as f64).max(0.0);
        Self { base, each }
    }

    fn with_reuse(self) -> Self {
        Self {
            base: self.base * (1.0 + REUSE),
            each: self.each * (1.0 + REUSE),
        }
    }

    fn at(&self, size: usize) -> u64 {
        (self.base + self.each * size as f64).ceil() as u64
    }
}

/// What a decode in tiles takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TileCosts {
    /// Positions of a tile.
    positions: usize,
    /// Tiles that are decoded at a time.
    ranks: u64,
    /// Bytes of the picture for each position.
    picture: u64,
}

/// What this worker's model takes.
#[derive(Debug, Clone)]
pub(crate) struct Costs {
    /// Resident before any request: weights, and what the process is.
    pub(crate) resident: u64,
    /// A step, by query tokens.
    pub(crate) step: Line,
    /// A decode, by latent positions.
    pub(crate) decode: Line,
    /// Where pictures are decoded in tiles.
    pub(crate) tiles: Option<TileCosts>,
    /// Positions of the largest picture.
    largest: usize,
    prefix_token: u64,
    /// Copies of a prefix: ranks that are not alone each have their part.
    copies: u64,
    hidden: u64,
    channels: u64,
    rope: u64,
    kept: u64,
    cell: usize,
}

impl Costs {
    /// Measures a loaded model that has not computed yet.
    ///
    /// # Errors
    /// Those of the model, and of reading what is resident.
    pub(crate) fn measure(ranks: &Ranks, cache: &StepCache) -> Result<Self, StageError> {
        let info = ranks.info();
        let config = ranks.first().config();
        let cell = info.pixels_per_token;
        let area = |bucket: &&model::Bucket| bucket.height * bucket.width;
        let nothing = || StageError::config("model", "has no sizes");
        let small = info.buckets.iter().min_by_key(area).ok_or_else(nothing)?;
        let large = info.buckets.iter().max_by_key(area).ok_or_else(nothing)?;
        let resident = resident_bytes()?;
        system::forget_peak();
        let mut steps = Vec::new();
        // The smaller one first: what it leaves behind hides nothing of the larger one.
        for bucket in [(cell, cell), (small.height, small.width)] {
            let tokens = one_step(ranks, bucket)?;
            steps.push((tokens, peak_bytes()?.saturating_sub(resident)));
        }
        let largest = large.height / cell * (large.width / cell);
        Ok(Self {
            resident,
            step: Line::through(steps[0], steps[1]).with_reuse(),
            decode: decode_line(&config.vae).with_reuse(),
            tiles: tile_costs(ranks),
            largest,
            prefix_token: (info.kv.elements_per_token() * size_of::<f32>()) as u64,
            copies: if ranks.models().len() == 1 { 1 } else { 2 },
            hidden: config.hidden_size as u64,
            channels: config.vae.latent_channels as u64,
            rope: config.head_dim as u64,
            kept: cache.kept() as u64,
            cell,
        })
    }

    /// What a request has in memory from its prefixes to its last step.
    pub(crate) fn job(&self, order: &Order) -> u64 {
        let image = (order.height / self.cell * (order.width / self.cell)) as u64;
        let rows = 1 + u64::from(order.uncond.is_some());
        let prefixes =
            u64::from(order.cond.tokens) + order.uncond.as_ref().map_or(0, |p| u64::from(p.tokens));
        let tokens = rows * (image + 1);
        // Latents, the step's copy of them, and a forecast.
        let latents = 3 * image * self.channels;
        let times = order.steps as u64 * 6 * self.hidden;
        let values = latents + times + tokens * (self.rope + self.kept * self.hidden);
        prefixes * self.prefix_token * self.copies
            + values * size_of::<f32>() as u64
            + (self.step.each * tokens as f64).ceil() as u64
    }

    /// What has to be free whoever is in: the fixed part of a step, and one decode of the largest picture.
    pub(crate) fn fixed(&self) -> u64 {
        self.step.at(0) + self.decoding(self.largest)
    }

    /// What decoding a picture of so many positions takes.
    pub(crate) fn decoding(&self, positions: usize) -> u64 {
        let whole = self.decode.at(positions);
        let Some(tiles) = self.tiles.filter(|tiles| positions > tiles.positions) else {
            return whole;
        };
        let shared = if tiles.ranks > 1 {
            TILED_SHARED * tiles.ranks
        } else {
            0
        };
        let picture = (TILED_COPIES + shared) * tiles.picture * positions as u64;
        whole.min(tiles.ranks * self.decode.at(tiles.positions) + picture)
    }
}

/// What requests take, and of which memory.
#[derive(Debug)]
enum Prices {
    /// Of the process.
    Host(Box<Costs>),
    /// Of the room for keys and values on each GPU: everything else there has its place from the start.
    #[cfg(feature = "cuda")]
    Device(Arc<Ranks>),
}

impl Prices {
    fn job(&self, order: &Order) -> u64 {
        match self {
            Self::Host(costs) => costs.job(order),
            #[cfg(feature = "cuda")]
            Self::Device(ranks) => {
                let cell = ranks.info().pixels_per_token;
                let image = order.height / cell * (order.width / cell);
                let rows = std::iter::once(&order.cond).chain(&order.uncond);
                let prefixes: Vec<usize> = rows.map(|prefix| prefix.tokens as usize).collect();
                let bytes = ranks.gpus().map_or(0, |gpus| {
                    gpus.picture_bytes(&prefixes, image + crate::MAX_SPECIALS)
                });
                bytes as u64
            }
        }
    }
}

/// Reservations against one budget.
#[derive(Debug)]
pub(crate) struct Ledger {
    prices: Prices,
    /// For requests, in bytes.
    room: u64,
    places: Places,
}

impl Ledger {
    /// `budget` is what the process may have in all; `None`: what the machine has free now. At most `places`
    /// requests are in at once, urgent ones aside.
    ///
    /// # Errors
    /// `Config` naming `memory` when not even an empty worker fits; reading what the machine has.
    pub(crate) fn new(
        costs: Costs,
        budget: Option<u64>,
        places: usize,
    ) -> Result<Self, StageError> {
        let budget = match budget {
            Some(bytes) => bytes,
            None => resident_bytes()? + system::available_bytes()?,
        };
        let taken = costs.resident + costs.fixed();
        let room = budget.checked_sub(taken).ok_or_else(|| {
            let message = format!(
                "{budget} bytes, and the model without requests takes {taken} (resident_layers keeps less of it)"
            );
            StageError::config("memory", message)
        })?;
        tracing::info!(budget, taken, room, "memory for requests");
        Ok(Self::of(Prices::Host(Box::new(costs)), room, places))
    }

    /// Of the GPUs that `ranks` have; the host only passes things on.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpus(ranks: &Arc<Ranks>, places: usize) -> Self {
        let room = ranks.gpus().map_or(0, stage::GpuRanks::room) as u64;
        tracing::info!(room, "memory for requests on each GPU");
        Self::of(Prices::Device(Arc::clone(ranks)), room, places)
    }

    fn of(prices: Prices, room: u64, places: usize) -> Self {
        Self {
            prices,
            room,
            places: Places::new(places, room),
        }
    }

    /// Bytes of a request.
    ///
    /// # Errors
    /// A request that would never fit, naming `size`.
    pub(crate) fn bytes(&self, order: &Order) -> Result<u64, StageError> {
        let (bytes, room) = (self.prices.job(order), self.room);
        if bytes <= room {
            return Ok(bytes);
        }
        let message = format!(
            "size: {}x{} with these prompts takes {bytes} bytes, this worker has {room}",
            order.width, order.height
        );
        Err(StageError::Other(Failure::invalid("size", message)))
    }

    /// Takes the bytes if they are free and nobody comes first.
    pub(crate) fn try_take(&self, bytes: u64, order: &Order) -> Option<Held> {
        self.places.try_take(bytes, &order.terms())
    }

    /// Waits for the bytes.
    ///
    /// # Errors
    /// `Draining`, which would be a defect: the ledger is never closed.
    pub(crate) async fn take(&self, bytes: u64, order: &Order) -> Result<Held, StageError> {
        self.places.take(bytes, &order.terms()).await
    }

    /// Bytes that requests may still reserve.
    pub(crate) fn free(&self) -> u64 {
        self.places.free()
    }

    /// Bytes reserved now.
    pub(crate) fn reserved(&self) -> u64 {
        self.room - self.free()
    }
}

/// Small numbers, none of them zero: untouched zeros take no memory.
fn filled(count: usize) -> Vec<f32> {
    (0..count).map(|i| 0.1 + (i % 7) as f32 / 70.0).collect()
}

/// One guided step (where guidance takes two rows) on a one-token prefix; its query tokens.
fn one_step(ranks: &Ranks, size: (usize, usize)) -> Result<usize, StageError> {
    let mut job = sample_job(ranks, size)?;
    RankJob::step_together(ranks, std::slice::from_mut(&mut job))?;
    Ok(crate::denoiser::weight(&job).tokens)
}

/// A guided job of one step on one-token prefixes.
pub(crate) fn sample_job(
    ranks: &Ranks,
    (height, width): (usize, usize),
) -> Result<RankJob, StageError> {
    let info = ranks.info();
    let values = filled(info.kv.elements_per_token());
    let prefix = Arc::new(PrefixKv::new(info.kv, 1, values)?);
    let spec = JobSpec {
        height,
        width,
        steps: 1,
        guidance: GUIDANCE,
        seed: 0,
        cond: Some(Arc::clone(&prefix)),
        uncond: Some(prefix),
    };
    RankJob::new(ranks, &spec, &JobOptions::default(), NewsPlan::default())
}

/// What a whole decode takes, by latent positions.
fn decode_line(vae: &VaeConfig) -> Line {
    let channels: Vec<usize> = vae.block_out_channels.iter().rev().copied().collect();
    // Values of one activation at each resolution, for each latent position.
    let level = |(level, channels): (usize, &usize)| {
        let frames = 1_usize << level.min(vae.temporal_levels());
        let pixels = 1_usize << (2 * level.min(vae.spatial_levels()));
        frames * pixels * channels
    };
    let levels: Vec<usize> = channels.iter().enumerate().map(level).collect();
    let widest = levels.iter().max().copied().unwrap_or(0);
    let lower = levels.iter().sum::<usize>() - widest;
    let values = DECODE_LIVE * widest + DECODE_KEPT * lower;
    Line {
        base: 0.0,
        each: (values * size_of::<f32>()) as f64,
    }
}

fn tile_costs(ranks: &Ranks) -> Option<TileCosts> {
    let vae = &ranks.first().config().vae;
    let tile = vae.sample_size / vae.spatial_factor;
    let pixels = vae.spatial_factor.pow(2) * vae.out_channels;
    (ranks.first().tiles() != Tiles::Whole).then(|| TileCosts {
        positions: tile * tile,
        ranks: ranks.models().len() as u64,
        picture: (pixels * size_of::<f32>()) as u64,
    })
}

#[cfg(test)]
mod tests {
    use base::Fault as _;
    use proto::v1::PrefixHandle;

    use super::*;

    fn costs() -> Costs {
        Costs {
            resident: 1 << 20,
            step: Line {
                base: 1e4,
                each: 2e3,
            },
            decode: Line {
                base: 0.0,
                each: 1e4,
            },
            tiles: None,
            largest: 16,
            prefix_token: 1 << 10,
            copies: 1,
            hidden: 64,
            channels: 4,
            rope: 16,
            kept: 0,
            cell: 16,
        }
    }

    fn order(side: usize, tokens: u32) -> Order {
        Order {
            request_id: "r".to_owned(),
            height: side * 16,
            width: side * 16,
            steps: 4,
            guidance: 1.0,
            seed: 1,
            cond: PrefixHandle {
                tokens,
                ..PrefixHandle::default()
            },
            uncond: None,
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

    #[test]
    fn only_what_fits_comes_in_and_what_leaves_makes_room() {
        let taken = costs().resident + costs().fixed();
        let one = costs().job(&order(4, 100));
        let ledger = Ledger::new(costs(), Some(taken + 2 * one + 4), 9).unwrap();
        let request = order(4, 100);
        let bytes = ledger.bytes(&request).unwrap();
        let first = ledger.try_take(bytes, &request).unwrap();
        let _second = ledger.try_take(bytes, &request).unwrap();
        assert!(ledger.try_take(bytes, &request).is_none());
        assert_eq!(ledger.reserved(), 2 * one);
        drop(first);
        assert!(ledger.try_take(bytes, &request).is_some());
    }

    #[test]
    fn tiles_bound_what_a_large_decode_takes_and_change_nothing_for_a_small_one() {
        let tiled = Costs {
            tiles: Some(TileCosts {
                positions: 4,
                ranks: 2,
                picture: 100,
            }),
            ..costs()
        };
        assert_eq!(tiled.decoding(4), costs().decoding(4));
        assert_eq!(tiled.decoding(1_000), 2 * 40_000 + 8 * 100 * 1_000);
        assert!(tiled.decoding(1_000) < costs().decoding(1_000) / 3);
    }

    #[test]
    fn what_can_never_fit_is_refused_by_name() {
        let taken = costs().resident + costs().fixed();
        let ledger = Ledger::new(costs(), Some(taken + (1 << 18)), 9).unwrap();
        assert!(ledger.bytes(&order(2, 10)).is_ok());
        let error = ledger.bytes(&order(2, 1_000)).unwrap_err();
        assert_eq!(error.field(), Some("size"), "{error}");
        let error = Ledger::new(costs(), Some(taken - 1), 9).unwrap_err();
        assert!(error.to_string().contains("memory"), "{error}");
    }

    #[test]
    fn a_line_goes_through_its_measurements_and_never_falls() {
        let line = Line::through((10, 1_500), (30, 3_500));
        assert_eq!(
            (line.at(10), line.at(30), line.at(20)),
            (1_500, 3_500, 2_500)
        );
        assert_eq!(Line::through((10, 900), (30, 800)).at(1_000), 900);
    }
}
