//! Keys and values of tokens that were already computed, head-major:
//! `[layer][k|v][kv_head][token][dim]`.
//!
//! Cached keys are rotated and normed. Head-major order makes the share of one KV head a contiguous
//! range, so that a tensor-parallel shard is a copy and never a kernel.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use kernels::{KvPart, Tensor};
use kv::{KvDType, KvGeometry, KvShard, Reshard};
use parallel::{Axis, SequenceShards};

use crate::error::ModelError;
use crate::rank::{CAUSAL_ORDER, RankShard};

/// The keys and values of a row's tokens `[0, tokens)`, or one rank's part of them; immutable.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixKv {
    geometry: KvGeometry,
    held: Held,
    data: Vec<f32>,
}

/// Which tokens of a row are in a buffer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Held {
    /// Tokens of the row.
    tokens: usize,
    /// Those in this buffer, ascending.
    ranges: Vec<Range<usize>>,
    /// Tokens in the buffer of each rank of the ring; empty where every rank has all.
    by_ring: Vec<usize>,
}

impl Held {
    fn all(tokens: usize) -> Self {
        Self {
            tokens,
            ranges: std::iter::once(0..tokens).collect(),
            by_ring: Vec::new(),
        }
    }

    /// Tokens in this buffer.
    fn count(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// Tokens that ring rank `source` contributes to the keys of rank `own`.
    fn from(&self, source: usize, own: usize) -> usize {
        match self.by_ring.get(source) {
            Some(count) => *count,
            None if source == own => self.count(),
            None => 0,
        }
    }

    /// Adds fresh tokens that were dealt to a ring; `own` is this rank's place in it.
    fn extend(&mut self, shards: &SequenceShards, own: usize) {
        let fresh = shards.ring_ranges(own).iter();
        for range in fresh.map(|r| self.tokens + r.start..self.tokens + r.end) {
            match self.ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.ranges.push(range),
            }
        }
        if shards.ring() > 1 {
            self.by_ring.resize(shards.ring(), 0);
            for (rank, count) in self.by_ring.iter_mut().enumerate() {
                *count += shards.ring_tokens(rank);
            }
        }
        self.tokens += shards.tokens();
    }
}

impl PrefixKv {
    /// Wraps values in the layout of this module.
    ///
    /// # Errors
    /// `Internal` when the number of values does not match, `Unimplemented` for a type other than F32.
    pub fn new(geometry: KvGeometry, tokens: usize, data: Vec<f32>) -> Result<Self, ModelError> {
        require_f32(&geometry)?;
        let expected = values(&geometry, tokens)?;
        if data.len() != expected {
            return Err(ModelError::Internal(format!(
                "prefix of {tokens} tokens needs {expected} values, got {}",
                data.len()
            )));
        }
        Ok(Self {
            geometry,
            held: Held::all(tokens),
            data,
        })
    }

    /// One rank's part of a prefix of `tokens` tokens, laid out as [`RankShard::kv_shard`] says; `whole` is
    /// the geometry of the model.
    ///
    /// # Errors
    /// Those of [`PrefixKv::new`].
    pub fn of_rank(
        rank: &RankShard,
        whole: &KvGeometry,
        tokens: usize,
        data: Vec<f32>,
    ) -> Result<Self, ModelError> {
        let geometry = rank.kv_geometry(whole);
        let held = if rank.shards_prefix() {
            let ring = rank.place(Axis::Ring);
            let mut held = Held::default();
            let shards = SequenceShards::new(tokens, ring.size, 1, CAUSAL_ORDER)?;
            held.extend(&shards, ring.index);
            held
        } else {
            Held::all(tokens)
        };
        let part = Self::new(geometry, held.count(), data)?;
        Ok(Self { held, ..part })
    }

