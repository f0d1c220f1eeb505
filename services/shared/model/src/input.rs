//! Tokens of rows made ready for a packed pass: vectors, rotary tables and segments.

use std::ops::Range;

use kernels::{RopeTable, Tensor};
use parallel::{Axis, RankContext};

use crate::backbone::{Backbone, Goal, NoProbe, Probe, Row, RowKv, RowSegment, segments};
use crate::cache::KvCache;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::positions::{ImageSpan, positions, rope_table};
use crate::rank::{CAUSAL_ORDER, group};

/// Consecutive tokens of one row.
#[derive(Clone, Copy, Debug)]
pub struct RowInput<'a> {
    /// Index of the first token in its row; what lies before is in the row's cache.
    pub start: usize,
    /// Token ids; those of image, timestep and other continuous tokens are only placeholders.
    pub ids: &'a [u32],
    /// Images of the row, for positions.
    pub images: &'a [ImageSpan],
    /// Full-attention spans of the row, sorted and disjoint.
    pub full: &'a [Range<usize>],
    /// Vectors that replace the embedding of tokens from the given index on, each `[n, hidden]`.
    pub vectors: &'a [(usize, Tensor)],
}

/// Several rows packed one after the other.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) x: Tensor,
    pub(crate) rope: RopeTable,
    pub(crate) segments: Vec<Vec<RowSegment>>,
}

impl Packed {
    pub(crate) fn new(
        config: &ModelConfig,
        backbone: &Backbone,
        inputs: &[RowInput<'_>],
    ) -> Result<Self, ModelError> {
        let ids: Vec<u32> = inputs
            .iter()
            .flat_map(|row| row.ids.iter().copied())
            .collect();
        let mut x = backbone.embed(&ids)?;
        let mut places = Vec::with_capacity(ids.len());
        let mut parts = Vec::with_capacity(inputs.len());
        for row in inputs {
            let range = row.start..row.start + row.ids.len();
            if range.end > config.max_position_embeddings {
                let message = format!(
                    "{} tokens are above the model's {} positions",
                    range.end, config.max_position_embeddings
                );
                return Err(ModelError::invalid("prompt", message));
            }
            replace(&mut x, places.len(), row, config.hidden_size)?;
            places.extend(positions(range.clone(), row.images)?);
            parts.push(segments(range, row.full)?);
        }
        let rope = rope_table(&places, config.head_dim, config.rope_theta)?;
        Ok(Self {
            x,
            rope,
            segments: parts,
        })
    }
}

/// Writes the given vectors of a row over its embeddings; `base` is the row's first packed token.
fn replace(
    x: &mut Tensor,
    base: usize,
    row: &RowInput<'_>,
    hidden: usize,
) -> Result<(), ModelError> {
    for (index, vectors) in row.vectors {
        let values = vectors.as_f32()?;
        let inside = *index >= row.start
            && vectors.dim(1) == hidden
            && index + vectors.dim(0) <= row.start + row.ids.len();
        if !inside {
            return Err(ModelError::Internal(format!(
                "vectors {:?} at token {index} do not fit tokens {}..{}",
                vectors.shape(),
                row.start,
                row.start + row.ids.len()
            )));
        }
        let at = (base + index - row.start) * hidden;
        x.as_f32_mut()?[at..at + values.len()].copy_from_slice(values);
    }
    Ok(())
}

/// Runs packed rows on top of their caches, appends to them, and returns hidden states
/// `[tokens, hidden]` (no final norm), on every rank.
pub(crate) fn run<P: Probe>(
    config: &ModelConfig,
    backbone: &Backbone,
    ctx: &RankContext,
    (inputs, caches): Rows<'_, '_, '_>,
    probe: &mut P,
) -> Result<Tensor, ModelError> {
    let Packed { x, rope, segments } = Packed::new(config, backbone, inputs)?;
    let tokens = x.dim(0);
    let mut rows = rows(inputs, &segments, caches)?;
    let hidden = backbone.run(ctx, Some(x), (&mut rows, &rope), Goal::Hidden, probe)?;
    let stages = ctx.plan().pp;
    if stages == 1 {
        return hidden.ok_or_else(|| ModelError::Internal("a pass without a result".into()));
    }
    // Every stage picks the next token by itself, from the same numbers.
    let own = hidden.map(|h| h.to_f32_vec()).unwrap_or_default();
    let all = group(ctx, Axis::Pp)?.broadcast(stages - 1, own)?.wait()?;
    Ok(Tensor::from_f32(&[tokens, config.hidden_size], all)?)
}

/// Like [`run`], but only to fill the caches.
pub(crate) fn fill(
    config: &ModelConfig,
    backbone: &Backbone,
    ctx: &RankContext,
    (inputs, caches): Rows<'_, '_, '_>,
) -> Result<(), ModelError> {
    let Packed { x, rope, segments } = Packed::new(config, backbone, inputs)?;
    let mut rows = rows(inputs, &segments, caches)?;
    let input = (&mut rows[..], &rope);
    backbone.run(ctx, Some(x), input, Goal::Cache, &mut NoProbe)?;
    Ok(())
}

/// Tokens of rows, and the cache that each continues.
pub(crate) type Rows<'a, 'b, 'c> = (&'a [RowInput<'b>], &'a mut [&'c mut KvCache]);

fn rows<'a>(
    inputs: &[RowInput<'_>],
    segments: &'a [Vec<RowSegment>],
    caches: &'a mut [&mut KvCache],
) -> Result<Vec<Row<'a>>, ModelError> {
    let fits = inputs.len() == caches.len()
        && inputs
            .iter()
            .zip(caches.iter())
            .all(|(input, cache)| input.start == cache.len());
    if !fits {
        return Err(ModelError::Internal(
            "rows do not continue their caches".into(),
        ));
    }
    let rows = inputs.iter().zip(segments).zip(caches);
    Ok(rows
        .map(|((input, segments), cache)| Row {
            tokens: input.ids.len(),
            segments,
            kv: RowKv::Append(cache),
            order: CAUSAL_ORDER,
        })
        .collect())
}
