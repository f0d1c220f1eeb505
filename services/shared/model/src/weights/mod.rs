//! The tensors of a checkpoint directory in the Hugging Face layout: `model.safetensors.index.json` with
//! shards, or one `model.safetensors`.
//!
//! Headers are checked in full before anything large is allocated; values are read on demand with positioned
//! reads, so opening a 170 GB checkpoint costs its headers only.

mod expected;
mod header;
mod identity;
mod mismatch;
mod parts;
mod stream;
#[cfg(feature = "cuda")]
mod upload;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;
use kernels::Tensor;
use serde_json::Value;

pub use self::expected::{SINUSOID_WIDTH, TensorSpec, expected_tensors, is_tolerated_extra};
pub use self::header::StoredType;
use self::header::read_header;
pub use self::mismatch::{Mismatch, ShapeMismatch};
pub use self::parts::{Chunk, Part};
pub use self::stream::{ChunkSink, Streamed};
#[cfg(feature = "cuda")]
pub use self::upload::Arrived;
use crate::config::read_bounded;
use crate::error::ModelError;

/// Name of the shard index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of a checkpoint that is one file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Largest accepted index; the released one has about half a megabyte.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Where one tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Position in [`Checkpoint`]'s list of files.
    file: usize,
    /// Type as stored.
    pub dtype: StoredType,
    /// Shape as stored.
    pub shape: Vec<usize>,
    /// First byte in the file.
    offset: u64,
}

impl TensorEntry {
    /// Number of values.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

#[derive(Debug)]
struct Shard {
    name: String,
    file: File,
}

/// An opened checkpoint: every header read and checked, no values yet.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, TensorEntry>,
}

