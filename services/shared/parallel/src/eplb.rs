//! Where experts live: replicas of hot ones, spread so that ranks carry like loads.
//!
//! Pure: counters in, placement out. A placement changes between steps, never during one; every
//! replica has the same weights, so where a token goes does not change its result.

mod rebalance;

pub use rebalance::{EplbConfig, LayerChange, Rebalancer};

use crate::{MAX_RANKS, ParallelError, error::in_range};

/// Most expert slots of one rank.
pub const MAX_SLOTS: usize = 4096;

/// The ranks that experts are spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EplbCluster {
    /// Hosts; ranks of one host have consecutive numbers.
    pub hosts: usize,
    /// Ranks of each host.
    pub ranks_per_host: usize,
    /// Experts a rank has memory for, per layer.
    pub slots_per_rank: usize,
}

/// How far the replicas of an expert may be apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Anywhere.
    Global,
    /// On one host: experts are dealt to hosts first, so that moves and reductions stay inside.
    Host,
}

/// Tokens each expert of a layer was chosen for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLoads {
    counts: Vec<u64>,
}

impl ExpertLoads {
    /// No tokens yet, for `experts` experts.
    #[must_use]
    pub fn new(experts: usize) -> Self {
        Self {
            counts: vec![0; experts],
        }
    }

    /// Counts the experts that routing chose, one entry a token and choice.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] naming an expert that is not there; nothing is counted then.
    pub fn record(&mut self, chosen: &[u32]) -> Result<(), ParallelError> {
        for &expert in chosen {
            let (got, experts) = (expert as usize, self.counts.len());
            if got >= experts {
                return Err(ParallelError::OutOfRange {
                    field: "expert",
                    min: 0,
                    max: experts.saturating_sub(1),
                    got,
                });
            }
        }
        for &expert in chosen {
            let count = &mut self.counts[expert as usize];
            *count = count.saturating_add(1);
        }
        Ok(())
    }

    /// Tokens of each expert.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Takes these counts in place of what was recorded.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when there is not one count an expert.
    pub fn set(&mut self, counts: &[u64]) -> Result<(), ParallelError> {
        if counts.len() != self.counts.len() {
            return Err(ParallelError::Mismatch {
                field: "counts of experts",
                expected: self.counts.len(),
                got: counts.len(),
            });
        }
        self.counts.copy_from_slice(counts);
        Ok(())
    }

    /// Forgets everything, for the next interval.
    pub fn reset(&mut self) {
        self.counts.fill(0);
    }
}

/// Which expert each slot of each rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    slots: Vec<Vec<Option<usize>>>,
    /// Holders of each expert, as `(rank, slot)` in rank order.
    holders: Vec<Vec<(usize, usize)>>,
}

/// Weights of one expert that must be copied before a placement holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertMove {
    /// The expert.
    pub expert: usize,
    /// A rank that holds it in the old placement.
    pub from: usize,
    /// The rank that needs it.
    pub to: usize,
    /// The slot it goes to.
    pub slot: usize,
}

/// Places experts so that the loads of ranks are alike.
///
/// Free slots go, one by one, to a replica of the expert with the largest load a replica; replicas
/// are then dealt to the ranks in rounds, largest first, the least loaded rank choosing first. In
/// a round no replica is larger than any of the round before, so two ranks never differ by more
/// than the largest replica: see [`Placement::load_bound`].
///
/// # Errors
/// [`ParallelError::OutOfRange`] naming the size that is zero or absurd, or `slots` when they
/// cannot hold every expert once.
pub fn place(
    loads: &[u64],
    cluster: &EplbCluster,
    spread: Spread,
) -> Result<Placement, ParallelError> {
    in_range("hosts", cluster.hosts, 1, MAX_RANKS)?;
    in_range("ranks_per_host", cluster.ranks_per_host, 1, MAX_RANKS)?;
    let ranks = cluster.hosts * cluster.ranks_per_host;
    in_range("ranks", ranks, 1, MAX_RANKS)?;
    in_range("slots_per_rank", cluster.slots_per_rank, 1, MAX_SLOTS)?;
    in_range("experts", loads.len(), 1, MAX_RANKS * MAX_SLOTS)?;
    let units = match spread {
        Spread::Global => 1,
        Spread::Host => cluster.hosts,
    };
    let most = loads.len().div_ceil(units);
    let unit = (ranks / units, cluster.slots_per_rank);
    in_range("slots", unit.0 * unit.1, most, usize::MAX)?;
    let singles = loads.iter().enumerate().map(|(expert, &load)| Replica {
        expert,
        load,
        copies: 1,
    });
    let mut slots = Vec::with_capacity(ranks);
    for experts in deal(singles.collect(), units) {
        slots.extend(deal(replicate(experts, unit), unit.0));
    }
    let names = |rank: Vec<Replica>| {
        let mut names: Vec<_> = rank.iter().map(|r| Some(r.expert)).collect();
        names.resize(cluster.slots_per_rank, None);
        names
    };
    let slots = slots.into_iter().map(names).collect();
    Ok(Placement::new(slots, loads.len()))
}

