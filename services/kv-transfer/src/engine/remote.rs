use crate::{TransferError, limits};

/// Marks of the two blobs, with the version of their form.
const ADDRESS_MARK: [u8; 4] = *b"OKA1";
const KEY_MARK: [u8; 4] = *b"OKK1";
/// Mark and CRC32C.
const HEAD_BYTES: usize = 8;
/// First address and size of the registered region, ahead of the key.
const REGION_BYTES: usize = 16;

/// Where a part of a peer's region is, and the permission to reach it. Its parts are never logged:
/// the key grants access to the whole region.
///
/// UCX ends the process when it parses an address that is none, and an operation outside the
/// region is a wild write at the peer. Both blobs therefore carry a checksum, and the key the
/// bounds of its region; nothing reaches UCX unless they agree.
#[derive(Clone, PartialEq, Eq)]
pub struct Remote {
    /// Address of the peer's worker.
    pub worker_address: Vec<u8>,
    /// Key of the region, with its bounds.
    pub key: Vec<u8>,
    /// Address of the first byte at the peer.
    pub address: u64,
    /// Bytes from there on.
    pub bytes: u64,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A [`Remote`] that was checked, without its envelopes.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) worker_address: Vec<u8>,
    pub(super) key: Vec<u8>,
    pub(super) address: u64,
}

impl Remote {
    /// Describes a whole region that starts at `address`.
    pub(super) fn of_region(worker_address: &[u8], key: &[u8], address: u64, bytes: u64) -> Self {
        let mut body = Vec::with_capacity(REGION_BYTES + key.len());
        body.extend_from_slice(&address.to_le_bytes());
        body.extend_from_slice(&bytes.to_le_bytes());
        body.extend_from_slice(key);
        Self {
            worker_address: envelope(ADDRESS_MARK, worker_address),
            key: envelope(KEY_MARK, &body),
            address,
            bytes,
        }
    }

    /// The part `[offset, offset + bytes)`. Whether it lies in the region is checked on use.
    #[must_use]
    pub fn part(&self, offset: u64, bytes: u64) -> Self {
        Self {
            address: self.address.saturating_add(offset),
            bytes,
            ..self.clone()
        }
    }

    /// As [`Self::open`], for a fuzzer.
    pub(crate) fn check(&self, end: u64) {
        let _ = self.open(end);
    }

    /// Checks everything that UCX will not, for operations on the first `end` bytes.
    pub(super) fn open(&self, end: u64) -> Result<Target, TransferError> {
        let max = limits::MAX_WORKER_ADDRESS_BYTES;
        let worker_address = opened("worker_address", ADDRESS_MARK, &self.worker_address, max)?;
        let body = opened("rkey", KEY_MARK, &self.key, limits::MAX_REMOTE_KEY_BYTES)?;
        let Some((bounds, key)) = body.split_first_chunk::<REGION_BYTES>() else {
            return Err(TransferError::invalid("rkey", "names no region"));
        };
        let word = |at: usize| {
            bounds[at..at + 8]
                .iter()
                .rev()
                .fold(0, |n, &b| n << 8 | u64::from(b))
        };
        let (base, size) = (word(0), word(8));
        let inside = self.address >= base
            && (self.address - base)
                .checked_add(self.bytes)
                .is_some_and(|end| end <= size);
        if !inside || self.bytes < end {
            let message = format!(
                "{} bytes for a payload of {end} are not in the region",
                self.bytes
            );
            return Err(TransferError::invalid("region", message));
        }
        Ok(Target {
            worker_address: worker_address.to_vec(),
            key: key.to_vec(),
            address: self.address,
        })
    }
}

fn envelope(mark: [u8; 4], body: &[u8]) -> Vec<u8> {
    [&mark, &kv::crc32c(body).to_le_bytes()[..], body].concat()
}

fn opened<'a>(
    field: &'static str,
    mark: [u8; 4],
    blob: &'a [u8],
    max: usize,
) -> Result<&'a [u8], TransferError> {
    if blob.len() > max {
        let message = format!("must hold at most {max} bytes, got {}", blob.len());
        return Err(TransferError::invalid(field, message));
    }
    let body = blob
        .split_first_chunk::<HEAD_BYTES>()
        .and_then(|(head, body)| {
            let sound = head[..4] == mark && head[4..] == kv::crc32c(body).to_le_bytes();
            (sound && !body.is_empty()).then_some(body)
        });
    body.ok_or_else(|| TransferError::invalid(field, "is damaged or of another version"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Fault as _;
    use proptest::prelude::*;

    fn remote() -> Remote {
        Remote::of_region(&[5; 48], &[6; 9], 1 << 40, 1000)
    }

    #[test]
    fn a_part_inside_the_region_opens_and_one_outside_does_not() {
        let whole = remote();
        let target = whole.part(100, 900).open(900).unwrap();
        assert_eq!(target.address, (1 << 40) + 100);
        assert_eq!(
            (target.worker_address, target.key),
            (vec![5; 48], vec![6; 9])
        );
        let outside = [
            whole.part(0, 1001),
            whole.part(101, 900),
            whole.part(u64::MAX, 1),
            Remote {
                address: (1 << 40) - 1,
                ..whole.clone()
            },
            Remote {
                address: 0x1000,
                ..whole.clone()
            },
            Remote {
                bytes: u64::MAX,
                ..whole.clone()
            },
        ];
        for part in outside {
            assert_eq!(part.open(1).err().unwrap().field(), Some("region"));
        }
        assert_eq!(
            whole.part(0, 10).open(11).err().unwrap().field(),
            Some("region")
        );
    }

    #[test]
    fn neither_key_nor_address_is_shown() {
        assert_eq!(format!("{:?}", remote()), "Remote { bytes: 1000, .. }");
    }

    proptest! {
        /// No blob that was changed in one place, or cut, gets as far as UCX.
        #[test]
        fn damaged_blobs_are_refused(at in any::<prop::sample::Index>(), flip in 1u8..=255, cut: bool) {
            let good = remote();
            let damage = |blob: &[u8]| {
                let mut blob = blob.to_vec();
                let at = at.index(blob.len());
                if cut { blob.truncate(at) } else { blob[at] ^= flip }
                blob
            };
            let bad = Remote { worker_address: damage(&good.worker_address), ..good.clone() };
            let error = bad.open(1).err().unwrap();
            prop_assert_eq!(error.field(), Some("worker_address"));
            let bad = Remote { key: damage(&good.key), ..good.clone() };
            let error = bad.open(1).err().unwrap();
            prop_assert_eq!(error.field(), Some("rkey"));
        }

        /// Bytes from anywhere are refused, and never panic.
        #[test]
        fn foreign_blobs_are_refused(blob in prop::collection::vec(any::<u8>(), 0..200)) {
            let bad = Remote { worker_address: blob.clone(), ..remote() };
            prop_assert!(bad.open(1).is_err());
            let bad = Remote { key: blob, ..remote() };
            prop_assert!(bad.open(1).is_err());
        }
    }
}
