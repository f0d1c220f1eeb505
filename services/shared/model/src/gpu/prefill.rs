//! Prefixes made on the device: packed rows of tokens through the layers, their keys and values kept.

use kernels::cuda::{DecodeRow, GpuTensor, GpuType, likeliest, narrow_to_bf16};

use super::GpuModel;
use super::arena::KvLease;
use super::batch::extent;
use super::deal::{BatchRow, Deal, Piece};
use super::group::{Ranks, Travel};
use super::prefix::GpuPrefix;
use super::rotary::Rotary;
use super::rows::{GpuRow, PassTokens, pass};
use super::step::Watch;
use crate::backbone::{Goal, RowSegment, segments};
use crate::error::ModelError;
use crate::input::RowInput;
use crate::prefill::{PreparedRow, RowTokens};

/// Keys and values of a row on the device that more tokens are appended to.
#[derive(Debug)]
pub struct GpuCache {
    lease: KvLease,
    tokens: usize,
}

impl GpuCache {
    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// True when there is none yet.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Tokens for which there is room.
    pub fn capacity(&self) -> usize {
        self.lease.capacity()
    }

    /// Forgets the tokens from `tokens` on.
    ///
    /// # Errors
    /// `Internal` when it has fewer.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), ModelError> {
        if tokens > self.tokens {
            let held = self.tokens;
            let message = format!("a cache of {held} tokens cannot go back to {tokens}");
            return Err(ModelError::Internal(message));
        }
        self.tokens = tokens;
        Ok(())
    }

    /// A row that begins with the first `tokens` tokens of this one, with room for `capacity`.
    ///
    /// # Errors
    /// `Exhausted` when there is no room, `Internal` for more tokens than there are, or than fit.
    pub fn branch(&self, tokens: usize, capacity: usize) -> Result<Self, ModelError> {
        if tokens > self.tokens || tokens > capacity {
            let held = self.tokens;
            let message = format!("{tokens} of {held} tokens for a row of {capacity}");
            return Err(ModelError::Internal(message));
        }
        let lease = self.lease.arena().lease(capacity, false)?;
        let (from, to) = (self.lease.tensor()?, lease.tensor()?);
        let sides = if tokens == 0 { 0 } else { from.dim(0) };
        for side in 0..sides {
            let of = |all: &GpuTensor| {
                let one = all.narrow0(side, 1)?.reshape(&all.shape()[1..])?;
                one.narrow0(0, tokens)
            };
            of(&to)?.copy_from(&of(&from)?)?;
        }
        Ok(Self { lease, tokens })
    }

    /// What decoding has to know of it.
    pub(super) fn row(&self) -> DecodeRow {
        DecodeRow {
            at: self.lease.place(),
            past: self.tokens,
            room: self.lease.capacity(),
        }
    }

    /// Counts tokens whose keys and values have been enqueued.
    pub(super) fn append(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// Freezes the tokens held.
    pub fn into_prefix(self) -> GpuPrefix {
        GpuPrefix::of(self.lease, self.tokens)
    }
}

impl GpuModel {
    /// An empty cache for a row of at most `tokens` tokens.
    ///
    /// # Errors
    /// `Exhausted` when there is no room.
    pub fn cache(&self, tokens: usize) -> Result<GpuCache, ModelError> {
        let lease = self.arena.lease(tokens, false)?;
        Ok(GpuCache { lease, tokens: 0 })
    }