    /// What `rank` needs of this whole prefix, by the copies that ship it.
    ///
    /// # Errors
    /// `Internal` when this is not a whole prefix of the rank's model.
    pub fn part_of(&self, rank: &RankShard) -> Result<Self, ModelError> {
        let tokens = self.tokens();
        let refused = |e: kv::KvError| ModelError::Internal(format!("prefix of a rank: {e}"));
        let whole = KvShard::whole(&self.geometry, self.held.count());
        let wanted = rank.kv_shard(tokens)?;
        let copies = Reshard::new(
            &self.geometry,
            tokens,
            std::slice::from_ref(&whole),
            std::slice::from_ref(&wanted),
        )
        .map_err(refused)?;
        let mut data = vec![0.0; wanted.elements(&self.geometry)];
        for copy in copies.copies() {
            let from = copy.src_offset..copy.src_offset + copy.len;
            data[copy.dst_offset..copy.dst_offset + copy.len].copy_from_slice(&self.data[from]);
        }
        Self::of_rank(rank, &self.geometry, tokens, data)
    }

    /// The whole prefix of a model of geometry `whole` out of the parts its ranks computed; the inverse of
    /// [`PrefixKv::part_of`].
    ///
    /// # Errors
    /// `Internal` when parts are missing or belong to different prefixes.
    pub fn whole_of(whole: &KvGeometry, parts: &[(&RankShard, &Self)]) -> Result<Self, ModelError> {
        let refused = |e: kv::KvError| ModelError::Internal(format!("parts of a prefix: {e}"));
        let tokens = parts.first().map_or(0, |(_, part)| part.tokens());
        let mut sources = Vec::with_capacity(parts.len());
        for (rank, part) in parts {
            let shard = KvShard {
                tokens: part.held().to_vec(),
                ..rank.kv_shard(tokens)?
            };
            let fits = part.tokens() == tokens && part.data.len() == shard.elements(whole);
            if !fits {
                let message = "parts of different prefixes".to_owned();
                return Err(ModelError::Internal(message));
            }
            sources.push(shard);
        }
        let wanted = KvShard::whole(whole, tokens);
        let copies = Reshard::new(whole, tokens, &sources, std::slice::from_ref(&wanted));
        let mut data = vec![0.0; values(whole, tokens)?];
        for copy in copies.map_err(refused)?.copies() {
            let from = copy.src_offset..copy.src_offset + copy.len;
            let source = &parts[copy.src].1.data[from];
            data[copy.dst_offset..copy.dst_offset + copy.len].copy_from_slice(source);
        }
        Self::new(*whole, tokens, data)
    }

    /// Layers, heads, head size and type.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Tokens of the prefix; under a ring this buffer may hold only some.
    pub fn tokens(&self) -> usize {
        self.held.tokens
    }

    /// Tokens in this buffer, ascending.
    pub fn held(&self) -> &[Range<usize>] {
        &self.held.ranges
    }

    /// Tokens that ring rank `source` contributes to the keys of rank `own`.
    pub(crate) fn held_from(&self, source: usize, own: usize) -> usize {
        self.held.from(source, own)
    }

    /// Whether the ranks of a ring hold different tokens.
    pub(crate) fn is_spread(&self) -> bool {
        !self.held.by_ring.is_empty()
    }

    /// The values, `[layer][k|v][kv_head][token][dim]`.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The values as little-endian bytes, in the same order.
    pub fn to_bytes(&self) -> Vec<u8> {
        little_endian(&self.data).into_owned()
    }

    /// One layer as [`LayerSink::layer`] takes it.
    pub fn layer_bytes(&self, layer: usize) -> Vec<u8> {
        let values = 2 * self.geometry.kv_heads * self.held.count() * self.geometry.head_dim;
        little_endian(&self.data[layer * values..(layer + 1) * values]).into_owned()
    }