/// One of `copies` replicas of an expert, which share its load.
#[derive(Debug, Clone, Copy)]
struct Replica {
    expert: usize,
    load: u64,
    copies: usize,
}

impl Replica {
    /// Orders by load a replica, exactly.
    fn cmp_load(&self, other: &Self) -> std::cmp::Ordering {
        let scaled = |a: &Self, b: &Self| u128::from(a.load) * b.copies as u128;
        scaled(self, other).cmp(&scaled(other, self))
    }

    fn share(&self) -> f64 {
        self.load as f64 / self.copies as f64
    }
}

/// Gives the free slots of `ranks` ranks to replicas; an expert is never twice on a rank.
fn replicate(mut experts: Vec<Replica>, (ranks, slots): (usize, usize)) -> Vec<Replica> {
    for _ in experts.len()..ranks * slots {
        let hot = experts
            .iter_mut()
            .filter(|e| e.copies < ranks && e.load > 0);
        let hottest = hot.max_by(|a, b| a.cmp_load(b).then(b.expert.cmp(&a.expert)));
        match hottest {
            Some(hottest) => hottest.copies += 1,
            None => break,
        }
    }
    let copies = experts
        .iter()
        .flat_map(|e| std::iter::repeat_n(*e, e.copies));
    copies.collect()
}

/// Deals replicas to `ranks` ranks in rounds, largest first, none twice to one rank.
///
/// Replicas of one expert are neighbours in the order, at most one a rank, so they reach over at
/// most two rounds, and those of the second round come first in it: a rank is always left.
fn deal(mut replicas: Vec<Replica>, ranks: usize) -> Vec<Vec<Replica>> {
    replicas.sort_by(|a, b| b.cmp_load(a).then(a.expert.cmp(&b.expert)));
    let mut dealt = vec![Vec::new(); ranks];
    let mut loads = vec![0.0; ranks];
    for round in replicas.chunks(ranks) {
        let mut left: Vec<usize> = (0..ranks).collect();
        for replica in round {
            let lacks = |rank: usize| {
                let own: &Vec<Replica> = &dealt[rank];
                own.iter().all(|r| r.expert != replica.expert)
            };
            let free = left.iter().enumerate().filter(|(_, rank)| lacks(**rank));
            let least = free.min_by(|a, b| f64::total_cmp(&loads[*a.1], &loads[*b.1]));
            let at = least.map_or(0, |(at, _)| at);
            let rank = left.remove(at);
            loads[rank] += replica.share();
            dealt[rank].push(*replica);
        }
    }
    dealt
}

impl Placement {
    fn new(slots: Vec<Vec<Option<usize>>>, experts: usize) -> Self {
        let mut holders = vec![Vec::new(); experts];
        for (rank, own) in slots.iter().enumerate() {
            for (slot, expert) in own.iter().enumerate() {
                if let Some(expert) = expert {
                    holders[*expert].push((rank, slot));
                }
            }
        }
        Self { slots, holders }
    }

    /// Experts in the order of numbers, one range a rank: what runs without balancing.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the ranks do not divide the experts.
    pub fn contiguous(experts: usize, ranks: usize) -> Result<Self, ParallelError> {
        let own = |rank| crate::even_range(experts, ranks, rank).map(|r| r.map(Some).collect());
        let slots = (0..ranks).map(own).collect::<Result<_, _>>()?;
        Ok(Self::new(slots, experts))
    }

