//! Writing text: logits of the next token over a growing cache.

mod deltas;
mod sampling;
mod transitions;

use kernels::Tensor;
use parallel::RankContext;

use crate::backbone::NoProbe;
use crate::cache::KvCache;
use crate::error::ModelError;
use crate::input::RowInput;
use crate::model::Model;
use crate::positions::ImageSpan;
use crate::prefill::{PreparedRow, RowTokens};

pub use deltas::Deltas;
pub use sampling::{Sampler, Sampling};
pub use transitions::{Choice, Transitions, Writing};

/// A text row between two tokens.
#[derive(Debug)]
pub struct TextPass {
    cache: KvCache,
    images: Vec<ImageSpan>,
    logits: Vec<f32>,
}

impl TextPass {
    /// Logits of the next token, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Tokens whose keys and values are held.
    pub fn tokens(&self) -> usize {
        self.cache.len()
    }

    /// The keys and values held.
    pub fn into_cache(self) -> KvCache {
        self.cache
    }

    /// The most likely next token; the lower id among equals.
    pub fn most_likely(&self) -> u32 {
        argmax(&self.logits)
    }
}

impl Model {
    /// Computes whole rows and the logits after each; there is room for `new_tokens` more in every row.
    ///
    /// # Errors
    /// Those of [`Model::run_rows`]; `Internal` for a model without its text head.
    pub fn start_text(
        &self,
        ctx: &RankContext,
        rows: &[&RowTokens<'_>],
        new_tokens: usize,
    ) -> Result<Vec<TextPass>, ModelError> {
        let prepared: Vec<PreparedRow<'_>> = rows
            .iter()
            .map(|row| PreparedRow::new(row, row.layout.len()))
            .collect::<Result<_, _>>()?;
        let inputs: Vec<RowInput<'_>> = prepared.iter().map(PreparedRow::input).collect();
        let mut caches: Vec<KvCache> = inputs
            .iter()
            .map(|input| self.cache(input.ids.len() + new_tokens))
            .collect::<Result<_, _>>()?;
        let mut refs: Vec<&mut KvCache> = caches.iter_mut().collect();
        let hidden = self.run_rows(ctx, &inputs, &mut refs, &mut NoProbe)?;
        let lengths: Vec<usize> = inputs.iter().map(|input| input.ids.len()).collect();
        let logits = self.last_logits(&hidden, &lengths)?;
        let passes = prepared.into_iter().zip(caches).zip(logits);
        Ok(passes
            .map(|((row, cache), logits)| TextPass {
                cache,
                images: row.into_images(),
                logits,
            })
            .collect())
    }

    /// Appends one token to every pass, all packed, and renews their logits.
    ///
    /// # Errors
    /// `Internal` when a pass has no room left or the numbers of passes and ids differ.
    pub fn step_text(
        &self,
        ctx: &RankContext,
        passes: &mut [&mut TextPass],
        ids: &[u32],
    ) -> Result<(), ModelError> {
        if passes.len() != ids.len() {
            return Err(ModelError::Internal(format!(
                "{} ids for {} text passes",
                ids.len(),
                passes.len()
            )));
        }
        let (mut inputs, mut caches, mut logits) = (Vec::new(), Vec::new(), Vec::new());
        for (pass, id) in passes.iter_mut().zip(ids) {
            let TextPass {
                cache,
                images,
                logits: last,
            } = &mut **pass;
            inputs.push(RowInput {
                start: cache.len(),
                ids: std::slice::from_ref(id),
                images,
                full: &[],
                vectors: &[],
            });
            caches.push(cache);
            logits.push(last);
        }
        let hidden = self.run_rows(ctx, &inputs, &mut caches, &mut NoProbe)?;
        let renewed = self.last_logits(&hidden, &vec![1; inputs.len()])?;
        for (old, new) in logits.into_iter().zip(renewed) {
            *old = new;
        }
        Ok(())
    }

    /// Writes the most likely tokens until a stop token (which is kept) or `max_new` of them.
    ///
    /// # Errors
    /// Those of [`Model::start_text`].
    pub fn write_greedy(
        &self,
        ctx: &RankContext,
        row: &RowTokens<'_>,
        max_new: usize,
        stops: &[u32],
    ) -> Result<Vec<u32>, ModelError> {
        let mut out = Vec::with_capacity(max_new);
        let mut passes = self.start_text(ctx, &[row], max_new)?;
        let Some(pass) = passes.first_mut() else {
            return Ok(out);
        };
        while out.len() < max_new {
            let id = pass.most_likely();
            out.push(id);
            if stops.contains(&id) || out.len() == max_new {
                break;
            }
            self.step_text(ctx, &mut [&mut *pass], &[id])?;
        }
        Ok(out)
    }

    /// Writes greedily along `transitions` until they end the pass or `max_new` tokens stand.
    ///
    /// # Errors
    /// Those of [`Model::start_text`].
    pub fn write_along(
        &self,
        ctx: &RankContext,
        row: &RowTokens<'_>,
        max_new: usize,
        mut transitions: Transitions,
    ) -> Result<Vec<u32>, ModelError> {
        let mut out = Vec::with_capacity(max_new);
        let mut passes = self.start_text(ctx, &[row], max_new)?;
        let Some(pass) = passes.first_mut() else {
            return Ok(out);
        };
        while out.len() < max_new {
            let id = transitions.pick(pass.logits());
            out.push(id);
            if transitions.accept(id) || out.len() == max_new {
                break;
            }
            self.step_text(ctx, &mut [&mut *pass], &[id])?;
        }
        Ok(out)
    }

    /// Logits after the last token of each packed row.
    fn last_logits(&self, hidden: &Tensor, lengths: &[usize]) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut end = 0;
        let mut last = Vec::with_capacity(lengths.len());
        for tokens in lengths {
            end += tokens;
            last.push(hidden.narrow0(end.saturating_sub(1), 1)?);
        }
        self.logits_of(&last)
    }

    /// Logits behind hidden states, each `[1, hidden]`.
    pub(crate) fn logits_of(&self, last: &[Tensor]) -> Result<Vec<Vec<f32>>, ModelError> {
        let backbone = self.backbone()?;
        let normed = backbone.final_norm(&Tensor::concat0(&last.iter().collect::<Vec<_>>())?)?;
        let logits = backbone.logits(&normed)?;
        Ok(logits
            .as_f32()?
            .chunks_exact(logits.dim(1))
            .map(<[f32]>::to_vec)
            .collect())
    }
}

/// Index of the largest value; the first among equals.
pub(crate) fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::argmax;

    #[test]
    fn the_first_of_equals_wins() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
    }
}
