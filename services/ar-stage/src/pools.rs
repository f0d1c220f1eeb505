//! Where rows have their keys and values: a pool of pages for each rank, and the pages that rows have left there.
//!
//! A page that is full never changes, so rows that begin with the same tokens have the same pages. They are found
//! by the name of everything up to their end, and stay until their place is needed.
use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kv::PrefixIdentity;
use model::{
    GrowingRow, KvCache, KvPage, KvPool, Model, ModelError, PAGE_TOKENS, PrefixKv, RowKind,
    RowTokens, pages_for,
};
use stage::{Ranks, StageError};
use telemetry::{Metrics, names};

use crate::publish;

/// Pages that stay for later rows, as a share of the pool: a stage that has nothing to do holds no more.
const KEPT_SHARE: usize = 8;
/// Whatever the share: so many may stay.
const KEPT_LEAST: usize = 64;

/// The pools of a stage. Clones are the same pools.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// In the order of ranks; none where GPUs compute.
    pools: Arc<[KvPool]>,
    shelf: Arc<Mutex<Shelf>>,
    metrics: Metrics,
}

/// Full pages by name.
#[derive(Debug, Default)]
struct Shelf {
    pages: HashMap<PageName, Kept>,
    /// Grows with every use.
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    /// In the order of ranks.
    pages: Vec<KvPage>,
    /// Place in its row.
    index: usize,
    used: u64,
}

/// Names a page: all tokens up to its end, and who may find it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PageName {
    identity: PrefixIdentity,
    scope: Arc<str>,
}

/// The names of a row's full pages.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names {
    pages: Vec<PageName>,
    /// Pages, from the first on, that are known to be on the shelf.
    kept: usize,
}

impl Names {
    /// Of a row that is laid out. What stands before the prompt, and rows without a prompt and without pictures,
    /// are everybody's; all else is the tenant's.
    pub(crate) fn new(
        model: &Model,
        row: &RowTokens<'_>,
        tenant: &str,
    ) -> Result<Self, ModelError> {
        let (layout, shared) = (row.layout, shared_by_all(row));
        let everybody: Arc<str> = Arc::from("");
        let own: Arc<str> = Arc::from(publish::own_scope(tenant));
        let name = |end: usize| {
            let scope = if end <= shared { &everybody } else { &own };
            Ok(PageName {
                identity: model.beginning_identity(row, end)?,
                scope: Arc::clone(scope),
            })
        };
        let ends = (1..=layout.prefix_len() / PAGE_TOKENS).map(|page| page * PAGE_TOKENS);
        Ok(Self {
            pages: ends.map(name).collect::<Result<_, ModelError>>()?,
            kept: 0,
        })
    }

    /// Those of the first pages.
    pub(crate) fn first(mut self, pages: usize) -> Self {
        self.pages.truncate(pages);
        self
    }
}

/// Tokens at the start of a row that say nothing about whose it is.
pub(crate) fn shared_by_all(row: &RowTokens<'_>) -> usize {
    let layout = row.layout;
    let shown = layout.cond_images.first();
    let shown = shown.map_or(usize::MAX, |image| image.timestep);
    match row.kind {
        RowKind::Cond => shown.min(layout.first_cfg.unwrap_or(0)),
        RowKind::Uncond => shown,
    }
}

