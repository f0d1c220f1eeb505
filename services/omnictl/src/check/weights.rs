//! The files of a checkpoint: that those the index names are there, and that each is as long as its header says.
//! No weight is read.
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read as _,
    path::Path,
};

use serde_json::Value;

use super::{Finding, failed, ok, skipped};
use crate::resource;

const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Largest index, config or header that is read, in bytes.
const MAX_JSON: u64 = 256 << 20;

/// Checks a directory.
pub(super) fn check(folder: Option<&Path>) -> Finding {
    const CHECK: &str = "weights";
    let Some(folder) = folder else {
        return skipped(CHECK, "no --model");
    };
    match look(folder) {
        Ok((files, bytes)) => {
            let size = resource::bytes(&Value::from(bytes));
            ok(CHECK, format!("{files} files, {size}, whole"))
        }
        Err(reason) => failed(
            CHECK,
            reason,
            "copy what is missing or short again, and compare digests with its source",
        ),
    }
}

fn json(path: &Path) -> Result<Value, String> {
    let named = |why: String| format!("{}: {why}", path.display());
    let about = fs::metadata(path).map_err(|error| named(error.to_string()))?;
    if about.len() > MAX_JSON {
        return Err(named(format!("has more than {MAX_JSON} bytes")));
    }
    let text = fs::read(path).map_err(|error| named(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| named(error.to_string()))
}

/// Files and bytes of a whole checkpoint.
fn look(folder: &Path) -> Result<(usize, u64), String> {
    json(&folder.join(CONFIG))?;
    let index = json(&folder.join(INDEX))?;
    let map = index["weight_map"].as_object();
    let map = map.ok_or_else(|| format!("{INDEX} has no weight_map"))?;
    let files: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    let mut total = 0;
    for name in &files {
        // A name, not a way out of the directory.
        if name.contains('/') || name.contains('\\') {
            return Err(format!(
                "{INDEX} names {name:?}, which is no file beside it"
            ));
        }
        total += whole(&folder.join(name), name)?;
    }
    Ok((files.len(), total))
}

/// Length of a file that is as long as its header says.
fn whole(path: &Path, name: &str) -> Result<u64, String> {
    let mut file = File::open(path).map_err(|error| format!("{name}: {error}"))?;
    let length = file
        .metadata()
        .map_err(|error| format!("{name}: {error}"))?
        .len();
    let mut head = [0; 8];
    file.read_exact(&mut head)
        .map_err(|_| format!("{name} has no header"))?;
    let header = u64::from_le_bytes(head);
    if header > MAX_JSON || header > length.saturating_sub(8) {
        return Err(format!("{name} ends within its header"));
    }
    let mut text = Vec::new();
    let read = file.take(header).read_to_end(&mut text);
    read.map_err(|error| format!("{name}: {error}"))?;
    let parsed: Value =
        serde_json::from_slice(&text).map_err(|error| format!("{name}: {error}"))?;
    let ends = parsed.as_object().into_iter().flatten();
    let end = ends
        .filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64())
        .max();
    let wanted = end.unwrap_or(0).saturating_add(8 + header);
    if wanted != length {
        return Err(format!(
            "{name} has {length} bytes, its header says {wanted}"
        ));
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    fn checkpoint() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONFIG), "{}").unwrap();
        fs::write(
            dir.path().join(INDEX),
            r#"{"weight_map": {"w": "a.safetensors"}}"#,
        )
        .unwrap();
        let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend([0; 4]);
        fs::write(dir.path().join("a.safetensors"), bytes).unwrap();
        dir
    }

    #[test]
    fn a_whole_checkpoint_passes_and_damage_is_named() {
        let dir = checkpoint();
        let shard = dir.path().join("a.safetensors");
        assert_eq!(check(Some(dir.path())).outcome, Outcome::Ok);
        assert_eq!(check(None).outcome, Outcome::Skipped);
        let bytes = fs::read(&shard).unwrap();
        for cut in [0, 4, 20, bytes.len() - 1] {
            fs::write(&shard, &bytes[..cut]).unwrap();
            let found = check(Some(dir.path()));
            assert_eq!(found.outcome, Outcome::Failed, "{cut}");
            assert!(found.found.contains("a.safetensors"), "{found:?}");
        }
        fs::remove_file(&shard).unwrap();
        assert_eq!(check(Some(dir.path())).outcome, Outcome::Failed);
        let index = r#"{"weight_map": {"w": "../a.safetensors"}}"#;
        fs::write(dir.path().join(INDEX), index).unwrap();
        assert!(check(Some(dir.path())).found.contains("no file beside it"));
    }
}