    /// The inverse of [`PrefixKv::to_bytes`] for a whole prefix.
    ///
    /// # Errors
    /// `Internal` when the number of bytes does not match, `Unimplemented` for a type other than F32.
    pub fn from_bytes(
        geometry: KvGeometry,
        tokens: usize,
        bytes: &[u8],
    ) -> Result<Self, ModelError> {
        require_f32(&geometry)?;
        let expected = values(&geometry, tokens)?;
        if bytes.len() / size_of::<f32>() != expected
            || !bytes.len().is_multiple_of(size_of::<f32>())
        {
            return Err(ModelError::Internal(format!(
                "prefix of {tokens} tokens needs {} bytes, got {}",
                expected * size_of::<f32>(),
                bytes.len()
            )));
        }
        let (words, _) = bytes.as_chunks::<4>();
        let data = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
        Self::new(geometry, tokens, data)
    }

    /// Keys and values in this buffer of one of its layers, as attention reads them.
    pub(crate) fn part(&self, layer: usize) -> KvPart<'_> {
        let held = self.held.count();
        part(&self.geometry, &self.data, layer, held, held)
    }
}

/// Takes the layers of a row as they are done, while the next ones are computed.
pub trait LayerSink: std::fmt::Debug + Send + Sync {
    /// All tokens of one of this rank's layers, counted from its first: `[k|v][kv_head][token][dim]`, little
    /// endian. A pass that is repeated tells the same again.
    fn layer(&self, layer: usize, bytes: Vec<u8>);
}

/// Keys and values that grow: prefill writes into it, text decoding appends to it.
#[derive(Clone, Debug)]
pub struct KvCache {
    geometry: KvGeometry,
    capacity: usize,
    held: Held,
    data: Vec<f32>,
    /// Where layers go once they have so many tokens.
    sink: Option<(usize, Arc<dyn LayerSink>)>,
}

impl KvCache {
    /// An empty cache with room for `capacity` tokens.
    ///
    /// # Errors
    /// `Unimplemented` for a type other than F32, `Internal` when the size cannot be addressed.
    pub fn new(geometry: KvGeometry, capacity: usize) -> Result<Self, ModelError> {
        require_f32(&geometry)?;
        let data = vec![0.0; values(&geometry, capacity)?];
        Ok(Self {
            geometry,
            capacity,
            held: Held::default(),
            data,
            sink: None,
        })
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
        let mut cache = Self::new(prefix.geometry, capacity)?;
        let held = prefix.held.count();
        cache.room_for(held)?;
        let from = held * prefix.geometry.head_dim;
        let to = capacity * prefix.geometry.head_dim;
        if from > 0 {
            let heads = prefix.data.chunks_exact(from);
            for (target, source) in cache.data.chunks_exact_mut(to).zip(heads) {
                target[..from].copy_from_slice(source);
            }
        }
        cache.held = prefix.held.clone();
        Ok(cache)
    }

