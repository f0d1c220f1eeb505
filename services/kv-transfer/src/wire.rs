//! The one place that turns wire messages into checked values, and back.
use std::time::Duration;

use base::{Failure, Fault as _, RequestId};
use kv::{KvDType, KvError, KvGeometry, Manifest, PrefixIdentity};
use proto::v1;

use crate::engine::Remote;
use crate::{TransferError, limits};

/// Reads a geometry off the wire.
///
/// # Errors
/// [`TransferError::Invalid`] for an absent geometry or an unknown element type,
/// [`TransferError::Manifest`] for one that is out of bounds.
pub fn geometry_from_proto(wire: Option<&v1::KvGeometry>) -> Result<KvGeometry, TransferError> {
    let wire = wire.ok_or_else(|| TransferError::invalid("geometry", "is required"))?;
    let dtype = match wire.dtype() {
        v1::DType::F32 => KvDType::F32,
        v1::DType::Bf16 => KvDType::Bf16,
        v1::DType::Unspecified => {
            return Err(TransferError::invalid(
                "geometry.dtype",
                "must be F32 or BF16",
            ));
        }
    };
    let geometry = KvGeometry {
        layers: wire.layers as usize,
        kv_heads: wire.kv_heads as usize,
        head_dim: wire.head_dim as usize,
        dtype,
    };
    geometry.validate().map_err(TransferError::Manifest)?;
    Ok(geometry)
}

/// Writes a geometry; its fields lie in their bounds, so they fit the wire.
#[must_use]
pub fn geometry_to_proto(geometry: &KvGeometry) -> v1::KvGeometry {
    let dtype = match geometry.dtype {
        KvDType::F32 => v1::DType::F32,
        KvDType::Bf16 => v1::DType::Bf16,
    };
    v1::KvGeometry {
        layers: saturate(geometry.layers),
        kv_heads: saturate(geometry.kv_heads),
        head_dim: saturate(geometry.head_dim),
        dtype: dtype.into(),
    }
}

/// Reads a manifest, of whose checksums some may be still to come.
pub(crate) fn manifest_from_proto(
    wire: Option<v1::PrefixManifest>,
) -> Result<Manifest, TransferError> {
    let wire = wire.ok_or_else(|| TransferError::invalid("manifest", "is required"))?;
    let manifest = Manifest {
        identity: identity_from_proto(&wire.identity)?,
        geometry: geometry_from_proto(wire.geometry.as_ref())?,
        tokens: wire.tokens as usize,
        bytes: wire.bytes,
        chunk_bytes: wire.chunk_bytes as usize,
        crcs: wire.chunk_crc32c,
    };
    manifest
        .validate_announced()
        .map_err(TransferError::Manifest)?;
    Ok(manifest)
}

/// Reads a manifest with all of its checksums.
pub(crate) fn sealed_from_proto(
    wire: Option<v1::PrefixManifest>,
) -> Result<Manifest, TransferError> {
    let manifest = manifest_from_proto(wire)?;
    manifest.validate().map_err(TransferError::Manifest)?;
    Ok(manifest)
}

pub(crate) fn manifest_to_proto(manifest: Manifest) -> v1::PrefixManifest {
    v1::PrefixManifest {
        identity: manifest.identity.as_bytes().to_vec(),
        geometry: Some(geometry_to_proto(&manifest.geometry)),
        tokens: saturate(manifest.tokens),
        bytes: manifest.bytes,
        chunk_bytes: saturate(manifest.chunk_bytes),
        chunk_crc32c: manifest.crcs,
    }
}

pub(crate) fn identity_from_proto(bytes: &[u8]) -> Result<PrefixIdentity, TransferError> {
    PrefixIdentity::from_slice(bytes).map_err(TransferError::Manifest)
}

pub(crate) fn region_to_proto(remote: Remote) -> v1::RemoteRegion {
    v1::RemoteRegion {
        worker_address: remote.worker_address,
        rkey: remote.key,
        address: remote.address,
        bytes: remote.bytes,
    }
}

/// Reads where a slot is; it must be exactly as large as the payload.
pub(crate) fn region_from_proto(
    wire: Option<v1::RemoteRegion>,
    bytes: u64,
) -> Result<Remote, TransferError> {
    let wire = wire.ok_or_else(|| TransferError::invalid("region", "is missing in the answer"))?;
    if wire.bytes != bytes {
        return Err(TransferError::Mismatch(KvError::Inconsistent {
            field: "region.bytes",
            expected: bytes,
            got: wire.bytes,
        }));
    }
    Ok(Remote {
        worker_address: wire.worker_address,
        key: wire.rkey,
        address: wire.address,
        bytes: wire.bytes,
    })
}

