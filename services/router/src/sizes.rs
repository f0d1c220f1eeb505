//! Which sizes a model makes, and which is nearest to a wish. Pure.
use base::limits::MAX_SIZE_CHARS;
use proto::{
    size::{Size, SizeError},
    v1::{Bucket, SizePolicy},
};

use crate::RouterError;

/// Legal sizes that a refusal lists.
const LISTED: usize = 3;

/// Size of a bucket.
pub fn size_of(bucket: &Bucket) -> Size {
    Size {
        width: bucket.width,
        height: bucket.height,
    }
}

/// Height over width, the ratio that names buckets.
fn ratio(size: Size) -> f64 {
    f64::from(size.height) / f64::from(size.width)
}

fn area(size: Size) -> u64 {
    u64::from(size.width) * u64::from(size.height)
}

/// Sizes of `buckets` by distance of the ratio, then of the area, then in the model's order.
fn ranked(buckets: &[Bucket], wish: Size) -> Vec<Size> {
    let mut sizes: Vec<Size> = buckets
        .iter()
        .filter(|bucket| bucket.width > 0 && bucket.height > 0)
        .map(size_of)
        .collect();
    let distance = |size: Size| (ratio(size) - ratio(wish)).abs();
    sizes.sort_by(|&a, &b| {
        let by_ratio = distance(a).total_cmp(&distance(b));
        by_ratio.then(
            area(a)
                .abs_diff(area(wish))
                .cmp(&area(b).abs_diff(area(wish))),
        )
    });
    sizes.dedup();
    sizes
}

/// The size that will really be made. `wish` is the text of the request; empty asks for the
/// model's square size.
///
/// # Errors
/// A text that is no size; under EXACT, a size that the model does not make, with the nearest
/// ones; a model without sizes.
pub fn choose(buckets: &[Bucket], wish: &str, policy: SizePolicy) -> Result<Size, RouterError> {
    if wish.is_empty() {
        return squarest(buckets).ok_or_else(no_sizes);
    }
    let wish: Size = wish.parse().map_err(|error: SizeError| {
        let text = error.to_string();
        let reason = text.strip_prefix("size ").unwrap_or(&text);
        let shown: String = wish.chars().take(MAX_SIZE_CHARS).collect();
        RouterError::invalid("size", format!("{reason}, got {shown:?}"))
    })?;
    let sizes = ranked(buckets, wish);
    let &nearest = sizes.first().ok_or_else(no_sizes)?;
    if policy == SizePolicy::Snap {
        return Ok(nearest);
    }
    if sizes.contains(&wish) {
        return Ok(wish);
    }
    let listed: Vec<_> = sizes.iter().take(LISTED).map(Size::to_string).collect();
    let reason = format!(
        "{wish} is no size of this model; the nearest are {}",
        listed.join(", ")
    );
    Err(RouterError::invalid("size", reason))
}

/// The squarest ratio at its largest.
fn squarest(buckets: &[Bucket]) -> Option<Size> {
    let square = Size {
        width: 1,
        height: 1,
    };
    let distance = |size: Size| (ratio(size) - ratio(square)).abs();
    let mut sizes = ranked(buckets, square);
    sizes.sort_by(|&a, &b| {
        distance(a)
            .total_cmp(&distance(b))
            .then(area(b).cmp(&area(a)))
    });
    sizes.first().copied()
}

fn no_sizes() -> RouterError {
    RouterError::invalid("model", "makes no size at all")
}

#[cfg(test)]
mod tests {
    use base::Fault as _;
    use proptest::prelude::*;

    use super::*;

    fn buckets() -> Vec<Bucket> {
        [
            (1024, 1024),
            (512, 2048),
            (1280, 768),
            (768, 1280),
            (2048, 512),
            (512, 512),
        ]
        .iter()
        .zip(0..)
        .map(|(&(height, width), ratio_index)| Bucket {
            ratio_index,
            height,
            width,
        })
        .collect()
    }

    fn exact(wish: &str) -> Result<Size, RouterError> {
        choose(&buckets(), wish, SizePolicy::Exact)
    }

    fn snap(wish: &str) -> String {
        choose(&buckets(), wish, SizePolicy::Snap)
            .unwrap()
            .to_string()
    }

    #[test]
    fn a_bucket_is_taken_as_it_is_and_nothing_means_square() {
        assert_eq!(
            exact("2048x512").unwrap(),
            Size {
                width: 2048,
                height: 512
            }
        );
        assert_eq!(exact("512x512").unwrap().to_string(), "512x512");
        assert_eq!(exact("").unwrap().to_string(), "1024x1024");
    }

    #[test]
    fn another_size_is_refused_with_the_nearest() {
        let error = exact("1000x1000").unwrap_err();
        assert_eq!(error.field(), Some("size"));
        assert_eq!(
            error.to_string(),
            "size 1000x1000 is no size of this model; the nearest are 1024x1024, 512x512, 1280x768"
        );
    }

    #[test]
    fn snap_takes_the_nearest_ratio_then_the_nearest_area() {
        assert_eq!(snap("1000x1000"), "1024x1024");
        assert_eq!(snap("600x600"), "512x512");
        assert_eq!(snap("5000x3000"), "1280x768");
        assert_eq!(snap("3000x5000"), "768x1280");
        assert_eq!(snap("1x1"), "512x512");
    }

    #[test]
    fn a_text_that_is_no_size_is_refused_under_any_policy() {
        for bad in [
            "0x0",
            "1024x",
            "x1024",
            "1024X1024",
            " 1024x1024",
            "100000x10000",
            "-1x5",
        ] {
            for policy in [SizePolicy::Unspecified, SizePolicy::Exact, SizePolicy::Snap] {
                let error = choose(&buckets(), bad, policy).unwrap_err();
                assert_eq!(error.field(), Some("size"), "{bad:?}");
                assert!(error.to_string().contains(bad), "{error}");
            }
        }
        assert!(choose(&[], "64x64", SizePolicy::Snap).is_err());
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_always_a_bucket(
            width in 1..=65_536_u32, height in 1..=65_536_u32, snap in any::<bool>(),
        ) {
            let policy = if snap { SizePolicy::Snap } else { SizePolicy::Exact };
            let wish = Size { width, height };
            match choose(&buckets(), &wish.to_string(), policy) {
                Ok(size) => prop_assert!(buckets().iter().any(|bucket| size_of(bucket) == size)),
                Err(error) => prop_assert!(!snap && error.field() == Some("size")),
            }
        }
    }
}
