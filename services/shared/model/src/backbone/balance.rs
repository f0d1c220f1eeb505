//! Experts that move between ranks: counters during steps, a decision and weight copies between two of them.
//!
//! Every rank of an expert-parallel group counts its own tokens; at the end of an interval the counts are
//! summed over the group, so all of its ranks decide alike. Every replica has the same weights, so a
//! placement never changes a result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use parallel::eplb::{EplbCluster, EplbConfig, LayerChange, Placement, Rebalancer, Spread};
use parallel::{ParallelError, RankContext};

use super::travel::Layers;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rank::{RankShard, group};

/// Live balancing of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalanceOptions {
    /// On or off, and how often.
    pub eplb: EplbConfig,
    /// Expert slots of each rank beyond an even share, for replicas of hot experts.
    pub extra_slots: usize,
    /// Whether replicas stay within a host, and how many hosts the group has; 0 or 1 is one host.
    pub hosts: usize,
}

/// Choices of each expert of a layer since they were last looked at.
pub(super) type Counter = Arc<Mutex<Vec<u64>>>;

/// The balancing state of one rank.
#[derive(Debug)]
pub(super) struct Balance {
    state: Mutex<Rebalancer>,
    /// By layer: choices of each expert by this rank's tokens. They outlive layers that are read anew.
    counters: Vec<Counter>,
    /// Set while experts move and left so by a failure: other ranks may have gone over to placements that
    /// this one does not know.
    torn: AtomicBool,
}

impl Balance {
    /// `None` where experts are not spread or balancing is off.
    ///
    /// # Errors
    /// `Config` naming `eplb` when hosts or slots do not fit the experts.
    pub(super) fn new(
        config: &ModelConfig,
        rank: &RankShard,
        options: &BalanceOptions,
    ) -> Result<Option<Self>, ModelError> {
        let ranks = rank.place(rank.plan().ep).size;
        if !options.eplb.enabled || ranks == 1 {
            return Ok(None);
        }
        let refused = |e: ParallelError| ModelError::config("eplb", e.to_string());
        let hosts = options.hosts.max(1);
        if !ranks.is_multiple_of(hosts) {
            let message = format!("{hosts} hosts do not divide {ranks} ranks");
            return Err(ModelError::config("eplb", message));
        }
        let experts: Vec<usize> = config.layers[rank.layers()]
            .iter()
            .map(|l| l.experts)
            .collect();
        let most = experts.iter().copied().max().unwrap_or(0);
        let cluster = EplbCluster {
            hosts,
            ranks_per_host: ranks / hosts,
            slots_per_rank: most.div_ceil(ranks) + options.extra_slots,
        };
        let spread = if hosts > 1 {
            Spread::Host
        } else {
            Spread::Global
        };
        let state = Rebalancer::new(options.eplb, cluster, spread, &experts).map_err(refused)?;
        Ok(Some(Self {
            state: Mutex::new(state),
            counters: experts
                .iter()
                .map(|experts| Arc::new(Mutex::new(vec![0; *experts])))
                .collect(),
            torn: AtomicBool::new(false),
        }))
    }

    /// Where the experts of this rank's layer `layer` are.
    pub(super) fn placement(&self, layer: usize) -> Option<Placement> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.placement(layer).cloned()
    }

    /// By layer: the load of the busiest rank over the mean in the last whole interval.
    pub(super) fn imbalance(&self) -> Vec<f64> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.imbalance().to_vec()
    }

    /// What layer `layer` of this rank counts in.
    pub(super) fn counter(&self, layer: usize) -> Option<Counter> {
        self.counters.get(layer).cloned()
    }

    /// Refuses to compute with experts that may not be where the other ranks take them to be.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        if self.torn.load(Ordering::Relaxed) {
            let message = "an earlier move of experts failed, so their places are not known";
            return Err(ModelError::Internal(message.into()));
        }
        Ok(())
    }

    /// Ends a step: at the end of an interval experts move. Called by every rank of the group between the
    /// same two steps.
    pub(super) fn end_step(
        &self,
        ctx: &RankContext,
        rank: &RankShard,
        layers: &Layers,
    ) -> Result<Vec<LayerChange>, ModelError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let group = group(ctx, rank.plan().ep)?;
        self.torn.store(true, Ordering::Relaxed);
        if state.is_due() {
            for (index, counter) in self.counters.iter().enumerate() {
                // Counts up to 2^24 are exact in F32; beyond that a decision needs no last digit.
                let own = take(counter).into_iter().map(|n| n as f32);
                let sum = group.all_reduce(own.collect())?.wait()?;
                let counts: Vec<u64> = sum.into_iter().map(|n| n as u64).collect();
                state.set_counts(index, &counts)?;
            }
        }
        let changes = state.end_step()?;
        for change in &changes {
            let missing = || ModelError::Internal("a placement of no layer".into());
            let placement = state.placement(change.layer).ok_or_else(missing)?;
            // A layer that travels is read from where its experts are now; all ranks of the group have the
            // same ones.
            match layers.resident(change.layer) {
                Some(layer) => layer.moe().rearrange(group, placement, &change.moves)?,
                None => layers.forget(),
            }
        }
        self.torn.store(false, Ordering::Relaxed);
        Ok(changes)
    }
}

/// The counts since the last call.
fn take(counter: &Counter) -> Vec<u64> {
    let mut counts = counter.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = vec![0; counts.len()];
    std::mem::replace(&mut counts, fresh)
}
