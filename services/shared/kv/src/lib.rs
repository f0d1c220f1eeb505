//! What a prefix's keys and values are: their shape, their place in a payload, their identity and
//! their checksums. Pure: this crate knows no transport, no model and no clock.
#![forbid(unsafe_code)]

mod checksum;
mod error;
mod geometry;
mod identity;
pub mod limits;
mod manifest;
mod plan;
mod reshard;

pub use checksum::{chunk_count, chunk_crc32c, chunk_range, crc32c, crc32c_append};
pub use error::KvError;
pub use geometry::{KvDType, KvGeometry, KvHalf};
pub use identity::{IdentityBuilder, PrefixIdentity};
pub use manifest::Manifest;
pub use plan::{ReadPlan, digest_bytes};
pub use reshard::{KvCopy, KvShard, MAX_SHARDS, MAX_TOKEN_RANGES, Reshard};
