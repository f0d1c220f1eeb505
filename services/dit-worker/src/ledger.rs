//! What requests take in memory, reserved before they come in.
//!
//! Prefixes, latents, what a job keeps between steps and what a decode takes follow from sizes. What a step
//! takes besides is measured when the worker starts, at two sizes, and is a line in tokens.
use std::{fs, path::Path, sync::Arc};

use base::Failure;
use model::{JobOptions, JobSpec, Latents, PrefixKv, StepCache, VaeConfig, vae::Tiles};
use stage::{Ranks, StageError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    denoiser::{NewsPlan, RankJob},
    order::Order,
};

const STATUS: &str = "/proc/self/status";
const MACHINE: &str = "/proc/meminfo";
/// Writing 5 to it makes the peak what is resident now.
const RESET: &str = "/proc/self/clear_refs";
/// Bytes of one permit: a reservation is rounded up to it.
const UNIT: u64 = 16 << 10;
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
        forget_peak();
        let mut steps = Vec::new();
        // The smaller one first: what it leaves behind hides nothing of the larger one.
        for bucket in [(cell, cell), (small.height, small.width)] {
            let tokens = one_step(ranks, bucket)?;
            steps.push((tokens, peak_bytes()?.saturating_sub(resident)));
        }
        let largest = large.height / cell * (large.width / cell);
        Ok(Self {
            resident,
            step: Line::through(steps[0], steps[1]),
            decode: decode_line(&config.vae),
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
    free: Arc<Semaphore>,
}

impl Ledger {
    /// `budget` is what the process may have in all; `None`: what the machine has free now.
    ///
    /// # Errors
    /// `Config` naming `memory` when not even an empty worker fits; reading what the machine has.
    pub(crate) fn new(costs: Costs, budget: Option<u64>) -> Result<Self, StageError> {
        let budget = match budget {
            Some(bytes) => bytes,
            None => resident_bytes()? + field(Path::new(MACHINE), "MemAvailable:")?,
        };
        let taken = costs.resident + costs.fixed();
        let room = budget.checked_sub(taken).ok_or_else(|| {
            let message = format!(
                "{budget} bytes, and the model without requests takes {taken} (resident_layers keeps less of it)"
            );
            StageError::config("memory", message)
        })?;
        tracing::info!(budget, taken, room, "memory for requests");
        Ok(Self::of(Prices::Host(Box::new(costs)), room))
    }

    /// Of the GPUs that `ranks` have; the host only passes things on.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpus(ranks: &Arc<Ranks>) -> Self {
        let room = ranks.gpus().map_or(0, stage::GpuRanks::room) as u64;
        tracing::info!(room, "memory for requests on each GPU");
        Self::of(Prices::Device(Arc::clone(ranks)), room)
    }

    fn of(prices: Prices, room: u64) -> Self {
        let permits = usize::try_from(room / UNIT).unwrap_or(Semaphore::MAX_PERMITS);
        Self {
            prices,
            room,
            free: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Permits of a request.
    ///
    /// # Errors
    /// A request that would never fit, naming `size`.
    pub(crate) fn permits(&self, order: &Order) -> Result<u32, StageError> {
        let bytes = self.prices.job(order);
        if bytes.div_ceil(UNIT) > self.room / UNIT {
            let room = self.room;
            let message = format!(
                "size: {}x{} with these prompts takes {bytes} bytes, this worker has {room}",
                order.width, order.height
            );
            return Err(StageError::Other(Failure::invalid("size", message)));
        }
        u32::try_from(bytes.div_ceil(UNIT)).map_err(|_| {
            let message = format!("size: {bytes} bytes are too many for one request");
            StageError::Other(Failure::invalid("size", message))
        })
    }

    /// Takes the permits if they are free.
    pub(crate) fn try_take(&self, permits: u32) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).try_acquire_many_owned(permits).ok()
    }

    /// Waits for the permits, in order of arrival.
    ///
    /// # Errors
    /// `Draining`, which would be a defect: the ledger is never closed.
    pub(crate) async fn take(&self, permits: u32) -> Result<OwnedSemaphorePermit, StageError> {
        let taken = Arc::clone(&self.free).acquire_many_owned(permits).await;
        taken.map_err(|_| StageError::Draining)
    }

    /// Bytes that requests may still reserve.
    pub(crate) fn free(&self) -> u64 {
        self.free.available_permits() as u64 * UNIT
    }

    /// Bytes reserved now.
    pub(crate) fn reserved(&self) -> u64 {
        self.room / UNIT * UNIT - self.free.available_permits() as u64 * UNIT
    }
}

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

