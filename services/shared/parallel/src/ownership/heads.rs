use std::ops::Range;

use super::check;
use crate::{ModelShape, ParallelError};

/// The attention heads of one of `parts` ranks.
///
/// Query heads are cut evenly. A KV head goes to every rank that owns one of its query heads: with
/// more ranks than KV heads it is replicated. Under `ulysses x tp` the heads of a tensor rank are
/// cut again over Ulysses, so the index is `tp_index * ulysses + ulysses_index`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShard {
    /// Query heads.
    pub q: Range<usize>,
    /// KV heads those attend to.
    pub kv: Range<usize>,
    /// Ranks that hold each KV head.
    pub kv_copies: usize,
    /// Place among the ranks that hold the same KV heads; copy 0 counts as their owner.
    pub copy: usize,
}

impl HeadShard {
    /// Heads of rank `index` of `parts`.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the heads do not divide (see [`crate::Rule`]),
    /// [`ParallelError::OutOfRange`].
    pub fn new(shape: &ModelShape, parts: usize, index: usize) -> Result<Self, ParallelError> {
        check(parts, index)?;
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        let divides = |field, whole: usize, by: usize| {
            if by > 0 && whole.is_multiple_of(by) {
                return Ok(());
            }
            Err(ParallelError::Mismatch {
                field,
                expected: whole - whole.checked_rem(by).unwrap_or(0),
                got: whole,
            })
        };
        divides("heads", heads, kv_heads)?;
        divides("heads", heads, parts)?;
        let kv_copies = (parts / kv_heads).max(1);
        if parts > kv_heads {
            divides("parts", parts, kv_heads)?;
        } else {
            divides("kv_heads", kv_heads, parts)?;
        }
        let each = heads / parts;
        let group = heads / kv_heads;
        let q = index * each..(index + 1) * each;
        Ok(Self {
            kv: q.start / group..q.end.div_ceil(group),
            q,
            kv_copies,
            copy: index % kv_copies,
        })
    }

