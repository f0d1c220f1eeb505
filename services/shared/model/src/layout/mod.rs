//! The token sequence of a request: ids of both rows, where images lie, which tokens are special, and how the
//! tokens may attend to each other.
//!
//! The conditional and the unconditional row have the same length and the same geometry: the second one differs
//! only in that each droppable text token is `<cfg>`.

mod template;

use std::ops::Range;

use kernels::{RopeTable, SegmentKind};

use self::template::{Section, Sections};
use crate::config::{ModelConfig, Template};
use crate::error::ModelError;
use crate::positions::{self, ImageSpan, Position};
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Most bytes of one text of a request; far above what the token limits let through, low enough to tokenise.
pub const MAX_TEXT_BYTES: usize = 256 << 10;
/// Most conditioning images of one request.
pub const MAX_COND_IMAGES: usize = 3;

/// Which row of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// With the prompt.
    Cond,
    /// With `<cfg>` in place of the prompt.
    Uncond,
}

/// What a text pass is to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextTask {
    /// Free text.
    Auto,
    /// Reasoning, from `<think>` on.
    Think,
    /// A rewritten prompt, from `<recaption>` on.
    Recaption,
    /// One ratio token, after `<boi>` and the size token.
    Ratio,
}

/// Grid of the image to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGrid {
    /// Number of the ratio token.
    pub ratio_index: usize,
    /// Tokens along the height.
    pub height: usize,
    /// Tokens along the width.
    pub width: usize,
}

/// Grids of a conditioning image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CondImageGrid {
    /// The VAE's tokens, in the image's own bucket.
    pub vae: ImageGrid,
    /// Real ViT patches along the height.
    pub vit_height: usize,
    /// Real ViT patches along the width.
    pub vit_width: usize,
}

/// What the sequence is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Denoise an image of this grid.
    Image(ImageGrid),
    /// Write text.
    Text(TextTask),
}

/// The parts of a request that make its sequence.
#[derive(Clone, Copy, Debug)]
pub struct LayoutInput<'a> {
    /// What the caller asks for; special-token text in it stays text.
    pub prompt: &'a str,
    /// System text, taken as it is.
    pub system_prompt: Option<&'a str>,
    /// What the model wrote in an earlier pass.
    pub assistant_text: Option<&'a str>,
    /// Order of roles and separators.
    pub template: Template,
    /// Leave think blocks out.
    pub drop_think: bool,
    /// Conditioning images, before the prompt.
    pub cond_images: &'a [CondImageGrid],
    /// What the sequence is for.
    pub target: Target,
}

/// What a model fixes for all its sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutRules {
    /// Names the `<img_size_N>` token.
    pub base_size: usize,
    /// ViT tokens of every conditioning image, padding included.
    pub vit_tokens: usize,
    /// Whether `<guidance>` follows the generated image's `<timestep>`.
    pub guidance_token: bool,
    /// Whether `<timestep_r>` follows.
    pub timestep_r_token: bool,
    /// Most text tokens.
    pub max_text_tokens: usize,
    /// Most tokens in all.
    pub max_sequence_tokens: usize,
}

impl LayoutRules {
    /// The rules of a model.
    pub fn new(config: &ModelConfig) -> Self {
        Self {
            base_size: config.image_base_size,
            vit_tokens: config.vit_processor.max_num_patches,
            guidance_token: config.cfg_distilled,
            timestep_r_token: config.use_meanflow,
            max_text_tokens: config.max_text_tokens(),
            max_sequence_tokens: config.max_position_embeddings,
        }
    }
}

/// A generated image inside a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedImage {
    /// Its image tokens.
    pub span: ImageSpan,
    /// Number of its ratio token.
    pub ratio_index: usize,
    /// Index of `<timestep>`.
    pub timestep: usize,
    /// Index of `<guidance>`.
    pub guidance: Option<usize>,
    /// Index of `<timestep_r>`.
    pub timestep_r: Option<usize>,
}

/// A conditioning image inside a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CondImage {
    /// Index of its `<timestep>`.
    pub timestep: usize,
    /// Its VAE tokens.
    pub vae: ImageSpan,
    /// Its ViT tokens, padding included.
    pub vit: ImageSpan,
    /// VAE tokens, separator and ViT tokens: they all see each other.
    pub joint: Range<usize>,
}

/// Consecutive tokens that see earlier ones by one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSegment {
    /// Indices in the sequence.
    pub tokens: Range<usize>,
    /// `Causal`: each sees what lies before it and itself. `Full`: each sees `[0, tokens.end)`.
    pub kind: SegmentKind,
}

