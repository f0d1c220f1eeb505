use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{KvDType, KvError};

/// Key-derivation context of the digest: no other digest of this project uses it.
const DOMAIN: &str = "omni prefix identity v1";

/// What a prefix is: equal identities mean interchangeable keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PrefixIdentity(pub [u8; 32]);

impl PrefixIdentity {
    /// The 32 bytes that travel.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads an identity off the wire.
    ///
    /// # Errors
    /// [`KvError::Inconsistent`] naming `identity` unless there are exactly 32 bytes.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, KvError> {
        let array = bytes.try_into().map_err(|_| KvError::Inconsistent {
            field: "identity",
            expected: 32,
            got: bytes.len() as u64,
        })?;
        Ok(Self(array))
    }
}

impl fmt::Display for PrefixIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for PrefixIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrefixIdentity({self})")
    }
}

/// Everything that the keys and values of a prefix depend on.
#[derive(Debug, Clone, Copy)]
pub struct IdentityBuilder<'a> {
    /// Digest of the weights, as the model publishes it.
    pub weights_id: &'a str,
    /// Name of the prompt template.
    pub template: &'a str,
    /// Token ids of the prefix, in order.
    pub tokens: &'a [u32],
    /// Identities of the conditioning images' posterior samples, in order.
    pub image_samples: &'a [&'a [u8]],
    /// Element type of the keys and values.
    pub dtype: KvDType,
}

impl IdentityBuilder<'_> {
    /// Digests the fields. Each is preceded by its tag and its length, so that no two different
    /// inputs spell the same bytes.
    #[must_use]
    pub fn build(&self) -> PrefixIdentity {
        let mut digest = blake3::Hasher::new_derive_key(DOMAIN);
        field(&mut digest, 1, self.weights_id.len());
        digest.update(self.weights_id.as_bytes());
        field(&mut digest, 2, self.template.len());
        digest.update(self.template.as_bytes());
        field(&mut digest, 3, self.tokens.len());
        for id in self.tokens {
            digest.update(&id.to_le_bytes());
        }
        field(&mut digest, 4, self.image_samples.len());
        for sample in self.image_samples {
            field(&mut digest, 5, sample.len());
            digest.update(sample);
        }
        field(&mut digest, 6, self.dtype.bytes());
        digest.update(match self.dtype {
            KvDType::F32 => b"f32 ",
            KvDType::Bf16 => b"bf16",
        });
        PrefixIdentity(*digest.finalize().as_bytes())
    }
}

fn field(digest: &mut blake3::Hasher, tag: u8, len: usize) {
    digest.update(&[tag]);
    digest.update(&(len as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: IdentityBuilder<'static> = IdentityBuilder {
        weights_id: "ab",
        template: "pretrain",
        tokens: &[1, 2, 3],
        image_samples: &[],
        dtype: KvDType::F32,
    };

    #[test]
    fn every_field_changes_the_identity() {
        let base = BASE.build();
        let others = [
            IdentityBuilder {
                weights_id: "ac",
                ..BASE
            },
            IdentityBuilder {
                weights_id: "abp",
                template: "retrain",
                ..BASE
            },
            IdentityBuilder {
                tokens: &[1, 2],
                ..BASE
            },
            IdentityBuilder {
                tokens: &[1, 3, 2],
                ..BASE
            },
            IdentityBuilder {
                image_samples: &[b""],
                ..BASE
            },
            IdentityBuilder {
                image_samples: &[b"x"],
                ..BASE
            },
            IdentityBuilder {
                dtype: KvDType::Bf16,
                ..BASE
            },
        ];
        let mut seen = std::collections::BTreeSet::from([base]);
        for other in others {
            assert!(seen.insert(other.build()), "{other:?} collides");
        }
    }

    #[test]
    fn the_identity_is_stable_across_versions() {
        assert_eq!(BASE.build(), BASE.build());
        assert_eq!(BASE.build().to_string(), PINNED);
    }

    /// Changing this value breaks prefixes held by running pools: raise the domain's version.
    const PINNED: &str = "e1696dd44b2fc38a33255696a3af71c29f51265dd813270467e820c9d71cecfd";

    #[test]
    fn a_truncated_identity_is_refused() {
        let err = PrefixIdentity::from_slice(&[0; 31]).unwrap_err();
        assert_eq!(
            err,
            KvError::Inconsistent {
                field: "identity",
                expected: 32,
                got: 31
            }
        );
    }

    proptest! {
        /// Moving the border between two neighbours never yields the same identity.
        #[test]
        fn image_samples_are_not_concatenated(a in prop::collection::vec(any::<u8>(), 0..8),
                                              b in prop::collection::vec(any::<u8>(), 1..8)) {
            let joined: Vec<u8> = [a.clone(), b.clone()].concat();
            let two = IdentityBuilder { image_samples: &[&a, &b], ..BASE }.build();
            let one = IdentityBuilder { image_samples: &[&joined], ..BASE }.build();
            prop_assert_ne!(two, one);
        }
    }
}
