//! From what a client sent to what will be run. Two steps: [`check`] needs no model, so a bad
//! request is told apart from an empty cluster; [`Checked::resolve`] fills in the model's defaults.
use base::{
    RequestId,
    limits::{MAX_GUIDANCE, MAX_IMAGES, MAX_PREVIEWS, MAX_PROMPT_CHARS, MAX_SEED, MAX_STEPS},
    rng::Source,
};
use proto::{
    size::Size,
    v1::{Accepted, GenerateRequest, ModelInfo, PreviewKind, Priority, Quality, SizePolicy},
};

use crate::{RouterError, sizes};

/// Longest model name that is looked up, in characters.
const MAX_MODEL_CHARS: usize = 256;
/// The prompt templates there are.
const TEMPLATES: [&str; 2] = ["pretrain", "instruct"];

/// A request whose fields are each within their bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    /// Given or generated.
    pub request_id: RequestId,
    /// Empty: the only one served.
    pub model: String,
    prompt: String,
    system_prompt: String,
    size: String,
    policy: SizePolicy,
    steps: Option<u32>,
    seed: Option<u64>,
    guidance: Option<f64>,
    template: String,
    quality: Quality,
    n: u32,
    previews: u32,
    preview_kind: PreviewKind,
    priority: Priority,
}

/// Everything a stage needs to know, nothing left open.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidRequest {
    /// Names it everywhere.
    pub request_id: RequestId,
    /// Name of the model.
    pub model: String,
    /// Weights it must run on.
    pub weights_id: String,
    /// Text of the user.
    pub prompt: String,
    /// Text before it; may be empty.
    pub system_prompt: String,
    /// "pretrain" or "instruct".
    pub template: String,
    /// One of the model's sizes.
    pub size: Size,
    /// Denoising steps, at least 1.
    pub steps: u32,
    /// Seed of the first image's noise; see [`ValidRequest::seed_of`].
    pub seed: u64,
    /// Images, at least 1.
    pub n: u32,
    /// Guidance scale.
    pub guidance: f64,
    /// Rows a step computes: 2 under classifier-free guidance, else 1.
    pub rows: u32,
    /// Image tokens of one image.
    pub tokens: u64,
    /// steps x rows x image tokens x images.
    pub cost: u64,
    /// Previews of each image.
    pub previews: u32,
    /// How they are made.
    pub preview_kind: PreviewKind,
    /// Who goes first.
    pub priority: Priority,
}

/// Checks every field that can be checked without a model.
///
/// # Errors
/// The first field that is out of bounds.
pub fn check(request: GenerateRequest) -> Result<Checked, RouterError> {
    let policy = SizePolicy::try_from(request.size_policy).map_err(|_| {
        let reason = format!("must be EXACT or SNAP, got number {}", request.size_policy);
        RouterError::invalid("size_policy", reason)
    })?;
    let steps = request.steps.map(steps).transpose()?;
    let n = images(request.n)?;
    Ok(Checked {
        request_id: request_id(&request.request_id)?,
        model: model(request.model)?,
        prompt: prompt(request.prompt)?,
        system_prompt: system_prompt(request.system_prompt)?,
        policy,
        steps,
        seed: request.seed.map(|first| seed(first, n)).transpose()?,
        guidance: request.guidance.map(guidance).transpose()?,
        template: template(request.template)?,
        size: size(request.size)?,
        quality: quality(request.quality, steps)?,
        n,
        previews: previews(request.previews)?,
        preview_kind: preview_kind(request.preview_kind)?,
        priority: priority(request.priority)?,
    })
}

impl Checked {
    /// Fills in what the model and chance decide.
    ///
    /// # Errors
    /// A size that the model does not make; a model whose own defaults break the bounds.
    pub fn resolve(self, model: &ModelInfo, chance: &Source) -> Result<ValidRequest, RouterError> {
        let size = sizes::choose(&model.buckets, &self.size, self.policy)?;
        let (default_steps, default_guidance) = (model.default_steps, model.default_guidance);
        let default_steps = steps_of(self.quality, default_steps.clamp(1, MAX_STEPS));
        let steps = self.steps.unwrap_or(default_steps);
        let guidance = self
            .guidance
            .unwrap_or(default_guidance.clamp(0.0, MAX_GUIDANCE));
        let rows = if model.cfg_distilled || guidance <= 1.0 {
            1
        } else {
            2
        };
        let template = if self.template.is_empty() {
            model.default_template.clone()
        } else {
            self.template
        };
        let tokens = tokens(size, model.pixels_per_token);
        Ok(ValidRequest {
            request_id: self.request_id,
            model: model.name.clone(),
            weights_id: model.weights_id.clone(),
            prompt: self.prompt,
            system_prompt: self.system_prompt,
            template,
            size,
            steps,
            seed: self
                .seed
                .unwrap_or_else(|| last_start(self.n).min(chance.next_u64() & MAX_SEED)),
            n: self.n,
            guidance,
            rows,
            tokens,
            cost: cost(tokens, steps, rows, self.n),
            previews: self.previews,
            preview_kind: self.preview_kind,
            priority: self.priority,
        })
    }
}

impl ValidRequest {
    /// Seed of image `index`: images that differ in nothing but their seed are the same request.
    pub fn seed_of(&self, index: u32) -> u64 {
        self.seed + u64::from(index)
    }

