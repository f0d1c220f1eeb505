use crate::checksum::{chunk_count, chunk_crc32c, chunk_range, crc32c};
use crate::error::{KvError, in_range};
use crate::{KvGeometry, PrefixIdentity, limits};

/// What a sealed payload holds, and how to check it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Which prefix this is.
    pub identity: PrefixIdentity,
    /// Shape of one token.
    pub geometry: KvGeometry,
    /// Tokens in the prefix, `[0, tokens)`.
    pub tokens: usize,
    /// Payload bytes; always `geometry.prefix_bytes(tokens)`.
    pub bytes: u64,
    /// Bytes that one checksum covers; the last chunk may be short.
    pub chunk_bytes: usize,
    /// CRC32C of each chunk, in order.
    pub crcs: Vec<u32>,
}

impl Manifest {
    /// Describes `payload`, which holds `tokens` tokens of `geometry`.
    ///
    /// # Errors
    /// As [`Self::validate`]; also [`KvError::Inconsistent`] when `payload` is not of the implied
    /// size.
    pub fn describe(
        identity: PrefixIdentity,
        geometry: KvGeometry,
        tokens: usize,
        payload: &[u8],
        chunk_bytes: usize,
    ) -> Result<Self, KvError> {
        in_range(
            "chunk_bytes",
            chunk_bytes as u64,
            limits::MIN_CHUNK_BYTES as u64,
            limits::MAX_CHUNK_BYTES as u64,
        )?;
        let mut manifest = Self {
            identity,
            geometry,
            tokens,
            bytes: payload.len() as u64,
            chunk_bytes,
            crcs: vec![],
        };
        manifest.validate_sizes()?;
        manifest.crcs = chunk_crc32c(payload, chunk_bytes);
        Ok(manifest)
    }

