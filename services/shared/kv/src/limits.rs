//! Named bounds. A description outside them is refused before anything is allocated for it.

/// Most decoder layers a geometry may name.
pub const MAX_LAYERS: usize = 1024;
/// Most key-value heads a geometry may name.
pub const MAX_KV_HEADS: usize = 1024;
/// Largest head dimension a geometry may name, in elements.
pub const MAX_HEAD_DIM: usize = 4096;
/// Most tokens of one prefix.
pub const MAX_PREFIX_TOKENS: usize = 1 << 20;
/// Largest payload of one prefix, in bytes (1 TiB).
pub const MAX_PREFIX_BYTES: u64 = 1 << 40;
/// Fewest bytes one checksum may cover.
pub const MIN_CHUNK_BYTES: usize = 1 << 10;
/// Most bytes one checksum may cover: the unit of a repair stays small.
pub const MAX_CHUNK_BYTES: usize = 64 << 20;
/// Most chunks of one payload, so that a manifest fits a control message.
pub const MAX_CHUNKS: usize = 1 << 16;
