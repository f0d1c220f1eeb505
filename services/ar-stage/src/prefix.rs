//! The rows of a picture's prefix.
//!
//! What the text pass has computed is taken over as far as ids agree: the same ids at the same places have
//! the same keys and values. The row without the prompt starts from what both rows have in common.
use kv::PrefixIdentity;
use model::{GrowingRow, PrefixKv, RowKind, RowTokens, SequenceLayout};
use proto::v1::prefix_row::Kind;
use stage::{Ranks, StageError};

use crate::{
    pools::Names,
    row::{Row, is_ring},
    run::Brief,
    stream::{self, BegunRow, Stream},
};

/// Rows under way.
#[derive(Debug)]
pub(crate) struct PrefixPhase {
    layout: SequenceLayout,
    cond: Row,
    uncond: Option<Negative>,
    /// Where layers go: of the row with the prompt, then of the one without.
    streams: [(PrefixIdentity, Option<Stream>); 2],
    /// Until somebody publishes them.
    begun: Vec<BegunRow>,
}

/// The row without the prompt.
#[derive(Debug)]
enum Negative {
    /// Begins with the first `at` tokens of the other row, once these are there.
    Waits {
        row: (GrowingRow, Names),
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
        let model = ranks.first();
        let grow = |kind| {
            let tokens = RowTokens::with_images(&layout, kind, features);
            let names = Names::new(model, &tokens, &brief.order.tenant)?;
            Ok::<_, StageError>((GrowingRow::new(&tokens)?, names))
        };
        let (cond, uncond) = (grow(RowKind::Cond)?, grow(RowKind::Uncond)?);
        let (tokens, shared) = (layout.prefix_len(), cond.0.shared_with(&uncond.0));
        let pools = (ranks, &brief.pools);
        let whole = is_ring(ranks);
        let reused = match &text {
            Some(row) if !whole => row.grow.shared_with(&cond.0).min(row.held()),
            _ => 0,
        };
        let waits = !whole && shared > 0 && (text.is_some() || !features.is_empty());
        let cond = match text {
            Some(mut row) if reused > 0 && row.capacity() >= tokens => {
                row.rewind(reused)?;
                let (grow, names) = cond;
                Row { grow, names, ..row }
            }
            Some(row) if reused > 0 => row.branch(cond, reused, tokens)?,
            _ => Row::new(pools, cond, tokens)?,
        };
        let uncond = match (brief.order.negative_row, waits) {
            (false, _) => None,
            (true, true) => Some(Negative::Waits {
                row: uncond,
                at: shared,
            }),
            (true, false) => Some(Negative::Row(Row::new(pools, uncond, tokens)?)),
        };
        brief.sized(ranks.first(), &layout);
        brief.written.reused = reused;
        let identity = |of| {
            let tokens = RowTokens::with_images(&layout, of, &brief.pictures.features);
            ranks.first().row_identity(&tokens)
        };
        let identities = [identity(RowKind::Cond)?, identity(RowKind::Uncond)?];
        let mut begun = Vec::new();
        let mut tell = |kind, identity| {
            let (stream, row) = stream::stream(ranks, kind, (identity, tokens));
            begun.push(row);
            stream
        };
        let cond_stream = Some(tell(Kind::Cond, identities[0]));
        let uncond_stream = uncond.is_some().then(|| tell(Kind::Uncond, identities[1]));
        let mut phase = Self {
            layout,
            cond,
            uncond,
            streams: [(identities[0], cond_stream), (identities[1], uncond_stream)],
            begun,
        };
        phase.attach(ranks, 0)?;
        phase.attach(ranks, 1)?;
        phase.branch(ranks)?;
        Ok(phase)
    }

