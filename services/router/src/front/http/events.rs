//! Answers as server-sent events. Both dialects tell progress at every step; the last image, or the
//! last chunk, carries the whole `omni` object. An error on the way is the last event.
use std::time::Duration;

use axum::body::{Body, Bytes};
use base::{Code, Failure};
use futures_util::stream;
use proto::v1::{Done, Image, Preview, StepDone, generate_response::Event};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    Desk,
    answer::{Picture, Run, chat_images, complete},
    error::HttpError,
};
use crate::dispatch::Answer;

/// Silence after which a comment is sent, so that nobody between us takes the stream for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Images,
    Chat,
}

/// A stream under way.
struct Feed {
    desk: Desk,
    answers: mpsc::Receiver<Answer>,
    teller: Teller,
    ended: bool,
}

/// Puts events into words.
#[derive(Debug)]
pub(super) struct Teller {
    pub(super) dialect: Dialect,
    pub(super) run: Run,
    /// Bytes of all but the last are dropped once told.
    pub(super) pictures: Vec<Picture>,
}

/// The body of a streamed answer. Dropping it cancels the request.
pub(super) fn body(desk: Desk, answers: mpsc::Receiver<Answer>, teller: Teller) -> Body {
    let opening = teller.opening();
    let feed = Feed {
        desk,
        answers,
        teller,
        ended: false,
    };
    let rest = stream::unfold(feed, |mut feed| async {
        let text = feed.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), feed))
    });
    let first = stream::iter([Ok(Bytes::from(opening))]);
    Body::from_stream(futures_util::StreamExt::chain(first, rest))
}

impl Feed {
    async fn next(&mut self) -> Option<String> {
        if self.ended {
            return None;
        }
        let Ok(answer) = tokio::time::timeout(KEEP_ALIVE, self.answers.recv()).await else {
            return Some(": still here\n\n".to_owned());
        };
        let told = match answer {
            Some(Ok(response)) => self.tell(response.event).await,
            Some(Err(status)) => Err(status.into()),
            None => Err(Failure::new(Code::Internal, "the request ended without a word").into()),
        };
        Some(told.unwrap_or_else(|error| {
            self.ended = true;
            self.teller.error(&error)
        }))
    }

    async fn tell(&mut self, event: Option<Event>) -> Result<String, HttpError> {
        match event {
            Some(Event::Step(step)) => Ok(self.teller.step(&step)),
            Some(Event::Queued(queued)) => {
                let omni =
                    json!({ "type": "queued", "stage": queued.stage, "ahead": queued.ahead });
                Ok(self.teller.progress(None, omni))
            }
            Some(Event::Text(text)) => Ok(self.teller.text(&text.text)),
            Some(Event::Written(written)) => {
                self.teller.run.written = Some(written);
                let mut omni = self.teller.run.effective();
                omni.insert("type".to_owned(), "written".into());
                Ok(self.teller.progress(None, omni.into()))
            }
            Some(Event::Preview(preview)) => {
                let Preview {
                    index,
                    number,
                    width,
                    height,
                    png,
                } = preview;
                let image = Image {
                    index,
                    width,
                    height,
                    png,
                    ..Image::default()
                };
                let size = format!("{width}x{height}");
                let picture = self.desk.draw(image, self.teller.run.output).await?;
                Ok(self.teller.preview(&picture, number, &size))
            }
            Some(Event::Image(image)) => {
                let picture = self.desk.draw(image, self.teller.run.output).await?;
                Ok(self.teller.image(picture))
            }
            Some(Event::Done(done)) => {
                self.ended = true;
                self.teller.done(&done)
            }
            // Told in the opening; and a newer router may say more.
            Some(_) | None => Ok(String::new()),
        }
    }
}

/// One event. JSON has no line breaks of its own.
fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

/// One event without a name, as the chat API has them.
fn chunk(data: &Value) -> String {
    format!("data: {data}\n\n")
}

impl Teller {
    /// What will run.
    fn opening(&self) -> String {
        let mut omni = self.run.effective();
        omni.insert("type".to_owned(), "accepted".into());
        match self.dialect {
            Dialect::Images => self.progress(None, omni.into()),
            Dialect::Chat => {
                let delta = json!({ "role": "assistant", "content": "" });
                let choices = self.every_choice(&delta, &Value::Null);
                chunk(&self.chunk_of(choices, Some(omni.into()), None))
            }
        }
    }

    /// An event that carries no part of the answer. `index`: the image it is about.
    fn progress(&self, index: Option<u32>, omni: Value) -> String {
        match self.dialect {
            Dialect::Images => {
                let kind = format!("omni.{}", omni["type"].as_str().unwrap_or("progress"));
                event(&kind, &json!({ "type": kind, "omni": omni }))
            }
            Dialect::Chat => {
                let index = index.unwrap_or(0);
                let choice = json!({ "index": index, "delta": {}, "finish_reason": null });
                chunk(&self.chunk_of(json!([choice]), Some(omni), None))
            }
        }
    }

