//! Bounds of each field by itself.
use base::{
    RequestId,
    limits::{
        MAX_GUIDANCE, MAX_IMAGES, MAX_PREVIEWS, MAX_PROMPT_CHARS, MAX_SEED, MAX_STEPS,
        MAX_TRANSFER_TIMEOUT,
    },
};
use proto::{
    size::Size,
    v1::{LossPolicy, PreviewKind, Priority, Quality, SizePolicy},
};

use super::{AUTO_SIZE, Loss, MAX_MODEL_CHARS, TEMPLATES};
use crate::{RouterError, sizes};

pub(super) fn request_id(text: &str) -> Result<RequestId, RouterError> {
    if text.is_empty() {
        return Ok(RequestId::generate());
    }
    text.parse().map_err(|_| {
        RouterError::invalid("request_id", "must be 1 to 64 characters of [A-Za-z0-9_-]")
    })
}

pub(super) fn model(name: String) -> Result<String, RouterError> {
    if !within(&name, MAX_MODEL_CHARS) {
        let reason = format!("must be at most {MAX_MODEL_CHARS} characters");
        return Err(RouterError::invalid("model", reason));
    }
    Ok(name)
}

/// A byte is at most a character, so the length in bytes spares counting what cannot fit.
pub(super) fn within(text: &str, characters: usize) -> bool {
    text.len() <= characters * 4 && text.chars().count() <= characters
}

pub(super) fn prompt(text: String) -> Result<String, RouterError> {
    if text.is_empty() {
        return Err(RouterError::invalid("prompt", "must not be empty"));
    }
    if !within(&text, MAX_PROMPT_CHARS) {
        let reason = format!("must be at most {MAX_PROMPT_CHARS} characters");
        return Err(RouterError::invalid("prompt", reason));
    }
    Ok(text)
}

pub(super) fn system_prompt(text: String) -> Result<String, RouterError> {
    if !within(&text, MAX_PROMPT_CHARS) {
        let reason = format!("must be at most {MAX_PROMPT_CHARS} characters");
        return Err(RouterError::invalid("system_prompt", reason));
    }
    Ok(text)
}

/// Form only: which sizes are legal, the model says. An absurd text is refused without one.
pub(super) fn size(text: String) -> Result<String, RouterError> {
    if !text.is_empty() && text != AUTO_SIZE {
        let form = Size {
            width: 1,
            height: 1,
        };
        let any = [proto::v1::Bucket {
            ratio_index: 0,
            height: form.height,
            width: form.width,
        }];
        sizes::choose(&any, &text, SizePolicy::Snap)?;
    }
    Ok(text)
}

pub(super) fn steps(steps: i32) -> Result<u32, RouterError> {
    match u32::try_from(steps) {
        Ok(steps) if (1..=MAX_STEPS).contains(&steps) => Ok(steps),
        _ => Err(RouterError::invalid(
            "steps",
            format!("must be 1 to {MAX_STEPS}, got {steps}"),
        )),
    }
}

pub(super) fn images(n: u32) -> Result<u32, RouterError> {
    if n > MAX_IMAGES {
        let reason = format!("must be 1 to {MAX_IMAGES}, got {n}");
        return Err(RouterError::invalid("n", reason));
    }
    Ok(n.max(1))
}

pub(super) fn previews(count: u32) -> Result<u32, RouterError> {
    if count > MAX_PREVIEWS {
        let reason = format!("must be 0 to {MAX_PREVIEWS}, got {count}");
        return Err(RouterError::invalid("previews", reason));
    }
    Ok(count)
}

pub(super) fn preview_kind(number: i32) -> Result<PreviewKind, RouterError> {
    PreviewKind::try_from(number).map_err(|_| {
        let reason = format!("must be LINEAR or VAE, got number {number}");
        RouterError::invalid("preview_kind", reason)
    })
}

pub(super) fn priority(number: i32) -> Result<Priority, RouterError> {
    Priority::try_from(number).map_err(|_| {
        let reason = format!("must be INTERACTIVE, STANDARD or BACKGROUND, got number {number}");
        RouterError::invalid("priority", reason)
    })
}

pub(super) fn loss(policy: i32, transfer_timeout_ms: u32) -> Result<Loss, RouterError> {
    let policy = match LossPolicy::try_from(policy) {
        Ok(LossPolicy::Unspecified) => LossPolicy::Fail,
        Ok(policy) => policy,
        Err(_) => {
            let reason = format!("must be FAIL, RECOMPUTE or WAIT, got number {policy}");
            return Err(RouterError::invalid("on_prefix_loss", reason));
        }
    };
    let most = MAX_TRANSFER_TIMEOUT.as_millis();
    if u128::from(transfer_timeout_ms) > most {
        let reason = format!("must be 0 to {most}, got {transfer_timeout_ms}");
        return Err(RouterError::invalid("transfer_timeout_ms", reason));
    }
    Ok(Loss {
        policy,
        transfer_timeout_ms,
    })
}

/// Largest seed of the first of `n` images.
pub(super) fn last_start(n: u32) -> u64 {
    MAX_SEED - u64::from(n.saturating_sub(1))
}

pub(super) fn seed(seed: u64, n: u32) -> Result<u64, RouterError> {
    let most = last_start(n);
    if seed > most {
        let images = if n > 1 {
            format!(" for {n} images")
        } else {
            String::new()
        };
        let reason = format!("must be 0 to {most}{images}, got {seed}");
        return Err(RouterError::invalid("seed", reason));
    }
    Ok(seed)
}

pub(super) fn quality(number: i32, steps: Option<u32>) -> Result<Quality, RouterError> {
    let quality = Quality::try_from(number).map_err(|_| {
        let reason = format!("must be LOW, MEDIUM or HIGH, got number {number}");
        RouterError::invalid("quality", reason)
    })?;
    if quality != Quality::Unspecified && steps.is_some() {
        let reason = "must be absent when steps is given, for it only chooses the steps";
        return Err(RouterError::invalid("quality", reason));
    }
    Ok(quality)
}

/// Steps that a quality takes on a model with `default` steps.
pub(super) fn steps_of(quality: Quality, default: u32) -> u32 {
    match quality {
        Quality::Low => (default / 4).max(1),
        Quality::Medium => (default / 2).max(1),
        Quality::High | Quality::Unspecified => default,
    }
}

pub(super) fn guidance(scale: f64) -> Result<f64, RouterError> {
    // A NaN is in no range.
    if !(0.0..=MAX_GUIDANCE).contains(&scale) {
        let reason = format!("must be a number from 0 to {MAX_GUIDANCE}, got {scale}");
        return Err(RouterError::invalid("guidance", reason));
    }
    Ok(scale)
}

pub(super) fn template(name: String) -> Result<String, RouterError> {
    if !name.is_empty() && !TEMPLATES.contains(&name.as_str()) {
        let known = TEMPLATES.join("\" or \"");
        let shown: String = name.chars().take(MAX_MODEL_CHARS).collect();
        let reason = format!("must be \"{known}\", got {shown:?}");
        return Err(RouterError::invalid("template", reason));
    }
    Ok(name)
}
