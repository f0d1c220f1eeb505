//! The conversation of a chat request: one user message of text, and at most one system message
//! before it.
use base::{Code, Failure};
use serde_json::{Map, Value};

/// Messages that are looked at.
const MAX_MESSAGES: usize = 2;

/// What the model is told.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) prompt: String,
    pub(super) system_prompt: String,
}

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
/// What is no message; what this version does not serve (earlier turns, pictures) by its name.
pub(super) fn conversation(messages: &Value) -> Result<Conversation, Failure> {
    let list = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let list: Vec<_> = list.iter().map(message).collect::<Result<_, _>>()?;
    if list.iter().any(|message| message.role == Role::Assistant) || list.len() > MAX_MESSAGES {
        return Err(unbuilt("a conversation of several turns"));
    }
    let mut list = list.into_iter();
    let (first, second) = (list.next(), list.next());
    match (first, second) {
        (Some(user), None) if user.role == Role::User => Ok(Conversation {
            prompt: user.text,
            system_prompt: String::new(),
        }),
        (Some(system), Some(user)) if (system.role, user.role) == (Role::System, Role::User) => {
            Ok(Conversation {
                prompt: user.text,
                system_prompt: system.text,
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
    let text = match object.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let parts = parts.iter().map(part).collect::<Result<Vec<_>, _>>()?;
            parts.concat()
        }
        _ => return Err(invalid("must have a string or a list of parts as content")),
    };
    if text.is_empty() && role == Role::User {
        return Err(invalid("must have a user message that is not empty"));
    }
    Ok(Message { role, text })
}

fn part(value: &Value) -> Result<&str, Failure> {
    let object = value
        .as_object()
        .ok_or_else(|| invalid("must have objects as parts"))?;
    match object.get("type").and_then(Value::as_str) {
        Some("text") => {
            only(object, &["type", "text"])?;
            let text = object.get("text").and_then(Value::as_str);
            text.ok_or_else(|| invalid("must have a string as text of a part"))
        }
        Some("image_url") => Err(unbuilt("a picture in a message")),
        _ => Err(invalid("must have parts of type text")),
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

    fn said(prompt: &str, system_prompt: &str) -> Conversation {
        Conversation {
            prompt: prompt.to_owned(),
            system_prompt: system_prompt.to_owned(),
        }
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
        let picture = json!({"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        ]});
        for messages in [
            json!([user, assistant, user]),
            json!([user, user]),
            json!([picture]),
        ] {
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
        ] {
            let error = conversation(&messages).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{messages}");
            assert_eq!(error.field.as_deref(), Some("messages"));
        }
    }
}
