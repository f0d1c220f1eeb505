//! The name of a set of weights.
//!
//! The digest covers the bytes of `config.json` and `tokenizer.json`, the name and shape of every tensor, and
//! values of every tensor: all of them in a small tensor, evenly spaced blocks in a large one, so that 170 GB
//! need not be read. Values are hashed as F32, so a BF16 checkpoint and its widened copy have the same digest.
//!
//! Equal digests mean: same config, same tokenizer, same tensors, and equal values wherever they were sampled.
//! Two differently trained checkpoints differ in nearly every value and therefore in their digest; a change
//! of a few values in a large tensor may go unnoticed, so this is an identity for caches, not a seal.

use super::Checkpoint;
use crate::config::{CONFIG_FILE, read_bounded};
use crate::error::ModelError;
use crate::tokenizer::{MAX_TOKENIZER_BYTES, TOKENIZER_FILE};

/// A tensor of up to this many values is hashed whole.
const WHOLE_VALUES: usize = 8192;
/// Blocks sampled from a larger tensor.
const BLOCKS: usize = 16;
/// Values of one block.
const BLOCK_VALUES: usize = 256;
/// Largest accepted `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Hex BLAKE3 digest of the checkpoint.
pub(super) fn weights_id(checkpoint: &Checkpoint) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new_derive_key("omni weights id v1");
    for (file, limit) in [
        (CONFIG_FILE, MAX_CONFIG_BYTES),
        (TOKENIZER_FILE, MAX_TOKENIZER_BYTES),
    ] {
        let bytes = read_bounded(checkpoint.dir(), file, limit)?;
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
    }
    for (name, entry) in &checkpoint.tensors {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&(entry.shape.len() as u64).to_le_bytes());
        for dim in &entry.shape {
            hasher.update(&(*dim as u64).to_le_bytes());
        }
        if entry.dtype == super::StoredType::Other {
            continue;
        }
        for (start, count) in sampled_blocks(entry.numel()) {
            let values = checkpoint.widened(name, entry, start, count)?;
            hasher.update(bytemuck::cast_slice(&values));
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// `(start, count)` of the values that are hashed.
fn sampled_blocks(numel: usize) -> Vec<(usize, usize)> {
    if numel <= WHOLE_VALUES {
        return vec![(0, numel)];
    }
    let last = numel - BLOCK_VALUES;
    (0..BLOCKS)
        .map(|i| (last / (BLOCKS - 1) * i, BLOCK_VALUES))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_blocks_stay_inside_the_tensor_and_reach_both_ends() {
        for numel in [1, WHOLE_VALUES, WHOLE_VALUES + 1, 123_457] {
            let blocks = sampled_blocks(numel);
            assert_eq!(blocks[0].0, 0);
            assert!(blocks.iter().all(|(s, n)| s + n <= numel));
            let (start, count) = blocks[blocks.len() - 1];
            assert!(numel - (start + count) < BLOCKS);
        }
    }
}
