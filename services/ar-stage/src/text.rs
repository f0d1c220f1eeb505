//! The text of a request: what may come next, what came, and where it ends.
use model::{
    Bucket, GrowingRow, Model, ModelError, RowKind, RowTokens, SequenceLayout, Target, TextTask,
    layout::CondImage,
    text::{Deltas, Sampler, Transitions},
};
use stage::{Ranks, StageError};

use crate::{order::Task, pools::Names, row::Row, run::Brief};

/// Tokens behind the text proper: `<answer>`, `<boi>`, size and ratio, and some slack.
const TAIL: usize = 8;
/// Text tokens that a picture's sequence has and its text pass has not.
const AROUND: usize = 16;

/// A text under way.
#[derive(Debug)]
pub(crate) struct TextPhase {
    pub(crate) row: Row,
    transitions: Transitions,
    sampler: Sampler,
    /// Never chosen freely.
    never: Vec<u32>,
    /// Ends the text proper.
    closing: Option<u32>,
    /// The text, from its opening tag to its closing one.
    pub(crate) ids: Vec<u32>,
    /// Nothing that follows belongs to the text.
    pub(crate) closed: bool,
    /// Tokens that were made, and the last one.
    pub(crate) new: usize,
    pub(crate) last: Option<u32>,
    max_new: usize,
    deltas: Deltas,
    /// Text that is told with the first token.
    opening: String,
}

impl TextPhase {
    /// Lays the text's sequence out; `bucket` is the picture's, if it is known.
    pub(crate) fn new(
        ranks: &Ranks,
        brief: &mut Brief,
        bucket: Option<Bucket>,
    ) -> Result<Self, StageError> {
        let model = ranks.first();
        let special = model.special_tokens()?;
        let base = model.config().image_base_size;
        let (order, features) = (&brief.order, &brief.pictures.features);
        let (transitions, tags) = match order.task {
            Task::Text => (Transitions::free(special), None),
            Task::Draw => (Transitions::ratio(special, base)?, None),
            Task::Write(writing) => {
                let auto = bucket.is_none().then_some(base);
                let rules = Transitions::new(special, writing, order.template, auto)?;
                let tags = (writing.opening(special), writing.closing(special));
                (rules, Some(tags))
            }
        };
        let layout = layout(model, brief)?;
        let max_new = room(model, &layout, order.task)?.min(order.max_new);
        let tokens = RowTokens::with_images(&layout, RowKind::Cond, features);
        let row = (
            GrowingRow::new(&tokens)?,
            Names::new(model, &tokens, &order.tenant)?,
        );
        let ids: Vec<u32> = tags.iter().map(|(opening, _)| *opening).collect();
        let opening = model.tokenizer()?.decode(&ids)?;
        let (sampler, never) = (Sampler::new(order.sampling), never(model, order.task)?);
        let closed = order.task == Task::Draw;
        brief.written.prompt_tokens = layout.len();
        Ok(Self {
            row: Row::new((ranks, &brief.pools), row, layout.len() + max_new + TAIL)?,
            transitions,
            sampler,
            never,
            closing: tags.map(|(_, closing)| closing),
            ids,
            closed,
            new: 0,
            last: None,
            max_new,
            deltas: Deltas::default(),
            opening,
        })
    }

    /// Chooses the next token; adds to `told` what it adds to the text. True when nothing follows.
    pub(crate) fn next(
        &mut self,
        model: &Model,
        logits: &[f32],
        told: &mut String,
    ) -> Result<bool, StageError> {
        let choice = self.transitions.choice();
        let id = self
            .sampler
            .pick(logits, self.row.grow.ids(), choice, &self.never);
        self.new += 1;
        self.last = Some(id);
        let ended = self.transitions.accept(id);
        if !self.closed {
            told.push_str(&std::mem::take(&mut self.opening));
            // Neither the end of a text without tags nor a ratio before the closing tag is a part of it.
            let special = model.special_tokens()?;
            let ratio = special.ratio_index(id).is_some();
            if !ended || (self.closing.is_some() && !ratio) {
                self.ids.push(id);
                told.push_str(&self.deltas.push(model.tokenizer()?, id)?);
            }
            self.closed = match self.closing {
                Some(closing) => id == closing || (ended && !ratio),
                None => ended,
            };
        }
        // What is forced behind the text proper comes whatever the limit says.
        let over = ended || (!self.closed && self.new >= self.max_new);
        if over {
            told.push_str(&self.deltas.rest(model.tokenizer()?)?);
        } else {
            self.row.grow.push(id);
        }
        Ok(over)
    }
}

/// The sequence of a request's text.
pub(crate) fn layout(model: &Model, brief: &Brief) -> Result<SequenceLayout, ModelError> {
    let task = match brief.order.task {
        Task::Text => TextTask::Auto,
        Task::Draw => TextTask::Ratio,
        Task::Write(writing) => writing.task(),
    };
    model.layout(&brief.layout_input(Target::Text(task)))
}

/// Tokens of pictures never stand in an answer in words.
fn never(model: &Model, task: Task) -> Result<Vec<u32>, ModelError> {
    let special = model.special_tokens()?;
    Ok(match task {
        Task::Draw | Task::Write(_) => Vec::new(),
        Task::Text => {
            let fixed = [special.boi, special.eoi, special.img, special.cfg];
            let more = [special.timestep, special.joint_img_sep];
            let sizes = special.sizes.iter().map(|(_, id)| *id);
            let ratios = special.ratios.iter().copied();
            let companions = special.guidance.into_iter().chain(special.timestep_r);
            let all = fixed.into_iter().chain(more).chain(sizes);
            all.chain(ratios).chain(companions).collect()
        }
    })
}

/// Tokens that may be written behind `layout` so that a picture still fits.
fn room(model: &Model, layout: &SequenceLayout, task: Task) -> Result<usize, StageError> {
    let config = model.config();
    let area = |bucket: &Bucket| {
        let (height, width) = bucket.grid(config.pixels_per_token());
        height * width
    };
    let picture = match task {
        Task::Text => 0,
        Task::Draw | Task::Write(_) => {
            let areas = model.buckets().buckets().iter().map(area);
            areas.max().unwrap_or(0)
        }
    };
    // `<boi>`, size, ratio, `<timestep>` and `<eoi>` stand around a shown picture.
    let shown = |image: &CondImage| image.joint.len() + 5;
    let shown: usize = layout.cond_images.iter().map(shown).sum();
    let text = config
        .max_text_tokens()
        .saturating_sub(layout.len() - shown);
    let all = config
        .max_position_embeddings
        .saturating_sub(layout.len() + picture);
    match text.min(all).saturating_sub(AROUND) {
        0 => Err(
            ModelError::invalid("prompt", "leaves no room for what the model is to write").into(),
        ),
        room => Ok(room),
    }
}
