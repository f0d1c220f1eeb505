use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{KvError, in_range};
use crate::limits;

/// Element type of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDType {
    /// IEEE 754 binary32, little endian.
    F32,
    /// bfloat16, little endian.
    Bf16,
}

impl KvDType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Which half of a layer: keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvHalf {
    /// Keys, after RoPE and QK-norm.
    Key,
    /// Values.
    Value,
}

/// Shape of one token's keys and values.
///
/// A payload of `T` tokens is laid out `[layer][k|v][kv_head][token][dim]`: a tensor-parallel shard
/// of heads is one contiguous range per layer and half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvGeometry {
    /// Decoder layers.
    pub layers: usize,
    /// Key-value heads of a layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Element type.
    pub dtype: KvDType,
}

impl KvGeometry {
    /// Checks every field against its bound.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] naming the field.
    pub fn validate(&self) -> Result<(), KvError> {
        in_range(
            "geometry.layers",
            self.layers as u64,
            1,
            limits::MAX_LAYERS as u64,
        )?;
        in_range(
            "geometry.kv_heads",
            self.kv_heads as u64,
            1,
            limits::MAX_KV_HEADS as u64,
        )?;
        in_range(
            "geometry.head_dim",
            self.head_dim as u64,
            1,
            limits::MAX_HEAD_DIM as u64,
        )
    }

    /// Elements of one token over all layers, keys and values together.
    ///
    /// Saturates for a geometry that [`Self::validate`] refuses, so that no later bound is fooled.
    #[must_use]
    pub fn elements_per_token(&self) -> usize {
        2usize
            .saturating_mul(self.layers)
            .saturating_mul(self.kv_heads)
            .saturating_mul(self.head_dim)
    }

    /// Bytes of one token over all layers, keys and values together. Saturates like
    /// [`Self::elements_per_token`].
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        self.elements_per_token().saturating_mul(self.dtype.bytes())
    }

    /// Bytes of a prefix of `tokens` tokens. Saturates like [`Self::elements_per_token`].
    #[must_use]
    pub fn prefix_bytes(&self, tokens: usize) -> usize {
        self.bytes_per_token().saturating_mul(tokens)
    }

    /// Where one head of one layer lies in a payload of `tokens` tokens, in elements.
    ///
    /// The range holds `tokens * head_dim` elements, token-major.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] when `layer` or `head` is not part of the geometry.
    pub fn head_range(
        &self,
        layer: usize,
        half: KvHalf,
        head: usize,
        tokens: usize,
    ) -> Result<Range<usize>, KvError> {
        let heads = self.heads_range(layer, half, head..head.saturating_add(1), tokens)?;
        Ok(heads)
    }

    /// Where the contiguous heads `heads` of one layer lie in a payload of `tokens` tokens, in
    /// elements.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] when `layer` or `heads` is not part of the geometry.
    pub fn heads_range(
        &self,
        layer: usize,
        half: KvHalf,
        heads: Range<usize>,
        tokens: usize,
    ) -> Result<Range<usize>, KvError> {
        self.validate()?;
        in_range("layer", layer as u64, 0, self.layers as u64 - 1)?;
        in_range("head", heads.start as u64, 0, self.kv_heads as u64 - 1)?;
        in_range(
            "head",
            heads.end as u64,
            heads.start as u64,
            self.kv_heads as u64,
        )?;
        in_range("tokens", tokens as u64, 0, limits::MAX_PREFIX_TOKENS as u64)?;
        let half = match half {
            KvHalf::Key => 0,
            KvHalf::Value => 1,
        };
        let per_head = tokens * self.head_dim;
        let base = (layer * 2 + half) * self.kv_heads;
        Ok((base + heads.start) * per_head..(base + heads.end) * per_head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REAL: KvGeometry = KvGeometry {
        layers: 32,
        kv_heads: 8,
        head_dim: 128,
        dtype: KvDType::Bf16,
    };

    #[test]
    fn the_80b_model_needs_131072_bytes_a_token() {
        assert_eq!(REAL.bytes_per_token(), 131_072);
        assert_eq!(REAL.prefix_bytes(1250), 163_840_000);
    }

    #[test]
    fn an_absurd_geometry_is_refused_and_never_wraps() {
        let g = KvGeometry {
            layers: usize::MAX,
            ..REAL
        };
        assert_eq!(g.prefix_bytes(usize::MAX), usize::MAX);
        assert_eq!(g.validate().unwrap_err().field(), "geometry.layers");
        let g = KvGeometry {
            kv_heads: 0,
            ..REAL
        };
        assert_eq!(g.validate().unwrap_err().field(), "geometry.kv_heads");
    }

    #[test]
    fn a_head_outside_the_geometry_is_refused() {
        assert_eq!(
            REAL.head_range(32, KvHalf::Key, 0, 5).unwrap_err().field(),
            "layer"
        );
        assert_eq!(
            REAL.head_range(0, KvHalf::Key, 8, 5).unwrap_err().field(),
            "head"
        );
    }

    proptest! {
        /// Walking layers, halves and heads in order visits each element of a payload once.
        #[test]
        fn head_ranges_tile_the_payload(
            layers in 1usize..5, kv_heads in 1usize..5, head_dim in 1usize..9, tokens in 0usize..17,
        ) {
            let g = KvGeometry { layers, kv_heads, head_dim, dtype: KvDType::F32 };
            let mut next = 0;
            for layer in 0..layers {
                for half in [KvHalf::Key, KvHalf::Value] {
                    for head in 0..kv_heads {
                        let r = g.head_range(layer, half, head, tokens).unwrap();
                        prop_assert_eq!(r.start, next);
                        prop_assert_eq!(r.len(), tokens * head_dim);
                        next = r.end;
                    }
                }
            }
            prop_assert_eq!(next * g.dtype.bytes(), g.prefix_bytes(tokens));
        }
    }
}