    /// Keys and values of tokens `[0, P)` of every row, all rows packed in one pass.
    ///
    /// # Errors
    /// `InvalidArgument` for a row beyond the model's positions, `Exhausted` when memory runs out, `Internal`
    /// when the model was opened without text.
    pub fn prefill(&mut self, rows: &[&RowTokens<'_>]) -> Result<Vec<GpuPrefix>, ModelError> {
        let rows: Vec<PreparedRow<'_>> = rows
            .iter()
            .map(|row| PreparedRow::new(row, row.layout.prefix_len()))
            .collect::<Result<_, _>>()?;
        let inputs: Vec<RowInput<'_>> = rows.iter().map(PreparedRow::input).collect();
        let mut caches: Vec<GpuCache> = inputs
            .iter()
            .map(|input| self.cache(input.ids.len()))
            .collect::<Result<_, _>>()?;
        let mut borrowed: Vec<&mut GpuCache> = caches.iter_mut().collect();
        self.run_rows(&inputs, &mut borrowed, false)?;
        Ok(caches.into_iter().map(GpuCache::into_prefix).collect())
    }

    /// Runs packed tokens of rows on top of their caches and appends to them. With `hidden` the last layer is
    /// computed whole and the raw hidden states `[tokens, hidden]` come back, valid until the next pass.
    ///
    /// Under a plan every rank calls it with the same rows, and its own caches.
    ///
    /// Up to 32 rows of one token each (and up to 256 choices of experts), of which hidden states are wanted, take the
    /// kernels for decoding: the same function, with other rounding, and with bits that do not depend on other rows.
    ///
    /// # Errors
    /// Those of [`GpuModel::prefill`].
    pub fn run_rows(
        &mut self,
        inputs: &[RowInput<'_>],
        caches: &mut [&mut GpuCache],
        hidden: bool,
    ) -> Result<Option<GpuTensor>, ModelError> {
        // The workspace is about to be used otherwise.
        self.batch = None;
        let parts = prepared(inputs, caches, &self.config)?;
        let decoder = self.decoder.as_ref().filter(|_| hidden);
        let done = if decoder.is_some_and(|decoder| decoder.takes(inputs)) {
            self.decode(inputs, caches).map(Some)
        } else {
            self.packed(inputs, &parts, (caches, hidden))
        };
        if let (Err(error), Some(group)) = (&done, &self.group) {
            // The others wait for this rank.
            group.abort(&error.to_string());
        }
        done
    }

    /// The same by the kernels of denoising: rows that were checked against their caches, and their segments.
    fn packed(
        &mut self,
        inputs: &[RowInput<'_>],
        parts: &[Vec<RowSegment>],
        (caches, hidden): (&mut [&mut GpuCache], bool),
    ) -> Result<Option<GpuTensor>, ModelError> {
        let rows = batch_rows(inputs);
        let deal = Deal::new(&self.share, &rows)?;
        let group = self.group.as_ref();
        let ranks = group.map(|group| Ranks::new(group, &deal));
        let extent = extent(&self.share, &deal, deal.own());
        let mut work = self.workspace_of(&extent, ranks.as_ref())?;
        self.embed_text(inputs, deal.own(), &work.x)?;
        let everyone = deal.pieces.concat();
        let Rotary { cos, sin } = self.rotary(inputs, &everyone)?;
        let attended: Vec<GpuRow<'_>> = rows
            .iter()
            .zip(parts)
            .zip(caches.iter())
            .map(|((row, segments), cache)| GpuRow {
                tokens: row.tokens,
                segments,
                prefix: None,
                at: cache.lease.place(),
                appended: cache.tokens,
                ring: Vec::new(),
            })
            .collect();
        let given = PassTokens {
            pieces: &everyone,
            cos,
            sin,
            flow: self.share.flow(),
            ranks,
            travel: Travel::default(),
        };
        let pass = pass(self.shape, self.arena.tensor()?, &attended, given)?;
        let goal = if hidden { Goal::Hidden } else { Goal::Cache };
        self.layers((&mut work, &pass), goal, &mut Watch::default())?;
        for (cache, input) in caches.iter_mut().zip(inputs) {
            cache.append(input.ids.len());
        }
        if !hidden {
            return Ok(None);
        }
        match &work.whole {
            Some(whole) => {
                self.gather_rows((&deal, &rows), &work.x, whole)?;
                Ok(Some(whole.clone()))
            }
            None => Ok(Some(work.x.clone())),
        }
    }

    /// F32 vocabulary logits `[rows, vocab]` of hidden states `[rows, hidden]`. Under a plan every rank calls it, with the
    /// same hidden states.
    ///
    /// # Errors
    /// `Internal` when the model was opened without text, `Gpu` when the device or another rank failed.
    pub fn logits(&self, hidden: &GpuTensor) -> Result<GpuTensor, ModelError> {
        let text = self.text.as_ref().ok_or_else(no_text)?;
        text.logits(hidden, self.group.as_deref())
    }

    /// The logits behind each of these hidden states on the host, `[vocab]` each. Under a plan every rank calls it.
    ///
    /// # Errors
    /// Those of [`GpuModel::logits`].
    pub fn logits_on_host(&self, hidden: &GpuTensor) -> Result<Vec<Vec<f32>>, ModelError> {
        let text = self.text.as_ref().ok_or_else(no_text)?;
        let rows = text.read(&self.logits(hidden)?)?;
        self.all_came()?;
        Ok(rows)
    }

    /// The likeliest token of each row of logits, found on the device; the first among equals.
    ///
    /// # Errors
    /// `Gpu` when the device or another rank failed.
    pub fn likeliest(&self, logits: &GpuTensor) -> Result<Vec<u32>, ModelError> {
        let ids = likeliest(logits)?.to_i32_vec()?;
        self.all_came()?;
        Ok(ids.into_iter().map(i32::cast_unsigned).collect())
    }

    /// Embeddings of `own` tokens of the rows into `x`, and the vectors that replace some of them.
    fn embed_text(
        &self,
        inputs: &[RowInput<'_>],
        own: &[Piece],
        x: &GpuTensor,
    ) -> Result<(), ModelError> {
        let text = self.text.as_ref().ok_or_else(no_text)?;
        let ids = own
            .iter()
            .flat_map(|p| &inputs[p.row].ids[p.tokens.clone()]);
        text.embed(&ids.copied().collect::<Vec<u32>>(), x)?;
        let mut base = 0;
        for piece in own {
            let row = &inputs[piece.row];
            for (index, vectors) in row.vectors {
                let inside = *index >= row.start
                    && vectors.dim(1) == self.config.hidden_size
                    && index + vectors.dim(0) <= row.start + row.ids.len();
                if !inside {
                    return Err(ModelError::Internal(format!(
                        "vectors {:?} at token {index} do not fit their row",
                        vectors.shape()
                    )));
                }
                // Those of this piece.
                let first = index - row.start;
                let start = first.max(piece.tokens.start);
                let end = (first + vectors.dim(0)).min(piece.tokens.end);
                if start >= end {
                    continue;
                }
                let vectors = vectors.narrow0(start - first, end - start)?;
                let there = GpuTensor::from_host(&self.gpu, &vectors, "vectors of tokens")?;
                let to = x.narrow0(base + start - piece.tokens.start, end - start)?;
                match there.dtype() {
                    GpuType::Bf16 => to.copy_from(&there)?,
                    _ => narrow_to_bf16(&there, &to)?,
                }
            }
            base += piece.tokens.len();
        }
        Ok(())
    }
}

/// The rows of a pass over text.
fn batch_rows(inputs: &[RowInput<'_>]) -> Vec<BatchRow> {
    let mut start = 0;
    let row = |(job, input): (usize, &RowInput<'_>)| {
        let tokens = input.ids.len();
        start += tokens;
        BatchRow {
            job,
            side: 0,
            tokens,
            start: start - tokens,
        }
    };
    inputs.iter().enumerate().map(row).collect()
}

/// The segments of every row, after checking that rows continue their caches and fit.
fn prepared(
    inputs: &[RowInput<'_>],
    caches: &[&mut GpuCache],
    config: &crate::config::ModelConfig,
) -> Result<Vec<Vec<RowSegment>>, ModelError> {
    let continues = inputs.len() == caches.len()
        && inputs.iter().zip(caches).all(|(input, cache)| {
            input.start == cache.tokens && cache.tokens + input.ids.len() <= cache.lease.capacity()
        });
    if !continues {
        let message = "rows do not continue their caches, or do not fit them".to_owned();
        return Err(ModelError::Internal(message));
    }
    let mut parts = Vec::with_capacity(inputs.len());
    for row in inputs {
        let range = row.start..row.start + row.ids.len();
        if range.end > config.max_position_embeddings {
            let (end, most) = (range.end, config.max_position_embeddings);
            let message = format!("{end} tokens are above the model's {most} positions");
            return Err(ModelError::invalid("prompt", message));
        }
        parts.push(segments(range, row.full)?);
    }
    Ok(parts)
}

fn no_text() -> ModelError {
    ModelError::Internal("the model was opened without text (GpuOptions.text)".into())
}
