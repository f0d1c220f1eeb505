//! One request under way: its text, if it has one, then the prefix of its picture, if it makes one.
use std::time::{Duration, Instant};

use base::clock;
use kv::PrefixIdentity;
use model::{
    Bucket, Model, ModelError, PrefixKv, RowKind, RowTokens, SequenceLayout, Target,
    cond::CondFeatures,
    layout::{ImageGrid, LayoutInput},
    preprocess::aligned_size,
};
use proto::v1::prefix_row::Kind;
use stage::{Ranks, StageError};

use crate::{
    beginning::Beginning,
    order::{Order, Size, Task},
    pictures::Pictures,
    pools::Pools,
    prefix::PrefixPhase,
    row::Row,
    stream::BegunRow,
    text::{self, TextPhase},
};

/// What a request came to.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Rows of the picture, computed; none for text alone.
    pub(crate) rows: Vec<(Kind, PrefixIdentity, PrefixKv)>,
    pub(crate) written: Written,
    pub(crate) elapsed: Duration,
}

/// What was written, and what it means for the picture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// With its tags.
    pub(crate) text: String,
    pub(crate) new_tokens: usize,
    /// The token limit came first.
    pub(crate) cut: bool,
    /// Height and width of the picture.
    pub(crate) size: Option<(usize, usize)>,
    /// Height and width that the image is scaled to, if it is.
    pub(crate) output: Option<(usize, usize)>,
    /// No size was named before the limit.
    pub(crate) size_fallback: bool,
    /// Prefix tokens taken over from the text.
    pub(crate) reused: usize,
    /// Of the system prompt that was chosen by name.
    pub(crate) fingerprint: String,
    /// Tokens that were read.
    pub(crate) prompt_tokens: usize,
}

/// Rows that are being computed, for whoever publishes them meanwhile.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) rows: Vec<BegunRow>,
    /// What is known of the picture already.
    pub(crate) written: Written,
}

/// What is known of a request from start to end.
#[derive(Debug)]
pub(crate) struct Brief {
    pub(crate) order: Order,
    pub(crate) pictures: Pictures,
    pub(crate) written: Written,
    /// Where its rows are.
    pub(crate) pools: Pools,
    started: Instant,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Run {
    brief: Brief,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Text(Box<TextPhase>),
    Prefix(Box<PrefixPhase>),
    /// It was text alone, and it is written.
    Over,
}

impl Brief {
    fn new(pools: Pools, order: Order, pictures: Pictures) -> Self {
        Self {
            pools,
            written: Written {
                fingerprint: order.fingerprint.clone(),
                ..Written::default()
            },
            order,
            pictures,
            started: clock::now(),
        }
    }

    /// Takes note of a picture that is drawn at once.
    fn drawn(&mut self, model: &Model, layout: &SequenceLayout) {
        self.written.prompt_tokens = layout.prefix_len();
        self.sized(model, layout);
    }

    /// Takes note of the picture's size.
    pub(crate) fn sized(&mut self, model: &Model, layout: &SequenceLayout) {
        let image = layout.generated.as_ref().map(|image| &image.span);
        let cell = model.config().pixels_per_token();
        self.written.size = image.map(|span| (span.grid_h * cell, span.grid_w * cell));
    }

    /// The size of the picture, if it is known before anything is written.
    fn bucket(&self, model: &Model) -> Result<Option<Bucket>, StageError> {
        Ok(match self.order.size {
            _ if self.order.task == Task::Text => None,
            Size::Given { height, width } => Some(model.buckets().exact(height, width)?),
            Size::FirstPicture => self.pictures.buckets.first().copied(),
            Size::Model => None,
        })
    }

    /// The request as a sequence.
    pub(crate) fn layout_input(&self, target: Target) -> LayoutInput<'_> {
        LayoutInput {
            prompt: &self.order.prompt,
            system_prompt: self.order.system_prompt.as_deref(),
            assistant_text: None,
            template: self.order.template,
            drop_think: self.order.drop_think,
            cond_images: &self.pictures.grids,
            target,
        }
    }

