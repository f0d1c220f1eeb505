//! From checked fields to what the router is asked and how the answer is written.
use std::time::Duration;

use base::{Failure, RequestId, limits::MAX_SEED};
use proto::v1::{GenerateRequest, PreviewKind, Priority, Quality, SizePolicy};

use super::{
    encode::{BEST, Format, Output},
    schema::Fields,
};

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
    /// What every endpoint has in common; `prompt` and `system_prompt` come from where the endpoint
    /// keeps them.
    ///
    /// # Errors
    /// Fields that contradict each other, or ask for what this version does not have.
    pub(super) fn new(
        mut fields: Fields,
        id: &RequestId,
        prompt: String,
        system_prompt: String,
    ) -> Result<Self, Failure> {
        let previews = narrow(fields.whole("partial_images")).unwrap_or(0);
        if previews > 0 && !fields.flag("stream") {
            let reason = "partial_images above 0 needs stream, or nobody would see them";
            return Err(Failure::invalid("partial_images", reason));
        }
        if let Some(user) = fields.text("user") {
            tracing::debug!(request_id = %id, user, "request of a named user");
        }
        let size = fields.text("size").unwrap_or_default();
        if fields.whole("steps").is_some() && fields.word("quality").is_some_and(|q| q != "auto") {
            let reason = "quality must be auto or absent when steps is given";
            return Err(Failure::invalid("quality", reason));
        }
        let request = GenerateRequest {
            request_id: id.to_string(),
            model: fields.text("model").unwrap_or_default(),
            prompt,
            size: if size == "auto" { String::new() } else { size },
            size_policy: match fields.word("size_policy") {
                Some("snap") => SizePolicy::Snap.into(),
                _ => SizePolicy::Exact.into(),
            },
            steps: narrow(fields.whole("steps")),
            seed: fields.whole("seed"),
            guidance: fields.number("guidance"),
            template: fields.word("template").unwrap_or_default().to_owned(),
            system_prompt,
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
            ..GenerateRequest::default()
        };
        Ok(Self {
            request,
            deadline: fields.number("deadline").map(Duration::from_secs_f64),
            output: output(&fields)?,
            stream: fields.flag("stream"),
        })
    }
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
