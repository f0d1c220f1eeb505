//! The exchange of sequence-parallel attention by heads: before attention every rank trades its
//! tokens of all heads for all tokens of its heads, and back afterwards.
//!
//! Nothing is computed, so the exchange is exact. All rows and tensors of a pass travel in one
//! operation; only the parts of an operation are padded to one length.

use std::ops::Range;

use crate::{Collective, ParallelError, Pending};

/// One row of a packed pass, over the ranks of a Ulysses group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeRow {
    /// Tokens every part has room for.
    pub piece: usize,
    /// Tokens of each rank, at most `piece`.
    pub tokens: Vec<usize>,
}

/// How the packed rows of a pass are spread over a Ulysses group, seen by one of its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadExchange {
    rows: Vec<ExchangeRow>,
    ranks: usize,
    index: usize,
}

/// One tensor `[own tokens, width]` of which rank `r` takes the columns `columns[r]`.
///
/// Key and value heads may be taken by several ranks. All ranks take as many columns.
#[derive(Debug, Clone, Copy)]
pub struct ByHead<'a> {
    /// Packed rows.
    pub data: &'a [f32],
    /// Elements of a token.
    pub width: usize,
    /// Columns of each rank.
    pub columns: &'a [Range<usize>],
}

fn equal(field: &'static str, expected: usize, got: usize) -> Result<(), ParallelError> {
    if expected == got {
        return Ok(());
    }
    Err(ParallelError::Mismatch {
        field,
        expected,
        got,
    })
}

impl HeadExchange {
    /// An exchange between `ranks` ranks of which this is `index`.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when a row does not list every rank,
    /// [`ParallelError::OutOfRange`] when a rank has more tokens than a part.
    pub fn new(rows: Vec<ExchangeRow>, ranks: usize, index: usize) -> Result<Self, ParallelError> {
        crate::error::in_range("index", index, 0, ranks.saturating_sub(1))?;
        for row in &rows {
            equal("ranks of a row", ranks, row.tokens.len())?;
            for &tokens in &row.tokens {
                crate::error::in_range("tokens of a rank", tokens, 0, row.piece)?;
            }
        }
        Ok(Self { rows, ranks, index })
    }

    /// Tokens of one rank over all rows.
    #[must_use]
    pub fn tokens_of(&self, rank: usize) -> usize {
        self.rows.iter().map(|row| row.tokens[rank]).sum()
    }

    /// Tokens of the group over all rows.
    #[must_use]
    pub fn tokens(&self) -> usize {
        (0..self.ranks).map(|rank| self.tokens_of(rank)).sum()
    }

    /// Elements of this rank's buffer in an exchange of `columns` columns a rank.
    #[must_use]
    pub fn elements(&self, columns: usize) -> usize {
        let padded: usize = self.rows.iter().map(|row| row.piece).sum();
        self.ranks * padded * columns
    }

    /// The number of columns each rank takes.
    fn columns(&self, columns: &[Range<usize>], width: usize) -> Result<usize, ParallelError> {
        equal("column ranges", self.ranks, columns.len())?;
        for range in columns {
            crate::error::in_range("columns", range.end, range.start, width)?;
            equal("columns of a rank", columns[0].len(), range.len())?;
        }
        Ok(columns[0].len())
    }

    /// Trades the own tokens of all heads for all tokens of the own heads, for several tensors at once.
    ///
    /// A result is `[tokens of the group, columns]`: row after row, in a row rank after rank.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] naming what has another size, and those of
    /// [`Collective::all_to_all`].
    pub fn to_heads(
        &self,
        group: &dyn Collective,
        tensors: &[ByHead<'_>],
    ) -> Result<Pending<Vec<Vec<f32>>>, ParallelError> {
        equal("group size", self.ranks, group.size())?;
        let mut each = Vec::with_capacity(tensors.len());
        for t in tensors {
            each.push(self.columns(t.columns, t.width)?);
            let own = self.tokens_of(self.index) * t.width;
            equal("elements of the own tokens", own, t.data.len())?;
        }
        let mut parts = Vec::with_capacity(self.elements(each.iter().sum()));
        for to in 0..self.ranks {
            for t in tensors {
                let columns = &t.columns[to];
                let mut tokens = t.data.chunks_exact(t.width.max(1));
                for row in &self.rows {
                    let end = parts.len() + row.piece * columns.len();
                    for token in tokens.by_ref().take(row.tokens[self.index]) {
                        parts.extend_from_slice(&token[columns.clone()]);
                    }
                    parts.resize(end, 0.0);
                }
            }
        }
        let exchange = self.clone();
        let pending = group.all_to_all(parts)?;
        Ok(pending.and_then(move |got| Ok(exchange.by_token(&got, &each))))
    }

    /// Received parts, without padding, in the order of the group's tokens.
    fn by_token(&self, got: &[f32], each: &[usize]) -> Vec<Vec<f32>> {
        let part = got.len() / self.ranks;
        let mut base = 0;
        let mut all = Vec::with_capacity(each.len());
        for &columns in each {
            let mut out = Vec::with_capacity(self.tokens() * columns);
            for row in &self.rows {
                for (from, &tokens) in row.tokens.iter().enumerate() {
                    let start = from * part + base;
                    out.extend_from_slice(&got[start..start + tokens * columns]);
                }
                base += row.piece * columns;
            }
            all.push(out);
        }
        all
    }

    /// Trades all tokens of the own heads, `[tokens of the group, columns]`, back for the own tokens of
    /// all heads, `[own tokens, width]`.
    ///
    /// # Errors
    /// As [`Self::to_heads`], and [`ParallelError::Mismatch`] when the columns do not tile the width.
    pub fn to_tokens(
        &self,
        group: &dyn Collective,
        data: &[f32],
        width: usize,
        columns: &[Range<usize>],
    ) -> Result<Pending<Vec<f32>>, ParallelError> {
        equal("group size", self.ranks, group.size())?;
        let each = self.columns(columns, width)?;
        let mut next = 0;
        for range in columns {
            equal("first column of a rank", next, range.start)?;
            next = range.end;
        }
        equal("columns of all ranks", width, next)?;
        equal(
            "elements of the group's tokens",
            self.tokens() * each,
            data.len(),
        )?;
        let mut by_rank: Vec<Vec<f32>> = vec![Vec::new(); self.ranks];
        let mut at = 0;
        for row in &self.rows {
            for (part, &tokens) in by_rank.iter_mut().zip(&row.tokens) {
                let end = part.len() + row.piece * each;
                part.extend_from_slice(&data[at..at + tokens * each]);
                part.resize(end, 0.0);
                at += tokens * each;
            }
        }
        let exchange = self.clone();
        let pending = group.all_to_all(by_rank.concat())?;
        Ok(pending.and_then(move |got| Ok(exchange.own(&got, each))))
    }

    /// Received parts, without padding, side by side in the columns of the ranks they came from.
    fn own(&self, got: &[f32], each: usize) -> Vec<f32> {
        let part = got.len() / self.ranks;
        let width = each * self.ranks;
        let mut out = Vec::with_capacity(self.tokens_of(self.index) * width);
        let mut base = 0;
        for row in &self.rows {
            for token in 0..row.tokens[self.index] {
                for from in 0..self.ranks {
                    let start = from * part + base + token * each;
                    out.extend_from_slice(&got[start..start + each]);
                }
            }
            base += row.piece * each;
        }
        out
    }
}

#[cfg(test)]
mod tests;
