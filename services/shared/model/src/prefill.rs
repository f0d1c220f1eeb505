//! From a request to the keys and values of its prefix `[0, P)`.

use kv::{IdentityBuilder, PrefixIdentity};
use parallel::RankContext;

use crate::cache::KvCache;
use crate::cond::{CondFeatures, placed};
use crate::config::Template;
use crate::error::ModelError;
use crate::input::RowInput;
use crate::layout::{ImageGrid, LayoutInput, LayoutRules, RowKind, SequenceLayout, Target};
use crate::model::Model;
use crate::prefix::PrefixKv;

/// Text to image, at one of the model's sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct T2iRequest {
    /// What to draw.
    pub prompt: String,
    /// System text, taken as it is.
    pub system_prompt: Option<String>,
    /// Order of roles and separators.
    pub template: Template,
    /// Pixels down.
    pub height: usize,
    /// Pixels across.
    pub width: usize,
}

/// One row of a laid out sequence.
#[derive(Clone, Copy, Debug)]
pub struct RowTokens<'a> {
    /// The sequence.
    pub layout: &'a SequenceLayout,
    /// Which of its rows.
    pub kind: RowKind,
    /// Its conditioning images, in order.
    pub images: &'a [CondFeatures],
}

impl<'a> RowTokens<'a> {
    /// A row without conditioning images.
    pub fn new(layout: &'a SequenceLayout, kind: RowKind) -> Self {
        Self {
            layout,
            kind,
            images: &[],
        }
    }

    /// A row with conditioning images.
    pub fn with_images(
        layout: &'a SequenceLayout,
        kind: RowKind,
        images: &'a [CondFeatures],
    ) -> Self {
        Self {
            layout,
            kind,
            images,
        }
    }
}

impl Model {
    /// Lays any request out.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field that is empty, too long or too many.
    pub fn layout(&self, input: &LayoutInput<'_>) -> Result<SequenceLayout, ModelError> {
        let rules = LayoutRules::new(self.config());
        SequenceLayout::new(self.tokenizer()?, self.special_tokens()?, &rules, input)
    }

    /// Lays a request out behind what the model wrote, by the ids that it wrote.
    ///
    /// # Errors
    /// Those of [`Model::layout`].
    pub fn layout_written(
        &self,
        input: &LayoutInput<'_>,
        written: &[u32],
    ) -> Result<SequenceLayout, ModelError> {
        let rules = LayoutRules::new(self.config());
        let (tokenizer, special) = (self.tokenizer()?, self.special_tokens()?);
        SequenceLayout::continuing(tokenizer, special, &rules, input, written)
    }

    /// Lays a text-to-image request out: both rows have the same length and geometry.
    ///
    /// # Errors
    /// `InvalidArgument` naming `prompt` (empty, too long) or `size` (with the nearest legal ones).
    pub fn layout_text_to_image(&self, request: &T2iRequest) -> Result<SequenceLayout, ModelError> {
        let bucket = self.buckets().exact(request.height, request.width)?;
        let (height, width) = bucket.grid(self.config().pixels_per_token());
        self.layout(&LayoutInput {
            prompt: &request.prompt,
            system_prompt: request.system_prompt.as_deref(),
            assistant_text: None,
            template: request.template,
            drop_think: self.config().generation.drop_think,
            cond_images: &[],
            target: Target::Image(ImageGrid {
                ratio_index: bucket.ratio_index,
                height,
                width,
            }),
        })
    }

    /// Keys and values of tokens `[0, P)` of every row, all rows packed in one pass. A row's result does
    /// not depend on the others.
    ///
    /// # Errors
    /// `InvalidArgument` for a row beyond the model's positions, `Internal` when features of conditioning
    /// images are missing or a part was not loaded.
    pub fn prefill(
        &self,
        ctx: &RankContext,
        rows: &[&RowTokens<'_>],
    ) -> Result<Vec<PrefixKv>, ModelError> {
        let rows: Vec<PreparedRow<'_>> = rows
            .iter()
            .map(|row| PreparedRow::new(row, row.layout.prefix_len()))
            .collect::<Result<_, _>>()?;
        let inputs: Vec<RowInput<'_>> = rows.iter().map(PreparedRow::input).collect();
        let mut caches: Vec<KvCache> = inputs
            .iter()
            .map(|input| self.cache(input.ids.len()))
            .collect::<Result<_, _>>()?;
        self.fill_rows(ctx, &inputs, &mut caches.iter_mut().collect::<Vec<_>>())?;
        Ok(caches.into_iter().map(KvCache::into_prefix).collect())
    }

    /// Names the prefix of a row without conditioning images: equal names mean equal keys and values.
    ///
    /// # Errors
    /// `Internal` when the row has conditioning images (use [`Model::row_identity`]).
    pub fn prefix_identity(
        &self,
        layout: &SequenceLayout,
        kind: RowKind,
    ) -> Result<PrefixIdentity, ModelError> {
        self.row_identity(&RowTokens::new(layout, kind))
    }

    /// Names the prefix of any row.
    ///
    /// # Errors
    /// `Internal` when features of conditioning images are missing.
    pub fn row_identity(&self, row: &RowTokens<'_>) -> Result<PrefixIdentity, ModelError> {
        placed(row.layout, row.images)?;
        self.beginning_identity(row, row.layout.prefix_len())
    }

    /// Names the first `tokens` tokens of a row: whatever follows, equal names mean equal keys and values there.
    ///
    /// # Errors
    /// `Internal` when the row has fewer tokens or features of its conditioning images are missing.
    pub fn beginning_identity(
        &self,
        row: &RowTokens<'_>,
        tokens: usize,
    ) -> Result<PrefixIdentity, ModelError> {
        let shown = &row.layout.cond_images;
        let ids = row.layout.tokens(row.kind).get(..tokens);
        let (Some(ids), true) = (ids, shown.len() == row.images.len()) else {
            let message = format!("no row of {tokens} tokens and its pictures");
            return Err(ModelError::Internal(message));
        };
        let begun = shown.iter().filter(|image| image.timestep < tokens);
        let samples = row.images.iter().take(begun.count());
        let samples: Vec<&[u8]> = samples.map(|i| i.sample_id.as_slice()).collect();
        let identity = IdentityBuilder {
            weights_id: &self.info().weights_id,
            template: row.layout.template.name(),
            tokens: ids,
            image_samples: &samples,
            dtype: self.info().kv.dtype,
        };
        Ok(identity.build())
    }
}

/// The first tokens of a row with everything a pass needs, owned.
#[derive(Debug)]
pub(crate) struct PreparedRow<'a> {
    ids: &'a [u32],
    images: Vec<crate::positions::ImageSpan>,
    full: Vec<std::ops::Range<usize>>,
    vectors: Vec<(usize, kernels::Tensor)>,
}

impl<'a> PreparedRow<'a> {
    pub(crate) fn new(row: &RowTokens<'a>, tokens: usize) -> Result<Self, ModelError> {
        Ok(Self {
            ids: &row.layout.tokens(row.kind)[..tokens],
            images: row.layout.image_spans(),
            full: row.layout.full_blocks(),
            vectors: placed(row.layout, row.images)?,
        })
    }

    pub(crate) fn input(&self) -> RowInput<'_> {
        RowInput {
            start: 0,
            ids: self.ids,
            images: &self.images,
            full: &self.full,
            vectors: &self.vectors,
        }
    }

    /// Images of the row, for the positions of tokens that follow.
    pub(crate) fn into_images(self) -> Vec<crate::positions::ImageSpan> {
        self.images
    }
}
