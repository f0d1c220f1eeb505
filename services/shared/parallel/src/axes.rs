//! Axes of the mesh, and products of them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One axis of the mesh, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// A product of axes, such as `ulysses x tp`; the empty one has a single rank.
///
/// In configuration it is a list of axis names: `ep = ["ulysses", "tp"]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<Axis>", into = "Vec<Axis>")]
pub struct AxisSet(u8);

impl AxisSet {
    /// No axis.
    pub const EMPTY: Self = Self(0);
    /// Every axis: the whole mesh.
    pub const ALL: Self = Self(0b1_1111);
    /// `cfg x ring x ulysses x tp`: what experts may be spread over.
    pub const EXPERTS: Self = Self(0b1_1110);
    /// `ring x ulysses`: what the tokens of one row are spread over.
    pub const SEQUENCE: Self = Self(0b0_1100);
    /// `ulysses x tp`: what attention heads are spread over.
    pub const HEADS: Self = Self(0b1_1000);

    /// The product of `axes`; an axis named twice counts once.
    #[must_use]
    pub fn of(axes: &[Axis]) -> Self {
        axes.iter().fold(Self::EMPTY, |set, &axis| set.with(axis))
    }

    /// This product and `axis`.
    #[must_use]
    pub fn with(self, axis: Axis) -> Self {
        Self(self.0 | 1 << axis as u8)
    }

    /// True when `axis` is a factor.
    #[must_use]
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & 1 << axis as u8 != 0
    }

    /// True when there is no factor.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The factors, outermost first.
    pub fn axes(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&a| self.contains(a))
    }

    /// Every product of factors of this one, the empty one included; those of inner axes first.
    pub(crate) fn subsets(self) -> impl Iterator<Item = Self> {
        // Counting with the bits reversed makes the innermost axis the fastest.
        (0..1_u8 << Axis::ALL.len())
            .map(|n| {
                let chosen = |a: &Axis| n & 1 << (Axis::ALL.len() - 1 - *a as usize) != 0;
                Self::of(&Axis::ALL.into_iter().filter(chosen).collect::<Vec<_>>())
            })
            .filter(move |set| set.0 & !self.0 == 0)
    }
}

impl From<Axis> for AxisSet {
    fn from(axis: Axis) -> Self {
        Self::of(&[axis])
    }
}

impl From<AxisSet> for Vec<Axis> {
    fn from(set: AxisSet) -> Self {
        set.axes().collect()
    }
}

impl TryFrom<Vec<Axis>> for AxisSet {
    type Error = String;

    fn try_from(axes: Vec<Axis>) -> Result<Self, String> {
        axes.into_iter().try_fold(Self::EMPTY, |set, axis| {
            if set.contains(axis) {
                Err(format!("axis {axis} is named twice"))
            } else {
                Ok(set.with(axis))
            }
        })
    }
}

impl fmt::Display for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (i, axis) in self.axes().enumerate() {
            let separator = if i == 0 { "" } else { " x " };
            write!(f, "{separator}{axis}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_reads_like_its_axes() {
        assert_eq!(AxisSet::HEADS.to_string(), "ulysses x tp");
        assert_eq!(AxisSet::SEQUENCE.to_string(), "ring x ulysses");
        assert_eq!(AxisSet::EMPTY.to_string(), "none");
        assert_eq!(AxisSet::EXPERTS.axes().count(), 4);
    }

    #[test]
    fn an_axis_named_twice_is_refused() {
        let e = AxisSet::try_from(vec![Axis::Tp, Axis::Tp]).unwrap_err();
        assert_eq!(e, "axis tp is named twice");
    }

    #[test]
    fn subsets_are_all_there_and_inner_axes_come_first() {
        let all: Vec<_> = AxisSet::EXPERTS.subsets().collect();
        assert_eq!(all.len(), 16);
        assert_eq!(all[0], AxisSet::EMPTY);
        assert_eq!(all[1], AxisSet::from(Axis::Tp));
        assert_eq!(all[3], AxisSet::HEADS);
    }
}
