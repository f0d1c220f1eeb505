//! When experts move: after every so many steps, between two of them, and only if it helps.

use serde::{Deserialize, Serialize};

use super::{EplbCluster, ExpertLoads, ExpertMove, Placement, Spread, place};
use crate::{ParallelError, error::in_range};

/// Whether and how often experts are placed anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EplbConfig {
    /// Off: every layer keeps its first placement.
    pub enabled: bool,
    /// Steps whose tokens are counted before each decision.
    pub interval_steps: usize,
}

impl Default for EplbConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            interval_steps: 200,
        }
    }
}

/// A better placement of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerChange {
    /// The layer.
    pub layer: usize,
    /// Weights to copy before the next step.
    pub moves: Vec<ExpertMove>,
    /// Busiest rank over the mean in the interval, as it was.
    pub before: f64,
    /// The same with the new placement.
    pub after: f64,
}

/// Counters and placements of all layers.
///
/// Every rank of a group must feed it the same counts (those of all ranks), so that all decide the
/// same without asking.
#[derive(Debug, Clone)]
pub struct Rebalancer {
    config: EplbConfig,
    cluster: EplbCluster,
    spread: Spread,
    loads: Vec<ExpertLoads>,
    placements: Vec<Placement>,
    /// By layer: busiest rank over the mean in the last whole interval.
    seen: Vec<f64>,
    steps: usize,
}

impl Rebalancer {
    /// Layers with `experts[layer]` experts each, placed without knowing any load.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] for an interval of zero, and those of [`place`].
    pub fn new(
        config: EplbConfig,
        cluster: EplbCluster,
        spread: Spread,
        experts: &[usize],
    ) -> Result<Self, ParallelError> {
        in_range("interval_steps", config.interval_steps, 1, usize::MAX)?;
        let first = |&n: &usize| place(&vec![0; n], &cluster, spread);
        Ok(Self {
            config,
            cluster,
            spread,
            loads: experts.iter().map(|&n| ExpertLoads::new(n)).collect(),
            placements: experts.iter().map(first).collect::<Result<_, _>>()?,
            seen: Vec::new(),
            steps: 0,
        })
    }

    /// By layer: the load of the busiest rank over the mean in the last whole interval, on the placement that
    /// it ran with; empty before the first has ended.
    #[must_use]
    pub fn imbalance(&self) -> &[f64] {
        &self.seen
    }

    /// The placement of a layer that holds until the next change.
    #[must_use]
    pub fn placement(&self, layer: usize) -> Option<&Placement> {
        self.placements.get(layer)
    }

    /// Counts the experts chosen in a layer during the running step.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] naming the layer or the expert.
    pub fn record(&mut self, layer: usize, chosen: &[u32]) -> Result<(), ParallelError> {
        let last = self.loads.len().saturating_sub(1);
        let loads = self.loads.get_mut(layer);
        let missing = ParallelError::OutOfRange {
            field: "layer",
            min: 0,
            max: last,
            got: layer,
        };
        loads.ok_or(missing)?.record(chosen)
    }

    /// Takes the counts of a layer over all ranks in place of what was recorded here.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] naming the layer, [`ParallelError::Mismatch`] when there is not one
    /// count an expert.
    pub fn set_counts(&mut self, layer: usize, counts: &[u64]) -> Result<(), ParallelError> {
        let last = self.loads.len().saturating_sub(1);
        let Some(loads) = self.loads.get_mut(layer) else {
            return Err(ParallelError::OutOfRange {
                field: "layer",
                min: 0,
                max: last,
                got: layer,
            });
        };
        loads.set(counts)
    }

    /// True when the running step is the last of its interval, so that the counts of all ranks are due.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.config.enabled && self.steps + 1 >= self.config.interval_steps
    }

    /// Ends a step. At the end of an interval, the layers whose placement gets better change, and
    /// what must be copied before the next step comes back; the counters start again.
    ///
    /// # Errors
    /// Those of [`place`]; none for sizes that [`Self::new`] took.
    pub fn end_step(&mut self) -> Result<Vec<LayerChange>, ParallelError> {
        self.steps += 1;
        if !self.config.enabled || self.steps < self.config.interval_steps {
            return Ok(Vec::new());
        }
        self.steps = 0;
        self.seen.clear();
        let mut changes = Vec::new();
        let layers = self.loads.iter_mut().zip(&mut self.placements);
        for (layer, (loads, placement)) in layers.enumerate() {
            let counts = loads.counts();
            let new = place(counts, &self.cluster, self.spread)?.aligned_to(placement);
            let (before, after) = (placement.imbalance(counts), new.imbalance(counts));
            self.seen.push(before);
            if after < before {
                let moves = new.moves_from(placement);
                *placement = new;
                changes.push(LayerChange {
                    layer,
                    moves,
                    before,
                    after,
                });
            }
            loads.reset();
        }
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: EplbCluster = EplbCluster {
        hosts: 1,
        ranks_per_host: 4,
        slots_per_rank: 3,
    };

    fn rebalancer(enabled: bool) -> Rebalancer {
        let config = EplbConfig {
            enabled,
            interval_steps: 3,
        };
        Rebalancer::new(config, CLUSTER, Spread::Global, &[8, 8]).unwrap()
    }

    /// A step in which layer 1 has a hot expert and layer 0 none.
    fn step(r: &mut Rebalancer) -> Vec<LayerChange> {
        r.record(0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        r.record(1, &[5, 5, 5, 5, 5, 5, 5, 5, 0, 1]).unwrap();
        r.end_step().unwrap()
    }

    #[test]
    fn experts_move_only_at_the_end_of_an_interval_and_only_where_it_helps() {
        let mut r = rebalancer(true);
        let first = r.placement(1).cloned();
        assert!(step(&mut r).is_empty() && step(&mut r).is_empty());
        assert_eq!(r.placement(1).cloned(), first);
        let changes = step(&mut r);
        assert_eq!(changes.len(), 1);
        let change = &changes[0];
        assert!(change.layer == 1 && change.after < change.before);
        assert!(change.before > 3.0 && change.after < 1.7, "{change:?}");
        assert!(change.moves.iter().any(|m| m.expert == 5));
        assert_eq!(r.placement(1).unwrap().holders(5).len(), 4);
        // The same loads again: nothing to gain.
        assert!((0..3).all(|_| step(&mut r).is_empty()));
        // Nothing changed, and what was seen is what was expected.
        assert!((r.imbalance()[1] - change.after).abs() < 1e-12);
        assert!((r.imbalance()[0] - 1.0).abs() < 1e-12);
    }

    #[test]
    fn switched_off_nothing_ever_moves() {
        let mut r = rebalancer(false);
        assert!((0..9).all(|_| step(&mut r).is_empty()));
    }

    #[test]
    fn an_interval_of_zero_and_unknown_layers_are_refused() {
        let config = EplbConfig {
            enabled: true,
            interval_steps: 0,
        };
        assert!(Rebalancer::new(config, CLUSTER, Spread::Global, &[8]).is_err());
        let e = rebalancer(true).record(2, &[0]).unwrap_err().to_string();
        assert_eq!(e, "layer must lie in [0, 1], got 2");
    }
}
