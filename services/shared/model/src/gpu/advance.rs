//! Rows that grow on the device: pieces of prompts and single tokens, any number of rows in one pass.

use kernels::cuda::{GpuTensor, GpuType};

use super::GpuModel;
use super::prefill::GpuCache;
use crate::error::ModelError;
use crate::growing::GrowingRow;
use crate::input::RowInput;

/// One row's part in a pass: its tokens from where its cache ends up to `to`.
#[derive(Debug)]
pub struct GpuAdvance<'a> {
    /// The row.
    pub row: &'a GrowingRow,
    /// End of this pass's tokens.
    pub to: usize,
    /// Whether the logits behind the last of them are wanted.
    pub logits: bool,
    /// Its keys and values.
    pub cache: &'a mut GpuCache,
}

impl GpuModel {
    /// Computes a piece of every row, all packed in one pass; answers with the logits that were asked for, `[vocab]`
    /// each. Nothing is counted in any cache when an error is returned. Under a plan every rank calls it with the same
    /// rows, and the first one has the logits.
    ///
    /// # Errors
    /// `InvalidArgument` for a row beyond the model's positions; `Exhausted` when the pass does not fit; `Internal`
    /// when a piece is empty, a cache is full, or the model was opened without text; `Gpu` when the device failed.
    pub fn advance_rows(
        &mut self,
        rows: &mut [GpuAdvance<'_>],
    ) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
        let mut inputs: Vec<RowInput<'_>> = Vec::with_capacity(rows.len());
        let mut caches = Vec::with_capacity(rows.len());
        let mut wanted = Vec::with_capacity(rows.len());
        for GpuAdvance {
            row,
            to,
            logits,
            cache,
        } in rows
        {
            let start = cache.len();
            if start >= *to || *to > row.ids().len() {
                let tokens = row.ids().len();
                return Err(ModelError::Internal(format!(
                    "a piece from {start} to {to} of a row of {tokens} tokens"
                )));
            }
            inputs.push(row.input(start..*to));
            caches.push(&mut **cache);
            wanted.push(*logits);
        }
        let starts: Vec<usize> = caches.iter().map(|cache| cache.len()).collect();
        let any = wanted.contains(&true);
        let hidden = self.run_rows(&inputs, &mut caches, any)?;
        let done = match hidden {
            Some(hidden) => self.last_logits(&hidden, &inputs, &wanted),
            // A pass counts once it has run.
            None => self.wait().map(|()| vec![None; wanted.len()]),
        };
        if let Err(error) = &done {
            if let Some(group) = &self.group {
                // The others wait for this rank.
                group.abort(&error.to_string());
            }
            for (cache, start) in caches.iter_mut().zip(starts) {
                cache.truncate(start)?;
            }
        }
        done
    }

    /// The logits behind the last tokens of rows that want them.
    fn last_logits(
        &self,
        hidden: &GpuTensor,
        inputs: &[RowInput<'_>],
        wanted: &[bool],
    ) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
        let count = wanted.iter().filter(|wanted| **wanted).count();
        let dims = [count, hidden.dim(1)];
        let last = GpuTensor::new(&self.gpu, &dims, GpuType::Bf16, "last hidden states")?;
        let (mut end, mut at) = (0, 0);
        for (input, wanted) in inputs.iter().zip(wanted) {
            end += input.ids.len();
            if *wanted {
                let from = hidden.narrow0(end - 1, 1)?;
                last.narrow0(at, 1)?.copy_from(&from)?;
                at += 1;
            }
        }
        if self.share.rank() > 0 {
            // The first rank answers for all.
            self.logits(&last)?;
            return self.wait().map(|()| vec![None; wanted.len()]);
        }
        let mut each = self.logits_on_host(&last)?.into_iter();
        let take = |wanted: &bool| wanted.then(|| each.next()).flatten();
        Ok(wanted.iter().map(take).collect())
    }
}