    fn step(&self, step: &StepDone) -> String {
        let StepDone { step, steps, index } = *step;
        let omni = json!({ "type": "step", "index": index, "step": step, "steps": steps });
        self.progress(Some(index), omni)
    }

    fn text(&self, text: &str) -> String {
        match self.dialect {
            Dialect::Images => self.progress(None, json!({ "type": "text", "text": text })),
            Dialect::Chat => {
                let choices = self.every_choice(&json!({ "content": text }), &Value::Null);
                chunk(&self.chunk_of(choices, None, None))
            }
        }
    }

    /// The last image waits for the end, so that it can say what everything took.
    fn image(&mut self, mut picture: Picture) -> String {
        let last = self.pictures.len() + 1 >= self.run.accepted.n as usize;
        let told = match self.dialect {
            Dialect::Images if last => String::new(),
            Dialect::Images => self.completed(&picture, None),
            Dialect::Chat => {
                let delta = json!({ "images": chat_images(&picture, self.run.output) });
                let choice = json!({
                    "index": picture.index, "delta": delta, "finish_reason": null,
                });
                chunk(&self.chunk_of(json!([choice]), None, None))
            }
        };
        if !told.is_empty() {
            picture.bytes = Vec::new();
        }
        self.pictures.push(picture);
        told
    }

    fn preview(&self, picture: &Picture, number: u32, size: &str) -> String {
        match self.dialect {
            Dialect::Images => {
                const NAME: &str = "image_generation.partial_image";
                let data = json!({
                    "type": NAME,
                    "b64_json": picture.base64(),
                    "created_at": self.run.created,
                    "background": "opaque",
                    "output_format": self.run.output.format.name(),
                    "size": size,
                    "partial_image_index": number,
                    "image_index": picture.index,
                });
                event(NAME, &data)
            }
            Dialect::Chat => String::new(),
        }
    }

    fn completed(&self, picture: &Picture, done: Option<&Done>) -> String {
        const NAME: &str = "image_generation.completed";
        let mut data = json!({
            "type": NAME,
            "b64_json": picture.base64(),
            "created_at": self.run.created,
            "background": "opaque",
            "output_format": self.run.output.format.name(),
            "size": self.run.size(),
            "image_index": picture.index,
        });
        data["omni"] = match done {
            Some(done) => {
                data["usage"] = self.run.images_usage(done);
                self.run
                    .omni(&self.pictures.iter().collect::<Vec<_>>(), done)
            }
            None => {
                let mut omni = self.run.effective();
                omni.insert("images".to_owned(), json!([picture.about()]));
                omni.into()
            }
        };
        event(NAME, &data)
    }

    fn done(&mut self, done: &Done) -> Result<String, HttpError> {
        let last = self.pictures.last().map(|picture| picture.index);
        let pictures = std::mem::take(&mut self.pictures);
        self.pictures = complete(pictures, self.run.pictures())?;
        match self.dialect {
            Dialect::Images => {
                let last = self
                    .pictures
                    .iter()
                    .find(|picture| Some(picture.index) == last);
                Ok(last.map_or_else(String::new, |picture| self.completed(picture, Some(done))))
            }
            Dialect::Chat => {
                let choices = self.every_choice(&json!({}), &self.run.finish().into());
                let omni = self
                    .run
                    .omni(&self.pictures.iter().collect::<Vec<_>>(), done);
                let usage = self.run.chat_usage(done);
                let last = chunk(&self.chunk_of(choices, Some(omni), Some(usage)));
                Ok(last + "data: [DONE]\n\n")
            }
        }
    }

    fn error(&self, error: &HttpError) -> String {
        let data = json!({ "type": "error", "error": error.object() });
        match self.dialect {
            Dialect::Images => event("error", &data),
            Dialect::Chat => chunk(&data),
        }
    }

    fn every_choice(&self, delta: &Value, finish: &Value) -> Value {
        let choice = |index| json!({ "index": index, "delta": delta, "finish_reason": finish });
        (0..self.run.accepted.n).map(choice).collect()
    }

    fn chunk_of(&self, choices: Value, omni: Option<Value>, usage: Option<Value>) -> Value {
        let mut chunk = json!({
            "id": self.run.accepted.request_id,
            "object": "chat.completion.chunk",
            "created": self.run.created,
            "model": self.run.accepted.model,
            "choices": choices,
        });
        for (name, value) in [("omni", omni), ("usage", usage)] {
            if let Some(value) = value {
                chunk[name] = value;
            }
        }
        chunk
    }
}
