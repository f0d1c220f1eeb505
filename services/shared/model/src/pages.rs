//! Pages of keys and values: a fixed number of tokens each, from a pool that is bounded.
//!
//! A row has a table of pages. Pages that hold what several rows begin with are shared and only read; whoever
//! writes into one gets a copy of its own first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::{KvDType, KvGeometry};

use crate::cache::KvCache;
use crate::error::ModelError;

/// Tokens of a page. A page is the grain of sharing and of waste: a row has at most one that is not full.
pub const PAGE_TOKENS: usize = 64;

/// Memory of pages that were given back stays for the next ones, up to this share of the pool, so that a peak does not
/// stay for ever.
const SPARE_SHARE: usize = 8;
/// Whatever the share: so many may stay.
const SPARE_LEAST: usize = 64;

/// Pages of one shape, no more than its bound at a time. Clones are the same pool.
#[derive(Clone, Debug)]
pub struct KvPool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    geometry: KvGeometry,
    /// Values of a page.
    values: usize,
    bound: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Pages that somebody has.
    taken: usize,
    /// Memory of pages that were given back.
    free: Vec<Vec<f32>>,
}

/// Keys and values of [`PAGE_TOKENS`] tokens, `[layer][k|v][kv_head][token][dim]`. Clones are the same page.
#[derive(Clone, Debug)]
pub struct KvPage {
    page: Arc<Page>,
}

#[derive(Debug)]
struct Page {
    values: Vec<f32>,
    pool: Arc<Inner>,
}

impl Drop for Page {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.taken -= 1;
        if state.free.len() < (self.pool.bound / SPARE_SHARE).max(SPARE_LEAST) {
            state.free.push(std::mem::take(&mut self.values));
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held; what it says is whole at any time.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvPool {
    /// A pool of at most `pages` pages; memory is taken as pages are.
    ///
    /// # Errors
    /// `Unimplemented` for a type other than F32, `Internal` when the pages cannot be addressed.
    pub fn new(geometry: KvGeometry, pages: usize) -> Result<Self, ModelError> {
        values(&geometry, pages.saturating_mul(PAGE_TOKENS))?;
        Self::of(geometry, pages)
    }

    /// The pool of a cache that bounds itself, and of its copies.
    pub(crate) fn of_cache(geometry: KvGeometry) -> Result<Self, ModelError> {
        Self::of(geometry, usize::MAX)
    }

    fn of(geometry: KvGeometry, bound: usize) -> Result<Self, ModelError> {
        require_f32(&geometry)?;
        let inner = Inner {
            geometry,
            values: values(&geometry, PAGE_TOKENS)?,
            bound,
            state: Mutex::default(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Layers, heads, head size and type of its pages.
    pub fn geometry(&self) -> &KvGeometry {
        &self.inner.geometry
    }

    /// Most pages at a time.
    pub fn pages(&self) -> usize {
        self.inner.bound
    }

    /// Pages that can be taken now.
    pub fn free(&self) -> usize {
        self.inner.bound - self.inner.state().taken
    }

    /// An empty cache for a row of at most `capacity` tokens, which takes pages as the row grows.
    pub fn cache(&self, capacity: usize) -> KvCache {
        KvCache::of_pages(self.clone(), Vec::new(), capacity)
    }

    /// A cache that begins with the tokens of these pages, all of them full and of this pool.
    pub fn cache_from(&self, pages: Vec<KvPage>, capacity: usize) -> KvCache {
        KvCache::of_pages(self.clone(), pages, capacity)
    }

    /// A page whose values are whatever they were; `None` when all are taken.
    pub(crate) fn take(&self) -> Option<KvPage> {
        let mut state = self.inner.state();
        if state.taken == self.inner.bound {
            return None;
        }
        state.taken += 1;
        let recycled = state.free.pop();
        drop(state);
        let values = recycled.unwrap_or_else(|| vec![0.0; self.inner.values]);
        let page = Page {
            values,
            pool: Arc::clone(&self.inner),
        };
        Some(KvPage {
            page: Arc::new(page),
        })
    }

    pub(crate) fn exhausted(&self, pages: usize) -> ModelError {
        let bytes = self.inner.values * size_of::<f32>();
        ModelError::Exhausted {
            what: "pages of keys and values",
            needed: pages * bytes,
            free: self.free() * bytes,
        }
    }
}

impl KvPage {
    pub(crate) fn values(&self) -> &[f32] {
        &self.page.values
    }

    /// Its values, if nobody else has it.
    pub(crate) fn own(&mut self) -> Option<&mut [f32]> {
        Arc::get_mut(&mut self.page).map(|page| &mut page.values[..])
    }

    /// Whether somebody else has it as well.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.page) > 1
    }
}

/// Pages that hold `tokens` tokens.
pub fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

pub(crate) fn require_f32(geometry: &KvGeometry) -> Result<(), ModelError> {
    if geometry.dtype == KvDType::F32 {
        Ok(())
    } else {
        Err(ModelError::Unimplemented(format!(
            "kv dtype {:?} (this build computes with F32 keys and values)",
            geometry.dtype
        )))
    }
}

/// Values of `tokens` tokens.
pub(crate) fn values(geometry: &KvGeometry, tokens: usize) -> Result<usize, ModelError> {
    [
        geometry.layers,
        2,
        geometry.kv_heads,
        geometry.head_dim,
        tokens,
    ]
    .into_iter()
    .try_fold(1_usize, usize::checked_mul)
    .filter(|n| *n <= isize::MAX as usize / size_of::<f32>())
    .ok_or_else(|| ModelError::Internal(format!("kv of {tokens} tokens cannot be addressed")))
}