    /// The sequence of the picture, behind what was written.
    fn picture_layout(
        &mut self,
        model: &Model,
        bucket: Bucket,
        written: &[u32],
    ) -> Result<SequenceLayout, StageError> {
        if self.order.align {
            let shown = &self.pictures.sizes;
            self.written.output = aligned_size(model.buckets(), bucket, shown)?;
        }
        let (height, width) = bucket.grid(model.config().pixels_per_token());
        let mut input = self.layout_input(Target::Image(ImageGrid {
            ratio_index: bucket.ratio_index,
            height,
            width,
        }));
        // HunyuanImage-3.0: without its thoughts, a text stands behind the system prompt about recaptions,
        // which is then taken as the file has it.
        let recaption = model.system_prompts()?.get("en_recaption");
        if let Some(prompt) = recaption
            && input.drop_think
            && !written.is_empty()
            && input.system_prompt.is_some()
        {
            input.system_prompt = Some(&prompt.raw);
        }
        Ok(model.layout_written(&input, written)?)
    }
}

/// What can be looked for before anything is computed.
pub(crate) fn foreseen(
    (ranks, pools): (&Ranks, &Pools),
    order: &Order,
    pictures: &Pictures,
) -> Result<Foreseen, StageError> {
    let (order, pictures) = (order.clone(), pictures.clone());
    let mut brief = Brief::new(pools.clone(), order, pictures);
    let model = ranks.first();
    let begins = |layout: &SequenceLayout, features: &[CondFeatures]| {
        let row = RowTokens::with_images(layout, RowKind::Cond, features);
        Beginning::of((ranks, pools), &row)
    };
    let (Task::Draw, Some(bucket)) = (brief.order.task, brief.bucket(model)?) else {
        let layout = text::layout(model, &brief)?;
        return Ok(Foreseen {
            rows: Vec::new(),
            beginning: begins(&layout, &brief.pictures.features)?,
            written: brief.written,
        });
    };
    let layout = brief.picture_layout(model, bucket, &[])?;
    brief.drawn(model, &layout);
    let features = &brief.pictures.features;
    let named = |kind, of| {
        let identity = model.row_identity(&RowTokens::with_images(&layout, of, features))?;
        Ok::<_, StageError>((kind, identity))
    };
    let mut rows = vec![named(Kind::Cond, RowKind::Cond)?];
    if brief.order.negative_row {
        rows.push(named(Kind::Uncond, RowKind::Uncond)?);
    }
    Ok(Foreseen {
        rows,
        beginning: begins(&layout, &brief.pictures.features)?,
        written: brief.written,
    })
}

/// See [`foreseen`].
#[derive(Debug)]
pub(crate) struct Foreseen {
    /// The rows of a picture that is drawn at once, by name; none when something is written first.
    pub(crate) rows: Vec<(Kind, PrefixIdentity)>,
    /// What the rows have in common with those of others.
    pub(crate) beginning: Option<Beginning>,
    /// What is known of the picture.
    pub(crate) written: Written,
}

impl Run {
    /// Lays a request out.
    pub(crate) fn new(
        (ranks, pools): (&Ranks, &Pools),
        order: Order,
        pictures: Pictures,
    ) -> Result<Self, StageError> {
        let model = ranks.first();
        let mut brief = Brief::new(pools.clone(), order, pictures);
        let phase = match (brief.order.task, brief.bucket(model)?) {
            (Task::Draw, Some(bucket)) => {
                let layout = brief.picture_layout(model, bucket, &[])?;
                brief.drawn(model, &layout);
                let prefix = PrefixPhase::new(ranks, &mut brief, layout, None)?;
                Phase::Prefix(Box::new(prefix))
            }
            (_, bucket) => Phase::Text(Box::new(TextPhase::new(ranks, &mut brief, bucket)?)),
        };
        Ok(Self { brief, phase })
    }

    /// Tokens for which there is room in its caches, or will be.
    pub(crate) fn capacity(&self) -> usize {
        match &self.phase {
            Phase::Text(text) => 2 * text.row.capacity(),
            Phase::Prefix(prefix) => 2 * prefix.tokens(),
            Phase::Over => 0,
        }
    }

    /// Tokens of its rows as they stand, and the next one of each.
    pub(crate) fn tokens(&self) -> usize {
        match &self.phase {
            Phase::Text(text) => text.row.grow.ids().len() + 1,
            Phase::Prefix(prefix) => 2 * prefix.tokens(),
            Phase::Over => 0,
        }
    }

