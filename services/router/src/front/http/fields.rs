//! The one table of what HTTP clients may send: [`super::schema`] parses requests by it and
//! [`super::openapi`] documents it. Bounds are those of [`base::limits`], which [`crate::validate`]
//! checks once more for every door.
use base::limits::{
    MAX_GUIDANCE, MAX_IMAGES, MAX_NEW_TOKENS, MAX_PICTURES, MAX_PREVIEWS, MAX_PROMPT_CHARS,
    MAX_REQUEST_DEADLINE, MAX_SEED, MAX_STEPS, MAX_TRANSFER_TIMEOUT,
};

use crate::validate::writing::{
    MAX_SELECTOR_CHARS, MAX_TOP_K, REPETITION_PENALTY, TEMPERATURE, TOP_P,
};

/// Longest `user` and `model`, in characters.
const MAX_LABEL_CHARS: usize = 256;
/// Shortest deadline, in seconds.
const MIN_DEADLINE: f64 = 0.001;

/// A door with a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    Generations,
    Edits,
    Chat,
}

/// What a value must be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// At most so many characters.
    Text(usize),
    Whole(u64, u64),
    Number(f64, f64),
    Flag,
    Word(&'static [&'static str]),
    /// A list of them.
    Words(&'static [&'static str]),
    /// "auto" or WIDTHxHEIGHT; the model says which.
    Size,
    /// A conversation; see [`super::chat`].
    Messages,
    /// Uploaded pictures, at most so many.
    Pictures(usize),
}

/// One field.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) on: &'static [Endpoint],
    pub(super) required: bool,
    /// Ours, unknown to the OpenAI API.
    pub(super) extension: bool,
    pub(super) about: &'static str,
}

use Endpoint::{Chat, Edits, Generations};

const ALL: &[Endpoint] = &[Generations, Edits, Chat];
const IMAGES: &[Endpoint] = &[Generations, Edits];

const fn field(
    name: &'static str,
    kind: Kind,
    on: &'static [Endpoint],
    about: &'static str,
) -> Field {
    Field {
        name,
        kind,
        on,
        required: false,
        extension: false,
        about,
    }
}

const fn required(field: Field) -> Field {
    Field {
        required: true,
        ..field
    }
}

const fn extension(
    name: &'static str,
    kind: Kind,
    on: &'static [Endpoint],
    about: &'static str,
) -> Field {
    Field {
        extension: true,
        ..field(name, kind, on, about)
    }
}

