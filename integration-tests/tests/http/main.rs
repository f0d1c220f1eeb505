//! The HTTP API of a running system, as clients of the OpenAI API see it.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod conform;
mod document;
mod images;
mod leaving;
mod python;
mod status;

use serde_json::{Value, json};

/// Paths of the API.
const IMAGES: &str = "/v1/images/generations";
const EDITS: &str = "/v1/images/edits";
const CHAT: &str = "/v1/chat/completions";

/// A small request that succeeds.
fn wish(prompt: &str) -> Value {
    json!({ "prompt": prompt, "size": "256x256", "steps": 2, "seed": 1, "guidance": 3.0 })
}

/// `json` with other and more fields.
fn with(mut json: Value, more: Value) -> Value {
    let Value::Object(more) = more else {
        panic!("not an object")
    };
    for (name, value) in more {
        json[name] = value;
    }
    json
}
