//! Keys and values of tokens that were already computed, head-major:
//! `[layer][k|v][kv_head][token][dim]`.
//!
//! Cached keys are rotated and normed. Head-major order makes the share of one KV head a contiguous
//! range, so that a tensor-parallel shard is a copy and never a kernel.

use std::borrow::Cow;
use std::ops::Range;

use kernels::KvPart;
use kv::{KvGeometry, KvShard, Reshard};
use parallel::{Axis, SequenceShards};

use crate::error::ModelError;
use crate::pages::{require_f32, values};
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
    pub(crate) fn all(tokens: usize) -> Self {
        Self {
            tokens,
            ranges: (tokens > 0).then_some(0..tokens).into_iter().collect(),
            by_ring: Vec::new(),
        }
    }

    /// Tokens of the row.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the ranks of a ring hold different tokens.
    pub(crate) fn is_spread(&self) -> bool {
        !self.by_ring.is_empty()
    }

    /// Tokens in this buffer.
    pub(crate) fn count(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// Tokens that ring rank `source` contributes to the keys of rank `own`.
    pub(crate) fn from(&self, source: usize, own: usize) -> usize {
        match self.by_ring.get(source) {
            Some(count) => *count,
            None if source == own => self.count(),
            None => 0,
        }
    }

    /// Adds fresh tokens that were dealt to a ring; `own` is this rank's place in it.
    pub(crate) fn extend(&mut self, shards: &SequenceShards, own: usize) {
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
        self.held.is_spread()
    }

    /// The values, `[layer][k|v][kv_head][token][dim]`.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The values as little-endian bytes, in the same order.
    pub fn to_bytes(&self) -> Vec<u8> {
        little_endian(&self.data).into_owned()
    }

    /// One layer as [`crate::LayerSink::layer`] takes it.
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

    /// Values in the layout of this module, of the tokens that `held` says.
    pub(crate) fn of_parts(geometry: KvGeometry, held: Held, data: Vec<f32>) -> Self {
        Self {
            geometry,
            held,
            data,
        }
    }

    /// Tokens in this buffer.
    pub(crate) fn buffered(&self) -> usize {
        self.held.count()
    }

    pub(crate) fn held_tokens(&self) -> &Held {
        &self.held
    }

    /// Keys and values in this buffer of one of its layers, as attention reads them.
    pub(crate) fn part(&self, layer: usize) -> KvPart<'_> {
        let len = self.held.count();
        let head_stride = len * self.geometry.head_dim;
        let side = self.geometry.kv_heads * head_stride;
        let base = layer * 2 * side;
        KvPart {
            k: &self.data[base..base + side],
            v: &self.data[base + side..base + 2 * side],
            head_stride,
            token_stride: self.geometry.head_dim,
            len,
        }
    }
}

pub(crate) fn little_endian(values: &[f32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(values))
    } else {
        Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
}