/// Every field.
pub(super) const FIELDS: &[Field] = &[
    required(field(
        "prompt",
        Kind::Text(MAX_PROMPT_CHARS),
        IMAGES,
        "What to draw. Text that looks like a special token stays text.",
    )),
    required(field(
        "messages",
        Kind::Messages,
        &[Chat],
        "One user message, and at most one system (or developer) message before it.",
    )),
    required(field(
        "image",
        Kind::Pictures(MAX_PICTURES),
        &[Edits],
        "Pictures to edit: files `image` or `image[]` of a form, or URLs in JSON: of data, or of a \
         place that this server may fetch from.",
    )),
    field(
        "mask",
        Kind::Pictures(1),
        &[Edits],
        "PNG of the size of the first picture. The model has no masks: answered with status 501.",
    ),
    field(
        "model",
        Kind::Text(MAX_LABEL_CHARS),
        ALL,
        "Absent: the only model served.",
    ),
    field(
        "n",
        Kind::Whole(1, MAX_IMAGES as u64),
        ALL,
        "Images to make. They share one prefix; image i has seed + i. All come, or an error does.",
    ),
    field(
        "size",
        Kind::Size,
        ALL,
        "WIDTHxHEIGHT in pixels, one of the model's sizes; auto: the model names one. Absent: the size \
         nearest to the first picture's shape, or without pictures the square one.",
    ),
    field(
        "quality",
        Kind::Word(&["auto", "low", "medium", "high", "standard", "hd"]),
        ALL,
        "Chooses the steps: low a quarter of the model's default, medium half, all else the \
         default. Only auto may come with steps.",
    ),
    field(
        "background",
        Kind::Word(&["auto", "opaque"]),
        IMAGES,
        "Pictures have no transparency.",
    ),
    field(
        "output_format",
        Kind::Word(&["png", "jpeg", "webp"]),
        ALL,
        "Default png, which is the picture exactly.",
    ),
    field(
        "output_compression",
        Kind::Whole(0, 100),
        ALL,
        "Quality of jpeg and webp, default 100; png is lossless and takes 100 only.",
    ),
    field(
        "response_format",
        Kind::Word(&["b64_json"]),
        IMAGES,
        "This server keeps no pictures, so there are no URLs.",
    ),
    field(
        "stream",
        Kind::Flag,
        ALL,
        "Server-sent events: progress at every step, then the images as they are done.",
    ),
    field(
        "partial_images",
        Kind::Whole(0, MAX_PREVIEWS as u64),
        IMAGES,
        "Previews of each image, spread over its steps; only with stream. Default 0.",
    ),
    field(
        "modalities",
        Kind::Words(&["image", "text"]),
        &[Chat],
        "Text alone: an answer in words, and no picture. Else, and when absent, pictures.",
    ),
    field(
        "user",
        Kind::Text(MAX_LABEL_CHARS),
        ALL,
        "Name of the end user; goes to the debug log beside the request id.",
    ),
    extension(
        "seed",
        Kind::Whole(0, MAX_SEED),
        ALL,
        "Seed of the first image. Absent: one is drawn, and answered.",
    ),
    extension(
        "steps",
        Kind::Whole(1, MAX_STEPS as u64),
        ALL,
        "Denoising steps. Absent: the model's default.",
    ),
    extension(
        "guidance",
        Kind::Number(0.0, MAX_GUIDANCE),
        ALL,
        "Guidance scale; 0 and 1 run one row. Absent: the model's default.",
    ),
    extension(
        "deadline",
        Kind::Number(MIN_DEADLINE, MAX_REQUEST_DEADLINE.as_secs() as f64),
        ALL,
        "Seconds until the request is given up with status 504. Default 600.",
    ),
    extension(
        "size_policy",
        Kind::Word(&["exact", "snap"]),
        ALL,
        "What happens to a size that the model does not make: refuse it, or take the nearest ratio.",
    ),
    extension(
        "template",
        Kind::Word(&["pretrain", "instruct"]),
        ALL,
        "Prompt template. Absent: the model's default.",
    ),
    extension(
        "preview_kind",
        Kind::Word(&["linear", "vae"]),
        IMAGES,
        "How previews are made: linear (default), cheap and a quarter of the size, or vae.",
    ),
    extension(
        "priority",
        Kind::Word(&["interactive", "standard", "background"]),
        ALL,
        "Who goes first; a lower class goes on later from where it stood. Default standard.",
    ),
    extension(
        "on_prefix_loss",
        Kind::Word(&["fail", "recompute", "wait"]),
        ALL,
        "When the prompt's prefix is lost before a worker has it: end the request (default), compute the very \
         same one again, or wait for what may come back until the deadline.",
    ),
    extension(
        "transfer_timeout_ms",
        Kind::Whole(0, MAX_TRANSFER_TIMEOUT.as_millis() as u64),
        ALL,
        "Bound of one transfer of a prefix in milliseconds; 0: the stages' own.",
    ),
    extension(
        "mode",
        Kind::Word(&["image", "think", "recaption", "think_recaption"]),
        ALL,
        "What the model writes before it draws. Absent: the model's default.",
    ),
    extension(
        "drop_think",
        Kind::Flag,
        ALL,
        "Draw without what was thought. Absent: the model's default.",
    ),
    extension(
        "align_image_size",
        Kind::Flag,
        &[Edits, Chat],
        "Pictures are stretched to the model's sizes, not cropped, and an image takes the exact shape of the \
         first picture of its size.",
    ),
    extension(
        "system_prompt_name",
        Kind::Text(MAX_SELECTOR_CHARS),
        ALL,
        "One of the model's system prompts by name or fingerprint, none or dynamic.",
    ),
    field(
        "temperature",
        Kind::Number(TEMPERATURE.0, TEMPERATURE.1),
        ALL,
        "Of the words that the model writes; 0 takes the most likely ones. Absent: the model's default.",
    ),
    field(
        "top_p",
        Kind::Number(TOP_P.0, TOP_P.1),
        ALL,
        "Only the most likely tokens that reach this probability together may come.",
    ),
    extension(
        "top_k",
        Kind::Whole(1, MAX_TOP_K as u64),
        ALL,
        "Only so many of the most likely tokens may come.",
    ),
    extension(
        "repetition_penalty",
        Kind::Number(REPETITION_PENALTY.0, REPETITION_PENALTY.1),
        ALL,
        "Makes tokens less likely that stand there already; 1 is off.",
    ),
    extension(
        "sampling_seed",
        Kind::Whole(0, MAX_SEED),
        ALL,
        "Of all that chance decides before denoising: words, and how pictures are looked at. Absent: seed.",
    ),
    extension(
        "max_new_tokens",
        Kind::Whole(1, MAX_NEW_TOKENS as u64),
        IMAGES,
        "Most tokens that are written.",
    ),
    field(
        "max_completion_tokens",
        Kind::Whole(1, MAX_NEW_TOKENS as u64),
        &[Chat],
        "Most tokens that are written.",
    ),
    field(
        "max_tokens",
        Kind::Whole(1, MAX_NEW_TOKENS as u64),
        &[Chat],
        "The same by its older name; only one of them may be given.",
    ),
    extension(
        "system_prompt",
        Kind::Text(MAX_PROMPT_CHARS),
        IMAGES,
        "Text before the user's turn.",
    ),
];

/// The fields of one endpoint.
pub(super) fn fields(endpoint: Endpoint) -> impl Iterator<Item = &'static Field> {
    FIELDS
        .iter()
        .filter(move |field| field.on.contains(&endpoint))
}

impl Kind {
    /// In words, for errors.
    pub(super) fn name(self) -> String {
        match self {
            Self::Text(_) | Self::Size => "a string".to_owned(),
            Self::Whole(least, most) => format!("a whole number from {least} to {most}"),
            Self::Number(least, most) => format!("a number from {least} to {most}"),
            Self::Flag => "true or false".to_owned(),
            Self::Word(known) => format!("one of {}", known.join(", ")),
            Self::Words(known) => format!("a list of {}", known.join(", ")),
            Self::Messages => "a list of messages".to_owned(),
            Self::Pictures(_) => "a picture".to_owned(),
        }
    }
}