/// Runs guided requests in one batch while a picture is decoded, and holds the ledger against it.
///
/// # Errors
/// Those of the model, and of reading what is resident.
pub fn rehearse(ranks: &Ranks, load: Load) -> Result<Rehearsal, StageError> {
    let costs = Costs::measure(ranks, &StepCache::Off)?;
    let info = ranks.info();
    let handle = proto::v1::PrefixHandle {
        tokens: load.prefix,
        ..Default::default()
    };
    let order = Order {
        request_id: String::new(),
        height: load.size.0,
        width: load.size.1,
        steps: load.steps,
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
        arrived: base::clock::now(),
    };
    let grid = (load.size.0 / costs.cell, load.size.1 / costs.cell);
    let fixed = costs.step.at(0) + costs.decoding(grid.0 * grid.1);
    let predicted = costs.resident + fixed + load.requests as u64 * costs.job(&order);
    reset_peak()?;
    let values = info.kv.elements_per_token() * load.prefix as usize;
    let prefix = || {
        Ok::<_, StageError>(Arc::new(PrefixKv::new(
            info.kv,
            load.prefix as usize,
            filled(values),
        )?))
    };
    let mut jobs = Vec::new();
    for seed in 0..load.requests as u64 {
        let spec = JobSpec {
            height: load.size.0,
            width: load.size.1,
            steps: load.steps,
            guidance: GUIDANCE,
            seed,
            cond: Some(prefix()?),
            uncond: Some(prefix()?),
        };
        let (options, news) = (JobOptions::default(), NewsPlan::default());
        jobs.push(RankJob::new(ranks, &spec, &options, news)?);
    }
    std::thread::scope(|scope| {
        let decoding = scope.spawn(|| {
            let channels = ranks.first().config().vae.latent_channels;
            let values = filled(channels * grid.0 * grid.1);
            let latents = Latents::new(channels, grid.0, grid.1, values)?;
            ranks.decode(&latents)?;
            Ok::<_, StageError>(())
        });
        for _ in 0..load.steps {
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

/// Bytes resident now.
///
/// # Errors
/// `Io` or `Config` where the system does not say.
pub fn resident_bytes() -> Result<u64, StageError> {
    field(Path::new(STATUS), "VmRSS:")
}

/// Most bytes that were resident since the peak was last reset.
///
/// # Errors
/// `Io` or `Config` where the system does not say.
pub fn peak_bytes() -> Result<u64, StageError> {
    field(Path::new(STATUS), "VmHWM:")
}

/// Makes the peak what is resident now.
///
/// # Errors
/// `Io` where the system does not let us.
pub fn reset_peak() -> Result<(), StageError> {
    fs::write(RESET, "5").map_err(|source| StageError::Io {
        what: format!("write {RESET}"),
        source,
    })
}

/// Where the peak cannot be reset, what the model took while it was loaded hides what it takes now.
fn forget_peak() {
    if let Err(error) = reset_peak() {
        tracing::warn!(%error, "memory is measured from the highest so far");
    }
}

fn field(file: &Path, name: &str) -> Result<u64, StageError> {
    let text = fs::read_to_string(file).map_err(|source| StageError::Io {
        what: format!("read {}", file.display()),
        source,
    })?;
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| StageError::config("memory", format!("{} has no {name}", file.display())))
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
            arrived: base::clock::now(),
        }
    }

    #[test]
    fn only_what_fits_comes_in_and_what_leaves_makes_room() {
        let taken = costs().resident + costs().fixed();
        let one = costs().job(&order(4, 100));
        let ledger = Ledger::new(costs(), Some(taken + 2 * one + 4 * UNIT)).unwrap();
        let permits = ledger.permits(&order(4, 100)).unwrap();
        let first = ledger.try_take(permits).unwrap();
        let _second = ledger.try_take(permits).unwrap();
        assert!(ledger.try_take(permits).is_none());
        assert!(ledger.reserved() >= 2 * one);
        drop(first);
        assert!(ledger.try_take(permits).is_some());
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
        let ledger = Ledger::new(costs(), Some(taken + (1 << 18))).unwrap();
        assert!(ledger.permits(&order(2, 10)).is_ok());
        let error = ledger.permits(&order(2, 1_000)).unwrap_err();
        assert_eq!(error.field(), Some("size"), "{error}");
        let error = Ledger::new(costs(), Some(taken - 1)).unwrap_err();
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

    #[test]
    fn the_peak_is_seen_and_can_be_forgotten() {
        reset_peak().unwrap();
        let before = peak_bytes().unwrap();
        let large = vec![1_u8; 64 << 20];
        assert!(
            std::hint::black_box(&large)
                .iter()
                .step_by(4096)
                .all(|b| *b == 1)
        );
        let held = peak_bytes().unwrap();
        assert!(held >= before + (48 << 20));
        drop(large);
        // Other tests of this process take and free memory meanwhile.
        let forgotten = (0..200).any(|_| {
            reset_peak().unwrap();
            let fell = peak_bytes().unwrap() + (32 << 20) < held;
            if !fell {
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            fell
        });
        assert!(forgotten, "the peak stays at {held}");
    }
}
