//! What clients read: the images, and the `omni` object that says what was really run.
use base::{Code, Failure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use proto::v1::{Accepted, Done, Image, Mode, Timings, Written};
use serde_json::{Map, Value, json};

use super::encode::Output;
use crate::validate::policy_name;

/// An image in the format that was asked for.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) index: u32,
    pub(super) seed: u64,
    pub(super) worker: String,
    pub(super) bytes: Vec<u8>,
    pub(super) encode_ms: f64,
}

/// Everything that is the same for all images of a request.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) accepted: Accepted,
    pub(super) output: Output,
    /// When it was accepted, in seconds since the Unix epoch.
    pub(super) created: u64,
    /// What was written, once it was.
    pub(super) written: Option<Written>,
}

impl Picture {
    pub(super) fn new(image: Image, bytes: Vec<u8>, encode_ms: f64) -> Self {
        Self {
            index: image.index,
            seed: image.seed,
            worker: image.worker,
            bytes,
            encode_ms,
        }
    }

    pub(super) fn base64(&self) -> String {
        STANDARD.encode(&self.bytes)
    }

    /// As chat messages carry it.
    pub(super) fn data_url(&self, output: Output) -> String {
        format!(
            "data:image/{};base64,{}",
            output.format.name(),
            self.base64()
        )
    }

    pub(super) fn about(&self) -> Value {
        json!({ "index": self.index, "seed": self.seed, "worker": self.worker })
    }
}

impl Run {
    /// Of the pictures; auto while it is open.
    pub(super) fn size(&self) -> String {
        let written = self.written.as_ref();
        let found = written.map_or((0, 0), |written| (written.width, written.height));
        let given = (self.accepted.width, self.accepted.height);
        match [given, found].into_iter().find(|(width, _)| *width > 0) {
            Some((width, height)) => format!("{width}x{height}"),
            None => "auto".to_owned(),
        }
    }

    fn is_text(&self) -> bool {
        self.accepted.mode() == Mode::Text
    }

    /// Pictures that are to come.
    pub(super) fn pictures(&self) -> u32 {
        if self.is_text() { 0 } else { self.accepted.n }
    }

