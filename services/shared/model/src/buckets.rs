//! The legal output sizes of a model and how a wish becomes one of them.
//!
//! HunyuanImage-3.0: sizes walk from the square in steps of base/16 to 1:4 and 4:1, 33 in all, sorted by
//! height over width; the Instruct releases append four more. A wish picks the nearest ratio; the size made is
//! always the bucket's own.

use crate::error::ModelError;

/// Steps from the square to the longest side.
const STEPS: usize = 16;
/// Base size that the Instruct extras are given for.
const EXTRAS_BASE: usize = 1024;
/// Extra sizes of the Instruct releases as height and width, in the order of their ratio indices 33..=36.
const EXTRAS: [(usize, usize); 4] = [(1024, 768), (1280, 720), (768, 1024), (720, 1280)];
/// Smaller squares that one serving system offers under the square's ratio token.
const SUB_SQUARES: [usize; 4] = [512, 640, 768, 896];
/// Largest side that a wish may name, in pixels.
pub const MAX_SIDE: usize = 65_536;

/// One legal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Number of the `<img_ratio_k>` token.
    pub ratio_index: usize,
    /// Height in pixels.
    pub height: usize,
    /// Width in pixels.
    pub width: usize,
}

impl Bucket {
    /// Height over width.
    pub fn ratio(&self) -> f64 {
        ratio(self.height, self.width)
    }

    /// Image tokens along height and width.
    pub fn grid(&self, pixels_per_token: usize) -> (usize, usize) {
        (
            self.height / pixels_per_token,
            self.width / pixels_per_token,
        )
    }
}

/// Which sizes exist beside the 33 of every release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketSet {
    /// The 33 sizes of the base release.
    Base,
    /// Those and the four extras of the Instruct releases.
    Instruct,
    /// The Instruct sizes, and smaller squares under the square's ratio index, chosen by area (a convention of
    /// another serving system, kept for comparison; the model was not trained for it).
    InstructWithSubSquares,
}

/// The sizes of one base size, by ratio index.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolutionGroup {
    base: usize,
    cell: usize,
    buckets: Vec<Bucket>,
    /// More sizes that share a bucket's ratio index.
    subs: Vec<Bucket>,
}

impl ResolutionGroup {
    /// Builds the table; `cell` is the number of pixels per token that every side is rounded down to.
    ///
    /// # Errors
    /// `base` is no positive multiple of `cell`, or so small that a side would vanish.
    pub fn new(base: usize, cell: usize, set: BucketSet) -> Result<Self, ModelError> {
        if cell == 0 || base < 2 * cell || !base.is_multiple_of(cell) || base > MAX_SIDE / 2 {
            return Err(ModelError::config(
                "image_base_size",
                format!("{base} makes no sizes in steps of {cell} pixels"),
            ));
        }
        let sizes = walk(base, cell);
        let mut group = Self {
            base,
            cell,
            buckets: numbered(sizes),
            subs: Vec::new(),
        };
        if set != BucketSet::Base {
            group.append_extras();
        }
        if set == BucketSet::InstructWithSubSquares {
            group.append_sub_squares();
        }
        Ok(group)
    }

    /// The square's side.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Side of a walk's step in pixels.
    pub fn step(&self) -> usize {
        self.base / STEPS
    }

    /// One bucket per ratio index.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Further sizes that share a bucket's ratio index; empty for the released tables.
    pub fn sub_sizes(&self) -> &[Bucket] {
        &self.subs
    }

    /// The bucket of a ratio index.
    pub fn by_index(&self, index: usize) -> Option<Bucket> {
        self.buckets.get(index).copied()
    }

    /// The index that stands in when the model names no ratio: the square's.
    pub fn fallback_index(&self) -> usize {
        STEPS
    }

    /// The bucket of the nearest ratio; among its sizes, the one of nearest area.
    ///
    /// # Errors
    /// A side that is zero or beyond [`MAX_SIDE`].
    pub fn nearest(&self, height: usize, width: usize) -> Result<Bucket, ModelError> {
        check_side(height)?;
        check_side(width)?;
        let wanted = ratio(height, width);
        let mut best = self.buckets[0];
        for bucket in &self.buckets[1..] {
            if (bucket.ratio() - wanted).abs() < (best.ratio() - wanted).abs() {
                best = *bucket;
            }
        }
        let area = height * width;
        let distance = |b: &Bucket| (b.height * b.width).abs_diff(area);
        for sub in &self.subs {
            if sub.ratio_index == best.ratio_index && distance(sub) < distance(&best) {
                best = *sub;
            }
        }
        Ok(best)
    }

