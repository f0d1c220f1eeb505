//! Everything here that reads bytes from elsewhere, one function a parser, for fuzzers and for the replay of
//! their corpus. Each must come back, whatever it is given.
use prost::Message as _;
use proto::v1;

use crate::engine::Remote;
use crate::{local, wire};

/// Control messages: the first byte says which, the rest is one.
pub fn message(bytes: &[u8]) {
    let Some((kind, body)) = bytes.split_first() else {
        return;
    };
    match kind % 4 {
        0 => {
            if let Ok(asked) = v1::ReserveRequest::decode(body) {
                let _ = wire::check_request_id(&asked.request_id);
                let _ = wire::ttl_from_proto(asked.ttl_ms);
                let _ = wire::wait_from_proto(asked.wait_ms);
                let _ = asked.cache.map(|terms| wire::check_scope(&terms.scope));
                manifest(asked.offer);
            }
        }
        1 => {
            if let Ok(asked) = v1::SealRequest::decode(body) {
                manifest(asked.manifest);
            }
        }
        2 => {
            if let Ok(asked) = v1::PullRequest::decode(body) {
                let _ = wire::check_receiver(&asked.receiver);
                let identity = asked.handle.unwrap_or_default().identity;
                let _ = wire::identity_from_proto(&identity);
            }
        }
        _ => {
            if let Ok(told) = v1::PullResponse::decode(body) {
                let _ = wire::region_from_proto(told.region, 1 << 20);
                manifest(told.manifest);
            }
        }
    }
}

/// What is accepted lies in its bounds, survives the way back, and has a plan.
fn manifest(wire: Option<v1::PrefixManifest>) {
    let Ok(manifest) = wire::manifest_from_proto(wire) else {
        return;
    };
    assert!(manifest.crcs.len() <= manifest.chunks());
    let again = wire::manifest_from_proto(Some(wire::manifest_to_proto(manifest.clone())));
    assert!(again.is_ok_and(|again| again == manifest));
    // Planning takes as long as there are heads; a fuzzer asks for a million of them.
    if manifest.geometry.layers * manifest.geometry.kv_heads <= 4096 {
        let whole = kv::KvShard::whole(&manifest.geometry, manifest.tokens);
        let plan = kv::ReadPlan::new(&manifest, &whole);
        assert!(plan.is_ok_and(|plan| plan.read_bytes() == manifest.bytes));
    }
}

/// Where a part of a peer's region is: the first byte cuts the rest into its two blobs.
pub fn remote(bytes: &[u8]) {
    let Some((cut, body)) = bytes.split_first() else {
        return;
    };
    let (worker_address, key) = body.split_at(usize::from(*cut).min(body.len()));
    let remote = Remote {
        worker_address: worker_address.to_vec(),
        key: key.to_vec(),
        address: u64::from_le_bytes(std::array::from_fn(|at| key.get(at).copied().unwrap_or(0))),
        bytes: body.len() as u64,
    };
    remote.check(body.len() as u64);
}

/// What comes in at either end of the pool's socket.
pub fn door(bytes: &[u8]) {
    local::understand(bytes);
}
