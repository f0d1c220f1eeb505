use crate::{KvDType, KvGeometry, PrefixIdentity};

/// Why a description of a prefix is refused, or a payload does not match its description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A field is zero or above its bound.
    #[error("{field} must lie in [{min}, {max}], got {got}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// Smallest legal value.
        min: u64,
        /// Largest legal value.
        max: u64,
        /// Value that was given.
        got: u64,
    },
    /// A field does not follow from the others.
    #[error("{field} must be {expected}, got {got}")]
    Inconsistent {
        /// Name of the field.
        field: &'static str,
        /// Value the other fields imply.
        expected: u64,
        /// Value that was given.
        got: u64,
    },
    /// The payload was computed for another model shape.
    #[error("geometry is {got}, the receiver expects {expected}")]
    Geometry {
        /// What the receiver's model needs.
        expected: KvGeometry,
        /// What the manifest describes.
        got: KvGeometry,
    },
    /// The payload belongs to another prefix.
    #[error("identity is {got}, the receiver expects {expected}")]
    Identity {
        /// What the receiver asked for.
        expected: PrefixIdentity,
        /// What the manifest names.
        got: PrefixIdentity,
    },
    /// A receiver needs an element that no producer holds.
    #[error("no shard holds layer {layer}, head {head}, token {token}")]
    Uncovered {
        /// Layer of the first such element.
        layer: usize,
        /// Its head.
        head: usize,
        /// Its token.
        token: usize,
    },
    /// Bytes of a chunk changed on the way.
    #[error("chunk {index} has CRC32C {got:08x}, its manifest says {expected:08x}")]
    Chunk {
        /// Index of the first bad chunk.
        index: usize,
        /// Checksum in the manifest.
        expected: u32,
        /// Checksum of the bytes.
        got: u32,
    },
}

impl KvError {
    /// Name of the offending field, in the words of the wire contract.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { field, .. } | Self::Inconsistent { field, .. } => field,
            Self::Geometry { .. } => "geometry",
            Self::Identity { .. } => "identity",
            Self::Uncovered { .. } => "src",
            Self::Chunk { .. } => "chunk_crc32c",
        }
    }
}

impl std::fmt::Display for KvGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dtype = match self.dtype {
            KvDType::F32 => "f32",
            KvDType::Bf16 => "bf16",
        };
        write!(
            f,
            "{} layers x {} heads x {} {dtype}",
            self.layers, self.kv_heads, self.head_dim
        )
    }
}

/// Refuses `got` outside `[min, max]`.
pub(crate) fn in_range(field: &'static str, got: u64, min: u64, max: u64) -> Result<(), KvError> {
    if (min..=max).contains(&got) {
        Ok(())
    } else {
        Err(KvError::OutOfRange {
            field,
            min,
            max,
            got,
        })
    }
}
