//! The golden checkpoint loads in both storage types; a damaged copy is refused by name.

use std::fs;
use std::path::Path;

use model::{Checkpoint, ErrorKind, ModelConfig, ModelError, expected_tensors};

use crate::common::{
    RawTensor, Tensors, copy_model, model_dir, read_raw, shards, widened_model_dir, write_raw,
};

/// The map from tensor to shard.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Opens a checkpoint and compares it with its config.
fn open(dir: &Path) -> Result<Checkpoint, ModelError> {
    let config = ModelConfig::from_dir(dir)?;
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.verify(&expected_tensors(&config))?;
    Ok(checkpoint)
}

/// Damages a copy and expects an error about the checkpoint that mentions `named`.
fn refused(what: &str, named: &str, damage: impl FnOnce(&Path)) {
    let copy = copy_model();
    damage(copy.path());
    let error = open(copy.path()).map(|_| ()).unwrap_err();
    println!("{what}: {error}");
    assert_eq!(error.kind(), ErrorKind::Checkpoint, "{what}: {error}");
    assert!(error.to_string().contains(named), "{what}: {error}");
}

/// Name and raw form of some tensor with at least two dimensions in the first shard.
fn a_matrix(dir: &Path) -> String {
    read_raw(&shards(dir)[0])
        .into_iter()
        .find(|(name, t)| t.shape.len() >= 2 && !name.starts_with("vision_model.head."))
        .unwrap()
        .0
}

#[test]
fn both_storage_types_load_with_equal_values_and_one_identity() {
    let narrow = open(&model_dir()).unwrap();
    let wide = open(widened_model_dir()).unwrap();
    let names: Vec<&str> = narrow.names().collect();
    assert_eq!(names, wide.names().collect::<Vec<_>>());
    for name in &names {
        let shape = &narrow.entry(name).unwrap().shape;
        let a = narrow.tensor_f32(name, shape).unwrap();
        let b = wide.tensor(name, shape).unwrap();
        assert_eq!(a.as_f32().unwrap(), b.as_f32().unwrap(), "{name}");
        assert_eq!(
            narrow.tensor(name, shape).unwrap().to_f32_vec(),
            a.to_f32_vec()
        );
    }
    assert_eq!(narrow.weights_id().unwrap(), wide.weights_id().unwrap());
    println!("{} tensors equal in BF16 and F32", names.len());
}

#[test]
fn values_are_those_of_the_file() {
    let checkpoint = open(&model_dir()).unwrap();
    for shard in shards(&model_dir()) {
        let tensors = Tensors::load_path(&shard);
        for (name, raw) in read_raw(&shard) {
            let want = match raw.dtype.as_str() {
                "F32" => tensors.f32(&name).1,
                "BF16" => raw
                    .bytes
                    .chunks_exact(2)
                    .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                    .collect(),
                other => panic!("{name} is {other}"),
            };
            let got = checkpoint.tensor_f32(&name, &raw.shape).unwrap();
            assert_eq!(got.as_f32().unwrap(), want, "{name}");
        }
    }
}

#[test]
fn another_value_in_one_tensor_is_another_identity() {
    let original = open(&model_dir()).unwrap().weights_id().unwrap();
    let copy = copy_model();
    let shard = &shards(copy.path())[0];
    let mut tensors = read_raw(shard);
    tensors.values_mut().next().unwrap().bytes[0] ^= 1;
    write_raw(shard, &tensors);
    assert_ne!(open(copy.path()).unwrap().weights_id().unwrap(), original);
}

#[test]
fn a_truncated_shard_is_refused() {
    let name = shards(&model_dir())[0].file_name().unwrap().to_owned();
    let name = name.to_str().unwrap();
    for keep in [0.0, 0.000_001, 0.001, 0.5, 0.999_99] {
        refused(&format!("kept {keep}"), name, |dir| {
            let file = fs::OpenOptions::new()
                .write(true)
                .open(dir.join(name))
                .unwrap();
            let size = file.metadata().unwrap().len();
            file.set_len((size as f64 * keep) as u64).unwrap();
        });
    }
}

#[test]
fn trailing_bytes_are_refused() {
    let shard = shards(&model_dir())[0].file_name().unwrap().to_owned();
    refused("trailing bytes", shard.to_str().unwrap(), |dir| {
        let mut bytes = fs::read(dir.join(&shard)).unwrap();
        bytes.extend([0; 16]);
        fs::write(dir.join(&shard), bytes).unwrap();
    });
}

#[test]
fn a_header_length_beyond_the_file_is_refused_before_it_is_allocated() {
    let shard = shards(&model_dir())[0].file_name().unwrap().to_owned();
    for length in [u64::MAX, 1 << 40, 99_000_000] {
        refused("header length", shard.to_str().unwrap(), |dir| {
            let mut bytes = fs::read(dir.join(&shard)).unwrap();
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            fs::write(dir.join(&shard), bytes).unwrap();
        });
    }
}

#[test]
fn a_wrongly_shaped_tensor_is_named() {
    let name = a_matrix(&model_dir());
    refused("transposed", &name, |dir| {
        edit(dir, |tensors| {
            let tensor = tensors.get_mut(&name).unwrap();
            let count = tensor.shape.iter().product();
            tensor.shape = vec![count];
        });
    });
}

#[test]
fn a_missing_tensor_is_named_and_the_unused_head_is_not_missed() {
    let name = a_matrix(&model_dir());
    refused("missing", &name, |dir| {
        edit(dir, |tensors| {
            tensors.remove(&name);
        });
        drop_from_index(dir, |n| n == name);
    });
    let copy = copy_model();
    let unused = |n: &str| n.starts_with("vision_model.head.");
    for shard in shards(copy.path()) {
        let mut tensors = read_raw(&shard);
        tensors.retain(|n, _| !unused(n));
        write_raw(&shard, &tensors);
    }
    drop_from_index(copy.path(), unused);
    open(copy.path()).unwrap();
}