    /// Forgets the tokens from `tokens` on, so that others may follow.
    ///
    /// # Errors
    /// `Internal` when it holds fewer, or when the ranks of a ring hold different ones.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), ModelError> {
        self.check_cut(tokens)?;
        self.held = Held::all(tokens);
        Ok(())
    }

    /// A copy of the first `tokens` tokens, with room for `capacity`.
    ///
    /// # Errors
    /// Those of [`KvCache::truncate`] and [`KvCache::new`].
    pub fn branch(&self, tokens: usize, capacity: usize) -> Result<Self, ModelError> {
        self.check_cut(tokens)?;
        let mut branch = Self::new(self.geometry, capacity)?;
        branch.room_for(tokens)?;
        let dim = self.geometry.head_dim;
        let (from, to) = (self.capacity * dim, capacity * dim);
        if tokens > 0 {
            let heads = self.data.chunks_exact(from);
            for (target, source) in branch.data.chunks_exact_mut(to).zip(heads) {
                target[..tokens * dim].copy_from_slice(&source[..tokens * dim]);
            }
        }
        branch.held = Held::all(tokens);
        Ok(branch)
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
        self.held.tokens
    }

    /// True when the row has no token yet.
    pub fn is_empty(&self) -> bool {
        self.held.tokens == 0
    }

    /// Tokens that ring rank `source` contributes to the keys of rank `own`.
    pub(crate) fn held_from(&self, source: usize, own: usize) -> usize {
        self.held.from(source, own)
    }

    /// Whether the ranks of a ring hold different tokens.
    pub(crate) fn is_spread(&self) -> bool {
        !self.held.by_ring.is_empty()
    }

    /// Most tokens it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Layers, heads, head size and type.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Freezes the tokens held.
    pub fn into_prefix(self) -> PrefixKv {
        let (from, to) = (
            self.capacity * self.geometry.head_dim,
            self.held.count() * self.geometry.head_dim,
        );
        let data = if from == to {
            self.data
        } else {
            self.data
                .chunks_exact(from)
                .flat_map(|head| head[..to].iter().copied())
                .collect()
        };
        PrefixKv {
            geometry: self.geometry,
            held: self.held,
            data,
        }
    }

    pub(crate) fn part(&self, layer: usize) -> KvPart<'_> {
        let held = self.held.count();
        part(&self.geometry, &self.data, layer, self.capacity, held)
    }

    /// Checks that `tokens` more fit.
    pub(crate) fn room_for(&self, tokens: usize) -> Result<(), ModelError> {
        let held = self.held.count();
        if tokens > self.capacity - held {
            return Err(ModelError::Internal(format!(
                "kv cache of {} tokens holds {held} and cannot take {tokens} more",
                self.capacity
            )));
        }
        Ok(())
    }

    /// Writes keys and values of packed tokens `start..start + tokens` behind the tokens held, without
    /// counting them yet: [`KvCache::advance`] does, after the last layer.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        k: &Tensor,
        v: &Tensor,
        fresh: std::ops::Range<usize>,
    ) -> Result<(), ModelError> {
        self.room_for(fresh.len())?;
        let dim = self.geometry.head_dim;
        let heads = self.geometry.kv_heads;
        let side = heads * self.capacity * dim;
        let base = layer * 2 * side;
        let held = self.held.count();
        for (which, source) in [k.as_f32()?, v.as_f32()?].into_iter().enumerate() {
            let target = &mut self.data[base + which * side..base + (which + 1) * side];
            for head in 0..heads {
                for (slot, token) in (held..).zip(fresh.clone()) {
                    let to = (head * self.capacity + slot) * dim;
                    let from = (token * heads + head) * dim;
                    target[to..to + dim].copy_from_slice(&source[from..from + dim]);
                }
            }
        }
        if let Some((tokens, sink)) = &self.sink
            && held + fresh.len() == *tokens
            && !self.is_spread()
        {
            sink.layer(layer, self.layer_bytes(layer, *tokens));
        }
        Ok(())
    }

    /// The first `tokens` tokens of a layer, `[k|v][kv_head][token][dim]`.
    fn layer_bytes(&self, layer: usize, tokens: usize) -> Vec<u8> {
        let (dim, heads) = (self.geometry.head_dim, 2 * self.geometry.kv_heads);
        let stride = self.capacity * dim;
        let values = &self.data[layer * heads * stride..(layer + 1) * heads * stride];
        let mut bytes = Vec::with_capacity(heads * tokens * dim * size_of::<f32>());
        for head in values.chunks_exact(stride) {
            bytes.extend_from_slice(&little_endian(&head[..tokens * dim]));
        }
        bytes
    }

    /// Counts fresh tokens that were dealt to a ring in which this rank is `own`.
    pub(crate) fn advance(&mut self, fresh: &SequenceShards, own: usize) {
        self.held.extend(fresh, own);
    }
}

fn little_endian(values: &[f32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(values))
    } else {
        Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
}

fn part<'a>(
    geometry: &KvGeometry,
    data: &'a [f32],
    layer: usize,
    capacity: usize,
    len: usize,
) -> KvPart<'a> {
    let head_stride = capacity * geometry.head_dim;
    let side = geometry.kv_heads * head_stride;
    let base = layer * 2 * side;
    KvPart {
        k: &data[base..base + side],
        v: &data[base + side..base + 2 * side],
        head_stride,
        token_stride: geometry.head_dim,
        len,
    }
}

