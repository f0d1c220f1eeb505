//! The mesh: how many ranks lie along each axis.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ParallelError;

/// Largest size accepted for one axis; a bound against nonsense configuration, not a goal.
pub const MAX_AXIS: usize = 1024;

/// One axis of the mesh, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Pipeline stages: consecutive layers.
    Pp,
    /// The rows of classifier-free guidance.
    Cfg,
    /// Ring attention over the sequence.
    Ring,
    /// Sequence split by all-to-all over heads.
    Ulysses,
    /// Tensor parallelism over heads and features.
    Tp,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Self; 5] = [Self::Pp, Self::Cfg, Self::Ring, Self::Ulysses, Self::Tp];

    /// The name used in configuration and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pp => "pp",
            Self::Cfg => "cfg",
            Self::Ring => "ring",
            Self::Ulysses => "ulysses",
            Self::Tp => "tp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Sizes of the axes `pp x cfg x ring x ulysses x tp`; `tp` varies fastest with the rank number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    sizes: [usize; 5],
}

impl Mesh {
    /// The mesh of one rank.
    #[must_use]
    pub fn single() -> Self {
        Self { sizes: [1; 5] }
    }

    /// A mesh of the given sizes, in the order of [`Axis::ALL`].
    ///
    /// # Errors
    /// [`ParallelError::InvalidAxis`] when a size is zero or above [`MAX_AXIS`].
    pub fn new(sizes: [usize; 5]) -> Result<Self, ParallelError> {
        for (axis, got) in Axis::ALL.into_iter().zip(sizes) {
            if got == 0 || got > MAX_AXIS {
                return Err(ParallelError::InvalidAxis {
                    axis,
                    max: MAX_AXIS,
                    got,
                });
            }
        }
        Ok(Self { sizes })
    }

    /// Ranks along one axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Ranks in the whole mesh.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Coordinates of a rank, in the order of [`Axis::ALL`].
    ///
    /// # Errors
    /// [`ParallelError::RankOutOfRange`] when the mesh has no such rank.
    pub fn coordinates(&self, rank: usize) -> Result<[usize; 5], ParallelError> {
        if rank >= self.ranks() {
            return Err(ParallelError::RankOutOfRange {
                rank,
                ranks: self.ranks(),
            });
        }
        let mut rest = rank;
        let mut at = [0; 5];
        for i in (0..5).rev() {
            at[i] = rest % self.sizes[i];
            rest /= self.sizes[i];
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_rank_has_its_own_coordinates(sizes in prop::array::uniform5(1_usize..4)) {
            let mesh = Mesh::new(sizes).unwrap();
            let mut seen = std::collections::HashSet::new();
            for rank in 0..mesh.ranks() {
                let at = mesh.coordinates(rank).unwrap();
                for (axis, c) in Axis::ALL.into_iter().zip(at) {
                    prop_assert!(c < mesh.size(axis));
                }
                prop_assert!(seen.insert(at));
            }
            prop_assert!(mesh.coordinates(mesh.ranks()).is_err());
        }
    }

    #[test]
    fn tp_varies_fastest() {
        let mesh = Mesh::new([1, 2, 1, 1, 4]).unwrap();
        assert_eq!(mesh.coordinates(5).unwrap(), [0, 1, 0, 0, 1]);
    }

    #[test]
    fn empty_and_absurd_axes_are_named() {
        let e = Mesh::new([1, 1, 0, 1, 1]).unwrap_err();
        assert_eq!(
            e.to_string(),
            "plan axis ring must be between 1 and 1024, got 0"
        );
        assert!(Mesh::new([1, 1, 1, 1, 4096]).is_err());
    }
}
