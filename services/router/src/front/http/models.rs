//! `/v1/models`: what is served right now.
use axum::{
    Json,
    extract::{Path, State},
};
use proto::v1::ModelInfo;
use serde_json::{Value, json};

use super::{Desk, answer::mode_name, error::HttpError};
use crate::{RouterError, sizes, validate::writing::default_mode};

/// Every model that has all of its stages.
pub(super) async fn list(State(desk): State<Desk>) -> Json<Value> {
    let models = desk.0.context.members.models();
    let data: Vec<_> = models.iter().map(|model| card(model, &desk)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// One of them.
pub(super) async fn retrieve(
    State(desk): State<Desk>,
    Path(name): Path<String>,
) -> Result<Json<Value>, HttpError> {
    let models = desk.0.context.members.models();
    let found = models.iter().find(|model| model.name == name);
    found
        .map(|model| Json(card(model, &desk)))
        .ok_or_else(|| RouterError::NoModel(name.chars().take(64).collect()).into())
}

fn card(model: &ModelInfo, desk: &Desk) -> Value {
    let sizes: Vec<_> = model
        .buckets
        .iter()
        .map(|bucket| sizes::size_of(bucket).to_string())
        .collect();
    let prompts: Vec<_> = model
        .system_prompts
        .iter()
        .map(|prompt| json!({ "name": prompt.name, "fingerprint": prompt.fingerprint }))
        .collect();
    json!({
        "id": model.name,
        "object": "model",
        // A checkpoint has no date: since when this router serves.
        "created": desk.0.started,
        "owned_by": "omni",
        "omni": {
            "weights_id": model.weights_id,
            "sizes": sizes,
            "default_steps": model.default_steps,
            "default_guidance": model.default_guidance,
            "default_template": model.default_template,
            "default_mode": mode_name(default_mode(model)),
            "system_prompts": prompts,
            "max_sequence_tokens": model.max_sequence_tokens,
        },
    })
}
