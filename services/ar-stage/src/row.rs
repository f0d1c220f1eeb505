//! A row of a request and what each rank has computed of it.
use model::{GrowingRow, KvCache, ModelError, PrefixKv, RankShard};
use stage::{Ranks, StageError};

/// A row and each rank's cache of it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) grow: GrowingRow,
    pub(crate) caches: Vec<KvCache>,
}

impl Row {
    /// A row of which nothing is computed, with room for `capacity` tokens.
    pub(crate) fn new(
        ranks: &Ranks,
        grow: GrowingRow,
        capacity: usize,
    ) -> Result<Self, StageError> {
        let caches = ranks.models().iter().map(|model| model.cache(capacity));
        Ok(Self {
            grow,
            caches: caches.collect::<Result<_, _>>()?,
        })
    }

    /// A row that begins with the first `tokens` tokens of this one.
    pub(crate) fn branch(
        &self,
        grow: GrowingRow,
        tokens: usize,
        capacity: usize,
    ) -> Result<Self, StageError> {
        let caches = self.caches.iter();
        let caches = caches.map(|cache| cache.branch(tokens, capacity));
        Ok(Self {
            grow,
            caches: caches.collect::<Result<_, _>>()?,
        })
    }

    /// Tokens whose keys and values are there.
    pub(crate) fn held(&self) -> usize {
        self.caches.first().map_or(0, KvCache::len)
    }

    /// Tokens that are still to be computed.
    pub(crate) fn left(&self) -> usize {
        self.grow.ids().len().saturating_sub(self.held())
    }

    /// Tokens for which there is room.
    pub(crate) fn capacity(&self) -> usize {
        self.caches.first().map_or(0, KvCache::capacity)
    }

    /// Goes back to `tokens`; ranks that have fewer are left as they are.
    pub(crate) fn rewind(&mut self, tokens: usize) -> Result<(), ModelError> {
        let mut behind = self.caches.iter_mut().filter(|cache| cache.len() > tokens);
        behind.try_for_each(|cache| cache.truncate(tokens))
    }

    /// The whole row, from the parts of all ranks.
    pub(crate) fn into_prefix(self, ranks: &Ranks) -> Result<PrefixKv, StageError> {
        let mut parts: Vec<PrefixKv> = self.caches.into_iter().map(KvCache::into_prefix).collect();
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
