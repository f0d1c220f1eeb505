//! Keys and values that grow, in pages.

use std::ops::Range;
use std::sync::Arc;

use kernels::{KvPart, Tensor};
use kv::KvGeometry;
use parallel::SequenceShards;

use crate::error::ModelError;
use crate::pages::{KvPage, KvPool, PAGE_TOKENS, pages_for, values};
use crate::prefix::{Held, PrefixKv, little_endian};

/// Takes the layers of a row as they are done, while the next ones are computed.
pub trait LayerSink: std::fmt::Debug + Send + Sync {
    /// All tokens of one of this rank's layers, counted from its first: `[k|v][kv_head][token][dim]`, little
    /// endian. A pass that is repeated tells the same again.
    fn layer(&self, layer: usize, bytes: Vec<u8>);
}

/// Keys and values that grow: prefill writes into it, text decoding appends to it.
#[derive(Clone, Debug)]
pub struct KvCache {
    pool: KvPool,
    capacity: usize,
    held: Held,
    /// Page `i` has tokens `i * PAGE_TOKENS..` of this buffer. Pages may be there before their tokens are.
    pages: Vec<KvPage>,
    /// Where layers go once they have so many tokens.
    sink: Option<(usize, Arc<dyn LayerSink>)>,
}

impl KvCache {
    /// An empty cache with room for `capacity` tokens, whose pool bounds nothing but that.
    ///
    /// # Errors
    /// `Unimplemented` for a type other than F32, `Internal` when the size cannot be addressed.
    pub fn new(geometry: KvGeometry, capacity: usize) -> Result<Self, ModelError> {
        values(&geometry, capacity)?;
        Ok(KvPool::of_cache(geometry)?.cache(capacity))
    }

    /// See [`KvPool::cache_from`].
    pub(crate) fn of_pages(pool: KvPool, pages: Vec<KvPage>, capacity: usize) -> Self {
        let held = Held::all(pages.len() * PAGE_TOKENS);
        Self {
            pool,
            capacity: capacity.max(held.count()),
            held,
            pages,
            sink: None,
        }
    }

    /// Tells `sink` each layer as soon as it has `tokens` tokens.
    pub fn send_layers(&mut self, tokens: usize, sink: Arc<dyn LayerSink>) {
        self.sink = Some((tokens, sink));
    }

    /// A copy of a prefix with room to grow to `capacity` tokens.
    ///
    /// # Errors
    /// Those of [`KvCache::new`], and `Internal` when the prefix is longer than `capacity`.
    pub fn resume(prefix: &PrefixKv, capacity: usize) -> Result<Self, ModelError> {
        let mut cache = Self::new(*prefix.geometry(), capacity)?;
        cache.take_over(prefix)?;
        Ok(cache)
    }

    /// Fills this empty cache with a prefix.
    ///
    /// # Errors
    /// `Internal` when there is something in it, when the prefix has another shape or is longer than its
    /// capacity; `Exhausted` when the pool has no pages for it.
    pub fn take_over(&mut self, prefix: &PrefixKv) -> Result<(), ModelError> {
        let held = prefix.buffered();
        if !self.is_empty() || prefix.geometry() != self.geometry() {
            let message = "a cache takes over a prefix of its shape, and only when it is empty";
            return Err(ModelError::Internal(message.into()));
        }
        self.room_for(held)?;
        self.claim(held)?;
        let dim = self.geometry().head_dim;
        for (head, values) in prefix.data().chunks_exact((held * dim).max(1)).enumerate() {
            for (page, values) in self.pages.iter_mut().zip(values.chunks(PAGE_TOKENS * dim)) {
                let at = head * PAGE_TOKENS * dim;
                own(page)?[at..at + values.len()].copy_from_slice(values);
            }
        }
        self.held = prefix.held_tokens().clone();
        Ok(())
    }

