//! The OpenAPI document: requests out of the table that parses them, answers as [`super::answer`]
//! and [`super::events`] write them.
use base::limits::MAX_EDIT_BYTES;
use serde_json::{Map, Value, json};

use super::{
    error::{KINDS, REQUEST_ID},
    fields::{Endpoint, Field, Kind, fields},
};

/// Version of OpenAPI.
const OPENAPI: &str = "3.1.0";
/// What `size` looks like; which sizes are legal, the model says.
const SIZE_PATTERN: &str = "^(auto|[1-9][0-9]*x[1-9][0-9]*)$";

/// The document of this version.
pub fn document() -> Value {
    json!({
        "openapi": OPENAPI,
        "info": {
            "title": "Omni",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            "description": "Images of HunyuanImage-3.0 for clients of the OpenAI API. Fields marked \
                x-omni-extension are ours. A field that is not named here is refused by name.",
        },
        "paths": {
            "/v1/images/generations": { "post": post(
                Endpoint::Generations, "createImage", "Make images from a prompt",
                "ImagesResponse", "ImageEvent",
            ) },
            "/v1/images/edits": { "post": post(
                Endpoint::Edits, "createImageEdit",
                "Make images from pictures and a prompt",
                "ImagesResponse", "ImageEvent",
            ) },
            "/v1/chat/completions": { "post": post(
                Endpoint::Chat, "createChatCompletion", "Answer one user message with images or words",
                "ChatCompletion", "ChatCompletionChunk",
            ) },
            "/v1/models": { "get": get("listModels", "What is served now", "Models", json!([])) },
            "/v1/models/{model}": { "get": get(
                "retrieveModel", "One model", "Model",
                json!([{ "name": "model", "in": "path", "required": true,
                    "schema": { "type": "string" } }]),
            ) },
        },
        "components": { "schemas": schemas(), "headers": {
            REQUEST_ID: { "schema": { "type": "string" },
                "description": "The request's own id, or the one it was given" },
        } },
    })
}

fn reference(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn request_name(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Generations => "ImagesRequest",
        Endpoint::Edits => "ImageEditRequest",
        Endpoint::Chat => "ChatCompletionRequest",
    }
}

fn post(endpoint: Endpoint, id: &str, summary: &str, answer: &str, event: &str) -> Value {
    let body = reference(request_name(endpoint));
    let mut responses = errors();
    responses.insert(
        "200".to_owned(),
        json!({
            "description": "Every image that was asked for",
            "headers": { REQUEST_ID: { "$ref": format!("#/components/headers/{REQUEST_ID}") } },
            "content": {
                "application/json": { "schema": reference(answer) },
                "text/event-stream": { "schema": reference(event) },
            },
        }),
    );
    json!({
        "operationId": id,
        "summary": summary,
        "parameters": [{
            "name": REQUEST_ID, "in": "header", "required": false,
            "description": "Names the request; the answer has the same. Absent: one is made up.",
            "schema": { "type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$" },
        }],
        "requestBody": {
            "required": true,
            "content": {
                "application/json": { "schema": body },
                "multipart/form-data": { "schema": body },
            },
        },
        "responses": responses,
    })
}

fn get(id: &str, summary: &str, answer: &str, parameters: Value) -> Value {
    let mut responses = errors();
    let content = json!({ "application/json": { "schema": reference(answer) } });
    let good = json!({ "description": summary, "content": content });
    responses.insert("200".to_owned(), good);
    json!({
        "operationId": id, "summary": summary, "parameters": parameters, "responses": responses,
    })
}

/// Every status is one of [`base::Code`], or one of the few that only HTTP has.
fn errors() -> Map<String, Value> {
    let content = json!({ "application/json": { "schema": reference("ErrorResponse") } });
    ["4XX", "5XX"]
        .into_iter()
        .zip(["The caller's fault", "The server's fault, or not built"])
        .map(|(status, about)| {
            (
                status.to_owned(),
                json!({ "description": about, "content": content }),
            )
        })
        .collect()
}

fn request(endpoint: Endpoint) -> Value {
    let properties: Map<String, Value> = fields(endpoint)
        .map(|field| (field.name.to_owned(), property(field)))
        .collect();
    let required: Vec<_> = fields(endpoint)
        .filter(|field| field.required)
        .map(|field| field.name)
        .collect();
    json!({
        "type": "object", "additionalProperties": false,
        "properties": properties, "required": required,
    })
}

