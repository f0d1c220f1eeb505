//! Where the layers' weights are: all in memory, or some in the checkpoint and read again in every pass.
//!
//! A thread reads the next layer that travels, by positioned reads, while the ones before it compute. At most
//! [`SLOTS`] of them are in memory at a time. Layers that travel are spread evenly among those that stay, so
//! that every read has the same time to hide in. A pass takes them in order and the reader goes on with the
//! first one for the next pass; what one pass reads serves every row of its batch.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use parallel::{Axis, Plan, SharedExpert, even_range};

use super::layer::Layer;
use crate::backbone::BalanceOptions;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::RankShard;

/// Layers that travel and are in memory: one computes, one is being read.
pub const SLOTS: usize = 2;

/// How much of a rank's decoder stays in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// Every layer.
    #[default]
    All,
    /// So many layers of each rank; the others are read in every pass.
    Layers(usize),
    /// As many layers of each rank as these bytes hold beside the [`SLOTS`] of those that are read.
    Bytes(u64),
}

impl Residency {
    /// The share of each of `ranks` ranks that divide it between them.
    #[must_use]
    pub fn shared_by(self, ranks: usize) -> Self {
        match self {
            Self::Bytes(bytes) => Self::Bytes(bytes / ranks.max(1) as u64),
            Self::All | Self::Layers(_) => self,
        }
    }
}

/// What travels on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Travelling {
    /// Layers that are read in every pass.
    pub layers: usize,
    /// Their bytes in the checkpoint, as far as they are this rank's.
    pub bytes: u64,
    /// Layers read so far.
    pub read: u64,
}

/// Makes layer `index` of this rank from its stored tensors.
pub(super) type Read = dyn Fn(usize) -> Result<Layer, ModelError> + Send + Sync;

/// The layers of one rank.
#[derive(Debug)]
pub(super) struct Layers {
    /// In order; `None`: it travels.
    resident: Vec<Option<Layer>>,
    travel: Option<Mutex<Travel>>,
    /// What was read for an earlier one is not used.
    epoch: AtomicU64,
    read: AtomicU64,
    bytes: u64,
}

/// A layer as it arrives, with the epoch it was asked for in.
type Arrived = (usize, u64, Result<Layer, ModelError>);

/// The reader's end here.
#[derive(Debug)]
struct Travel {
    /// The layers that travel.
    order: Vec<usize>,
    /// Asked for and not yet taken.
    outstanding: usize,
    ask: Option<SyncSender<(usize, u64)>>,
    arrived: Receiver<Arrived>,
    reader: Option<JoinHandle<()>>,
}

/// The layers during one pass, which no other pass of the rank overlaps while layers travel.
pub(super) struct LayerPass<'a> {
    layers: &'a Layers,
    travel: Option<MutexGuard<'a, Travel>>,
}

/// A layer for as long as it computes.
pub(super) enum LayerRef<'a> {
    Resident(&'a Layer),
    Travelling(Box<Layer>),
}

impl Deref for LayerRef<'_> {
    type Target = Layer;

    fn deref(&self) -> &Layer {
        match self {
            Self::Resident(layer) => layer,
            Self::Travelling(layer) => layer,
        }
    }
}