    /// Why an answer ends.
    pub(super) fn finish(&self) -> &'static str {
        let cut = self.written.as_ref().is_some_and(|written| written.cut);
        if self.is_text() && cut {
            "length"
        } else {
            "stop"
        }
    }

    fn text(&self) -> &str {
        self.written.as_ref().map_or("", |written| &written.text)
    }

    /// What was written, and what it led to.
    fn writing(&self) -> Option<Value> {
        let written = self.written.as_ref()?;
        Some(json!({
            "text": written.text, "tokens": written.tokens, "cut": written.cut,
            "size_fallback": written.size_fallback, "reused_tokens": written.reused_tokens,
            "system_prompt": written.system_prompt,
        }))
    }

    /// What runs; known from the first moment on.
    pub(super) fn effective(&self) -> Map<String, Value> {
        let accepted = &self.accepted;
        let object = json!({
            "request_id": accepted.request_id,
            "model": accepted.model,
            "size": self.size(),
            "n": accepted.n,
            "seed": accepted.seed,
            "steps": accepted.steps,
            "guidance": accepted.guidance,
            "template": accepted.template,
            "mode": mode_name(accepted.mode()),
            "on_prefix_loss": policy_name(accepted.on_prefix_loss()),
        });
        let mut map = match object {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        if self.is_text() {
            map.remove("size");
        }
        map.extend(
            self.writing()
                .map(|writing| ("writing".to_owned(), writing)),
        );
        map
    }

    /// The whole object, once everything is over.
    pub(super) fn omni(&self, pictures: &[&Picture], done: &Done) -> Value {
        let timings = done.timings.clone().unwrap_or_default();
        let Timings {
            queue_ms,
            prefill_ms,
            transfer_ms,
            denoise_ms,
            decode_ms,
            total_ms,
            transport,
            transfer_bytes,
        } = timings;
        let encode_ms = pictures.iter().map(|picture| picture.encode_ms);
        let encode_ms = encode_ms.fold(0.0, f64::max);
        let images: Vec<_> = pictures.iter().map(|picture| picture.about()).collect();
        let mut omni = self.effective();
        omni.extend([
            ("images".to_owned(), images.into()),
            ("ar_stage".to_owned(), done.ar_stage.clone().into()),
            ("transport".to_owned(), transport.into()),
            ("transfer_bytes".to_owned(), transfer_bytes.into()),
            ("prefix".to_owned(), prefix_report(done)),
            (
                "timings".to_owned(),
                json!({
                    "queue_ms": queue_ms, "prefill_ms": prefill_ms, "transfer_ms": transfer_ms,
                    "denoise_ms": denoise_ms, "decode_ms": decode_ms, "encode_ms": encode_ms,
                    "total_ms": total_ms,
                }),
            ),
        ]);
        Value::Object(omni)
    }

    /// Tokens read and made: of the prompt's prefix, and of all images.
    fn tokens(&self, done: &Done) -> (u64, u64) {
        let made = done.image_tokens.saturating_mul(self.accepted.n.into());
        let written = self.written.as_ref().map_or(0, |written| written.tokens);
        let made = made.saturating_add(written.into());
        (u64::from(done.prefix_tokens), made)
    }

    /// In the words of the images API.
    pub(super) fn images_usage(&self, done: &Done) -> Value {
        let (read, made) = self.tokens(done);
        json!({
            "input_tokens": read,
            "input_tokens_details": { "text_tokens": read, "image_tokens": 0 },
            "output_tokens": made,
            "total_tokens": read + made,
        })
    }

    /// In the words of the chat API.
    pub(super) fn chat_usage(&self, done: &Done) -> Value {
        let (read, made) = self.tokens(done);
        json!({ "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made })
    }

    /// Answer of the images API.
    pub(super) fn images(&self, pictures: &[Picture], done: &Done) -> Value {
        let data: Vec<_> = pictures
            .iter()
            .map(|picture| json!({ "b64_json": picture.base64() }))
            .collect();
        json!({
            "created": self.created,
            "data": data,
            "background": "opaque",
            "output_format": self.output.format.name(),
            "size": self.size(),
            "usage": self.images_usage(done),
            "omni": self.omni(&pictures.iter().collect::<Vec<_>>(), done),
        })
    }

    /// Answer of the chat API: one choice an image, or one of words alone.
    pub(super) fn chat(&self, pictures: &[Picture], done: &Done) -> Value {
        let choice = |index: u32, images: Value| {
            let message = json!({
                "role": "assistant", "content": self.text(), "images": images,
            });
            json!({ "index": index, "message": message, "finish_reason": self.finish() })
        };
        let with_picture =
            |picture: &Picture| choice(picture.index, chat_images(picture, self.output));
        let choices: Vec<_> = match self.is_text() {
            true => vec![choice(0, json!([]))],
            false => pictures.iter().map(with_picture).collect(),
        };
        json!({
            "id": self.accepted.request_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.accepted.model,
            "choices": choices,
            "usage": self.chat_usage(done),
            "omni": self.omni(&pictures.iter().collect::<Vec<_>>(), done),
        })
    }
}

/// What became of the prefixes on their way.
fn prefix_report(done: &Done) -> Value {
    let report = done.prefix.clone().unwrap_or_default();
    json!({
        "recomputed": report.recomputed, "waits": report.waits, "reason": report.reason,
        "cached_rows": report.cached_rows,
    })
}

/// As requests spell it.
pub(super) fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Unspecified | Mode::Image => "image",
        Mode::Think => "think",
        Mode::Recaption => "recaption",
        Mode::ThinkRecaption => "think_recaption",
        Mode::Text => "text",
    }
}

/// The `images` of a chat message.
pub(super) fn chat_images(picture: &Picture, output: Output) -> Value {
    json!([{ "type": "image_url", "image_url": { "url": picture.data_url(output) } }])
}

/// Every image of a request, in order.
///
/// # Errors
/// Fewer or other images than were asked for: the answer is all of them or none.
pub(super) fn complete(mut pictures: Vec<Picture>, n: u32) -> Result<Vec<Picture>, Failure> {
    pictures.sort_by_key(|picture| picture.index);
    let whole = pictures.iter().map(|picture| picture.index).eq(0..n);
    if whole {
        Ok(pictures)
    } else {
        let message = format!("{n} images were asked for, {} came", pictures.len());
        Err(Failure::new(Code::Internal, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_never_has_fewer_images_than_were_asked_for() {
        let picture = |index| Picture {
            index,
            seed: 0,
            worker: String::new(),
            bytes: vec![],
            encode_ms: 0.0,
        };
        let order = complete(vec![picture(2), picture(0), picture(1)], 3).unwrap();
        assert!(order.iter().map(|picture| picture.index).eq(0..3));
        for wrong in [vec![], vec![picture(0)], vec![picture(0), picture(0)]] {
            assert_eq!(complete(wrong, 2).unwrap_err().code, Code::Internal);
        }
    }
}
