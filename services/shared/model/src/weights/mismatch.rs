//! The difference between the tensors a checkpoint holds and the tensors its config calls for.

use std::collections::BTreeMap;
use std::fmt;

use super::expected::{TensorSpec, is_tolerated_extra};
use super::{StoredType, TensorEntry};

/// How many tensors an error message names; all of them are counted.
const NAMED: usize = 20;

/// A tensor of the wrong shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// Tensor name.
    pub name: String,
    /// Shape the config calls for.
    pub expected: Vec<usize>,
    /// Shape in the checkpoint.
    pub found: Vec<usize>,
}

/// Everything that differs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Called for, not there.
    pub missing: Vec<String>,
    /// There, not called for.
    pub extra: Vec<String>,
    /// There with another shape.
    pub misshaped: Vec<ShapeMismatch>,
    /// There in a type other than F32 and BF16.
    pub mistyped: Vec<String>,
}

impl Mismatch {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.extra.is_empty()
            && self.misshaped.is_empty()
            && self.mistyped.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} missing, {} unexpected, {} wrongly shaped, {} of a wrong type",
            self.missing.len(),
            self.extra.len(),
            self.misshaped.len(),
            self.mistyped.len()
        )?;
        let lines = self
            .misshaped
            .iter()
            .map(|m| {
                format!(
                    "`{}` has shape {:?}, expected {:?}",
                    m.name, m.found, m.expected
                )
            })
            .chain(self.missing.iter().map(|n| format!("`{n}` is missing")))
            .chain(self.extra.iter().map(|n| format!("`{n}` is unexpected")))
            .chain(
                self.mistyped
                    .iter()
                    .map(|n| format!("`{n}` is not F32 or BF16")),
            );
        for (i, line) in lines.enumerate() {
            if i == NAMED {
                return f.write_str("; and more");
            }
            write!(f, "; {line}")?;
        }
        Ok(())
    }
}

/// Compares the stored tensors with the expected ones.
pub(super) fn compare(stored: &BTreeMap<String, TensorEntry>, expected: &[TensorSpec]) -> Mismatch {
    let mut mismatch = Mismatch::default();
    let wanted: BTreeMap<&str, &TensorSpec> =
        expected.iter().map(|s| (s.name.as_str(), s)).collect();
    for spec in expected {
        match stored.get(&spec.name) {
            None if spec.optional => {}
            None => mismatch.missing.push(spec.name.clone()),
            Some(entry) => {
                if entry.shape != spec.shape {
                    mismatch.misshaped.push(ShapeMismatch {
                        name: spec.name.clone(),
                        expected: spec.shape.clone(),
                        found: entry.shape.clone(),
                    });
                }
                if entry.dtype == StoredType::Other {
                    mismatch.mistyped.push(spec.name.clone());
                }
            }
        }
    }
    for name in stored.keys() {
        if !wanted.contains_key(name.as_str()) && !is_tolerated_extra(name) {
            mismatch.extra.push(name.clone());
        }
    }
    mismatch
}