/// One laid out sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLayout {
    cond: Vec<u32>,
    uncond: Vec<u32>,
    /// Template of the sequence.
    pub template: Template,
    /// Text sections in order, empty ones included.
    pub text_slices: Vec<Range<usize>>,
    /// Conditioning images in order.
    pub cond_images: Vec<CondImage>,
    /// The image to generate, unless this is a text pass.
    pub generated: Option<GeneratedImage>,
    /// Index of the first `</recaption>`, else of the first `</think>`, of the assistant's earlier text.
    pub assistant_end: Option<usize>,
    /// Index of the first `<cfg>` in the unconditional row: both rows are equal before it.
    pub first_cfg: Option<usize>,
}

impl SequenceLayout {
    /// Lays a request out.
    ///
    /// # Errors
    /// An empty prompt, a text or a sequence that is too long, too many images, a token that the tokenizer lacks.
    pub fn new(
        tokenizer: &Tokenizer,
        special: &SpecialTokens,
        rules: &LayoutRules,
        input: &LayoutInput<'_>,
    ) -> Result<Self, ModelError> {
        Self::continuing(tokenizer, special, rules, input, &[])
    }

    /// Like [`SequenceLayout::new`], with what the model wrote as the ids that it wrote, in place of the
    /// input's `assistant_text`: decoding and encoding them again might give others.
    ///
    /// # Errors
    /// Those of [`SequenceLayout::new`]; `Internal` when both ids and text are given.
    pub fn continuing(
        tokenizer: &Tokenizer,
        special: &SpecialTokens,
        rules: &LayoutRules,
        input: &LayoutInput<'_>,
        written: &[u32],
    ) -> Result<Self, ModelError> {
        check_input(input)?;
        if input.assistant_text.is_some() && !written.is_empty() {
            return Err(ModelError::Internal("assistant text and its ids".into()));
        }
        let mut sections = Sections {
            written,
            tokenizer,
            special,
            size_token: special.size(rules.base_size)?,
            list: Vec::new(),
        };
        sections.build(input)?;
        check_length(&sections.list, rules, input)?;
        let mut writer = Writer {
            special,
            rules,
            size_token: sections.size_token,
            layout: Self {
                cond: vec![special.bos],
                uncond: vec![special.bos],
                template: input.template,
                text_slices: Vec::new(),
                cond_images: Vec::new(),
                generated: None,
                assistant_end: None,
                first_cfg: None,
            },
        };
        for section in &sections.list {
            match section {
                Section::Text { ids, droppable } => writer.text(ids, *droppable),
                Section::Joint(n) => writer.joint_image(&input.cond_images[*n])?,
                Section::Generated => match input.target {
                    Target::Image(grid) => writer.generated_image(grid)?,
                    Target::Text(_) => {}
                },
            }
        }
        let mut layout = writer.layout;
        layout.first_cfg = layout.uncond.iter().position(|id| *id == special.cfg);
        layout.assistant_end = [special.end_recaption, special.end_think]
            .iter()
            .find_map(|tag| layout.cond.iter().position(|id| id == tag));
        Ok(layout)
    }

    /// Ids of a row.
    pub fn tokens(&self, kind: RowKind) -> &[u32] {
        match kind {
            RowKind::Cond => &self.cond,
            RowKind::Uncond => &self.uncond,
        }
    }

    /// Tokens of the sequence (of either row).
    pub fn len(&self) -> usize {
        self.cond.len()
    }

    /// Never: every sequence has its `<bos>`.
    pub fn is_empty(&self) -> bool {
        self.cond.is_empty()
    }

    /// Length P of the prefix [0, P) that no denoise step changes: the index of the generated image's
    /// `<timestep>`, or the whole sequence of a text pass.
    pub fn prefix_len(&self) -> usize {
        self.generated
            .as_ref()
            .map_or(self.len(), |image| image.timestep)
    }

    /// Tokens that a denoise step computes: `<timestep>` and its companions, then the image tokens.
    pub fn target(&self) -> Option<Range<usize>> {
        self.generated
            .as_ref()
            .map(|image| image.timestep..image.span.tokens.end)
    }

    /// All images in order, for positions.
    pub fn image_spans(&self) -> Vec<ImageSpan> {
        self.cond_images
            .iter()
            .flat_map(|image| [image.vae.clone(), image.vit.clone()])
            .chain(self.generated.iter().map(|image| image.span.clone()))
            .collect()
    }