#[test]
fn an_unexpected_tensor_is_named() {
    refused("extra", "model.surprise.weight", |dir| {
        edit(dir, |tensors| {
            let tensor = RawTensor {
                dtype: "F32".into(),
                shape: vec![1],
                bytes: vec![0; 4],
            };
            tensors.insert("model.surprise.weight".into(), tensor);
        });
        let shard = shards(dir)[0].file_name().unwrap().to_owned();
        let shard = shard.to_str().unwrap();
        edit_index(dir, |map| {
            map.insert("model.surprise.weight".into(), shard.into());
        });
    });
}

#[test]
fn all_differences_come_in_one_error() {
    let copy = copy_model();
    let name = a_matrix(copy.path());
    let mut removed = Vec::new();
    edit(copy.path(), |tensors| {
        let count = tensors[&name].shape.iter().product();
        tensors.get_mut(&name).unwrap().shape = vec![count];
        let others: Vec<String> = tensors
            .keys()
            .filter(|n| **n != name)
            .take(3)
            .cloned()
            .collect();
        for other in others {
            tensors.remove(&other);
            removed.push(other);
        }
    });
    drop_from_index(copy.path(), |n| removed.iter().any(|r| r == n));
    match open(copy.path()).unwrap_err() {
        ModelError::CheckpointMismatch(mismatch) => {
            assert_eq!(mismatch.misshaped.len(), 1);
            assert_eq!(mismatch.missing.len(), removed.len());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_tensor_of_another_type_is_named() {
    let name = a_matrix(&model_dir());
    refused("half precision", &name, |dir| {
        edit(dir, |tensors| {
            tensors.get_mut(&name).unwrap().dtype = "F16".into()
        });
    });
}

#[test]
fn overlapping_tensors_are_refused() {
    let shard = shards(&model_dir())[0].file_name().unwrap().to_owned();
    refused("overlap", "overlaps", |dir| {
        let path = dir.join(&shard);
        let mut tensors = read_raw(&path);
        tensors.values_mut().for_each(|t| t.bytes.clear());
        let small = |offsets: [usize; 2]| serde_json::json!({"dtype": "F32", "shape": [2], "data_offsets": offsets});
        let header = serde_json::json!({"a": small([0, 8]), "b": small([4, 12])});
        let header = serde_json::to_vec(&header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend([0; 12]);
        fs::write(path, bytes).unwrap();
    });
}

#[test]
fn an_index_that_points_elsewhere_is_refused() {
    for (place, named) in [
        ("../model/config.json", "index"),
        ("absent.safetensors", "absent.safetensors"),
    ] {
        let name = a_matrix(&model_dir());
        refused(place, named, |dir| {
            with_index(dir);
            edit_index(dir, |map| {
                map.insert(name, place.into());
            });
        });
    }
}

#[test]
fn a_directory_without_weights_is_refused() {
    refused("no weights", "model.safetensors", |dir| {
        for file in [INDEX_FILE, "model.safetensors"] {
            drop(fs::remove_file(dir.join(file)));
        }
    });
}

#[test]
fn damaged_headers_never_panic_nor_load_beyond_their_file() {
    use proptest::prelude::*;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let tensor = |shape: Vec<usize>| RawTensor {
        dtype: "BF16".into(),
        bytes: vec![0; 2 * shape.iter().product::<usize>()],
        shape,
    };
    let tensors = [("a", tensor(vec![2, 3])), ("b", tensor(vec![4]))];
    write_raw(&path, &tensors.map(|(n, t)| (n.to_owned(), t)).into());
    let sound = fs::read(&path).unwrap();
    let size = sound.len();
    let damage = proptest::collection::vec((0..size, any::<u8>()), 1..6);
    proptest!(|(damage in damage)| {
        let mut bytes = sound.clone();
        for (at, value) in damage {
            bytes[at] = value;
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            for name in checkpoint.names() {
                let entry = checkpoint.entry(name).unwrap();
                prop_assert!(entry.numel() <= size);
                drop(checkpoint.tensor_f32(name, &entry.shape));
            }
        }
    });
}

/// Edits the tensors of the first shard.
fn edit(dir: &Path, change: impl FnOnce(&mut std::collections::BTreeMap<String, RawTensor>)) {
    let shard = &shards(dir)[0];
    let mut tensors = read_raw(shard);
    change(&mut tensors);
    write_raw(shard, &tensors);
}

/// Edits the index's map from tensor to file; a checkpoint of one file has none to edit.
fn edit_index(dir: &Path, change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
    let path = dir.join(INDEX_FILE);
    if !path.exists() {
        return;
    }
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(index["weight_map"].as_object_mut().unwrap());
    fs::write(&path, serde_json::to_vec(&index).unwrap()).unwrap();
}

/// Gives a checkpoint of one file the index it does not need.
fn with_index(dir: &Path) {
    let path = dir.join(INDEX_FILE);
    if path.exists() {
        return;
    }
    let shard = &shards(dir)[0];
    let file = shard.file_name().unwrap().to_str().unwrap();
    let map: serde_json::Map<_, _> = read_raw(shard)
        .into_keys()
        .map(|name| (name, file.into()))
        .collect();
    let index = serde_json::json!({ "weight_map": map });
    fs::write(&path, serde_json::to_vec(&index).unwrap()).unwrap();
}

fn drop_from_index(dir: &Path, gone: impl Fn(&str) -> bool) {
    edit_index(dir, |map| map.retain(|name, _| !gone(name)));
}