    /// Announces a payload of `tokens` tokens whose checksums are to come.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn announce(
        identity: PrefixIdentity,
        geometry: KvGeometry,
        tokens: usize,
        chunk_bytes: usize,
    ) -> Result<Self, KvError> {
        geometry.validate()?;
        let manifest = Self {
            identity,
            geometry,
            tokens,
            bytes: geometry.prefix_bytes(tokens) as u64,
            chunk_bytes,
            crcs: vec![],
        };
        manifest.validate_announced()?;
        Ok(manifest)
    }

    /// As [`Self::validate`], when some of the checksums may still be to come.
    ///
    /// # Errors
    /// As [`Self::validate`].
    pub fn validate_announced(&self) -> Result<(), KvError> {
        self.validate_sizes()?;
        let max = self.chunks() as u64;
        in_range("chunk_crc32c", self.crcs.len() as u64, 0, max)
    }

    /// Chunks of the payload; only for a manifest within its bounds.
    #[must_use]
    pub fn chunks(&self) -> usize {
        usize::try_from(chunk_count(self.bytes, self.chunk_bytes)).unwrap_or(usize::MAX)
    }

    /// Checks that every field lies in its bound and follows from the others. Allocates nothing.
    ///
    /// # Errors
    /// [`KvError::OutOfRange`] or [`KvError::Inconsistent`] naming the field.
    pub fn validate(&self) -> Result<(), KvError> {
        self.validate_sizes()?;
        let expected = chunk_count(self.bytes, self.chunk_bytes);
        let got = self.crcs.len() as u64;
        if got == expected {
            Ok(())
        } else {
            Err(KvError::Inconsistent {
                field: "chunk_crc32c",
                expected,
                got,
            })
        }
    }

    fn validate_sizes(&self) -> Result<(), KvError> {
        self.geometry.validate()?;
        in_range(
            "tokens",
            self.tokens as u64,
            1,
            limits::MAX_PREFIX_TOKENS as u64,
        )?;
        in_range("bytes", self.bytes, 1, limits::MAX_PREFIX_BYTES)?;
        let expected = self.geometry.prefix_bytes(self.tokens) as u64;
        if self.bytes != expected {
            return Err(KvError::Inconsistent {
                field: "bytes",
                expected,
                got: self.bytes,
            });
        }
        in_range(
            "chunk_bytes",
            self.chunk_bytes as u64,
            limits::MIN_CHUNK_BYTES as u64,
            limits::MAX_CHUNK_BYTES as u64,
        )?;
        let chunks = chunk_count(self.bytes, self.chunk_bytes);
        in_range("chunk_crc32c", chunks, 1, limits::MAX_CHUNKS as u64)
    }

    /// Checks that this describes the prefix and the shape that the receiver wants.
    ///
    /// # Errors
    /// [`KvError::Identity`] or [`KvError::Geometry`].
    pub fn expect(&self, identity: PrefixIdentity, geometry: KvGeometry) -> Result<(), KvError> {
        if self.identity != identity {
            return Err(KvError::Identity {
                expected: identity,
                got: self.identity,
            });
        }
        if self.geometry != geometry {
            return Err(KvError::Geometry {
                expected: geometry,
                got: self.geometry,
            });
        }
        Ok(())
    }

    /// Checks the bytes of chunk `index`.
    ///
    /// # Errors
    /// [`KvError::Chunk`] when they differ, [`KvError::OutOfRange`] when there is no such chunk.
    pub fn verify_chunk(&self, index: usize, bytes: &[u8]) -> Result<(), KvError> {
        self.verify_chunk_crc(index, crc32c(bytes))
    }

    /// As [`Self::verify_chunk`], for a checksum that was computed elsewhere.
    ///
    /// # Errors
    /// As [`Self::verify_chunk`].
    pub fn verify_chunk_crc(&self, index: usize, got: u32) -> Result<(), KvError> {
        let expected = *self.crcs.get(index).ok_or(KvError::OutOfRange {
            field: "chunk",
            min: 0,
            max: self.crcs.len() as u64,
            got: index as u64,
        })?;
        if expected == got {
            Ok(())
        } else {
            Err(KvError::Chunk {
                index,
                expected,
                got,
            })
        }
    }

    /// Checks a whole payload.
    ///
    /// # Errors
    /// [`KvError::Inconsistent`] when its size differs, [`KvError::Chunk`] for the first bad chunk.
    pub fn verify(&self, payload: &[u8]) -> Result<(), KvError> {
        if payload.len() as u64 != self.bytes {
            let got = payload.len() as u64;
            return Err(KvError::Inconsistent {
                field: "bytes",
                expected: self.bytes,
                got,
            });
        }
        (0..self.crcs.len()).try_for_each(|index| {
            self.verify_chunk(
                index,
                &payload[chunk_range(index, payload.len(), self.chunk_bytes)],
            )
        })
    }

    /// Indices of the chunks of `payload` that do not match. A payload of another size has none
    /// that match beyond its end.
    #[must_use]
    pub fn bad_chunks(&self, payload: &[u8]) -> Vec<usize> {
        (0..self.crcs.len())
            .filter(|&index| {
                let range = chunk_range(index, payload.len(), self.chunk_bytes);
                self.verify_chunk(index, &payload[range]).is_err()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvDType;
    use proptest::prelude::*;

    const GEOMETRY: KvGeometry = KvGeometry {
        layers: 2,
        kv_heads: 2,
        head_dim: 8,
        dtype: KvDType::F32,
    };
    const IDENTITY: PrefixIdentity = PrefixIdentity([7; 32]);

    fn sample(tokens: usize) -> (Manifest, Vec<u8>) {
        let payload: Vec<u8> = (0..GEOMETRY.prefix_bytes(tokens))
            .map(|i| (i % 251) as u8)
            .collect();
        let manifest = Manifest::describe(
            IDENTITY,
            GEOMETRY,
            tokens,
            &payload,
            limits::MIN_CHUNK_BYTES,
        )
        .unwrap();
        (manifest, payload)
    }

    #[test]
    fn a_truncated_manifest_is_refused() {
        let (mut manifest, _) = sample(9);
        manifest.crcs.pop();
        assert_eq!(manifest.validate().unwrap_err().field(), "chunk_crc32c");
    }

    #[test]
    fn each_inconsistent_field_is_named() {
        let (good, _) = sample(9);
        let cases: [(&str, Manifest); 5] = [
            (
                "tokens",
                Manifest {
                    tokens: 0,
                    ..good.clone()
                },
            ),
            (
                "tokens",
                Manifest {
                    tokens: usize::MAX,
                    ..good.clone()
                },
            ),
            (
                "bytes",
                Manifest {
                    bytes: good.bytes - 1,
                    ..good.clone()
                },
            ),
            (
                "chunk_bytes",
                Manifest {
                    chunk_bytes: 0,
                    ..good.clone()
                },
            ),
            (
                "geometry.head_dim",
                Manifest {
                    geometry: KvGeometry {
                        head_dim: 0,
                        ..GEOMETRY
                    },
                    ..good.clone()
                },
            ),
        ];
        for (field, manifest) in cases {
            assert_eq!(manifest.validate().unwrap_err().field(), field);
        }
        good.validate().unwrap();
    }

    #[test]
    fn another_prefix_or_shape_is_refused() {
        let (manifest, _) = sample(1);
        manifest.expect(IDENTITY, GEOMETRY).unwrap();
        let other = manifest
            .expect(PrefixIdentity([8; 32]), GEOMETRY)
            .unwrap_err();
        assert_eq!(other.field(), "identity");
        let shape = KvGeometry {
            dtype: KvDType::Bf16,
            ..GEOMETRY
        };
        assert_eq!(
            manifest.expect(IDENTITY, shape).unwrap_err().field(),
            "geometry"
        );
    }

    #[test]
    fn a_payload_of_another_size_is_refused() {
        let (manifest, payload) = sample(9);
        let err = manifest.verify(&payload[1..]).unwrap_err();
        assert_eq!(err.field(), "bytes");
    }

    proptest! {
        /// One flipped bit anywhere is found, and found in its chunk.
        #[test]
        fn one_flipped_bit_is_found_in_its_chunk(tokens in 1usize..40, at in any::<prop::sample::Index>(),
                                                 bit in 0u8..8) {
            let (manifest, mut payload) = sample(tokens);
            manifest.verify(&payload).unwrap();
            prop_assert!(manifest.bad_chunks(&payload).is_empty());
            let at = at.index(payload.len());
            payload[at] ^= 1 << bit;
            prop_assert!(manifest.verify(&payload).is_err());
            prop_assert_eq!(manifest.bad_chunks(&payload), vec![at / manifest.chunk_bytes]);
        }
    }
}