impl Layers {
    /// Reads the `count` layers of a rank but those in `moving`, which come to `bytes` a pass.
    pub(super) fn load(
        count: usize,
        (moving, bytes): (Vec<usize>, u64),
        read: Box<Read>,
    ) -> Result<Self, ModelError> {
        let resident = (0..count)
            .map(|index| (!moving.contains(&index)).then(|| read(index)).transpose())
            .collect::<Result<_, _>>()?;
        let travel = (!moving.is_empty()).then(|| Travel::start(moving, read));
        Ok(Self {
            resident,
            travel: travel.transpose()?.map(Mutex::new),
            epoch: AtomicU64::new(0),
            read: AtomicU64::new(0),
            bytes,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.resident.len()
    }

    /// Layer `index`, if it stays.
    pub(super) fn resident(&self, index: usize) -> Option<&Layer> {
        self.resident.get(index).and_then(Option::as_ref)
    }

    /// Begins a pass.
    pub(super) fn pass(&self) -> LayerPass<'_> {
        let travel = self.travel.as_ref();
        LayerPass {
            layers: self,
            travel: travel.map(|travel| travel.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Makes the next pass read every layer that travels anew: its experts are other ones now.
    pub(super) fn forget(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn travelling(&self) -> Travelling {
        Travelling {
            layers: self.resident.iter().filter(|layer| layer.is_none()).count(),
            bytes: self.bytes,
            read: self.read.load(Ordering::Relaxed),
        }
    }
}

impl<'a> LayerPass<'a> {
    /// Layer `index`; the layers of a pass are taken in order.
    pub(super) fn layer(&mut self, index: usize) -> Result<LayerRef<'a>, ModelError> {
        if let Some(layer) = self.layers.resident(index) {
            return Ok(LayerRef::Resident(layer));
        }
        let lost = || ModelError::Internal(format!("layer {index} of a rank is nowhere"));
        let travel = self.travel.as_mut().ok_or_else(lost)?;
        let layer = travel.take(index, self.layers.epoch.load(Ordering::SeqCst))?;
        self.layers.read.fetch_add(1, Ordering::Relaxed);
        Ok(LayerRef::Travelling(Box::new(layer)))
    }
}

impl Travel {
    fn start(order: Vec<usize>, read: Box<Read>) -> Result<Self, ModelError> {
        let (ask, asked) = sync_channel::<(usize, u64)>(SLOTS);
        let (arrive, arrived) = sync_channel(SLOTS);
        let work = move || {
            for (index, epoch) in asked {
                if arrive.send((index, epoch, read(index))).is_err() {
                    return;
                }
            }
        };
        let reader = std::thread::Builder::new()
            .name("layers".to_owned())
            .spawn(work)
            .map_err(|e| ModelError::Internal(format!("no thread that reads layers: {e}")))?;
        Ok(Self {
            order,
            outstanding: 0,
            ask: Some(ask),
            arrived,
            reader: Some(reader),
        })
    }

    /// Layer `index`, and the one after it is asked for.
    fn take(&mut self, index: usize, epoch: u64) -> Result<Layer, ModelError> {
        loop {
            if self.outstanding == 0 {
                self.ask(index, epoch)?;
            }
            let (got, at, layer) = self.arrived.recv().map_err(|_| gone())?;
            self.outstanding -= 1;
            // Otherwise a pass that broke off had asked for it, or one before experts moved.
            if (got, at) == (index, epoch) {
                let layer = layer?;
                if let Some(next) = self.after(index) {
                    self.ask(next, epoch)?;
                }
                return Ok(layer);
            }
        }
    }

    /// What travels after `index`, round and round; a single one has nothing to be read beside.
    fn after(&self, index: usize) -> Option<usize> {
        let place = self.order.iter().position(|layer| *layer == index)?;
        (self.order.len() > 1).then(|| self.order[(place + 1) % self.order.len()])
    }

    fn ask(&mut self, index: usize, epoch: u64) -> Result<(), ModelError> {
        let ask = self.ask.as_ref().ok_or_else(gone)?;
        ask.send((index, epoch)).map_err(|_| gone())?;
        self.outstanding += 1;
        Ok(())
    }
}

impl Drop for Travel {
    fn drop(&mut self) {
        // The reader ends after the layer it is at; there is room for that one.
        drop(self.ask.take());
        if let Some(reader) = self.reader.take() {
            // It ended in a panic at worst, which `take` has reported.
            let _ = reader.join();
        }
    }
}

fn gone() -> ModelError {
    ModelError::Internal("the thread that reads layers has ended".into())
}

/// Which of `layers` layers travel when `resident` stay: the middle of each of equal parts.
pub(crate) fn spread(layers: usize, resident: usize) -> Vec<usize> {
    let count = layers.saturating_sub(resident);
    (0..count)
        .map(|i| (2 * i + 1) * layers / (2 * count))
        .collect()
}

/// What travels under a plan.
pub(super) struct Moving {
    /// On this rank, counted from its first layer.
    pub(super) layers: Vec<usize>,
    /// Their bytes.
    pub(super) bytes: u64,
    /// Whether any layer of any rank does.
    pub(super) anywhere: bool,
}

impl Moving {
    /// Ranks that hold the same layers decide alike: the one with the most bytes decides for all.
    ///
    /// # Errors
    /// `Config` naming `resident_layers` when the bytes do not hold the slots of layers that travel.
    pub(super) fn new(
        config: &ModelConfig,
        rank: &RankShard,
        (residency, width): (Residency, usize),
        balance: &BalanceOptions,
    ) -> Result<Self, ModelError> {
        let none = Self {
            layers: Vec::new(),
            bytes: 0,
            anywhere: false,
        };
        if residency == Residency::All {
            return Ok(none);
        }
        let plan = rank.plan();
        let ranks = plan.sizes().into_iter().product::<usize>();
        let own = layer_bytes(config, rank, width, balance)?;
        let (mut moving, mut anywhere) = (none, false);
        for other in 0..ranks {
            let other = RankShard::new(config, plan, other)?;
            let bytes = layer_bytes(config, &other, width, balance)?;
            let away = away(&bytes, residency)?;
            anywhere |= !away.is_empty();
            if other.layers() == rank.layers() && away.len() >= moving.layers.len() {
                moving.layers = away;
            }
        }
        moving.bytes = moving.layers.iter().map(|layer| own[*layer]).sum();
        Ok(Self { anywhere, ..moving })
    }
}

/// Which of the layers of these sizes travel: as few as may.
fn away(bytes: &[u64], residency: Residency) -> Result<Vec<usize>, ModelError> {
    let layers = bytes.len();
    let room = match residency {
        Residency::All => return Ok(Vec::new()),
        Residency::Layers(stay) => return Ok(spread(layers, stay)),
        Residency::Bytes(room) => room,
    };
    let (all, largest) = (
        bytes.iter().sum::<u64>(),
        bytes.iter().max().copied().unwrap_or(0),
    );
    for stay in (0..=layers).rev() {
        let moving = spread(layers, stay);
        let gone: u64 = moving.iter().map(|layer| bytes[*layer]).sum();
        let slots = moving.len().min(SLOTS) as u64;
        if all - gone + slots * largest <= room {
            return Ok(moving);
        }
    }
    let needed = largest * SLOTS.min(layers) as u64;
    let message = format!("{room} bytes, but two layers at a time take {needed}");
    Err(ModelError::config("resident_layers", message))
}

/// Stored bytes of each layer's matrices and norms on one rank, `width` bytes a value of a matrix.
fn layer_bytes(
    config: &ModelConfig,
    rank: &RankShard,
    width: usize,
    balance: &BalanceOptions,
) -> Result<Vec<u64>, ModelError> {
    let (plan, shape, heads) = (rank.plan(), rank.shape(), rank.projected());
    let (hidden, dim) = (shape.hidden, shape.head_dim);
    let tp = rank.place(Axis::Tp);
    let part = |inner: usize, whole: bool| {
        let ranks = if whole { 1 } else { tp.size };
        even_range(inner, ranks, if whole { 0 } else { tp.index }).map(|range| range.len())
    };
    let projections = (2 * heads.q.len() + 2 * heads.kv.len()) * dim * hidden;
    let norms = 2 * hidden + if config.use_qk_norm { 2 * dim } else { 0 };
    let each = config.layers[rank.layers()].iter().map(|layer| {
        let inner = part(
            layer.intermediate,
            tp.size == 1 || plan.ep.contains(Axis::Tp),
        )?;
        let shared = layer.shared_intermediate.unwrap_or(0);
        let shared = part(
            shared,
            tp.size == 1 || plan.shared_expert != SharedExpert::Split,
        )?;
        let experts = slots(layer.experts, plan, rank, balance) * inner;
        let values = projections + hidden * layer.experts + 3 * hidden * (experts + shared);
        Ok((values * width + norms * size_of::<f32>()) as u64)
    });
    each.collect()
}

/// Experts that a rank holds of a layer.
fn slots(experts: usize, plan: &Plan, rank: &RankShard, balance: &BalanceOptions) -> usize {
    let ranks = rank.place(plan.ep).size;
    let replicas = if balance.eplb.enabled && ranks > 1 {
        balance.extra_slots
    } else {
        0
    };
    experts.div_ceil(ranks) + replicas
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::weights::expected_tensors;

    const CHECKPOINT: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../integration-tests/fixtures/golden/model"
    );

    #[test]
    fn layers_that_travel_are_spread_evenly() {
        assert_eq!(spread(32, 32), Vec::<usize>::new());
        assert_eq!(spread(8, 0), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(spread(32, 28), [4, 12, 20, 28]);
    }

    #[test]
    fn as_few_layers_travel_as_the_bytes_allow() {
        let away = |room| away(&[10; 8], Residency::Bytes(room)).map(|moving| moving.len());
        assert_eq!(away(80).unwrap(), 0);
        // Two slots: with three away, five stay and two are on their way.
        assert_eq!(away(79).unwrap(), 3);
        assert_eq!(away(70).unwrap(), 3);
        assert_eq!(away(69).unwrap(), 4);
        assert_eq!(away(20).unwrap(), 8);
        let error = away(19).unwrap_err().to_string();
        assert!(
            error.contains("resident_layers") && error.contains("20"),
            "{error}"
        );
    }

    #[test]
    fn one_rank_reads_what_the_checkpoint_stores_of_a_layer() {
        let config = ModelConfig::from_dir(Path::new(CHECKPOINT)).unwrap();
        let balance = BalanceOptions::default();
        let rank = RankShard::new(&config, &Plan::default(), 0).unwrap();
        let bytes = layer_bytes(&config, &rank, 2, &balance).unwrap();
        for (index, bytes) in bytes.iter().enumerate() {
            let prefix = format!("model.layers.{index}.");
            let own = expected_tensors(&config).into_iter();
            let stored: usize = own
                .filter(|tensor| tensor.name.starts_with(&prefix))
                .map(|t| t.shape.iter().product::<usize>() * if t.shape.len() > 1 { 2 } else { 4 })
                .sum();
            assert_eq!(*bytes, stored as u64, "layer {index}");
        }
    }

    #[test]
    fn ranks_with_the_same_layers_send_the_same_ones_away() {
        let config = ModelConfig::from_dir(Path::new(CHECKPOINT)).unwrap();
        let balance = BalanceOptions::default();
        let plan: Plan = "ulysses=2,ep=ulysses".parse().unwrap();
        let moving = |rank| {
            let rank = RankShard::new(&config, &plan, rank).unwrap();
            Moving::new(&config, &rank, (Residency::Layers(1), 4), &balance).unwrap()
        };
        assert_eq!(moving(0).layers, moving(1).layers);
        assert!(moving(0).anywhere && moving(0).bytes > 0);
    }
}
