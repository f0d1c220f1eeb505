//! The mesh: how many ranks lie along each axis.

use crate::{Axis, AxisSet, ParallelError};

/// Largest size accepted for one axis; a bound against nonsense configuration, not a goal.
pub const MAX_AXIS: usize = 1024;

/// Most ranks of one mesh; as above.
pub const MAX_RANKS: usize = 65_536;

/// Sizes of the axes `pp x cfg x ring x ulysses x tp`; `tp` varies fastest with the rank number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    sizes: [usize; 5],
}

/// The ranks that differ from each other only along some axes, and one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Global rank numbers, ascending: outer axes vary slowest, as in the mesh.
    pub ranks: Vec<usize>,
    /// Place of the rank that asked in `ranks`.
    pub index: usize,
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
    /// [`ParallelError::InvalidAxis`] when a size is zero or above [`MAX_AXIS`],
    /// [`ParallelError::TooManyRanks`] when their product is above [`MAX_RANKS`].
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
        let got = sizes.iter().product();
        if got > MAX_RANKS {
            return Err(ParallelError::TooManyRanks {
                max: MAX_RANKS,
                got,
            });
        }
        Ok(Self { sizes })
    }

    /// Ranks along one axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Ranks of a group along a product of axes.
    #[must_use]
    pub fn size_of(&self, axes: AxisSet) -> usize {
        axes.axes().map(|axis| self.size(axis)).product()
    }

    /// The factors of `axes` that have more than one rank.
    #[must_use]
    pub fn used(&self, axes: AxisSet) -> AxisSet {
        let used = axes.axes().filter(|&axis| self.size(axis) > 1);
        AxisSet::of(&used.collect::<Vec<_>>())
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

    /// The rank at `coordinates`, the inverse of [`Self::coordinates`].
    ///
    /// # Errors
    /// [`ParallelError::CoordinateOutOfRange`] naming the first axis left.
    pub fn rank_at(&self, coordinates: [usize; 5]) -> Result<usize, ParallelError> {
        let mut rank = 0;
        for (axis, got) in Axis::ALL.into_iter().zip(coordinates) {
            let size = self.size(axis);
            if got >= size {
                return Err(ParallelError::CoordinateOutOfRange { axis, size, got });
            }
            rank = rank * size + got;
        }
        Ok(rank)
    }

    /// Place of `rank` within its group along `axes`: its coordinates there, outer axes slowest.
    ///
    /// # Errors
    /// As [`Self::coordinates`].
    pub fn index_in(&self, rank: usize, axes: AxisSet) -> Result<usize, ParallelError> {
        let at = self.coordinates(rank)?;
        Ok(axes
            .axes()
            .fold(0, |index, a| index * self.size(a) + at[a as usize]))
    }

    /// The ranks that share every coordinate of `rank` outside `axes`.
    ///
    /// # Errors
    /// As [`Self::coordinates`].
    pub fn group(&self, rank: usize, axes: AxisSet) -> Result<Group, ParallelError> {
        let index = self.index_in(rank, axes)?;
        let mut at = self.coordinates(rank)?;
        let mut ranks = Vec::with_capacity(self.size_of(axes));
        for member in 0..self.size_of(axes) {
            let mut rest = member;
            for axis in Axis::ALL.into_iter().rev().filter(|&a| axes.contains(a)) {
                at[axis as usize] = rest % self.size(axis);
                rest /= self.size(axis);
            }
            ranks.push(self.rank_at(at)?);
        }
        Ok(Group { ranks, index })
    }

    /// Every group along `axes`; together they hold each rank of the mesh once.
    #[must_use]
    pub fn groups(&self, axes: AxisSet) -> Vec<Vec<usize>> {
        let first = |rank: &usize| self.index_in(*rank, axes) == Ok(0);
        (0..self.ranks())
            .filter(first)
            .filter_map(|rank| self.group(rank, axes).ok())
            .map(|group| group.ranks)
            .collect()
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
                prop_assert_eq!(mesh.rank_at(at).unwrap(), rank);
                prop_assert!(seen.insert(at));
            }
            prop_assert!(mesh.coordinates(mesh.ranks()).is_err());
        }

        #[test]
        fn groups_along_any_product_partition_the_mesh(
            sizes in prop::array::uniform5(1_usize..4), bits in 0_usize..32,
        ) {
            let mesh = Mesh::new(sizes).unwrap();
            let axes = AxisSet::ALL.subsets().nth(bits).unwrap();
            let groups = mesh.groups(axes);
            let mut all: Vec<_> = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..mesh.ranks()).collect::<Vec<_>>());
            for ranks in groups {
                prop_assert_eq!(ranks.len(), mesh.size_of(axes));
                prop_assert!(ranks.is_sorted());
                let first = mesh.coordinates(ranks[0]).unwrap();
                for (index, &rank) in ranks.iter().enumerate() {
                    let expected = Group { ranks: ranks.clone(), index };
                    prop_assert_eq!(mesh.group(rank, axes).unwrap(), expected);
                    let at = mesh.coordinates(rank).unwrap();
                    for axis in Axis::ALL.into_iter().filter(|&a| !axes.contains(a)) {
                        prop_assert_eq!(at[axis as usize], first[axis as usize]);
                    }
                }
            }
        }
    }

    #[test]
    fn tp_varies_fastest() {
        let mesh = Mesh::new([1, 2, 1, 1, 4]).unwrap();
        assert_eq!(mesh.coordinates(5).unwrap(), [0, 1, 0, 0, 1]);
        let group = |axis: Axis| mesh.group(5, axis.into()).unwrap();
        assert_eq!(group(Axis::Tp).ranks, [4, 5, 6, 7]);
        assert_eq!(group(Axis::Cfg).ranks, [1, 5]);
        assert_eq!(group(Axis::Cfg).index, 1);
    }

    #[test]
    fn empty_and_absurd_axes_are_named() {
        let e = Mesh::new([1, 1, 0, 1, 1]).unwrap_err();
        assert_eq!(
            e.to_string(),
            "plan axis ring must be between 1 and 1024, got 0"
        );
        assert!(Mesh::new([1, 1, 1, 1, 4096]).is_err());
        let e = Mesh::new([1024, 1, 1, 1024, 1]).unwrap_err();
        assert_eq!(e.to_string(), "a plan has at most 65536 ranks, got 1048576");
    }

    #[test]
    fn a_coordinate_outside_the_mesh_names_its_axis() {
        let mesh = Mesh::new([1, 2, 1, 1, 4]).unwrap();
        let e = mesh.rank_at([0, 2, 0, 0, 0]).unwrap_err();
        assert_eq!(
            e.to_string(),
            "coordinate cfg = 2 is outside an axis of 2 ranks"
        );
    }
}