    /// Makes sure that the first `tokens` tokens have pages and that those still to be written have them for this
    /// cache alone. False when the pool has none left; what was got stays.
    pub fn reserve(&mut self, tokens: usize) -> bool {
        let (first, end) = (self.held.count() / PAGE_TOKENS, pages_for(tokens));
        for index in first..end.max(first) {
            let shared = match self.pages.get(index) {
                Some(page) if !page.is_shared() => continue,
                found => found,
            };
            let Some(mut page) = self.pool.take() else {
                return false;
            };
            match (shared, page.own()) {
                // Only where a page is not full yet; others are never written again.
                (Some(shared), Some(own)) => own.copy_from_slice(shared.values()),
                (None, _) => {
                    self.pages.push(page);
                    continue;
                }
                (Some(_), None) => return false,
            }
            self.pages[index] = page;
        }
        true
    }

    fn claim(&mut self, tokens: usize) -> Result<(), ModelError> {
        if self.reserve(tokens) {
            return Ok(());
        }
        let missing = pages_for(tokens).saturating_sub(self.pages.len());
        Err(self.pool.exhausted(missing.max(1)))
    }

    /// Forgets the tokens from `tokens` on, so that others may follow.
    ///
    /// # Errors
    /// `Internal` when it holds fewer, or when the ranks of a ring hold different ones.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), ModelError> {
        self.check_cut(tokens)?;
        self.held = Held::all(tokens);
        self.pages.truncate(pages_for(tokens));
        Ok(())
    }

    /// Forgets everything and gives its pages back.
    pub fn clear(&mut self) {
        self.held = Held::default();
        self.pages.clear();
    }

    /// The first `tokens` tokens again, with room for `capacity`. Nothing is copied: both have the same pages, and
    /// whoever writes into one that is not full gets a copy first.
    ///
    /// # Errors
    /// Those of [`KvCache::truncate`]; `Internal` when there are more tokens than `capacity`.
    pub fn branch(&self, tokens: usize, capacity: usize) -> Result<Self, ModelError> {
        self.check_cut(tokens)?;
        let pages = self.pages[..pages_for(tokens)].to_vec();
        let branch = Self {
            pool: self.pool.clone(),
            capacity,
            held: Held::default(),
            pages,
            sink: None,
        };
        branch.room_for(tokens)?;
        Ok(Self {
            held: Held::all(tokens),
            ..branch
        })
    }

    fn check_cut(&self, tokens: usize) -> Result<(), ModelError> {
        if self.is_spread() || tokens > self.len() {
            return Err(ModelError::Internal(format!(
                "a cache of {} tokens cannot be cut to {tokens} here",
                self.len()
            )));
        }
        Ok(())
    }

    /// Tokens of the row so far; under a ring this buffer holds only some of them.
    pub fn len(&self) -> usize {
        self.held.tokens()
    }

    /// True when the row has no token yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that ring rank `source` contributes to the keys of rank `own`.
    pub(crate) fn held_from(&self, source: usize, own: usize) -> usize {
        self.held.from(source, own)
    }

    /// Whether the ranks of a ring hold different tokens.
    pub fn is_spread(&self) -> bool {
        self.held.is_spread()
    }

    /// Most tokens it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Its pages, in order; the last of them may not be full.
    pub fn pages(&self) -> &[KvPage] {
        &self.pages
    }

    /// Layers, heads, head size and type.
    pub fn geometry(&self) -> &KvGeometry {
        self.pool.geometry()
    }

    /// Freezes the tokens held.
    pub fn into_prefix(self) -> PrefixKv {
        let geometry = *self.geometry();
        let (dim, held) = (geometry.head_dim, self.held.count());
        let heads = geometry.layers * 2 * geometry.kv_heads;
        let mut data = Vec::with_capacity(heads * held * dim);
        for head in 0..heads {
            self.head(head, held, |values| data.extend_from_slice(values));
        }
        PrefixKv::of_parts(geometry, self.held, data)
    }

    /// Shows the first `tokens` tokens of a head, counted over layers and both sides, page by page.
    fn head(&self, head: usize, tokens: usize, mut show: impl FnMut(&[f32])) {
        let dim = self.geometry().head_dim;
        let at = head * PAGE_TOKENS * dim;
        for (page, first) in self.pages.iter().zip((0..tokens).step_by(PAGE_TOKENS)) {
            let count = PAGE_TOKENS.min(tokens - first);
            show(&page.values()[at..at + count * dim]);
        }
    }

    /// Keys and values of one of its layers, as attention reads them.
    pub(crate) fn parts(&self, layer: usize) -> Vec<KvPart<'_>> {
        let KvGeometry {
            kv_heads, head_dim, ..
        } = *self.geometry();
        let (held, head_stride) = (self.held.count(), PAGE_TOKENS * head_dim);
        let side = kv_heads * head_stride;
        let base = layer * 2 * side;
        let pages = self.pages.iter().zip((0..held).step_by(PAGE_TOKENS));
        pages
            .map(|(page, first)| {
                let values = page.values();
                KvPart {
                    k: &values[base..base + side],
                    v: &values[base + side..base + 2 * side],
                    head_stride,
                    token_stride: head_dim,
                    len: PAGE_TOKENS.min(held - first),
                }
            })
            .collect()
    }

    /// Checks that `tokens` more fit.
    pub(crate) fn room_for(&self, tokens: usize) -> Result<(), ModelError> {
        let held = self.held.count();
        if tokens > self.capacity.saturating_sub(held) {
            return Err(ModelError::Internal(format!(
                "kv cache of {} tokens holds {held} and cannot take {tokens} more",
                self.capacity
            )));
        }
        Ok(())
    }

    /// Writes keys and values of packed tokens `fresh` behind the tokens held, without counting them yet:
    /// [`KvCache::advance`] does, after the last layer.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        k: &Tensor,
        v: &Tensor,
        fresh: Range<usize>,
    ) -> Result<(), ModelError> {
        self.room_for(fresh.len())?;
        let KvGeometry {
            kv_heads, head_dim, ..
        } = *self.geometry();
        let held = self.held.count();
        let end = held + fresh.len();
        self.claim(end)?;
        let sides = [k.as_f32()?, v.as_f32()?];
        for index in held / PAGE_TOKENS..pages_for(end) {
            let first = index * PAGE_TOKENS;
            let page = own(&mut self.pages[index])?;
            for (which, source) in sides.into_iter().enumerate() {
                for head in 0..kv_heads {
                    let base = ((layer * 2 + which) * kv_heads + head) * PAGE_TOKENS;
                    for slot in held.max(first)..end.min(first + PAGE_TOKENS) {
                        let to = (base + slot - first) * head_dim;
                        let from = ((fresh.start + slot - held) * kv_heads + head) * head_dim;
                        page[to..to + head_dim].copy_from_slice(&source[from..from + head_dim]);
                    }
                }
            }
        }
        if let Some((tokens, sink)) = &self.sink
            && end == *tokens
            && !self.is_spread()
        {
            sink.layer(layer, self.layer_bytes(layer, *tokens));
        }
        Ok(())
    }

    /// The first `tokens` tokens of a layer, `[k|v][kv_head][token][dim]`.
    fn layer_bytes(&self, layer: usize, tokens: usize) -> Vec<u8> {
        let heads = 2 * self.geometry().kv_heads;
        let values = heads * tokens * self.geometry().head_dim;
        let mut bytes = Vec::with_capacity(values * size_of::<f32>());
        for head in layer * heads..(layer + 1) * heads {
            self.head(head, tokens, |values| {
                bytes.extend_from_slice(&little_endian(values));
            });
        }
        bytes
    }

    /// Counts fresh tokens that were dealt to a ring in which this rank is `own`.
    pub(crate) fn advance(&mut self, fresh: &SequenceShards, own: usize) {
        self.held.extend(fresh, own);
    }
}

/// The values of a page that was reserved.
fn own(page: &mut KvPage) -> Result<&mut [f32], ModelError> {
    let shared = || ModelError::Internal("a page that others read is written".into());
    page.own().ok_or_else(shared)
}

#[cfg(test)]
mod tests;