    /// Experts by rank and slot; `None` is a slot left empty.
    #[must_use]
    pub fn slots(&self) -> &[Vec<Option<usize>>] {
        &self.slots
    }

    /// Ranks and slots that hold an expert, in rank order; empty for an expert that is not there.
    #[must_use]
    pub fn holders(&self, expert: usize) -> &[(usize, usize)] {
        self.holders.get(expert).map_or(&[], Vec::as_slice)
    }

    /// The replica that takes a token: tokens go round the replicas by their number.
    #[must_use]
    pub fn holder_for(&self, expert: usize, token: usize) -> Option<(usize, usize)> {
        let holders = self.holders(expert);
        holders.get(token % holders.len().max(1)).copied()
    }

    /// Load of each rank when replicas share their expert's tokens evenly.
    #[must_use]
    pub fn rank_loads(&self, loads: &[u64]) -> Vec<f64> {
        let share = |expert: &usize| {
            let load = loads.get(*expert).copied().unwrap_or(0);
            load as f64 / self.holders(*expert).len() as f64
        };
        let own = |slots: &Vec<Option<usize>>| slots.iter().flatten().map(share).sum();
        self.slots.iter().map(own).collect()
    }

    /// Load of the busiest rank over the mean: 1 is perfect, the number of ranks is the worst.
    #[must_use]
    pub fn imbalance(&self, loads: &[u64]) -> f64 {
        let ranks = self.rank_loads(loads);
        let total: f64 = ranks.iter().sum();
        let max = ranks.iter().copied().fold(0.0, f64::max);
        if total > 0.0 {
            max * ranks.len() as f64 / total
        } else {
            1.0
        }
    }

    /// The most any rank may carry in a placement by [`place`] over all ranks: the mean and, of
    /// the largest replica, what one of `n` ranks can have more than the mean, `1 - 1 / n`.
    #[must_use]
    pub fn load_bound(&self, loads: &[u64]) -> f64 {
        let n = self.slots.len() as f64;
        let total: f64 = loads.iter().map(|&l| l as f64).sum();
        let shares = loads.iter().zip(&self.holders);
        let share = shares.map(|(&load, held)| load as f64 / held.len() as f64);
        total / n + share.fold(0.0, f64::max) * (1.0 - 1.0 / n)
    }

    /// The same experts on the same ranks, each in the slot it has in `old` where it can be.
    #[must_use]
    pub fn aligned_to(&self, old: &Self) -> Self {
        let align = |(new, old): (&Vec<Option<usize>>, &Vec<Option<usize>>)| {
            let mut slots = vec![None; new.len()];
            let mut rest = Vec::new();
            for expert in new.iter().flatten() {
                match old.iter().position(|o| o == &Some(*expert)) {
                    Some(at) if at < slots.len() => slots[at] = Some(*expert),
                    _ => rest.push(*expert),
                }
            }
            let mut rest = rest.into_iter();
            for slot in slots.iter_mut().filter(|s| s.is_none()) {
                *slot = rest.next();
            }
            slots
        };
        let none = Vec::new();
        let old = old.slots.iter().chain(std::iter::repeat(&none));
        let slots = self.slots.iter().zip(old).map(align).collect();
        Self::new(slots, self.holders.len())
    }

    /// The copies that turn `old` into this placement. Ranks that need the same expert ask its old
    /// holders in turn.
    #[must_use]
    pub fn moves_from(&self, old: &Self) -> Vec<ExpertMove> {
        let mut moves = Vec::new();
        for (to, own) in self.slots.iter().enumerate() {
            for (slot, expert) in own.iter().enumerate() {
                let Some(expert) = *expert else { continue };
                let held = old.holders(expert);
                if held.contains(&(to, slot)) {
                    continue;
                }
                let here = held.iter().find(|(rank, _)| *rank == to);
                let from = here.or_else(|| held.get(to % held.len().max(1)));
                if let Some(&(from, _)) = from {
                    moves.push(ExpertMove {
                        expert,
                        from,
                        to,
                        slot,
                    });
                }
            }
        }
        moves
    }
}

#[cfg(test)]
mod tests;