    /// The bucket of exactly this size.
    ///
    /// # Errors
    /// No bucket has this size; the message names the nearest legal ones.
    pub fn exact(&self, height: usize, width: usize) -> Result<Bucket, ModelError> {
        check_side(height)?;
        check_side(width)?;
        self.buckets
            .iter()
            .chain(&self.subs)
            .find(|b| (b.height, b.width) == (height, width))
            .copied()
            .ok_or_else(|| {
                let near: Vec<String> = self
                    .nearest_sizes(height, width, 3)
                    .iter()
                    .map(|b| format!("{}x{}", b.height, b.width))
                    .collect();
                ModelError::invalid(
                    "size",
                    format!(
                        "{height}x{width} (height x width) is no size of this model; nearest: {}",
                        near.join(", ")
                    ),
                )
            })
    }

    /// Up to `count` legal sizes, nearest ratio first.
    pub fn nearest_sizes(&self, height: usize, width: usize, count: usize) -> Vec<Bucket> {
        let wanted = ratio(height.max(1), width.max(1));
        let mut all: Vec<Bucket> = self.buckets.iter().chain(&self.subs).copied().collect();
        all.sort_by(|a, b| {
            (a.ratio() - wanted)
                .abs()
                .total_cmp(&(b.ratio() - wanted).abs())
        });
        all.truncate(count);
        all
    }

    fn append_extras(&mut self) {
        for (height, width) in EXTRAS {
            let (height, width) = (self.scaled(height), self.scaled(width));
            let known = self
                .buckets
                .iter()
                .any(|b| b.ratio() == ratio(height, width));
            if !known {
                self.buckets.push(Bucket {
                    ratio_index: self.buckets.len(),
                    height,
                    width,
                });
            }
        }
    }

    fn append_sub_squares(&mut self) {
        let square = self.fallback_index();
        for side in SUB_SQUARES {
            let side = self.scaled(side);
            self.subs.push(Bucket {
                ratio_index: square,
                height: side,
                width: side,
            });
        }
    }

    /// A side that is given for base 1024, for this base, rounded down to whole cells.
    fn scaled(&self, side: usize) -> usize {
        side * self.base / EXTRAS_BASE / self.cell * self.cell
    }
}

/// The walk from the square to both ends, rounded to cells and sorted by ratio.
fn walk(base: usize, cell: usize) -> Vec<(usize, usize)> {
    let step = (base / STEPS).max(1);
    let (longest, shortest) = (2 * base, base / 2);
    let mut sizes = vec![(base, base)];
    for tall in [true, false] {
        let (mut long, mut short) = (base, base);
        while long < longest || short > shortest {
            long = (long + step).min(longest);
            short = short.saturating_sub(step).max(shortest);
            sizes.push(if tall { (long, short) } else { (short, long) });
        }
    }
    for (height, width) in &mut sizes {
        *height = *height / cell * cell;
        *width = *width / cell * cell;
    }
    sizes.sort_by(|a, b| ratio(a.0, a.1).total_cmp(&ratio(b.0, b.1)));
    sizes
}

fn numbered(sizes: Vec<(usize, usize)>) -> Vec<Bucket> {
    sizes
        .into_iter()
        .enumerate()
        .map(|(ratio_index, (height, width))| Bucket {
            ratio_index,
            height,
            width,
        })
        .collect()
}

/// Both sides are below 2^17, so their quotient in f64 is the correctly rounded ratio.
fn ratio(height: usize, width: usize) -> f64 {
    height as f64 / width as f64
}

fn check_side(side: usize) -> Result<(), ModelError> {
    if side == 0 || side > MAX_SIDE {
        return Err(ModelError::invalid(
            "size",
            format!("a side of {side} pixels is not in 1..={MAX_SIDE}"),
        ));
    }
    Ok(())
}

/// Which side a colon names first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColonOrder {
    /// `H:W`, as in the base release.
    HeightFirst,
    /// `W:H`, as in the Instruct releases.
    WidthFirst,
}

/// What a caller may say about the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeRequest {
    /// The model chooses a ratio.
    Auto,
    /// Height and width in pixels (or any two numbers of that ratio).
    Pixels {
        /// Height.
        height: usize,
        /// Width.
        width: usize,
    },
    /// The bucket of a ratio index.
    Ratio(usize),
}

