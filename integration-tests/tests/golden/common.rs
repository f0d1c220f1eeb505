//! Reading the golden set and comparing with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Limits of the golden set's README, float32.
pub(crate) mod limit {
    /// Rotary tables.
    pub(crate) const ROPE: f32 = 2e-6;
    /// Rotary tables at positions in the thousands.
    pub(crate) const ROPE_FAR: f32 = 1e-4;
    /// One grey level of a byte.
    pub(crate) const GREY_LEVEL: f32 = 1.0;
}

/// A file of the golden set.
pub(crate) fn path(name: &str) -> PathBuf {
    integration_tests::golden_dir().join(name)
}

/// The golden model's directory.
pub(crate) fn model_dir() -> PathBuf {
    path("model")
}

/// A parsed JSON file.
pub(crate) fn json(name: &str) -> Value {
    let bytes = std::fs::read(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Whether a test that needs all of `names` applies to this set. A file that the manifest lists must be there,
/// so that only what the set never had is passed over, and the output says so.
pub(crate) fn in_set(names: &[&str]) -> bool {
    let manifest = json("MANIFEST.json");
    let absent = names.iter().find(|name| manifest.get(name).is_none());
    if let Some(name) = absent {
        assert!(!path(name).exists(), "{name} is not in the manifest");
        println!("skipped: the set has no {name}");
    }
    absent.is_none()
}

/// A safetensors file, read whole.
pub(crate) struct Tensors {
    name: String,
    bytes: Vec<u8>,
}

impl Tensors {
    pub(crate) fn load(name: &str) -> Self {
        Self::load_path(&path(name))
    }

    pub(crate) fn load_path(path: &Path) -> Self {
        Self {
            name: path.display().to_string(),
            bytes: std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())),
        }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// Names of all tensors.
    pub(crate) fn names(&self) -> Vec<String> {
        self.file().names().into_iter().map(str::to_owned).collect()
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.file().tensor(key).is_ok()
    }

    fn raw(&self, key: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
        let file = self.file();
        let tensor = file
            .tensor(key)
            .unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name));
        (
            tensor.dtype(),
            tensor.shape().to_vec(),
            tensor.data().to_vec(),
        )
    }

    fn typed(&self, key: &str, wanted: Dtype) -> (Vec<usize>, Vec<u8>) {
        let (dtype, shape, bytes) = self.raw(key);
        assert_eq!(dtype, wanted, "{}: type of {key}", self.name);
        (shape, bytes)
    }

    /// Shape and values of an F32 tensor.
    pub(crate) fn f32(&self, key: &str) -> (Vec<usize>, Vec<f32>) {
        let (shape, bytes) = self.typed(key, Dtype::F32);
        let values = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        (shape, values)
    }

    /// Shape and values of an I32 tensor.
    pub(crate) fn i32(&self, key: &str) -> (Vec<usize>, Vec<i32>) {
        let (shape, bytes) = self.typed(key, Dtype::I32);
        let values = bytes
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        (shape, values)
    }

    /// Shape and values of an I32 tensor of token ids.
    pub(crate) fn ids(&self, key: &str) -> (Vec<usize>, Vec<u32>) {
        let (shape, values) = self.i32(key);
        (
            shape,
            values
                .into_iter()
                .map(|v| u32::try_from(v).unwrap())
                .collect(),
        )
    }

    /// Shape and values of a U8 tensor.
    pub(crate) fn u8(&self, key: &str) -> (Vec<usize>, Vec<u8>) {
        self.typed(key, Dtype::U8)
    }
}

/// Largest absolute difference; NaN anywhere counts as infinite.
pub(crate) fn max_abs(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len(), "number of values");
    got.iter()
        .zip(want)
        .map(|(g, w)| {
            let d = (g - w).abs();
            if d.is_nan() { f32::INFINITY } else { d }
        })
        .fold(0.0, f32::max)
}

/// Fails when two lists differ by more than `limit` anywhere; prints the measured difference.
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f32], limit: f32) {
    let difference = max_abs(got, want);
    println!("{what}: max abs difference {difference:.3e} (limit {limit:.0e})");
    assert!(difference <= limit, "{what}: {difference} is above {limit}");
}

/// A number of a golden JSON file.
pub(crate) fn count(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap_or_else(|| panic!("{value}"))).unwrap()
}

/// A copy of the golden checkpoint in which every tensor is stored as F32; made once per run.
pub(crate) fn widened_model_dir() -> &'static Path {
    static COPY: OnceLock<tempfile::TempDir> = OnceLock::new();
    COPY.get_or_init(|| {
        let copy = copy_model();
        for shard in shards(copy.path()) {
            rewrite(&shard, |_, tensor| {
                if tensor.dtype == "BF16" {
                    tensor.bytes = tensor
                        .bytes
                        .chunks_exact(2)
                        .flat_map(|b| [0, 0, b[0], b[1]])
                        .collect();
                    tensor.dtype = "F32".into();
                }
            });
        }
        copy
    })
    .path()
}

/// A writable copy of the golden model's directory.
pub(crate) fn copy_model() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model_dir()).unwrap() {
        let entry = entry.unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        std::fs::write(copy.path().join(entry.file_name()), bytes).unwrap();
    }
    copy
}

/// The safetensors files of a directory, in order.
pub(crate) fn shards(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    files
}

/// One tensor of a file that is being rewritten.
pub(crate) struct RawTensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// The tensors of a file by name.
pub(crate) fn read_raw(path: &Path) -> BTreeMap<String, RawTensor> {
    let tensors = Tensors::load_path(path);
    tensors
        .names()
        .into_iter()
        .map(|name| {
            let (dtype, shape, bytes) = tensors.raw(&name);
            let dtype = format!("{dtype:?}");
            (
                name,
                RawTensor {
                    dtype,
                    shape,
                    bytes,
                },
            )
        })
        .collect()
}

/// Writes tensors as one file.
pub(crate) fn write_raw(path: &Path, tensors: &BTreeMap<String, RawTensor>) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        header.insert(
            name.clone(),
            serde_json::json!({
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [begin, data.len()],
            }),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

/// Rewrites every tensor of a file.
pub(crate) fn rewrite(path: &Path, mut edit: impl FnMut(&str, &mut RawTensor)) {
    let mut tensors = read_raw(path);
    for (name, tensor) in &mut tensors {
        edit(name, tensor);
    }
    write_raw(path, &tensors);
}