impl Pools {
    /// Room for `tokens` tokens on every rank.
    pub(crate) fn new(ranks: &Ranks, tokens: usize, metrics: Metrics) -> Result<Self, StageError> {
        #[cfg(feature = "cuda")]
        if ranks.gpus().is_some() {
            return Ok(Self {
                pools: Arc::default(),
                shelf: Arc::default(),
                metrics,
            });
        }
        let pools = ranks.models().iter();
        let pools = pools.map(|model| model.pool(pages_for(tokens)));
        Ok(Self {
            pools: pools.collect::<Result<_, ModelError>>()?,
            shelf: Arc::default(),
            metrics,
        })
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // Nothing panics while it is held.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages of each rank that are free, or would be if need be.
    pub(crate) fn available(&self) -> usize {
        self.free() + self.idle()
    }

    /// Pages on the shelf that no row has.
    fn idle(&self) -> usize {
        let shelf = self.shelf();
        shelf.pages.values().filter(|kept| kept.is_idle()).count()
    }

    fn free(&self) -> usize {
        self.pools.iter().map(KvPool::free).min().unwrap_or(0)
    }

    /// Pages of each rank.
    pub(crate) fn pages(&self) -> usize {
        self.pools.first().map_or(0, KvPool::pages)
    }

    /// Caches for a row of at most `capacity` tokens, that begin with what is there of it already. The row's last
    /// token is always left to compute, and a span is never cut.
    pub(crate) fn caches(
        &self,
        grow: &GrowingRow,
        names: &mut Names,
        capacity: usize,
    ) -> Vec<KvCache> {
        let tokens = grow.ids().len();
        let most = names
            .pages
            .len()
            .min(tokens.saturating_sub(1) / PAGE_TOKENS);
        let found = self
            .shelf()
            .find(&names.pages[..most], |pages| whole_pages(grow, pages));
        names.kept = found.len();
        self.count(names.kept * PAGE_TOKENS, tokens);
        let pools = self.pools.iter().enumerate();
        let cache = |(rank, pool): (usize, &KvPool)| {
            let of_rank = found.iter().filter_map(|pages| pages.get(rank).cloned());
            pool.cache_from(of_rank.collect(), capacity)
        };
        pools.map(cache).collect()
    }

    /// Counts what a row of `tokens` tokens need not compute.
    fn count(&self, taken: usize, tokens: usize) {
        let each = |pool: &KvPool| pool.geometry().bytes_per_token();
        let bytes = taken * self.pools.iter().map(each).sum::<usize>();
        let (metrics, tokens) = (&self.metrics, tokens - taken);
        let count = |outcome, tokens: usize| {
            metrics.add(&names::STAGE_PREFIX_TOKENS, &[outcome], tokens as u64);
        };
        count("hit", taken);
        count("miss", tokens);
        metrics.add(&names::STAGE_PREFIX_BYTES, &[], bytes as u64);
    }

    /// Keeps the full pages of a row for those that begin like it.
    pub(crate) fn keep(&self, caches: &[KvCache], names: &mut Names) {
        let spread = caches.iter().any(KvCache::is_spread);
        let tokens = caches.iter().map(KvCache::len).min().unwrap_or(0);
        let full = (tokens / PAGE_TOKENS).min(names.pages.len());
        if spread || full <= names.kept {
            return;
        }
        let page = |index| {
            let pages = caches.iter().filter_map(|cache| cache.pages().get(index));
            pages.cloned().collect()
        };
        let most = (self.pages() / KEPT_SHARE).max(KEPT_LEAST);
        let mut shelf = self.shelf();
        shelf.put(&names.pages[..full], page);
        let over = shelf.pages.len().saturating_sub(most);
        shelf.evict(over);
        names.kept = full;
    }

    /// Whether all pages of these names are there.
    pub(crate) fn has(&self, names: &Names) -> bool {
        let shelf = self.shelf();
        let mut pages = names.pages.iter();
        pages.all(|name| shelf.pages.contains_key(name))
    }

    /// The tokens of these pages, if all of them are there.
    pub(crate) fn read(
        &self,
        ranks: &Ranks,
        names: &Names,
    ) -> Result<Option<PrefixKv>, StageError> {
        let found = self.shelf().find(&names.pages, |pages| pages);
        if found.len() < names.pages.len() {
            return Ok(None);
        }
        let part = |(rank, pool): (usize, &KvPool)| {
            let pages: Vec<KvPage> = found.iter().filter_map(|p| p.get(rank).cloned()).collect();
            let tokens = pages.len() * PAGE_TOKENS;
            pool.cache_from(pages, tokens).into_prefix()
        };
        let parts: Vec<PrefixKv> = self.pools.iter().enumerate().map(part).collect();
        let models = ranks.models().iter();
        let shards: Vec<_> = models.map(|model| model.rank()).zip(&parts).collect();
        Ok(Some(PrefixKv::whole_of(&ranks.info().kv, &shards)?))
    }

    /// Puts the beginning of a row on the shelf that was computed elsewhere.
    pub(crate) fn place(
        &self,
        ranks: &Ranks,
        names: &mut Names,
        beginning: &PrefixKv,
    ) -> Result<(), StageError> {
        let (mut caches, pages) = (Vec::new(), pages_for(beginning.tokens()));
        self.evict(pages);
        for (pool, model) in self.pools.iter().zip(ranks.models()) {
            let mut cache = pool.cache(beginning.tokens());
            cache.take_over(&beginning.part_of(model.rank())?)?;
            caches.push(cache);
        }
        self.keep(&caches, names);
        Ok(())
    }

    /// Frees `pages` pages of what nobody uses, as far as there are so many; the oldest first. True when any were.
    pub(crate) fn evict(&self, pages: usize) -> bool {
        let missing = pages.saturating_sub(self.free());
        missing > 0 && self.shelf().evict(missing)
    }

    /// A request lost its pages to another one.
    pub(crate) fn preempted(&self) {
        self.metrics.count(&names::STAGE_PREEMPTIONS, &[]);
    }

    /// Tells how the pages stand.
    pub(crate) fn report(&self) {
        // Rows go on meanwhile, so the numbers may be of different moments.
        let (free, kept) = (self.free(), self.idle());
        let used = self.pages().saturating_sub(free + kept);
        for (state, pages) in [("free", free), ("kept", kept), ("used", used)] {
            self.metrics
                .set(&names::STAGE_PAGES, &[state], pages as f64);
        }
    }
}

/// How many of the first `pages` pages may be taken over without cutting a span.
fn whole_pages(grow: &GrowingRow, mut pages: usize) -> usize {
    loop {
        let whole = grow.uncut(pages * PAGE_TOKENS) / PAGE_TOKENS;
        if whole == pages {
            return pages;
        }
        pages = whole;
    }
}

impl Kept {
    /// No row has it.
    fn is_idle(&self) -> bool {
        !self.pages.iter().any(KvPage::is_shared)
    }
}

impl Shelf {
    /// The pages of these names, from the first to the last one that is there, as many of them as `legal` lets.
    fn find(&mut self, names: &[PageName], legal: impl Fn(usize) -> usize) -> Vec<Vec<KvPage>> {
        let there = names
            .iter()
            .take_while(|name| self.pages.contains_key(*name));
        let count = legal(there.count());
        self.clock += 1;
        let clock = self.clock;
        let taken = names[..count].iter().filter_map(|name| {
            let kept = self.pages.get_mut(name)?;
            kept.used = clock;
            Some(kept.pages.clone())
        });
        taken.collect()
    }

    /// Takes the first pages of a row, those that are not there yet.
    fn put(&mut self, names: &[PageName], page: impl Fn(usize) -> Vec<KvPage>) {
        self.clock += 1;
        let used = self.clock;
        for (index, name) in names.iter().enumerate() {
            let entry = self.pages.entry(name.clone());
            let kept = entry.or_insert_with(|| Kept {
                pages: page(index),
                index,
                used,
            });
            kept.used = used;
        }
    }

    /// Drops pages that no row has: the oldest, and of a row the last one first, since without the ones before it
    /// none is found.
    fn evict(&mut self, pages: usize) -> bool {
        if pages == 0 {
            return false;
        }
        let idle = self.pages.iter().filter(|(_, kept)| kept.is_idle());
        let mut idle: Vec<_> = idle
            .map(|(name, kept)| (kept.used, Reverse(kept.index), name.clone()))
            .collect();
        idle.sort_unstable_by_key(|(used, index, _)| (*used, *index));
        for (_, _, name) in idle.iter().take(pages) {
            self.pages.remove(name);
        }
        !idle.is_empty()
    }
}