impl SizeRequest {
    /// Parses `auto`, `HxW`, `a:b` or `<img_ratio_k>`.
    pub fn parse(text: &str, colon: ColonOrder) -> Result<Self, ModelError> {
        let bad = || {
            ModelError::invalid(
                "size",
                format!(
                    "`{}` is neither auto, HxW, a:b nor <img_ratio_k>",
                    clipped(text)
                ),
            )
        };
        if text == "auto" {
            return Ok(Self::Auto);
        }
        if let Some(rest) = text.strip_prefix("<img_ratio_") {
            let index = rest.strip_suffix('>').and_then(number).ok_or_else(bad)?;
            return Ok(Self::Ratio(index));
        }
        let pair = |separator: char| {
            let (a, b) = text.split_once(separator)?;
            Some((number(a)?, number(b)?))
        };
        let (height, width) = match (pair('x'), pair(':'), colon) {
            (Some(pair), _, _) => pair,
            (None, Some((h, w)), ColonOrder::HeightFirst) => (h, w),
            (None, Some((w, h)), ColonOrder::WidthFirst) => (h, w),
            (None, None, _) => return Err(bad()),
        };
        check_side(height)?;
        check_side(width)?;
        Ok(Self::Pixels { height, width })
    }

    /// The bucket this asks for; `None` for [`Self::Auto`].
    pub fn snap(self, group: &ResolutionGroup) -> Result<Option<Bucket>, ModelError> {
        match self {
            Self::Auto => Ok(None),
            Self::Pixels { height, width } => group.nearest(height, width).map(Some),
            Self::Ratio(index) => group.by_index(index).map(Some).ok_or_else(|| {
                ModelError::invalid(
                    "size",
                    format!("ratio index {index} is not below {}", group.buckets().len()),
                )
            }),
        }
    }
}

/// Plain decimal digits only: no sign, no space, no more than a side can have.
fn number(text: &str) -> Option<usize> {
    let digits = !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// The first characters of a caller's text, for an error message.
pub(crate) fn clipped(text: &str) -> &str {
    let end = text.char_indices().nth(40).map_or(text.len(), |(i, _)| i);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn group(base: usize, set: BucketSet) -> ResolutionGroup {
        ResolutionGroup::new(base, 16, set).unwrap()
    }

    #[test]
    fn the_square_is_in_the_middle_of_33() {
        for base in [256, 512, 1024] {
            let group = group(base, BucketSet::Base);
            assert_eq!(group.buckets().len(), 33);
            let square = group.by_index(group.fallback_index()).unwrap();
            assert_eq!((square.height, square.width), (base, base));
        }
    }

    #[test]
    fn a_size_outside_the_table_is_refused_with_the_nearest_ones() {
        let error = group(1024, BucketSet::Base).exact(1000, 1000).unwrap_err();
        assert!(error.to_string().contains("1024x1024"), "{error}");
        assert_eq!(
            error.kind(),
            crate::ErrorKind::InvalidArgument { field: "size" }
        );
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let parse = |s| SizeRequest::parse(s, ColonOrder::HeightFirst);
        for bad in [
            "",
            "0x5",
            "5x0",
            "1024x",
            "x",
            "ax3",
            "-1x5",
            "+1x5",
            " 1x5",
            "1x2x3",
            "100000x10000",
            "<img_ratio_>",
            "<img_ratio_3",
            "99999999999999999999x1",
            "1:0",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let beyond = SizeRequest::Ratio(33).snap(&group(1024, BucketSet::Base));
        assert!(beyond.is_err());
        assert!(ResolutionGroup::new(0, 16, BucketSet::Base).is_err());
        assert!(ResolutionGroup::new(1000, 16, BucketSet::Base).is_err());
    }

    #[test]
    fn a_colon_names_the_side_that_the_release_says() {
        let wide = SizeRequest::Pixels {
            height: 9,
            width: 16,
        };
        assert_eq!(
            SizeRequest::parse("9:16", ColonOrder::HeightFirst).unwrap(),
            wide
        );
        assert_eq!(
            SizeRequest::parse("16:9", ColonOrder::WidthFirst).unwrap(),
            wide
        );
    }

    proptest! {
        #[test]
        fn nearest_is_never_beaten(h in 1usize..5000, w in 1usize..5000, extra in any::<bool>()) {
            let set = if extra { BucketSet::Instruct } else { BucketSet::Base };
            let group = group(1024, set);
            let got = group.nearest(h, w).unwrap();
            let wanted = h as f64 / w as f64;
            for bucket in group.buckets() {
                prop_assert!((got.ratio() - wanted).abs() <= (bucket.ratio() - wanted).abs());
            }
            prop_assert_eq!(group.by_index(got.ratio_index), Some(got));
        }

        #[test]
        fn every_bucket_is_its_own_nearest(index in 0usize..37) {
            let group = group(1024, BucketSet::Instruct);
            let bucket = group.by_index(index).unwrap();
            prop_assert_eq!(group.nearest(bucket.height, bucket.width).unwrap(), bucket);
            prop_assert_eq!(group.exact(bucket.height, bucket.width).unwrap(), bucket);
        }
    }
}
