//! Which rank owns which heads, experts, layers, features and tokens. Pure functions; the tests
//! check that every element is owned exactly as declared.

mod heads;
mod tokens;

use std::ops::Range;

pub use heads::HeadShard;
pub use tokens::TokenShards;

use crate::{ParallelError, error::in_range};

/// Checks `index < parts` and that there are parts at all.
fn check(parts: usize, index: usize) -> Result<(), ParallelError> {
    in_range("parts", parts, 1, crate::MAX_RANKS)?;
    in_range("index", index, 0, parts - 1)
}

/// Part `index` of `0..total` cut evenly: the experts of a rank, or its share of an inner width.
///
/// # Errors
/// [`ParallelError::Mismatch`] when `parts` does not divide `total`, [`ParallelError::OutOfRange`].
pub fn even_range(total: usize, parts: usize, index: usize) -> Result<Range<usize>, ParallelError> {
    check(parts, index)?;
    let each = total / parts;
    if each * parts != total {
        return Err(ParallelError::Mismatch {
            field: "total",
            expected: each * parts,
            got: total,
        });
    }
    Ok(index * each..(index + 1) * each)
}

/// Part `index` of `0..total` cut as evenly as it goes: the first `total % parts` parts get one
/// more. The layers of a pipeline stage, or the elements a rank reduces.
///
/// # Errors
/// [`ParallelError::OutOfRange`].
pub fn near_even_range(
    total: usize,
    parts: usize,
    index: usize,
) -> Result<Range<usize>, ParallelError> {
    check(parts, index)?;
    Ok(chunk(total, parts, index))
}

/// As [`near_even_range`], for callers that know `index < parts`.
pub(crate) fn chunk(total: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (total / parts, total % parts);
    let start = |i: usize| i * each + i.min(more);
    start(index)..start(index + 1)
}

/// Rows of a fused `gate_and_up` weight of inner width `inner` that tensor rank `index` of `parts`
/// keeps: its part of the first half, then the same part of the second.
///
/// # Errors
/// As [`even_range`].
pub fn gate_up_rows(
    inner: usize,
    parts: usize,
    index: usize,
) -> Result<[Range<usize>; 2], ParallelError> {
    let first = even_range(inner, parts, index)?;
    let second = inner + first.start..inner + first.end;
    Ok([first, second])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_whole(total in 0_usize..200, parts in 1_usize..17) {
            let mut next = 0;
            for index in 0..parts {
                let r = near_even_range(total, parts, index).unwrap();
                prop_assert_eq!(r.start, next);
                prop_assert!(r.len() == total / parts || r.len() == total / parts + 1);
                if total % parts == 0 {
                    prop_assert_eq!(&even_range(total, parts, index).unwrap(), &r);
                } else {
                    prop_assert!(even_range(total, parts, index).is_err());
                }
                next = r.end;
            }
            prop_assert_eq!(next, total);
        }

        #[test]
        fn every_gate_and_up_row_has_one_owner(each in 1_usize..9, parts in 1_usize..9) {
            let inner = each * parts;
            let mut owners = vec![0; 2 * inner];
            for index in 0..parts {
                let [gate, up] = gate_up_rows(inner, parts, index).unwrap();
                prop_assert_eq!(up.start, gate.start + inner);
                for row in gate.chain(up) {
                    owners[row] += 1;
                }
            }
            prop_assert!(owners.iter().all(|&n| n == 1));
        }
    }

    #[test]
    fn a_part_that_is_not_there_is_refused() {
        assert!(even_range(8, 0, 0).is_err());
        let e = near_even_range(8, 4, 4).unwrap_err().to_string();
        assert_eq!(e, "index must lie in [0, 3], got 4");
    }
}