/// Reads a time to live; zero means the default.
pub(crate) fn ttl_from_proto(ttl_ms: u32) -> Result<Duration, TransferError> {
    if ttl_ms == 0 {
        return Ok(limits::DEFAULT_TTL);
    }
    let ttl = Duration::from_millis(u64::from(ttl_ms));
    check_ttl("ttl_ms", ttl)?;
    Ok(ttl)
}

pub(crate) fn check_ttl(field: &'static str, ttl: Duration) -> Result<(), TransferError> {
    if (limits::MIN_TTL..=limits::MAX_TTL).contains(&ttl) {
        return Ok(());
    }
    let (min, max) = (limits::MIN_TTL.as_millis(), limits::MAX_TTL.as_millis());
    let message = format!("must lie in [{min}, {max}] ms, got {}", ttl.as_millis());
    Err(TransferError::invalid(field, message))
}

pub(crate) fn check_request_id(text: &str) -> Result<(), TransferError> {
    match text.parse::<RequestId>() {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::invalid("request_id", error.message()).into()),
    }
}

pub(crate) fn check_receiver(text: &str) -> Result<(), TransferError> {
    match text.parse::<base::MemberId>() {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::invalid("receiver", error.message()).into()),
    }
}

/// Reads a pull token.
pub(crate) fn token_from_proto(bytes: &[u8]) -> Result<[u8; limits::TOKEN_BYTES], TransferError> {
    if bytes.is_empty() {
        return Err(TransferError::Token { why: "is required" });
    }
    bytes.try_into().map_err(|_| TransferError::Token {
        why: "is unknown or was used",
    })
}

/// Reads for how long a producer waits in line.
pub(crate) fn wait_from_proto(wait_ms: u32) -> Result<Duration, TransferError> {
    let wait = Duration::from_millis(u64::from(wait_ms));
    if wait <= limits::MAX_WAIT {
        return Ok(wait);
    }
    let max = limits::MAX_WAIT.as_millis();
    let message = format!("must lie in [0, {max}], got {wait_ms}");
    Err(TransferError::invalid("wait_ms", message))
}

/// Checks who may find a cached prefix.
pub(crate) fn check_scope(text: &str) -> Result<(), TransferError> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if text.len() <= limits::MAX_SCOPE_BYTES && text.chars().all(good) {
        return Ok(());
    }
    let max = limits::MAX_SCOPE_BYTES;
    let message = format!("must hold at most {max} letters, digits, '-', '_', '.' or ':'");
    Err(TransferError::invalid("scope", message))
}

/// Milliseconds on the wire. Every time to live is checked against a bound far below `u32::MAX`.
pub(crate) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn saturate(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let geometry = KvGeometry {
            layers: 2,
            kv_heads: 1,
            head_dim: 4,
            dtype: KvDType::Bf16,
        };
        let payload = vec![3; geometry.prefix_bytes(70)];
        Manifest::describe(PrefixIdentity([1; 32]), geometry, 70, &payload, 1024).unwrap()
    }

    #[test]
    fn a_manifest_survives_the_wire() {
        let sent = manifest();
        let wire = manifest_to_proto(sent.clone());
        assert_eq!(manifest_from_proto(Some(wire)).unwrap(), sent);
    }

    #[test]
    fn each_broken_field_of_a_manifest_is_named() {
        type Break = fn(&mut v1::PrefixManifest);
        let cases: [(&str, Break); 8] = [
            ("identity", |m| m.identity.truncate(31)),
            ("geometry", |m| m.geometry = None),
            ("geometry.dtype", |m| m.geometry.as_mut().unwrap().dtype = 9),
            ("geometry.layers", |m| {
                m.geometry.as_mut().unwrap().layers = u32::MAX
            }),
            ("tokens", |m| m.tokens = 0),
            ("bytes", |m| m.bytes = u64::MAX),
            ("chunk_bytes", |m| m.chunk_bytes = 1),
            ("chunk_crc32c", |m| m.chunk_crc32c.truncate(1)),
        ];
        for (field, damage) in cases {
            let mut wire = manifest_to_proto(manifest());
            damage(&mut wire);
            let error = sealed_from_proto(Some(wire)).unwrap_err();
            assert_eq!(error.field(), Some(field), "{error}");
            assert_eq!(error.code(), base::Code::InvalidArgument);
        }
        assert_eq!(
            manifest_from_proto(None).unwrap_err().field(),
            Some("manifest")
        );
    }

    #[test]
    fn times_to_live_outside_the_bounds_are_refused() {
        assert_eq!(ttl_from_proto(0).unwrap(), limits::DEFAULT_TTL);
        for bad in [1, millis(limits::MAX_TTL) + 1, u32::MAX] {
            assert_eq!(ttl_from_proto(bad).unwrap_err().field(), Some("ttl_ms"));
        }
    }
}