    /// Spans whose tokens all see each other.
    pub fn full_blocks(&self) -> Vec<Range<usize>> {
        self.cond_images
            .iter()
            .map(|image| image.joint.clone())
            .chain(self.generated.iter().map(|image| image.span.tokens.clone()))
            .collect()
    }

    /// Positions of tokens `range`, which may reach beyond the sequence (text that is still to come).
    pub fn positions(&self, range: Range<usize>) -> Result<Vec<Position>, ModelError> {
        positions::positions(range, &self.image_spans())
    }

    /// Rotary tables of tokens `range`.
    pub fn rope_table(
        &self,
        range: Range<usize>,
        config: &ModelConfig,
    ) -> Result<RopeTable, ModelError> {
        positions::rope_table(&self.positions(range)?, config.head_dim, config.rope_theta)
    }

    /// Attention of tokens `range` as segments that cover it without gap.
    ///
    /// # Errors
    /// `range` begins or ends inside a block whose tokens all see each other: such a block runs whole.
    pub fn segments(&self, range: Range<usize>) -> Result<Vec<LayoutSegment>, ModelError> {
        let mut segments = Vec::new();
        let mut next = range.start;
        let causal = |from: usize, to: usize, segments: &mut Vec<LayoutSegment>| {
            if from < to {
                segments.push(LayoutSegment {
                    tokens: from..to,
                    kind: SegmentKind::Causal,
                });
            }
        };
        for block in self.full_blocks() {
            if block.end <= range.start || block.start >= range.end {
                continue;
            }
            if block.start < range.start || block.end > range.end {
                return Err(ModelError::Internal(format!(
                    "tokens {range:?} cut the block {block:?}"
                )));
            }
            causal(next, block.start, &mut segments);
            next = block.end;
            segments.push(LayoutSegment {
                tokens: block,
                kind: SegmentKind::Full,
            });
        }
        causal(next, range.end, &mut segments);
        Ok(segments)
    }
}

/// Ids that end a text pass; `size_given` says that the caller fixed the size, so that no ratio token is due.
pub fn stop_token_ids(special: &SpecialTokens, task: TextTask, size_given: bool) -> Vec<u32> {
    let image = |mut ids: Vec<u32>| {
        if size_given {
            ids.push(special.boi);
        } else {
            ids.extend(&special.ratios);
        }
        ids
    };
    match task {
        TextTask::Auto => image(vec![special.eos]),
        TextTask::Ratio => image(Vec::new()),
        TextTask::Think | TextTask::Recaption => {
            vec![special.end_recaption, special.end_answer, special.eos]
        }
    }
}

fn check_input(input: &LayoutInput<'_>) -> Result<(), ModelError> {
    if input.prompt.trim().is_empty() {
        return Err(ModelError::invalid("prompt", "is empty"));
    }
    for (field, text) in [
        ("prompt", Some(input.prompt)),
        ("system_prompt", input.system_prompt),
        ("assistant_text", input.assistant_text),
    ] {
        let bytes = text.map_or(0, str::len);
        if bytes > MAX_TEXT_BYTES {
            return Err(ModelError::invalid(
                field,
                format!("has {bytes} bytes, more than the bound {MAX_TEXT_BYTES}"),
            ));
        }
    }
    if input.cond_images.len() > MAX_COND_IMAGES {
        return Err(ModelError::invalid(
            "images",
            format!(
                "{} images, more than the bound {MAX_COND_IMAGES}",
                input.cond_images.len()
            ),
        ));
    }
    Ok(())
}

/// Refuses a sequence that is too long before any of it is written.
fn check_length(
    sections: &[Section],
    rules: &LayoutRules,
    input: &LayoutInput<'_>,
) -> Result<(), ModelError> {
    let mut text = 1usize;
    let mut images = 0usize;
    for section in sections {
        match (section, input.target) {
            (Section::Text { ids, .. }, _) => text += ids.len(),
            (Section::Joint(n), _) => {
                let grid = input.cond_images[*n].vae;
                images = images
                    .saturating_add(grid.height.saturating_mul(grid.width))
                    .saturating_add(rules.vit_tokens + 6);
            }
            (Section::Generated, Target::Image(grid)) => {
                images = images
                    .saturating_add(grid.height.saturating_mul(grid.width))
                    .saturating_add(7);
            }
            (Section::Generated, Target::Text(_)) => {}
        }
    }
    // The longer text is the one at fault.
    let system = input.system_prompt.map_or(0, str::len);
    let field = if system > input.prompt.len() {
        "system_prompt"
    } else {
        "prompt"
    };
    if text > rules.max_text_tokens {
        return Err(ModelError::invalid(
            field,
            format!(
                "makes {text} text tokens, the model takes {}",
                rules.max_text_tokens
            ),
        ));
    }
    let total = text.saturating_add(images);
    if total > rules.max_sequence_tokens {
        return Err(ModelError::invalid(
            field,
            format!(
                "makes a sequence of {total} tokens with its images, the model takes {}",
                rules.max_sequence_tokens
            ),
        ));
    }
    Ok(())
}