    /// What the client is told first.
    pub fn accepted(&self) -> Accepted {
        Accepted {
            request_id: self.request_id.to_string(),
            model: self.model.clone(),
            width: self.size.width,
            height: self.size.height,
            seed: self.seed,
            steps: self.steps,
            guidance: self.guidance,
            cost: self.cost,
            n: self.n,
            template: self.template.clone(),
            ..Accepted::default()
        }
    }
}

/// Image tokens of a picture.
fn tokens(size: Size, pixels_per_token: u32) -> u64 {
    let side = |pixels: u32| u64::from(pixels.div_ceil(pixels_per_token.max(1)));
    side(size.width) * side(size.height)
}

/// steps x rows x image tokens x images: what a request costs the denoiser.
pub fn cost(tokens: u64, steps: u32, rows: u32, n: u32) -> u64 {
    [steps, rows, n]
        .into_iter()
        .fold(tokens, |cost, factor| cost.saturating_mul(factor.into()))
}

fn request_id(text: &str) -> Result<RequestId, RouterError> {
    if text.is_empty() {
        return Ok(RequestId::generate());
    }
    text.parse().map_err(|_| {
        RouterError::invalid("request_id", "must be 1 to 64 characters of [A-Za-z0-9_-]")
    })
}

fn model(name: String) -> Result<String, RouterError> {
    if !within(&name, MAX_MODEL_CHARS) {
        let reason = format!("must be at most {MAX_MODEL_CHARS} characters");
        return Err(RouterError::invalid("model", reason));
    }
    Ok(name)
}

/// A byte is at most a character, so the length in bytes spares counting what cannot fit.
fn within(text: &str, characters: usize) -> bool {
    text.len() <= characters * 4 && text.chars().count() <= characters
}

fn prompt(text: String) -> Result<String, RouterError> {
    if text.is_empty() {
        return Err(RouterError::invalid("prompt", "must not be empty"));
    }
    if !within(&text, MAX_PROMPT_CHARS) {
        let reason = format!("must be at most {MAX_PROMPT_CHARS} characters");
        return Err(RouterError::invalid("prompt", reason));
    }
    Ok(text)
}

fn system_prompt(text: String) -> Result<String, RouterError> {
    if !within(&text, MAX_PROMPT_CHARS) {
        let reason = format!("must be at most {MAX_PROMPT_CHARS} characters");
        return Err(RouterError::invalid("system_prompt", reason));
    }
    Ok(text)
}

/// Form only: which sizes are legal, the model says. An absurd text is refused without one.
fn size(text: String) -> Result<String, RouterError> {
    if !text.is_empty() {
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

fn steps(steps: i32) -> Result<u32, RouterError> {
    match u32::try_from(steps) {
        Ok(steps) if (1..=MAX_STEPS).contains(&steps) => Ok(steps),
        _ => Err(RouterError::invalid(
            "steps",
            format!("must be 1 to {MAX_STEPS}, got {steps}"),
        )),
    }
}

fn images(n: u32) -> Result<u32, RouterError> {
    if n > MAX_IMAGES {
        let reason = format!("must be 1 to {MAX_IMAGES}, got {n}");
        return Err(RouterError::invalid("n", reason));
    }
    Ok(n.max(1))
}

fn previews(count: u32) -> Result<u32, RouterError> {
    if count > MAX_PREVIEWS {
        let reason = format!("must be 0 to {MAX_PREVIEWS}, got {count}");
        return Err(RouterError::invalid("previews", reason));
    }
    Ok(count)
}

fn preview_kind(number: i32) -> Result<PreviewKind, RouterError> {
    PreviewKind::try_from(number).map_err(|_| {
        let reason = format!("must be LINEAR or VAE, got number {number}");
        RouterError::invalid("preview_kind", reason)
    })
}

fn priority(number: i32) -> Result<Priority, RouterError> {
    Priority::try_from(number).map_err(|_| {
        let reason = format!("must be INTERACTIVE, STANDARD or BACKGROUND, got number {number}");
        RouterError::invalid("priority", reason)
    })
}

/// Largest seed of the first of `n` images.
fn last_start(n: u32) -> u64 {
    MAX_SEED - u64::from(n.saturating_sub(1))
}

fn seed(seed: u64, n: u32) -> Result<u64, RouterError> {
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

fn quality(number: i32, steps: Option<u32>) -> Result<Quality, RouterError> {
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
fn steps_of(quality: Quality, default: u32) -> u32 {
    match quality {
        Quality::Low => (default / 4).max(1),
        Quality::Medium => (default / 2).max(1),
        Quality::High | Quality::Unspecified => default,
    }
}

fn guidance(scale: f64) -> Result<f64, RouterError> {
    // A NaN is in no range.
    if !(0.0..=MAX_GUIDANCE).contains(&scale) {
        let reason = format!("must be a number from 0 to {MAX_GUIDANCE}, got {scale}");
        return Err(RouterError::invalid("guidance", reason));
    }
    Ok(scale)
}

fn template(name: String) -> Result<String, RouterError> {
    if !name.is_empty() && !TEMPLATES.contains(&name.as_str()) {
        let known = TEMPLATES.join("\" or \"");
        let shown: String = name.chars().take(MAX_MODEL_CHARS).collect();
        let reason = format!("must be \"{known}\", got {shown:?}");
        return Err(RouterError::invalid("template", reason));
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
