//! The conversation of a chat request: one user message of text and pictures, and at most one system
//! message before it.
use base::{Code, Failure};
use proto::v1::input_image::Source;
use serde_json::{Map, Value};

use super::{order::Said, pictures};

/// Messages that are looked at.
const MAX_MESSAGES: usize = 2;

fn invalid(reason: &str) -> Failure {
    Failure::invalid("messages", format!("messages {reason}"))
}

fn unbuilt(what: &str) -> Failure {
    let message = format!("messages: {what} is not built in this version");
    Failure::new(Code::Unimplemented, message).with_field("messages")
}

/// Reads the messages.
///
/// # Errors
/// What is no message; what this version does not serve (earlier turns) by its name.
pub(super) fn conversation(messages: &Value) -> Result<Said, Failure> {
    let list = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let list: Vec<_> = list.iter().map(message).collect::<Result<_, _>>()?;
    if list.iter().any(|message| message.role == Role::Assistant) || list.len() > MAX_MESSAGES {
        return Err(unbuilt("a conversation of several turns"));
    }
    let mut list = list.into_iter();
    let (first, second) = (list.next(), list.next());
    match (first, second) {
        (Some(user), None) if user.role == Role::User => Ok(Said {
            prompt: user.text,
            images: user.images,
            ..Said::default()
        }),
        (Some(system), Some(user)) if (system.role, user.role) == (Role::System, Role::User) => {
            Ok(Said {
                prompt: user.text,
                images: user.images,
                system_prompt: system.text,
                ..Said::default()
            })
        }
        (Some(a), Some(b)) if (a.role, b.role) == (Role::User, Role::User) => {
            Err(unbuilt("a conversation of several turns"))
        }
        _ => Err(invalid(
            "must be one user message, and at most one system message before it",
        )),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
}

struct Message {
    role: Role,
    text: String,
    images: Vec<Source>,
}

/// A part of a message.
enum Part<'a> {
    Text(&'a str),
    Image(Source),
}

fn message(value: &Value) -> Result<Message, Failure> {
    let object = value
        .as_object()
        .ok_or_else(|| invalid("must be objects"))?;
    only(object, &["role", "content", "name"])?;
    let role = match object.get("role").and_then(Value::as_str) {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        _ => {
            return Err(invalid(
                "must have the role system, developer, user or assistant",
            ));
        }
    };
    if object.get("name").is_some_and(|name| !name.is_string()) {
        return Err(invalid("must have a string as name"));
    }
    let (mut text, mut images) = (String::new(), Vec::new());
    match object.get("content") {
        Some(Value::String(content)) => text.clone_from(content),
        Some(Value::Array(parts)) => {
            for value in parts {
                match part(value)? {
                    Part::Text(more) => text.push_str(more),
                    Part::Image(_) if role != Role::User => {
                        return Err(invalid("may have pictures in the user message only"));
                    }
                    Part::Image(image) => images.push(image),
                }
            }
        }
        _ => return Err(invalid("must have a string or a list of parts as content")),
    }
    if text.is_empty() && role == Role::User {
        return Err(invalid("must have a user message that is not empty"));
    }
    Ok(Message { role, text, images })
}

fn part(value: &Value) -> Result<Part<'_>, Failure> {
    let object = value
        .as_object()
        .ok_or_else(|| invalid("must have objects as parts"))?;
    match object.get("type").and_then(Value::as_str) {
        Some("text") => {
            only(object, &["type", "text"])?;
            let text = object.get("text").and_then(Value::as_str);
            text.map(Part::Text)
                .ok_or_else(|| invalid("must have a string as text of a part"))
        }
        Some("image_url") => {
            only(object, &["type", "image_url"])?;
            let image = object.get("image_url").and_then(Value::as_object);
            let image = image.ok_or_else(|| invalid("must have an object as image_url"))?;
            only(image, &["url", "detail"])?;
            let url = image.get("url").and_then(Value::as_str);
            let url = url.ok_or_else(|| invalid("must have a string as url of a picture"))?;
            let source = pictures::of_url(url);
            source
                .map(Part::Image)
                .map_err(|reason| invalid(&format!("have a picture that {reason}")))
        }
        _ => Err(invalid("must have parts of type text or image_url")),
    }
}

fn only(object: &Map<String, Value>, known: &[&str]) -> Result<(), Failure> {
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let shown: String = key.chars().take(64).collect();
            Err(invalid(&format!(
                "have no field {shown:?}, only {}",
                known.join(", ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(prompt: &str, system_prompt: &str) -> Said {
        Said {
            prompt: prompt.to_owned(),
            system_prompt: system_prompt.to_owned(),
            ..Said::default()
        }
    }

    #[test]
    fn pictures_of_the_user_message_are_shown() {
        let shown = json!({"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "text", "text": "bluer"},
            {"type": "image_url", "image_url": {"url": "https://a.example/b", "detail": "low"}},
        ]});
        let told = conversation(&json!([shown])).unwrap();
        let address = Source::Url("https://a.example/b".to_owned());
        assert_eq!(told.images, [Source::Data(vec![0; 3]), address]);
        assert_eq!(told.prompt, "bluer");
    }

    #[test]
    fn one_user_message_is_the_prompt_and_a_system_message_goes_before_it() {
        let user = json!({"role": "user", "content": "a fox"});
        let parts = json!({"role": "user", "name": "ann", "content": [
            {"type": "text", "text": "a "}, {"type": "text", "text": "fox"},
        ]});
        let system = json!({"role": "developer", "content": "be brief"});
        assert_eq!(conversation(&json!([user])), Ok(said("a fox", "")));
        assert_eq!(conversation(&json!([parts])), Ok(said("a fox", "")));
        assert_eq!(
            conversation(&json!([system, user])),
            Ok(said("a fox", "be brief"))
        );
    }

    #[test]
    fn what_is_not_built_is_told_from_what_is_wrong() {
        let user = json!({"role": "user", "content": "a fox"});
        let assistant = json!({"role": "assistant", "content": "here"});
        let part = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}});
        let told = json!({"type": "text", "text": "bluer"});
        let by =
            |role: &str, part: &serde_json::Value| json!({"role": role, "content": [part, told]});
        for messages in [json!([user, assistant, user]), json!([user, user])] {
            let error = conversation(&messages).unwrap_err();
            assert_eq!(error.code, Code::Unimplemented, "{messages}");
            assert_eq!(error.field.as_deref(), Some("messages"));
        }
        for messages in [
            json!([]),
            json!(["a fox"]),
            json!([{"role": "system", "content": "x"}]),
            json!([user, {"role": "system", "content": "x"}]),
            json!([{"role": "tool", "content": "x"}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": ""}]),
            json!([{"role": "user", "content": "x", "mood": "good"}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "user", "content": [{"type": "audio"}]}]),
            json!([{"role": "user", "content": [part]}]),
            json!([by("system", &part), user]),
            json!([by("user", &json!({"type": "image_url", "image_url": "x"}))]),
            json!([by(
                "user",
                &json!({"type": "image_url", "image_url": {"url": "x"}})
            )]),
            json!([by(
                "user",
                &json!({"type": "image_url", "image_url": {"uri": "x"}})
            )]),
        ] {
            let error = conversation(&messages).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{messages}");
            assert_eq!(error.field.as_deref(), Some("messages"));
        }
    }
}