/// Appends sections to both rows.
struct Writer<'a> {
    special: &'a SpecialTokens,
    rules: &'a LayoutRules,
    size_token: u32,
    layout: SequenceLayout,
}

impl Writer<'_> {
    fn at(&self) -> usize {
        self.layout.cond.len()
    }

    fn token(&mut self, id: u32) -> usize {
        self.layout.cond.push(id);
        self.layout.uncond.push(id);
        self.at() - 1
    }

    fn text(&mut self, ids: &[u32], droppable: bool) {
        let start = self.at();
        self.layout.cond.extend_from_slice(ids);
        if droppable {
            let cfg = self.special.cfg;
            self.layout.uncond.extend(ids.iter().map(|_| cfg));
        } else {
            self.layout.uncond.extend_from_slice(ids);
        }
        let end = self.at();
        self.layout.text_slices.push(start..end);
    }

    fn image_tokens(&mut self, count: usize) -> Range<usize> {
        let start = self.at();
        for row in [&mut self.layout.cond, &mut self.layout.uncond] {
            row.extend(std::iter::repeat_n(self.special.img, count));
        }
        start..start + count
    }

    /// `<boi>`, size and ratio; answers with the index of the `<timestep>` that follows.
    fn image_head(&mut self, ratio_index: usize) -> Result<usize, ModelError> {
        let ratio = self.special.ratio(ratio_index)?;
        for id in [self.special.boi, self.size_token, ratio] {
            self.token(id);
        }
        Ok(self.token(self.special.timestep))
    }

    fn joint_image(&mut self, image: &CondImageGrid) -> Result<(), ModelError> {
        let timestep = self.image_head(image.vae.ratio_index)?;
        let (h, w) = (image.vae.height, image.vae.width);
        let vae = self.image_tokens(h * w);
        self.token(self.special.joint_img_sep);
        let vit = self.image_tokens(self.rules.vit_tokens);
        self.token(self.special.eoi);
        if image.vit_height * image.vit_width > vit.len() {
            return Err(ModelError::Internal(format!(
                "{}x{} vision patches in a block of {}",
                image.vit_height,
                image.vit_width,
                vit.len()
            )));
        }
        self.layout.cond_images.push(CondImage {
            timestep,
            joint: vae.start..vit.end,
            vae: ImageSpan {
                tokens: vae,
                grid_h: h,
                grid_w: w,
            },
            vit: ImageSpan {
                tokens: vit,
                grid_h: image.vit_height,
                grid_w: image.vit_width,
            },
        });
        Ok(())
    }

    fn generated_image(&mut self, grid: ImageGrid) -> Result<(), ModelError> {
        let timestep = self.image_head(grid.ratio_index)?;
        let guidance = self.extra(
            self.rules.guidance_token,
            self.special.guidance,
            "<guidance>",
        )?;
        let timestep_r = self.extra(
            self.rules.timestep_r_token,
            self.special.timestep_r,
            "<timestep_r>",
        )?;
        let tokens = self.image_tokens(grid.height * grid.width);
        self.token(self.special.eoi);
        self.layout.generated = Some(GeneratedImage {
            span: ImageSpan {
                tokens,
                grid_h: grid.height,
                grid_w: grid.width,
            },
            ratio_index: grid.ratio_index,
            timestep,
            guidance,
            timestep_r,
        });
        Ok(())
    }

    fn extra(
        &mut self,
        wanted: bool,
        id: Option<u32>,
        name: &str,
    ) -> Result<Option<usize>, ModelError> {
        match (wanted, id) {
            (false, _) => Ok(None),
            (true, Some(id)) => Ok(Some(self.token(id))),
            (true, None) => Err(ModelError::Tokenizer(format!("has no token `{name}`"))),
        }
    }
}