    /// Heads of a rank of tensor group `tp` and Ulysses group `ulysses`, each `(size, index)`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn under_ulysses(
        shape: &ModelShape,
        tp: (usize, usize),
        ulysses: (usize, usize),
    ) -> Result<Self, ParallelError> {
        check(tp.0, tp.1)?;
        check(ulysses.0, ulysses.1)?;
        Self::new(shape, tp.0 * ulysses.0, tp.1 * ulysses.0 + ulysses.1)
    }

    /// Rows of the fused `qkv_proj` weight this shard needs, in the order of the checkpoint: per KV
    /// group its query heads, the key head, the value head. One range when whole groups are owned.
    #[must_use]
    pub fn qkv_rows(&self, shape: &ModelShape) -> Vec<Range<usize>> {
        let (group, dim) = (shape.heads / shape.kv_heads, shape.head_dim);
        let mut rows: Vec<Range<usize>> = Vec::new();
        for kv in self.kv.clone() {
            let base = kv * (group + 2);
            let q = self.q.start.max(kv * group)..self.q.end.min((kv + 1) * group);
            let queries = base + q.start - kv * group..base + q.end - kv * group;
            for heads in [queries, base + group..base + group + 2] {
                let next = heads.start * dim..heads.end * dim;
                match rows.last_mut() {
                    Some(last) if last.end == next.start => last.end = next.end,
                    _ => rows.push(next),
                }
            }
        }
        rows
    }

    /// Columns of the `o_proj` weight this shard multiplies: its query heads.
    #[must_use]
    pub fn o_columns(&self, shape: &ModelShape) -> Range<usize> {
        self.q.start * shape.head_dim..self.q.end * shape.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::published;
    use proptest::prelude::*;

    /// Legal (heads, kv_heads, parts): one of parts and KV heads divides the other.
    fn legal() -> impl Strategy<Value = (usize, usize, usize)> {
        (1_usize..5, 1_usize..5, 1_usize..5, any::<bool>()).prop_map(|(a, b, c, replicate)| {
            let (small, large) = (a, a * b);
            let (kv, parts) = if replicate {
                (small, large)
            } else {
                (large, small)
            };
            (large * c, kv, parts)
        })
    }

    fn shape(heads: usize, kv_heads: usize) -> ModelShape {
        ModelShape {
            heads,
            kv_heads,
            head_dim: 3,
            ..published()
        }
    }

    proptest! {
        #[test]
        fn heads_are_owned_as_declared((heads, kv_heads, parts) in legal()) {
            let s = shape(heads, kv_heads);
            let mut q_owners = vec![0; heads];
            let mut kv_holders = vec![0; kv_heads];
            let mut kv_owners = vec![0; kv_heads];
            for index in 0..parts {
                let shard = HeadShard::new(&s, parts, index).unwrap();
                let group = heads / kv_heads;
                for q in shard.q.clone() {
                    q_owners[q] += 1;
                    prop_assert!(shard.kv.contains(&(q / group)));
                }
                for kv in shard.kv.clone() {
                    kv_holders[kv] += 1;
                    kv_owners[kv] += usize::from(shard.copy == 0);
                    prop_assert!(shard.q.clone().any(|q| q / group == kv));
                }
                prop_assert_eq!(shard.kv_copies, (parts / kv_heads).max(1));
            }
            prop_assert!(q_owners.iter().all(|&n| n == 1));
            prop_assert!(kv_holders.iter().all(|&n| n == (parts / kv_heads).max(1)));
            prop_assert!(kv_owners.iter().all(|&n| n == 1));
        }

        #[test]
        fn qkv_rows_hold_each_query_row_once_and_kv_rows_once_a_copy(
            (heads, kv_heads, parts) in legal(),
        ) {
            let s = shape(heads, kv_heads);
            let (group, dim) = (heads / kv_heads, s.head_dim);
            let mut owners = vec![0; (heads + 2 * kv_heads) * dim];
            for index in 0..parts {
                let shard = HeadShard::new(&s, parts, index).unwrap();
                let rows = shard.qkv_rows(&s);
                if parts <= kv_heads {
                    prop_assert_eq!(rows.len(), 1);
                }
                for row in rows.into_iter().flatten() {
                    owners[row] += 1;
                }
            }
            for (row, &n) in owners.iter().enumerate() {
                let is_query = row / dim % (group + 2) < group;
                prop_assert_eq!(n, if is_query { 1 } else { (parts / kv_heads).max(1) });
            }
        }

        #[test]
        fn ulysses_cuts_the_heads_of_each_tensor_rank((heads, kv_heads, parts) in legal()) {
            let s = shape(heads, kv_heads);
            for tp in (1..=parts).filter(|tp| parts % tp == 0) {
                let Ok(outer) = HeadShard::new(&s, tp, tp - 1) else { continue };
                let mut next = outer.q.start;
                for u in 0..parts / tp {
                    let inner =
                        HeadShard::under_ulysses(&s, (tp, tp - 1), (parts / tp, u)).unwrap();
                    prop_assert_eq!(inner.q.start, next);
                    prop_assert!(outer.kv.start <= inner.kv.start && inner.kv.end <= outer.kv.end);
                    next = inner.q.end;
                }
                prop_assert_eq!(next, outer.q.end);
            }
        }
    }

    #[test]
    fn the_published_model_over_sixteen_ranks_holds_each_kv_head_twice() {
        let shard = HeadShard::new(&published(), 16, 5).unwrap();
        assert_eq!((shard.q.clone(), shard.kv.clone()), (10..12, 2..3));
        assert_eq!((shard.kv_copies, shard.copy), (2, 1));
        // Group 2 starts at row 1536; its heads 10 and 11 are followed by key and value head 2.
        assert_eq!(shard.qkv_rows(&published()), vec![1792..2304; 1]);
        let even = HeadShard::new(&published(), 16, 4).unwrap();
        assert_eq!(even.qkv_rows(&published()), [1536..1792, 2048..2304]);
        assert_eq!(even.o_columns(&published()), 1024..1280);
    }

    #[test]
    fn heads_that_do_not_divide_are_refused() {
        assert!(HeadShard::new(&published(), 3, 0).is_err());
        assert!(HeadShard::new(&shape(24, 8), 12, 0).is_err());
        assert!(HeadShard::new(&shape(24, 0), 1, 0).is_err());
    }
}
