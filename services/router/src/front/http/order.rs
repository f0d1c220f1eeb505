//! From checked fields to what the router is asked and how the answer is written.
use std::time::Duration;

use base::{Failure, RequestId, limits::MAX_SEED};
use proto::v1::{
    GenerateRequest, InputImage, LossPolicy, Mode, PreviewKind, Priority, Quality, Sampling,
    SizePolicy, input_image::Source,
};

use super::{
    encode::{BEST, Format, Output},
    schema::Fields,
};

/// What the model is told and shown; endpoints keep it in different places.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) prompt: String,
    pub(super) system_prompt: String,
    pub(super) images: Vec<Source>,
    /// The answer is to be words alone.
    pub(super) text_only: bool,
}

/// Ways to say how many tokens may be written.
const TOKEN_LIMITS: [&str; 3] = ["max_new_tokens", "max_completion_tokens", "max_tokens"];

/// One request of a client.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) request: GenerateRequest,
    /// What the client gives it.
    pub(super) deadline: Option<Duration>,
    pub(super) output: Output,
    pub(super) stream: bool,
}

impl Order {
    /// What every endpoint has in common.
    ///
    /// # Errors
    /// Fields that contradict each other, or ask for what this version does not have.
    pub(super) fn new(mut fields: Fields, id: &RequestId, said: Said) -> Result<Self, Failure> {
        let previews = narrow(fields.whole("partial_images")).unwrap_or(0);
        if previews > 0 && !fields.flag("stream") {
            let reason = "partial_images above 0 needs stream, or nobody would see them";
            return Err(Failure::invalid("partial_images", reason));
        }
        if let Some(user) = fields.text("user") {
            tracing::debug!(request_id = %id, user, "request of a named user");
        }
        if fields.whole("steps").is_some() && fields.word("quality").is_some_and(|q| q != "auto") {
            let reason = "quality must be auto or absent when steps is given";
            return Err(Failure::invalid("quality", reason));
        }
        let request = GenerateRequest {
            request_id: id.to_string(),
            model: fields.text("model").unwrap_or_default(),
            mode: mode(&fields, said.text_only)?.into(),
            images: images(said.images),
            sampling: Some(sampling(&fields)?),
            drop_think: fields.flag_given("drop_think"),
            align_image_size: fields.flag("align_image_size"),
            system_prompt_name: fields.text("system_prompt_name").unwrap_or_default(),
            prompt: said.prompt,
            size: fields.text("size").unwrap_or_default(),
            size_policy: match fields.word("size_policy") {
                Some("snap") => SizePolicy::Snap.into(),
                _ => SizePolicy::Exact.into(),
            },
            steps: narrow(fields.whole("steps")),
            seed: fields.whole("seed"),
            guidance: fields.number("guidance"),
            template: fields.word("template").unwrap_or_default().to_owned(),
            system_prompt: said.system_prompt,
            n: narrow(fields.whole("n")).unwrap_or(1),
            quality: match fields.word("quality") {
                Some("low") => Quality::Low.into(),
                Some("medium") => Quality::Medium.into(),
                Some("high" | "hd") => Quality::High.into(),
                _ => Quality::Unspecified.into(),
            },
            previews,
            preview_kind: match fields.word("preview_kind") {
                Some("vae") => PreviewKind::Vae.into(),
                _ => PreviewKind::Linear.into(),
            },
            priority: match fields.word("priority") {
                Some("interactive") => Priority::Interactive.into(),
                Some("background") => Priority::Background.into(),
                _ => Priority::Standard.into(),
            },
            on_prefix_loss: match fields.word("on_prefix_loss") {
                Some("recompute") => LossPolicy::Recompute.into(),
                Some("wait") => LossPolicy::Wait.into(),
                _ => LossPolicy::Fail.into(),
            },
            transfer_timeout_ms: narrow(fields.whole("transfer_timeout_ms")).unwrap_or(0),
        };
        Ok(Self {
            request,
            deadline: fields.number("deadline").map(Duration::from_secs_f64),
            output: output(&fields)?,
            stream: fields.flag("stream"),
        })
    }
}

/// What the model writes; an answer in words has no other mode, and no format of pictures.
fn mode(fields: &Fields, text_only: bool) -> Result<Mode, Failure> {
    let of_pictures = ["mode", "output_format", "output_compression"];
    let given = |name: &&&'static str| fields.word(name).is_some() || fields.whole(name).is_some();
    match of_pictures.iter().find(given) {
        Some(name) if text_only => {
            let reason = format!("{name} must be absent when the answer is text alone");
            Err(Failure::invalid(name, reason))
        }
        _ if text_only => Ok(Mode::Text),
        _ => Ok(match fields.word("mode") {
            Some("think") => Mode::Think,
            Some("recaption") => Mode::Recaption,
            Some("think_recaption") => Mode::ThinkRecaption,
            Some(_) => Mode::Image,
            None => Mode::Unspecified,
        }),
    }
}

fn images(sources: Vec<Source>) -> Vec<InputImage> {
    let image = |source| InputImage {
        source: Some(source),
    };
    sources.into_iter().map(image).collect()
}

fn sampling(fields: &Fields) -> Result<Sampling, Failure> {
    let mut limits = TOKEN_LIMITS
        .iter()
        .filter_map(|name| Some((*name, fields.whole(name)?)));
    let limit = limits.next();
    if let Some((other, _)) = limits.next() {
        let reason = format!("{other} must be absent when the same is given by another name");
        return Err(Failure::invalid(other, reason));
    }
    Ok(Sampling {
        temperature: fields.number("temperature"),
        top_k: narrow(fields.whole("top_k")),
        top_p: fields.number("top_p"),
        repetition_penalty: fields.number("repetition_penalty"),
        seed: fields.whole("sampling_seed"),
        max_new_tokens: narrow(limit.map(|(_, tokens)| tokens)),
    })
}

/// The table has checked the bounds, which are far below those of the type.
fn narrow<T: TryFrom<u64>>(value: Option<u64>) -> Option<T> {
    debug_assert!(value.is_none_or(|value| value <= MAX_SEED));
    value.and_then(|value| T::try_from(value).ok())
}

fn output(fields: &Fields) -> Result<Output, Failure> {
    let named = fields.word("output_format").and_then(Format::of_name);
    let format = named.unwrap_or(Format::Png);
    let compression = narrow(fields.whole("output_compression")).unwrap_or(BEST);
    if format == Format::Png && compression != BEST {
        let reason = format!("output_compression must be {BEST} or absent for png, it is lossless");
        return Err(Failure::invalid("output_compression", reason));
    }
    Ok(Output {
        format,
        compression,
    })
}
