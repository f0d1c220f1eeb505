//! A row of a request and what each rank has computed of it.
#[cfg(feature = "cuda")]
use model::gpu::GpuCache;
use model::{GrowingRow, KvCache, ModelError, PrefixKv, RankShard};
use stage::{Ranks, StageError};

use crate::pools::{Names, Pools};

/// A row and each rank's cache of it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) grow: GrowingRow,
    pub(crate) caches: Caches,
    /// Of its pages.
    pub(crate) names: Names,
}

/// Keys and values of a row, where they are computed.
#[derive(Debug)]
pub(crate) enum Caches {
    /// In the order of ranks.
    Host(Vec<KvCache>),
    /// Likewise.
    #[cfg(feature = "cuda")]
    Device(Vec<GpuCache>),
}

impl Caches {
    /// Those of ranks on the processor.
    pub(crate) fn on_host(&mut self) -> &mut [KvCache] {
        match self {
            Self::Host(caches) => caches,
            #[cfg(feature = "cuda")]
            Self::Device(_) => &mut [],
        }
    }

    /// Those of ranks on GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&mut self) -> &mut [GpuCache] {
        match self {
            Self::Host(_) => &mut [],
            Self::Device(caches) => caches,
        }
    }

    /// The first rank's caches as tokens and room.
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Host(caches) => {
                let first = caches.first();
                first.map_or((0, 0), |cache| (cache.len(), cache.capacity()))
            }
            #[cfg(feature = "cuda")]
            Self::Device(caches) => {
                let first = caches.first();
                first.map_or((0, 0), |cache| (cache.len(), cache.capacity()))
            }
        }
    }
}

impl Row {
    /// A row that is to have at most `capacity` tokens. What is there of its beginning is not computed again.
    pub(crate) fn new(
        (ranks, pools): (&Ranks, &Pools),
        (grow, mut names): (GrowingRow, Names),
        capacity: usize,
    ) -> Result<Self, StageError> {
        #[cfg(feature = "cuda")]
        if let Some(gpus) = ranks.gpus() {
            let each = vec![(); gpus.count()];
            let caches = gpus.run(each, |model, ()| model.cache(capacity))?;
            return Ok(Self {
                grow,
                caches: Caches::Device(caches),
                names,
            });
        }
        // Ranks of a ring hold different tokens: their rows are computed whole.
        if is_ring(ranks) {
            names = Names::default();
        }
        let caches = pools.caches(&grow, &mut names, capacity);
        Ok(Self {
            grow,
            caches: Caches::Host(caches),
            names,
        })
    }

    /// A row that begins with the first `tokens` tokens of this one.
    pub(crate) fn branch(
        &self,
        (grow, names): (GrowingRow, Names),
        tokens: usize,
        capacity: usize,
    ) -> Result<Self, StageError> {
        let caches = match &self.caches {
            Caches::Host(caches) => {
                let caches = caches.iter().map(|cache| cache.branch(tokens, capacity));
                Caches::Host(caches.collect::<Result<_, _>>()?)
            }
            #[cfg(feature = "cuda")]
            Caches::Device(caches) => {
                let caches = caches.iter().map(|cache| cache.branch(tokens, capacity));
                Caches::Device(caches.collect::<Result<_, _>>()?)
            }
        };
        Ok(Self {
            grow,
            caches,
            names,
        })
    }

    /// Makes sure of pages for the first `tokens` tokens; false when there are none left.
    pub(crate) fn reserve(&mut self, tokens: usize) -> bool {
        let caches = self.caches.on_host();
        caches.iter_mut().all(|cache| cache.reserve(tokens))
    }

    /// Leaves its full pages for those that begin like it.
    pub(crate) fn keep(&mut self, pools: &Pools) {
        pools.keep(self.caches.on_host(), &mut self.names);
    }

    /// Forgets what is computed and gives the pages back; it is computed again later.
    pub(crate) fn forget(&mut self) {
        self.caches.on_host().iter_mut().for_each(KvCache::clear);
    }

    /// Pages that it has on each rank.
    pub(crate) fn pages(&self) -> usize {
        match &self.caches {
            Caches::Host(caches) => caches.first().map_or(0, |cache| cache.pages().len()),
            #[cfg(feature = "cuda")]
            Caches::Device(_) => 0,
        }
    }

    /// Tokens whose keys and values are there.
    pub(crate) fn held(&self) -> usize {
        self.caches.size().0
    }

    /// Tokens that are still to be computed.
    pub(crate) fn left(&self) -> usize {
        self.grow.ids().len().saturating_sub(self.held())
    }

    /// Tokens for which there is room.
    pub(crate) fn capacity(&self) -> usize {
        self.caches.size().1
    }

    /// Goes back to `tokens`; ranks that have fewer are left as they are.
    pub(crate) fn rewind(&mut self, tokens: usize) -> Result<(), ModelError> {
        match &mut self.caches {
            Caches::Host(caches) => {
                let mut behind = caches.iter_mut().filter(|cache| cache.len() > tokens);
                behind.try_for_each(|cache| cache.truncate(tokens))
            }
            #[cfg(feature = "cuda")]
            Caches::Device(caches) => {
                let mut behind = caches.iter_mut().filter(|cache| cache.len() > tokens);
                behind.try_for_each(|cache| cache.truncate(tokens))
            }
        }
    }

    /// The whole row, from the parts of all ranks.
    pub(crate) fn into_prefix(self, ranks: &Ranks) -> Result<PrefixKv, StageError> {
        let mut parts: Vec<PrefixKv> = match self.caches {
            Caches::Host(caches) => caches.into_iter().map(KvCache::into_prefix).collect(),
            #[cfg(feature = "cuda")]
            Caches::Device(caches) => {
                let none = || ModelError::Internal("a row on no gpu".to_owned());
                return ranks.gpus().ok_or_else(none)?.download(caches);
            }
        };
        if parts.len() == 1 {
            return Ok(parts.swap_remove(0));
        }
        let models = ranks.models().iter();
        let shards: Vec<(&RankShard, &PrefixKv)> =
            models.map(|model| model.rank()).zip(&parts).collect();
        Ok(PrefixKv::whole_of(&ranks.info().kv, &shards)?)
    }
}

/// Whether ranks hold different tokens of a row: then it is computed in one piece, and cannot be cut.
pub(crate) fn is_ring(ranks: &Ranks) -> bool {
    ranks.plan().ring > 1
}
