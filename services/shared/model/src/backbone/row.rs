//! Rows of a packed forward pass.
//!
//! A row is an optional immutable past plus fresh tokens. Rows of any lengths lie one after the other in
//! `[total_tokens, hidden]`; which key a query sees is said by segments, never by a mask.

use std::ops::Range;

use kernels::{KvPart, SegmentKind};
use parallel::TokenOrder;

use crate::cache::KvCache;
use crate::error::ModelError;
use crate::prefix::PrefixKv;

/// Consecutive fresh tokens of one row that see keys by one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSegment {
    /// Fresh tokens of the row, counted from its first fresh token.
    pub tokens: Range<usize>,
    /// `Causal`: each sees what lies before it and itself. `Full`: all see keys `[0, end)`, `end` being
    /// the row's position right after this segment.
    pub kind: SegmentKind,
}

/// Where a row's earlier keys and values come from and where fresh ones go.
#[derive(Debug)]
pub enum RowKv<'a> {
    /// No past; fresh keys and values are forgotten.
    Fresh,
    /// An immutable past; fresh keys and values are forgotten.
    Past(&'a PrefixKv),
    /// The cache's tokens are the past; fresh keys and values are appended to it.
    Append(&'a mut KvCache),
}

impl RowKv<'_> {
    /// Tokens before the row's first fresh one, over all ranks.
    pub fn past(&self) -> usize {
        match self {
            Self::Fresh => 0,
            Self::Past(prefix) => prefix.tokens(),
            Self::Append(cache) => cache.len(),
        }
    }

    /// Past tokens that ring rank `source` contributes to the keys of ring rank `own`.
    pub(super) fn held_from(&self, source: usize, own: usize) -> usize {
        match self {
            Self::Fresh => 0,
            Self::Past(prefix) => prefix.held_from(source, own),
            Self::Append(cache) => cache.held_from(source, own),
        }
    }

    /// Whether the ranks of a ring hold different past tokens.
    pub(super) fn is_spread(&self) -> bool {
        match self {
            Self::Fresh => false,
            Self::Past(prefix) => prefix.is_spread(),
            Self::Append(cache) => cache.is_spread(),
        }
    }

    /// The past tokens this rank holds, in one of its layers, page by page.
    pub(super) fn parts(&self, layer: usize) -> Vec<KvPart<'_>> {
        match self {
            Self::Past(prefix) if prefix.buffered() > 0 => vec![prefix.part(layer)],
            Self::Fresh | Self::Past(_) => Vec::new(),
            Self::Append(cache) => cache.parts(layer),
        }
    }
}

/// One row of a packed pass.
#[derive(Debug)]
pub struct Row<'a> {
    /// Fresh tokens, over all ranks.
    pub tokens: usize,
    /// Cover the fresh tokens without gap, in order.
    pub segments: &'a [RowSegment],
    /// Past and sink.
    pub kv: RowKv<'a>,
    /// How a ring deals the fresh tokens.
    pub order: TokenOrder,
}

/// The segments of tokens `range` of a row whose full-attention spans are `full`: causal everywhere else.
///
/// `full` is sorted and disjoint, in absolute row positions; so is `range`. Segments count from
/// `range.start`. A span may not be cut by `range`, since its tokens must all be present at once.
///
/// # Errors
/// `Internal` when a span is cut.
pub fn segments(range: Range<usize>, full: &[Range<usize>]) -> Result<Vec<RowSegment>, ModelError> {
    let mut out = Vec::with_capacity(2 * full.len() + 1);
    let mut at = range.start;
    let mut push = |tokens: Range<usize>, kind| {
        if !tokens.is_empty() {
            let tokens = tokens.start - range.start..tokens.end - range.start;
            out.push(RowSegment { tokens, kind });
        }
    };
    for span in full {
        if span.end <= range.start || span.start >= range.end {
            continue;
        }
        if span.start < range.start || span.end > range.end {
            return Err(ModelError::Internal(format!(
                "full-attention span {span:?} is cut by tokens {range:?}"
            )));
        }
        push(at..span.start, SegmentKind::Causal);
        push(span.clone(), SegmentKind::Full);
        at = span.end;
    }
    push(at..range.end, SegmentKind::Causal);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_become_full_segments_and_the_rest_is_causal() {
        let got = segments(2..12, &[4..6, 6..9]).unwrap();
        let want = [
            (0..2, SegmentKind::Causal),
            (2..4, SegmentKind::Full),
            (4..7, SegmentKind::Full),
            (7..10, SegmentKind::Causal),
        ];
        assert_eq!(got.len(), want.len());
        for (g, (tokens, kind)) in got.iter().zip(want) {
            assert_eq!((g.tokens.clone(), g.kind), (tokens, kind));
        }
    }

    #[test]
    fn a_cut_span_is_refused_and_a_distant_one_ignored() {
        let span = std::slice::from_ref(&(4..6));
        assert!(segments(0..5, span).is_err());
        assert!(segments(5..9, span).is_err());
        assert_eq!(segments(6..9, &[4..6, 9..12]).unwrap().len(), 1);
    }
}