    /// Forgets what is computed of its rows and gives their pages back; it is computed again later, with the same
    /// outcome.
    pub(crate) fn forget(&mut self) {
        match &mut self.phase {
            Phase::Text(text) => text.row.forget(),
            Phase::Prefix(prefix) => prefix.all().for_each(Row::forget),
            Phase::Over => {}
        }
    }

    /// Pages that its rows have on each rank; shared ones count for each.
    pub(crate) fn pages(&self) -> usize {
        match &self.phase {
            Phase::Text(text) => text.row.pages(),
            Phase::Prefix(prefix) => prefix.pages(),
            Phase::Over => 0,
        }
    }

    /// Tokens of its first row that are there.
    #[cfg(test)]
    pub(crate) fn held(&mut self) -> usize {
        self.rows().first().map_or(0, |(row, _)| row.held())
    }

    /// The rows that can be computed now, and whether the logits behind their last token are wanted.
    pub(crate) fn rows(&mut self) -> Vec<(&mut Row, bool)> {
        match &mut self.phase {
            Phase::Text(text) => vec![(&mut text.row, true)],
            Phase::Prefix(prefix) => prefix.rows().map(|row| (row, false)).collect(),
            Phase::Over => Vec::new(),
        }
    }

    /// The rows of the picture, once, when they are known.
    pub(crate) fn begun(&mut self) -> Option<Begun> {
        let Phase::Prefix(prefix) = &mut self.phase else {
            return None;
        };
        let rows = prefix.begun();
        let written = || self.brief.written.clone();
        (!rows.is_empty()).then(|| Begun {
            rows,
            written: written(),
        })
    }

    /// Takes note of a pass; `logits` are those behind the text, if it was computed to its end. Answers with
    /// what was added to the text.
    pub(crate) fn passed(
        &mut self,
        ranks: &Ranks,
        logits: Option<&[f32]>,
    ) -> Result<String, StageError> {
        let mut told = String::new();
        match (&mut self.phase, logits) {
            (Phase::Text(text), Some(logits)) => {
                if text.next(ranks.first(), logits, &mut told)? {
                    self.end_text(ranks)?;
                }
            }
            (Phase::Prefix(prefix), _) => prefix.branch(ranks)?,
            (Phase::Text(_) | Phase::Over, _) => {}
        }
        Ok(told)
    }

    /// From the text to the picture, or to the end.
    fn end_text(&mut self, ranks: &Ranks) -> Result<(), StageError> {
        let Phase::Text(text) = std::mem::replace(&mut self.phase, Phase::Over) else {
            return Ok(());
        };
        let (model, brief) = (ranks.first(), &mut self.brief);
        let special = model.special_tokens()?;
        brief.written.text = model.tokenizer()?.decode(&text.ids)?;
        brief.written.new_tokens = text.new;
        brief.written.cut = !text.closed;
        if brief.order.task == Task::Text {
            return Ok(());
        }
        let buckets = model.buckets();
        let named = text.last.and_then(|id| special.ratio_index(id));
        let named = named.and_then(|index| buckets.by_index(index));
        let bucket = match brief.bucket(model)? {
            Some(known) => Some(known),
            None => {
                brief.written.size_fallback = named.is_none();
                named.or_else(|| buckets.by_index(buckets.fallback_index()))
            }
        };
        let bucket = bucket.ok_or_else(|| ModelError::Internal("no square bucket".into()))?;
        let layout = brief.picture_layout(model, bucket, &text.ids)?;
        let prefix = PrefixPhase::new(ranks, brief, layout, Some(text.row))?;
        self.phase = Phase::Prefix(Box::new(prefix));
        Ok(())
    }

    /// Nothing is left to compute.
    pub(crate) fn is_done(&self) -> bool {
        match &self.phase {
            Phase::Text(_) => false,
            Phase::Prefix(prefix) => prefix.is_done(),
            Phase::Over => true,
        }
    }

    /// What it came to.
    pub(crate) fn finish(self, ranks: &Ranks) -> Result<Outcome, StageError> {
        let rows = match self.phase {
            Phase::Prefix(prefix) => prefix.finish(ranks)?,
            Phase::Text(_) | Phase::Over => Vec::new(),
        };
        let started = self.brief.started;
        Ok(Outcome {
            rows,
            written: self.brief.written,
            elapsed: clock::now().saturating_duration_since(started),
        })
    }
}
