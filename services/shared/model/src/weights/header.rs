//! The header of one safetensors file: eight bytes of length, then JSON, then the values.

use std::fs::File;
use std::os::unix::fs::FileExt;

use serde::Deserialize;
use serde_json::Value;

use super::TensorEntry;
use crate::error::ModelError;

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: u64 = 8;
/// Largest accepted header; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// How values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    /// 32-bit IEEE float.
    F32,
    /// bfloat16.
    Bf16,
    /// Any other type of the format; no tensor that the model reads may have it.
    Other,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Reads and checks a header; the entries come with `file` = 0, for the caller to set.
pub(super) fn read_header(
    file: &File,
    name: &str,
) -> Result<Vec<(String, TensorEntry)>, ModelError> {
    let fail = |message: String| ModelError::file(name, message);
    let size = file
        .metadata()
        .map_err(|e| fail(format!("cannot be read: {e}")))?
        .len();
    if size < LENGTH_BYTES {
        return Err(fail(format!(
            "is truncated: {size} bytes, not even a header length"
        )));
    }
    let mut length = [0u8; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0)
        .map_err(|e| fail(format!("cannot be read: {e}")))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(fail(format!(
            "claims a header of {length} bytes, above the bound {MAX_HEADER_BYTES}"
        )));
    }
    if length > size - LENGTH_BYTES {
        return Err(fail(format!(
            "claims a header of {length} bytes but has only {size} bytes in all"
        )));
    }
    let mut json = vec![0u8; length as usize];
    file.read_exact_at(&mut json, LENGTH_BYTES)
        .map_err(|e| fail(format!("header cannot be read: {e}")))?;
    let data_start = LENGTH_BYTES + length;
    let entries = parse_entries(&json, name)?;
    check_coverage(&entries, size - data_start, name)?;
    Ok(entries
        .into_iter()
        .map(|(tensor, mut entry, _)| {
            entry.offset += data_start;
            (tensor, entry)
        })
        .collect())
}

/// Each tensor with its place relative to the data and its end.
type Placed = (String, TensorEntry, u64);

fn parse_entries(json: &[u8], name: &str) -> Result<Vec<Placed>, ModelError> {
    let header: serde_json::Map<String, Value> = serde_json::from_slice(json)
        .map_err(|e| ModelError::file(name, format!("header is not valid JSON: {e}")))?;
    header
        .into_iter()
        .filter(|(tensor, _)| tensor != "__metadata__")
        .map(|(tensor, value)| parse_entry(tensor, value))
        .collect()
}

fn parse_entry(tensor: String, value: Value) -> Result<Placed, ModelError> {
    let fail = |message: String| ModelError::tensor(&tensor, message);
    let raw: RawEntry =
        serde_json::from_value(value).map_err(|e| fail(format!("bad header entry: {e}")))?;
    let (dtype, width) =
        stored_type(&raw.dtype).ok_or_else(|| fail(format!("has unknown type `{}`", raw.dtype)))?;
    let bytes = raw
        .shape
        .iter()
        .try_fold(width, |product, dim| product.checked_mul(*dim))
        .ok_or_else(|| fail(format!("has impossible shape {:?}", raw.shape)))?;
    let [begin, end] = raw.data_offsets;
    if end.checked_sub(begin) != Some(bytes) {
        return Err(fail(format!(
            "spans bytes {begin}..{end}, but shape {:?} in {} takes {bytes}",
            raw.shape, raw.dtype
        )));
    }
    let shape = raw
        .shape
        .iter()
        .map(|d| usize::try_from(*d))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| fail("has a dimension beyond this machine".into()))?;
    let entry = TensorEntry {
        file: 0,
        dtype,
        shape,
        offset: begin,
    };
    Ok((tensor, entry, end))
}

fn stored_type(name: &str) -> Option<(StoredType, u64)> {
    Some(match name {
        "F32" => (StoredType::F32, 4),
        "BF16" => (StoredType::Bf16, 2),
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => (StoredType::Other, 1),
        "I16" | "U16" | "F16" => (StoredType::Other, 2),
        "I32" | "U32" => (StoredType::Other, 4),
        "F64" | "I64" | "U64" | "C64" => (StoredType::Other, 8),
        _ => return None,
    })
}

/// The tensors must tile the data exactly: no overlap, no hole, no byte beyond the file.
fn check_coverage(entries: &[Placed], data_bytes: u64, name: &str) -> Result<(), ModelError> {
    let mut spans: Vec<(u64, u64, &str)> = entries
        .iter()
        .map(|(tensor, entry, end)| (entry.offset, *end, tensor.as_str()))
        .collect();
    spans.sort_unstable();
    if let Some((_, end, tensor)) = spans.iter().max_by_key(|(_, end, _)| *end)
        && *end > data_bytes
    {
        return Err(ModelError::file(
            name,
            format!(
                "is truncated: tensor `{tensor}` ends at {end}, the data has {data_bytes} bytes"
            ),
        ));
    }
    let mut reached = 0;
    for (begin, end, tensor) in spans {
        if begin != reached {
            let what = if begin < reached {
                "overlaps another"
            } else {
                "leaves a hole before it"
            };
            return Err(ModelError::tensor(tensor, format!("{what} in `{name}`")));
        }
        reached = end;
    }
    if reached != data_bytes {
        return Err(ModelError::file(
            name,
            format!("has {} bytes that no tensor claims", data_bytes - reached),
        ));
    }
    Ok(())
}
