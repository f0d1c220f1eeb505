//! The rows of a picture's prefix.
//!
//! What the text pass has computed is taken over as far as ids agree: the same ids at the same places have
//! the same keys and values. The row without the prompt starts from what both rows have in common.
use kv::PrefixIdentity;
use model::{GrowingRow, PrefixKv, RowKind, RowTokens, SequenceLayout};
use proto::v1::prefix_row::Kind;
use stage::{Ranks, StageError};

use crate::{
    pictures::Pictures,
    row::{Row, is_ring},
    run::Brief,
};

/// Rows under way.
#[derive(Debug)]
pub(crate) struct PrefixPhase {
    layout: SequenceLayout,
    cond: Row,
    uncond: Option<Negative>,
}

/// The row without the prompt.
#[derive(Debug)]
enum Negative {
    /// Begins with the first `at` tokens of the other row, once these are there.
    Waits {
        grow: GrowingRow,
        at: usize,
    },
    Row(Row),
}

impl PrefixPhase {
    /// Sets the rows up; `text` is the row that was written, which the prefix continues.
    pub(crate) fn new(
        ranks: &Ranks,
        brief: &mut Brief,
        layout: SequenceLayout,
        text: Option<Row>,
    ) -> Result<Self, StageError> {
        let features = &brief.pictures.features;
        let grow = |kind| GrowingRow::new(&RowTokens::with_images(&layout, kind, features));
        let (cond, uncond) = (grow(RowKind::Cond)?, grow(RowKind::Uncond)?);
        let (tokens, shared) = (layout.prefix_len(), cond.shared_with(&uncond));
        let whole = is_ring(ranks);
        let reused = match &text {
            Some(row) if !whole => row.grow.shared_with(&cond).min(row.held()),
            _ => 0,
        };
        let waits = !whole && shared > 0 && (text.is_some() || !features.is_empty());
        let cond = match text {
            Some(mut row) if reused > 0 && row.capacity() >= tokens => {
                row.rewind(reused)?;
                Row { grow: cond, ..row }
            }
            Some(row) if reused > 0 => row.branch(cond, reused, tokens)?,
            _ => Row::new(ranks, cond, tokens)?,
        };
        let uncond = match (brief.order.negative_row, waits) {
            (false, _) => None,
            (true, true) => Some(Negative::Waits {
                grow: uncond,
                at: shared,
            }),
            (true, false) => Some(Negative::Row(Row::new(ranks, uncond, tokens)?)),
        };
        let image = layout.generated.as_ref().map(|image| &image.span);
        let cell = ranks.first().config().pixels_per_token();
        brief.written.size = image.map(|span| (span.grid_h * cell, span.grid_w * cell));
        brief.written.reused = reused;
        let mut phase = Self {
            layout,
            cond,
            uncond,
        };
        phase.branch()?;
        Ok(phase)
    }

    /// Tokens of each row.
    pub(crate) fn tokens(&self) -> usize {
        self.layout.prefix_len()
    }

    /// Starts the row without the prompt once what it begins with is there.
    pub(crate) fn branch(&mut self) -> Result<(), StageError> {
        if let Some(Negative::Waits { grow, at }) = &self.uncond
            && self.cond.held() >= *at
        {
            let row = self.cond.branch(grow.clone(), *at, self.tokens())?;
            self.uncond = Some(Negative::Row(row));
        }
        Ok(())
    }

    /// Rows that can be computed now.
    pub(crate) fn rows(&mut self) -> impl Iterator<Item = &mut Row> {
        let uncond = match &mut self.uncond {
            Some(Negative::Row(row)) => Some(row),
            Some(Negative::Waits { .. }) | None => None,
        };
        let rows = std::iter::once(&mut self.cond).chain(uncond);
        rows.filter(|row| row.left() > 0)
    }

    /// Every row is there.
    pub(crate) fn is_done(&self) -> bool {
        let uncond = match &self.uncond {
            Some(Negative::Row(row)) => row.left() == 0,
            Some(Negative::Waits { .. }) => false,
            None => true,
        };
        uncond && self.cond.left() == 0
    }

    /// The rows by name.
    pub(crate) fn finish(
        self,
        ranks: &Ranks,
        pictures: &Pictures,
    ) -> Result<Vec<(Kind, PrefixIdentity, PrefixKv)>, StageError> {
        let mut rows = vec![(Kind::Cond, RowKind::Cond, self.cond)];
        if let Some(Negative::Row(row)) = self.uncond {
            rows.push((Kind::Uncond, RowKind::Uncond, row));
        }
        let named = rows.into_iter().map(|(kind, of, row)| {
            let tokens = RowTokens::with_images(&self.layout, of, &pictures.features);
            let identity = ranks.first().row_identity(&tokens)?;
            Ok((kind, identity, row.into_prefix(ranks)?))
        });
        named.collect()
    }
}