    /// Has a row tell its layers, if it is there.
    fn attach(&mut self, ranks: &Ranks, which: usize) -> Result<(), StageError> {
        let tokens = self.tokens();
        let row = match (which, &mut self.uncond) {
            (0, _) => &mut self.cond,
            (_, Some(Negative::Row(row))) => row,
            _ => return Ok(()),
        };
        // Ranks of a ring hold different tokens: their layers are put together at the end.
        match &self.streams[which].1 {
            Some(stream) if !is_ring(ranks) => stream.attach(ranks, row, tokens),
            _ => Ok(()),
        }
    }

    /// The rows, for whoever publishes them, once.
    pub(crate) fn begun(&mut self) -> Vec<BegunRow> {
        std::mem::take(&mut self.begun)
    }

    /// Whether a row was found in the pool.
    fn is_found(&self, which: usize) -> bool {
        let stream = self.streams[which].1.as_ref();
        stream.is_some_and(Stream::is_found)
    }

    /// Rows that need not be computed: with the prompt, without it. The first is computed as long as the
    /// second waits for its beginning.
    fn needless(&self) -> (bool, bool) {
        let uncond = self.is_found(1);
        let waits = matches!(self.uncond, Some(Negative::Waits { .. })) && !uncond;
        (self.is_found(0) && !waits, uncond)
    }

    /// Tokens of each row.
    pub(crate) fn tokens(&self) -> usize {
        self.layout.prefix_len()
    }

    /// Starts the row without the prompt once what it begins with is there.
    pub(crate) fn branch(&mut self, ranks: &Ranks) -> Result<(), StageError> {
        if let Some(Negative::Waits { row, at }) = &self.uncond
            && self.cond.held() >= *at
        {
            let row = self.cond.branch(row.clone(), *at, self.tokens())?;
            self.uncond = Some(Negative::Row(row));
            self.attach(ranks, 1)?;
        }
        Ok(())
    }

    /// Every row that has begun.
    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Row> {
        let uncond = match &mut self.uncond {
            Some(Negative::Row(row)) => Some(row),
            Some(Negative::Waits { .. }) | None => None,
        };
        std::iter::once(&mut self.cond).chain(uncond)
    }

    /// Pages of its rows on each rank; shared ones count for each.
    pub(crate) fn pages(&self) -> usize {
        let uncond = match &self.uncond {
            Some(Negative::Row(row)) => row.pages(),
            Some(Negative::Waits { .. }) | None => 0,
        };
        self.cond.pages() + uncond
    }

    /// Rows that can be computed now.
    pub(crate) fn rows(&mut self) -> impl Iterator<Item = &mut Row> {
        let needless = self.needless();
        let uncond = match &mut self.uncond {
            Some(Negative::Row(row)) => Some(row).filter(|_| !needless.1),
            Some(Negative::Waits { .. }) | None => None,
        };
        let cond = Some(&mut self.cond).filter(|_| !needless.0);
        let rows = cond.into_iter().chain(uncond);
        rows.filter(|row| row.left() > 0)
    }

    /// Every row is there.
    pub(crate) fn is_done(&self) -> bool {
        let needless = self.needless();
        let uncond = match &self.uncond {
            Some(Negative::Row(row)) => needless.1 || row.left() == 0,
            Some(Negative::Waits { .. }) => needless.1,
            None => true,
        };
        uncond && (needless.0 || self.cond.left() == 0)
    }

    /// The rows by name, but for those that were found before they were computed.
    pub(crate) fn finish(
        self,
        ranks: &Ranks,
    ) -> Result<Vec<(Kind, PrefixIdentity, PrefixKv)>, StageError> {
        let [cond, uncond] = self.streams.map(|(identity, _)| identity);
        let mut rows = vec![(Kind::Cond, cond, self.cond)];
        if let Some(Negative::Row(row)) = self.uncond {
            rows.push((Kind::Uncond, uncond, row));
        }
        let computed = rows.into_iter().filter(|(_, _, row)| row.left() == 0);
        let named =
            computed.map(|(kind, identity, row)| Ok((kind, identity, row.into_prefix(ranks)?)));
        named.collect()
    }
}
