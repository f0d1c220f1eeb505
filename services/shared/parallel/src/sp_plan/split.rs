//! What a rule does to the elements of a tensor.

use super::{SpRule, SpTensor};
use crate::{ParallelError, TokenShards};

/// How one tensor is cut along one dimension: text whole on every rank, the rest in shards.
///
/// This is also the explicit form, for what a table cannot say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpSplit {
    /// Elements before the dimension, along it, and after it.
    outer: usize,
    inner: usize,
    text: usize,
    shards: TokenShards,
}

impl SpRule {
    /// How this rule cuts a tensor that has `shape` when whole, with `text` leading text tokens,
    /// over `ranks` ranks.
    ///
    /// # Errors
    /// [`ParallelError::SpPlan`] when the shape has other dimensions than declared, text is given
    /// that the rule does not know of, or the length needs padding and the rule forbids it.
    pub fn split(
        &self,
        shape: &[usize],
        text: usize,
        ranks: usize,
    ) -> Result<SpSplit, ParallelError> {
        let refused = |problem: String| {
            let (module, tensor): (&str, &SpTensor) = (&self.module, &self.tensor);
            Err(ParallelError::SpPlan {
                entry: format!("\"{module}\" {tensor}"),
                problem,
            })
        };
        if shape.len() != self.dims {
            let (dims, got) = (self.dims, shape.len());
            return refused(format!("{dims} dimensions declared, got {got}"));
        }
        if text > 0 && !self.text_first {
            return refused(format!("got {text} text tokens, but text_first is not set"));
        }
        let split = SpSplit::new(shape, self.action.dim(), text, ranks)?;
        if split.padding() > 0 && !self.auto_pad {
            let tokens = split.shards.tokens();
            return refused(format!(
                "{tokens} tokens do not divide over {ranks} ranks, and auto_pad is not set"
            ));
        }
        Ok(split)
    }
}

impl SpSplit {
    /// Cuts dimension `dim` of `shape`, leaving its first `text` entries whole, over `ranks` ranks
    /// in consecutive shards, padded to one length.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] naming `dim`, `text` or the number of ranks.
    pub fn new(
        shape: &[usize],
        dim: usize,
        text: usize,
        ranks: usize,
    ) -> Result<Self, ParallelError> {
        let refused = |field, max, got| ParallelError::OutOfRange {
            field,
            min: 0,
            max,
            got,
        };
        let length = *shape
            .get(dim)
            .ok_or(refused("dim", shape.len().saturating_sub(1), dim))?;
        let tokens = length
            .checked_sub(text)
            .ok_or(refused("text", length, text))?;
        Ok(Self {
            outer: shape[..dim].iter().product(),
            inner: shape[dim + 1..].iter().product(),
            text,
            shards: TokenShards::contiguous(tokens, ranks)?,
        })
    }

    /// Padding entries along the dimension, over all ranks.
    #[must_use]
    pub fn padding(&self) -> usize {
        self.shards.padding()
    }

    /// Entries along the dimension that every rank holds, padding included.
    #[must_use]
    pub fn local_len(&self) -> usize {
        self.text + self.shards.shard_len()
    }

    /// The shard of one rank out of the whole tensor; padding is `T::default()`.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the data are not the whole tensor,
    /// [`ParallelError::RankOutOfRange`].
    pub fn shard<T: Copy + Default>(
        &self,
        whole: &[T],
        rank: usize,
    ) -> Result<Vec<T>, ParallelError> {
        let length = self.text + self.shards.tokens();
        check(
            "whole tensor",
            self.outer * length * self.inner,
            whole.len(),
        )?;
        let ranges = self.shards.ranges(rank)?;
        let mut out = Vec::with_capacity(self.outer * self.local_len() * self.inner);
        for outer in 0..self.outer {
            let row = &whole[outer * length * self.inner..(outer + 1) * length * self.inner];
            out.extend_from_slice(&row[..self.text * self.inner]);
            for range in &ranges {
                let (start, end) = (self.text + range.start, self.text + range.end);
                out.extend_from_slice(&row[start * self.inner..end * self.inner]);
            }
            out.resize((outer + 1) * self.local_len() * self.inner, T::default());
        }
        Ok(out)
    }

    /// The whole tensor out of the shards of all ranks, without padding. Text is rank 0's.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when a shard is missing or has another length.
    pub fn gather<T: Copy>(&self, parts: &[Vec<T>]) -> Result<Vec<T>, ParallelError> {
        check("shards", self.shards.ranks(), parts.len())?;
        let local = self.local_len() * self.inner;
        for part in parts {
            check("shard", self.outer * local, part.len())?;
        }
        let mut whole = Vec::new();
        for outer in 0..self.outer {
            let text = outer * local..outer * local + self.text * self.inner;
            whole.extend_from_slice(&parts[0][text]);
            for (rank, part) in parts.iter().enumerate() {
                let start = outer * local + self.text * self.inner;
                for range in self.shards.ranges(rank)? {
                    whole.extend_from_slice(&part[start..start + range.len() * self.inner]);
                }
            }
        }
        Ok(whole)
    }
}

fn check(field: &'static str, expected: usize, got: usize) -> Result<(), ParallelError> {
    if expected == got {
        return Ok(());
    }
    Err(ParallelError::Mismatch {
        field,
        expected,
        got,
    })
}