impl Checkpoint {
    /// Opens a directory, reading index and headers.
    ///
    /// # Errors
    /// A missing or unreadable file, a file that is truncated, a header that reaches beyond its file, tensors
    /// that overlap or leave holes, a tensor that the index places elsewhere or that no shard holds.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self {
            dir: dir.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        if dir.join(INDEX_FILE).exists() {
            checkpoint.open_index()?;
        } else if dir.join(SINGLE_FILE).exists() {
            checkpoint.open_shard(SINGLE_FILE)?;
        } else {
            return Err(ModelError::file(
                INDEX_FILE,
                format!("neither it nor `{SINGLE_FILE}` is in the checkpoint directory"),
            ));
        }
        Ok(checkpoint)
    }

    /// All tensor names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// What the checkpoint says about one tensor.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The directory that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Compares the stored tensors with the expected set.
    ///
    /// # Errors
    /// One error that counts every missing, unexpected, wrongly shaped and wrongly typed tensor and names the
    /// first ones.
    pub fn verify(&self, expected: &[TensorSpec]) -> Result<(), ModelError> {
        let mismatch = mismatch::compare(&self.tensors, expected);
        if mismatch.is_empty() {
            Ok(())
        } else {
            Err(ModelError::CheckpointMismatch(mismatch))
        }
    }

    /// Reads one tensor in its stored type (F32 or BF16), checking its shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let entry = self.checked(name, shape)?;
        let tensor = match entry.dtype {
            StoredType::Bf16 => {
                Tensor::from_bf16(shape, self.read_values::<bf16>(entry, 0, entry.numel())?)
            }
            StoredType::F32 => {
                Tensor::from_f32(shape, self.read_values::<f32>(entry, 0, entry.numel())?)
            }
            StoredType::Other => return Err(unreadable(name)),
        };
        Ok(tensor?)
    }

    /// Reads one tensor as F32; BF16 values are widened exactly.
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let entry = self.checked(name, shape)?;
        Ok(Tensor::from_f32(
            shape,
            self.widened(name, entry, 0, entry.numel())?,
        )?)
    }

    /// Hex digest that names these weights; see the `identity` module for what equal digests mean.
    pub fn weights_id(&self) -> Result<String, ModelError> {
        identity::weights_id(self)
    }

    /// `count` values of a tensor from value `start` on, as F32.
    fn widened(
        &self,
        name: &str,
        entry: &TensorEntry,
        start: usize,
        count: usize,
    ) -> Result<Vec<f32>, ModelError> {
        match entry.dtype {
            StoredType::F32 => self.read_values::<f32>(entry, start, count),
            StoredType::Bf16 => Ok(self
                .read_values::<bf16>(entry, start, count)?
                .into_iter()
                .map(bf16::to_f32)
                .collect()),
            StoredType::Other => Err(unreadable(name)),
        }
    }

    fn checked(&self, name: &str, shape: &[usize]) -> Result<&TensorEntry, ModelError> {
        let entry = self
            .tensors
            .get(name)
            .ok_or_else(|| ModelError::tensor(name, "is missing"))?;
        if entry.shape != shape {
            return Err(ModelError::tensor(
                name,
                format!("has shape {:?}, expected {shape:?}", entry.shape),
            ));
        }
        Ok(entry)
    }

    /// Reads values whose stored bytes are those of `T` (little-endian, as the format fixes).
    fn read_values<T: bytemuck::Pod>(
        &self,
        entry: &TensorEntry,
        start: usize,
        count: usize,
    ) -> Result<Vec<T>, ModelError> {
        let shard = &self.shards[entry.file];
        if cfg!(target_endian = "big") {
            return Err(ModelError::Unimplemented(
                "checkpoints on a big-endian machine".into(),
            ));
        }
        let mut values = vec![T::zeroed(); count];
        let offset = entry.offset + (start * size_of::<T>()) as u64;
        shard
            .file
            .read_exact_at(bytemuck::cast_slice_mut(&mut values), offset)
            .map_err(|e| ModelError::file(&shard.name, format!("read at {offset} failed: {e}")))?;
        Ok(values)
    }

    fn open_index(&mut self) -> Result<(), ModelError> {
        let bytes = read_bounded(&self.dir, INDEX_FILE, MAX_INDEX_BYTES)?;
        let index: Value = serde_json::from_slice(&bytes)
            .map_err(|e| ModelError::file(INDEX_FILE, format!("is not valid JSON: {e}")))?;
        let map = index
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| ModelError::file(INDEX_FILE, "has no `weight_map` object"))?;
        let mut placed: BTreeMap<&str, &str> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|f| is_plain_name(f)).ok_or_else(|| {
                ModelError::file(INDEX_FILE, format!("`{tensor}` names no plain file"))
            })?;
            placed.insert(tensor, file);
        }
        let mut files: Vec<&str> = placed.values().copied().collect();
        files.sort_unstable();
        files.dedup();
        for file in files {
            self.open_shard(file)?;
        }
        for (tensor, file) in &placed {
            match self.tensors.get(*tensor) {
                Some(entry) if self.shards[entry.file].name == *file => {}
                _ => {
                    return Err(ModelError::tensor(
                        *tensor,
                        format!("the index places it in `{file}`, which does not hold it"),
                    ));
                }
            }
        }
        match self
            .tensors
            .keys()
            .find(|t| !placed.contains_key(t.as_str()))
        {
            Some(tensor) => Err(ModelError::tensor(
                tensor,
                "is in a shard but not in the index",
            )),
            None => Ok(()),
        }
    }

    fn open_shard(&mut self, name: &str) -> Result<(), ModelError> {
        let file = File::open(self.dir.join(name))
            .map_err(|e| ModelError::file(name, format!("cannot be opened: {e}")))?;
        let index = self.shards.len();
        for (tensor, mut entry) in read_header(&file, name)? {
            entry.file = index;
            if self.tensors.insert(tensor.clone(), entry).is_some() {
                return Err(ModelError::tensor(tensor, "is in two shards"));
            }
        }
        self.shards.push(Shard {
            name: name.to_owned(),
            file,
        });
        Ok(())
    }
}

fn unreadable(name: &str) -> ModelError {
    ModelError::tensor(name, "is stored in a type other than F32 and BF16")
}

/// A file name without any directory part.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(
        (parts.next(), parts.next()),
        (Some(std::path::Component::Normal(_)), None)
    ) && !name.ends_with('/')
}