fn require_f32(geometry: &KvGeometry) -> Result<(), ModelError> {
    if geometry.dtype == KvDType::F32 {
        Ok(())
    } else {
        Err(ModelError::Unimplemented(format!(
            "kv dtype {:?} (this build computes with F32 keys and values)",
            geometry.dtype
        )))
    }
}

fn values(geometry: &KvGeometry, tokens: usize) -> Result<usize, ModelError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> KvGeometry {
        KvGeometry {
            layers: 2,
            kv_heads: 3,
            head_dim: 4,
            dtype: KvDType::F32,
        }
    }

    /// `tokens` tokens whose value tells layer, side, head, token and dim apart.
    fn filled(capacity: usize, tokens: usize) -> KvCache {
        let mut cache = KvCache::new(geometry(), capacity).unwrap();
        for layer in 0..2 {
            let make = |side: f32| {
                let data = (0..tokens * 12).map(|i| i as f32 + side * 1e3 + layer as f32 * 1e4);
                Tensor::from_f32(&[tokens, 3, 4], data.collect()).unwrap()
            };
            cache
                .write(layer, &make(0.0), &make(1.0), 0..tokens)
                .unwrap();
        }
        let alone = SequenceShards::new(tokens, 1, 1, CAUSAL_ORDER).unwrap();
        cache.advance(&alone, 0);
        cache
    }

    #[test]
    fn values_are_laid_out_layer_side_head_token_dim() {
        let prefix = filled(5, 5).into_prefix();
        for (i, value) in prefix.data().iter().enumerate() {
            let (dim, token, head) = (i % 4, i / 4 % 5, i / 20 % 3);
            let (side, layer) = (i / 60 % 2, i / 120);
            let expected = (token * 12 + head * 4 + dim + side * 1000 + layer * 10000) as f32;
            assert_eq!(*value, expected);
        }
    }

    #[test]
    fn spare_room_never_reaches_the_prefix() {
        assert_eq!(filled(9, 5).into_prefix(), filled(5, 5).into_prefix());
        let again = KvCache::resume(&filled(5, 5).into_prefix(), 8).unwrap();
        assert_eq!((again.len(), again.capacity()), (5, 8));
        assert_eq!(again.into_prefix(), filled(5, 5).into_prefix());
    }

    #[test]
    fn bytes_round_trip_and_wrong_lengths_are_refused() {
        let prefix = filled(5, 5).into_prefix();
        let bytes = prefix.to_bytes();
        assert_eq!(PrefixKv::from_bytes(geometry(), 5, &bytes).unwrap(), prefix);
        assert!(PrefixKv::from_bytes(geometry(), 4, &bytes).is_err());
        assert!(PrefixKv::from_bytes(geometry(), 5, &bytes[..bytes.len() - 1]).is_err());
        assert!(PrefixKv::from_bytes(geometry(), usize::MAX, &bytes).is_err());
    }

    #[test]
    fn a_cut_cache_and_a_branch_hold_the_first_tokens() {
        let mut cache = filled(9, 5);
        let branch = cache.branch(3, 7).unwrap();
        assert_eq!((branch.len(), branch.capacity()), (3, 7));
        cache.truncate(3).unwrap();
        assert_eq!(branch.into_prefix(), cache.clone().into_prefix());
        assert!(cache.truncate(4).is_err());
        assert!(cache.branch(3, 2).is_err());
        let cut = cache.into_prefix();
        let first = filled(5, 5).into_prefix();
        // The second token of the first head follows the first one.
        assert_eq!(cut.data()[4..12], first.data()[4..12]);
    }

    #[test]
    fn a_full_cache_refuses_more() {
        let mut cache = filled(5, 5);
        let one = Tensor::zeros(&[1, 3, 4]).unwrap();
        assert!(cache.write(0, &one, &one, 0..1).is_err());
    }
}
