//! Rows that grow: a prompt that is read in pieces, then a token at a time, any number of rows in one pass.
//!
//! A piece never cuts a span whose tokens all see each other. What a row computes depends on neither its
//! pieces nor its batch mates.

use std::ops::Range;

use kernels::Tensor;
use parallel::RankContext;

use crate::backbone::NoProbe;
use crate::cache::KvCache;
use crate::cond::placed;
use crate::error::ModelError;
use crate::input::RowInput;
use crate::model::Model;
use crate::positions::ImageSpan;
use crate::prefill::RowTokens;

/// The tokens of a row and how they see each other, owned; the cache that it fills is kept beside it, for
/// each rank has its own.
#[derive(Clone, Debug)]
pub struct GrowingRow {
    ids: Vec<u32>,
    images: Vec<ImageSpan>,
    full: Vec<Range<usize>>,
    vectors: Vec<(usize, Tensor)>,
}

/// One row's part in a pass: its tokens from where its cache ends up to `to`.
#[derive(Debug)]
pub struct Advance<'a> {
    /// The row.
    pub row: &'a GrowingRow,
    /// End of this pass's tokens.
    pub to: usize,
    /// Whether the logits behind the last of them are wanted.
    pub logits: bool,
    /// This rank's cache of the row.
    pub cache: &'a mut KvCache,
}

impl GrowingRow {
    /// The prefix `[0, P)` of a laid out row; of a text pass, all of it.
    ///
    /// # Errors
    /// `Internal` when features of conditioning images are missing.
    pub fn new(row: &RowTokens<'_>) -> Result<Self, ModelError> {
        let tokens = row.layout.prefix_len();
        let inside = |span: &Range<usize>| span.end <= tokens;
        Ok(Self {
            ids: row.layout.tokens(row.kind)[..tokens].to_vec(),
            images: row.layout.image_spans(),
            full: row
                .layout
                .full_blocks()
                .into_iter()
                .filter(inside)
                .collect(),
            vectors: placed(row.layout, row.images)?,
        })
    }

    /// Its tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Appends a token.
    pub fn push(&mut self, id: u32) {
        self.ids.push(id);
    }

    /// Where a piece ends that starts at `start` and has about `budget` tokens: before a span that it would
    /// cut, behind one that is longer than the whole budget. Always later than `start`, unless the row ends
    /// there.
    pub fn piece_end(&self, start: usize, budget: usize) -> usize {
        let wish = start.saturating_add(budget.max(1)).min(self.ids.len());
        let cut = |span: &&Range<usize>| span.start < wish && wish < span.end;
        match self.full.iter().find(cut) {
            Some(span) if span.start > start => span.start,
            Some(span) => span.end,
            None => wish,
        }
    }

    /// Tokens that this row has in common with another one, from the start, spans whole. Both rows must hold
    /// the same pictures.
    pub fn shared_with(&self, other: &Self) -> usize {
        let pairs = self.ids.iter().zip(&other.ids);
        let shared = pairs.take_while(|(a, b)| a == b).count();
        self.uncut(shared).min(other.uncut(shared))
    }

    /// The most tokens, no more than `tokens`, behind which the row may be cut: no span is.
    pub fn uncut(&self, tokens: usize) -> usize {
        let cut = |span: &&Range<usize>| span.start < tokens && tokens < span.end;
        let cut = self.full.iter().filter(cut);
        cut.map(|span| span.start).fold(tokens, usize::min)
    }

    pub(crate) fn input(&self, range: Range<usize>) -> RowInput<'_> {
        let from = self.vectors.partition_point(|(at, _)| *at < range.start);
        let to = self.vectors.partition_point(|(at, _)| *at < range.end);
        RowInput {
            start: range.start,
            ids: &self.ids[range],
            images: &self.images,
            full: &self.full,
            vectors: &self.vectors[from..to],
        }
    }
}

impl Model {
    /// Computes a piece of every row, all packed in one pass. The logits that were asked for, `[vocab]` each,
    /// are given on rank 0 alone: one rank decides what comes next. Nothing is counted in any cache when an
    /// error is returned.
    ///
    /// # Errors
    /// `InvalidArgument` for a row beyond the model's positions; `Internal` when a piece is empty or cuts a
    /// span, a cache is full, or a part was not loaded.
    pub fn advance_rows(
        &self,
        ctx: &RankContext,
        rows: &mut [Advance<'_>],
    ) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
        let mut inputs = Vec::with_capacity(rows.len());
        let mut caches = Vec::with_capacity(rows.len());
        let mut wanted = Vec::with_capacity(rows.len());
        for Advance {
            row,
            to,
            logits,
            cache,
        } in rows
        {
            let start = cache.len();
            if start >= *to || *to > row.ids.len() {
                return Err(ModelError::Internal(format!(
                    "a piece from {start} to {to} of a row of {} tokens",
                    row.ids.len()
                )));
            }
            inputs.push(row.input(start..*to));
            caches.push(&mut **cache);
            wanted.push(*logits);
        }
        if !wanted.contains(&true) {
            self.fill_rows(ctx, &inputs, &mut caches)?;
            return Ok(vec![None; wanted.len()]);
        }
        let hidden = self.run_rows(ctx, &inputs, &mut caches, &mut NoProbe)?;
        if ctx.rank() != 0 {
            return Ok(vec![None; wanted.len()]);
        }
        let mut end = 0;
        let mut last = Vec::new();
        for (input, wanted) in inputs.iter().zip(&wanted) {
            end += input.ids.len();
            if *wanted {
                last.push(hidden.narrow0(end - 1, 1)?);
            }
        }
        let mut logits = self.logits_of(&last)?.into_iter();
        let given = wanted
            .into_iter()
            .map(|wanted| if wanted { logits.next() } else { None });
        Ok(given.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ids: &[u32], full: &[Range<usize>]) -> GrowingRow {
        GrowingRow {
            ids: ids.to_vec(),
            images: Vec::new(),
            full: full.to_vec(),
            vectors: Vec::new(),
        }
    }

    #[test]
    fn pieces_cover_a_row_and_never_cut_a_span() {
        let ids: Vec<u32> = (0..40).collect();
        let row = row(&ids, &[3..9, 9..20, 31..40]);
        for budget in 1..50 {
            let mut at = 0;
            while at < ids.len() {
                let end = row.piece_end(at, budget);
                assert!(end > at, "{budget} {at}");
                let cut = |span: &Range<usize>| span.start < end && end < span.end;
                assert!(!row.full.iter().any(cut), "{budget} {at}..{end}");
                let span = row
                    .full
                    .iter()
                    .any(|span| span.start == at && span.end == end);
                assert!(end - at <= budget || span, "{budget} {at}..{end}");
                at = end;
            }
            assert_eq!((at, row.piece_end(at, budget)), (40, 40));
        }
    }

    #[test]
    fn what_rows_share_ends_before_a_span_that_only_begins_alike() {
        let spans = std::slice::from_ref(&(2..5));
        let one = row(&[1, 2, 7, 7, 7, 3, 4], spans);
        assert_eq!(one.shared_with(&row(&[1, 2, 7, 7, 7, 3, 9], spans)), 6);
        assert_eq!(one.shared_with(&row(&[1, 2, 7, 7, 8, 3, 4], spans)), 2);
        assert_eq!(one.shared_with(&one), 7);
        assert_eq!(one.shared_with(&row(&[5], &[])), 0);
    }
}