fn property(field: &Field) -> Value {
    let mut property = match field.kind {
        Kind::Text(most) => json!({ "type": "string", "maxLength": most }),
        Kind::Whole(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Kind::Number(least, most) => json!({ "type": "number", "minimum": least, "maximum": most }),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Word(words) => json!({ "type": "string", "enum": words }),
        Kind::Words(words) => json!({
            "type": "array", "maxItems": words.len(),
            "items": { "type": "string", "enum": words },
        }),
        Kind::Size => json!({ "type": "string", "pattern": SIZE_PATTERN }),
        Kind::Messages => json!({
            "type": "array", "minItems": 1, "maxItems": 2, "items": reference("ChatMessage"),
        }),
        Kind::Pictures(most) => json!({
            "description": field.about,
            "anyOf": [
                reference("Picture"),
                { "type": "array", "minItems": 1, "maxItems": most, "items": reference("Picture") },
            ],
        }),
    };
    property["description"] = field.about.into();
    if field.extension {
        property["x-omni-extension"] = true.into();
    }
    property
}

fn object(properties: Value) -> Value {
    let names = properties.as_object().map(Map::keys);
    let required: Vec<_> = names.into_iter().flatten().cloned().collect();
    json!({
        "type": "object", "additionalProperties": false,
        "properties": properties, "required": required,
    })
}

fn list(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}

fn word(only: &str) -> Value {
    json!({ "type": "string", "const": only })
}

fn schemas() -> Value {
    let mut all = Map::new();
    for endpoint in [Endpoint::Generations, Endpoint::Edits, Endpoint::Chat] {
        all.insert(request_name(endpoint).to_owned(), request(endpoint));
    }
    all.extend([
        ("Picture".to_owned(), picture()),
        ("ChatMessage".to_owned(), chat_message()),
        ("Omni".to_owned(), omni()),
        ("ImagesResponse".to_owned(), images_response()),
        ("ImageEvent".to_owned(), image_event()),
        ("ChatCompletion".to_owned(), chat_completion()),
        ("ChatCompletionChunk".to_owned(), chat_chunk()),
        ("Model".to_owned(), model()),
        ("ErrorResponse".to_owned(), error_response()),
        (
            "Models".to_owned(),
            object(json!({ "object": word("list"), "data": list(reference("Model")) })),
        ),
    ]);
    Value::Object(all)
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn whole() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn number() -> Value {
    json!({ "type": "number", "minimum": 0 })
}

fn picture() -> Value {
    json!({
        "description": format!(
            "A PNG, JPEG, WebP or GIF picture: a file of a form, or a URL in JSON (of data, or of a \
            place that this server may fetch from), as a string or under image_url. Turned upright, \
            flattened on white, of an animation the first frame. A request of at most \
            {MAX_EDIT_BYTES} bytes."
        ),
        "anyOf": [
            { "type": "string" },
            object(json!({ "image_url": text() })),
        ],
    })
}

fn chat_message() -> Value {
    let words = object(json!({ "type": word("text"), "text": text() }));
    let url = json!({
        "type": "object", "additionalProperties": false, "required": ["url"],
        "properties": { "url": text(), "detail": text() },
    });
    let picture = object(json!({ "type": word("image_url"), "image_url": url }));
    let part = json!({ "anyOf": [words, picture] });
    json!({
        "type": "object", "additionalProperties": false, "required": ["role", "content"],
        "properties": {
            "role": { "type": "string", "enum": ["system", "developer", "user", "assistant"] },
            "name": text(),
            "content": { "anyOf": [text(), list(part)] },
        },
    })
}

fn omni() -> Value {
    let milliseconds = [
        "queue_ms",
        "prefill_ms",
        "transfer_ms",
        "denoise_ms",
        "decode_ms",
        "encode_ms",
        "total_ms",
    ];
    let timings: Map<String, Value> = milliseconds
        .iter()
        .map(|name| ((*name).to_owned(), number()))
        .collect();
    let image = json!({ "index": whole(), "seed": whole(), "worker": text() });
    let prefix = json!({
        "recomputed": whole(), "waits": whole(), "reason": text(), "cached_rows": whole(),
    });
    let mut schema = object(json!({
        "request_id": text(), "model": text(), "size": { "type": "string", "pattern": SIZE_PATTERN },
        "n": whole(), "seed": whole(), "steps": whole(), "guidance": number(), "template": text(),
        "images": list(object(image)), "ar_stage": text(), "transport": text(),
        "transfer_bytes": whole(), "timings": object(timings.into()), "mode": text(),
        "on_prefix_loss": { "type": "string", "enum": ["fail", "recompute", "wait"] },
        "prefix": object(prefix),
    }));
    // Words alone have no size.
    if let Some(required) = schema["required"].as_array_mut() {
        required.retain(|name| name != "size");
    }
    schema["properties"]["writing"] = object(json!({
        "text": text(), "tokens": whole(), "cut": { "type": "boolean" },
        "size_fallback": { "type": "boolean" }, "reused_tokens": whole(), "system_prompt": text(),
    }));
    schema["description"] = "What was really run: effective size, seed, steps and guidance; which \
        members worked; what carried the prefix, and what became of it where it was lost; milliseconds, of several images the longest. Where \
        the model wrote or chose a size, writing says what: the text, whether the token limit cut it, \
        whether no size was named and the square one taken, the tokens of the prefix that came from \
        the text, the fingerprint of the system prompt that was used by name"
        .into();
    schema
}

fn images_response() -> Value {
    let details = object(json!({ "text_tokens": whole(), "image_tokens": whole() }));
    let usage = object(json!({
        "input_tokens": whole(), "input_tokens_details": details, "output_tokens": whole(),
        "total_tokens": whole(),
    }));
    object(json!({
        "created": whole(), "data": list(object(json!({ "b64_json": text() }))),
        "background": word("opaque"), "size": text(), "usage": usage, "omni": reference("Omni"),
        "output_format": { "type": "string", "enum": ["png", "jpeg", "webp"] },
    }))
}

fn image_event() -> Value {
    json!({
        "type": "object", "required": ["type"],
        "description": "Events by type: omni.accepted (what will run), omni.queued, omni.text (a \
            piece of what is written), omni.written (all of it, and the size), omni.step (step, steps, index), image_generation.completed (one an image: b64_json, \
            image_index; the last one with usage and the whole omni object), error (then it ends).",
        "properties": {
            "type": { "type": "string", "enum": [
                "omni.accepted", "omni.queued", "omni.text", "omni.written", "omni.step",
                "image_generation.completed", "error",
            ] },
            "omni": { "type": "object" },
            "b64_json": text(), "created_at": whole(), "background": text(), "size": text(),
            "output_format": text(), "image_index": whole(), "usage": { "type": "object" },
            "error": { "type": "object" },
        },
    })
}

fn chat_images() -> Value {
    let url = object(json!({ "url": text() }));
    list(object(
        json!({ "type": word("image_url"), "image_url": url }),
    ))
}

fn chat_usage() -> Value {
    object(json!({
        "prompt_tokens": whole(), "completion_tokens": whole(), "total_tokens": whole(),
    }))
}

/// An answer in words may reach its token limit.
fn finish() -> Value {
    json!({ "type": "string", "enum": ["stop", "length"] })
}

fn chat_completion() -> Value {
    let message = object(json!({
        "role": word("assistant"), "content": text(), "images": chat_images(),
    }));
    let choice = json!({ "index": whole(), "message": message, "finish_reason": finish() });
    object(json!({
        "id": text(), "object": word("chat.completion"), "created": whole(), "model": text(),
        "choices": list(object(choice)), "usage": chat_usage(), "omni": reference("Omni"),
    }))
}

fn chat_chunk() -> Value {
    let delta = json!({
        "type": "object", "additionalProperties": false,
        "properties": { "role": word("assistant"), "content": text(), "images": chat_images() },
    });
    let finish = json!({ "type": ["string", "null"], "enum": ["stop", "length", null] });
    let choice = object(json!({ "index": whole(), "delta": delta, "finish_reason": finish }));
    json!({
        "type": "object",
        "description": "Progress is in omni, by its type: accepted, queued, written, step. The last \
            chunk has a finish_reason, the whole omni object and usage; then comes [DONE].",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": text(), "object": word("chat.completion.chunk"), "created": whole(),
            "model": text(), "choices": list(choice), "omni": { "type": "object" },
            "usage": chat_usage(),
        },
    })
}

fn model() -> Value {
    let omni = object(json!({
        "weights_id": text(), "sizes": list(text()), "default_steps": whole(),
        "default_guidance": number(), "default_template": text(), "max_sequence_tokens": whole(),
        "default_mode": text(),
        "system_prompts": list(object(json!({ "name": text(), "fingerprint": text() }))),
    }));
    object(json!({
        "id": text(), "object": word("model"), "created": whole(), "owned_by": text(), "omni": omni,
    }))
}

fn error_response() -> Value {
    let codes: Vec<_> = base::Code::all()
        .map(|code| code.name().to_ascii_lowercase())
        .collect();
    object(json!({ "error": object(json!({
        "message": text(),
        "type": { "type": "string", "enum": KINDS },
        "param": { "type": ["string", "null"] },
        "code": { "type": "string", "enum": codes },
    })) }))
}
