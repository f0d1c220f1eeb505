//! From what a client sent to what will be run. Two steps: [`check`] needs no model, so a bad
//! request is told apart from an empty cluster; [`Checked::resolve`] fills in the model's defaults.
use base::{
    RequestId,
    limits::{MAX_GUIDANCE, MAX_SEED, MAX_STEPS},
    rng::Source,
};
use proto::{
    size::Size,
    v1::{
        Accepted, GenerateRequest, LossPolicy, Mode, ModelInfo, PreviewKind, Priority, Quality,
        Sampling, SizePolicy, input_image::Source as Shown,
    },
};

use self::fields::{
    guidance, images, last_start, loss, model, preview_kind, previews, priority, prompt, quality,
    request_id, seed, size, steps, steps_of, system_prompt, template,
};
use crate::{RouterError, sizes};

mod fields;
pub(crate) mod writing;

/// Longest model name that is looked up, in characters.
const MAX_MODEL_CHARS: usize = 256;
/// The prompt templates there are.
const TEMPLATES: [&str; 2] = ["pretrain", "instruct"];
/// The `size` that leaves it to the model.
pub const AUTO_SIZE: &str = "auto";

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
    loss: Loss,
    mode: Mode,
    /// Pictures to show.
    pub images: Vec<Shown>,
    sampling: Sampling,
    drop_think: Option<bool>,
    system_prompt_name: String,
    align_image_size: bool,
}

/// Who decides the size, when the request does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenSize {
    /// The model names one.
    Model,
    /// It is that of the first picture.
    FirstImage,
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
    /// One of the model's sizes; while it is open, the square one, which stands for it in the cost.
    pub size: Size,
    /// Who decides the size, if it is open.
    pub open_size: Option<OpenSize>,
    /// What is made of the prompt.
    pub mode: Mode,
    /// Pictures to show.
    pub images: Vec<Shown>,
    /// How words are chosen.
    pub sampling: Sampling,
    /// Draw without what was thought.
    pub drop_think: Option<bool>,
    /// Selector of a system prompt; may be empty.
    pub system_prompt_name: String,
    /// Images take the shape of a shown picture.
    pub align_image_size: bool,
    /// The model's.
    pub pixels_per_token: u32,
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
    /// What is done when a prefix is lost.
    pub loss: Loss,
}

/// What is done when a prefix does not come to its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Never unspecified.
    pub policy: LossPolicy,
    /// Bound of one transfer; 0: the stages' own.
    pub transfer_timeout_ms: u32,
}

/// As requests spell it.
pub fn policy_name(policy: LossPolicy) -> &'static str {
    match policy {
        LossPolicy::Unspecified | LossPolicy::Fail => "fail",
        LossPolicy::Recompute => "recompute",
        LossPolicy::Wait => "wait",
    }
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
    let sampling = request.sampling.unwrap_or_default();
    writing::sampling(&sampling)?;
    let system_prompt = system_prompt(request.system_prompt)?;
    Ok(Checked {
        mode: writing::mode(request.mode)?,
        images: writing::images(request.images)?,
        sampling,
        drop_think: request.drop_think,
        align_image_size: request.align_image_size,
        system_prompt_name: writing::selector(request.system_prompt_name, &system_prompt)?,
        request_id: request_id(&request.request_id)?,
        model: model(request.model)?,
        prompt: prompt(request.prompt)?,
        system_prompt,
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
        loss: loss(request.on_prefix_loss, request.transfer_timeout_ms)?,
    })
}

impl Checked {
    /// Fills in what the model and chance decide.
    ///
    /// # Errors
    /// A size that the model does not make; a model whose own defaults break the bounds.
    pub fn resolve(self, model: &ModelInfo, chance: &Source) -> Result<ValidRequest, RouterError> {
        let (mode, open_size) = (self.mode_of(model)?, self.open_size());
        let wish = open_size.map_or(self.size.as_str(), |_| "");
        let size = sizes::choose(&model.buckets, wish, self.policy)?;
        let (default_steps, default_guidance) = (model.default_steps, model.default_guidance);
        let default_steps = steps_of(self.quality, default_steps.clamp(1, MAX_STEPS));
        let steps = self.steps.unwrap_or(default_steps);
        let guidance = self
            .guidance
            .unwrap_or(default_guidance.clamp(0.0, MAX_GUIDANCE));
        let rows = if mode == Mode::Text || model.cfg_distilled || guidance <= 1.0 {
            1
        } else {
            2
        };
        let template = if self.template.is_empty() {
            model.default_template.clone()
        } else {
            self.template
        };
        let tokens = match mode {
            Mode::Text => 0,
            _ => tokens(size, model.pixels_per_token),
        };
        let new_tokens = self.sampling.max_new_tokens.unwrap_or(model.max_new_tokens);
        let writing = match mode {
            Mode::Image => 0,
            _ => u64::from(new_tokens),
        };
        Ok(ValidRequest {
            open_size,
            mode,
            images: self.images,
            sampling: self.sampling,
            drop_think: self.drop_think,
            system_prompt_name: self.system_prompt_name,
            align_image_size: self.align_image_size,
            pixels_per_token: model.pixels_per_token,
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
            cost: cost(tokens, steps, rows, self.n).saturating_add(writing),
            previews: self.previews,
            preview_kind: self.preview_kind,
            priority: self.priority,
            loss: self.loss,
        })
    }

    /// The mode, the fields of which fit together and are the model's.
    fn mode_of(&self, model: &ModelInfo) -> Result<Mode, RouterError> {
        let mode = match self.mode {
            Mode::Unspecified => writing::default_mode(model),
            given => given,
        };
        writing::useful(mode, &self.sampling, self.drop_think)?;
        writing::known_selector(&self.system_prompt_name, model)?;
        if mode == Mode::Text {
            self.no_picture()?;
        }
        if self.align_image_size && self.images.is_empty() {
            let reason = "must be absent or false without pictures to align to";
            return Err(RouterError::invalid("align_image_size", reason));
        }
        Ok(mode)
    }

    fn open_size(&self) -> Option<OpenSize> {
        match self.size.as_str() {
            AUTO_SIZE => Some(OpenSize::Model),
            "" if !self.images.is_empty() => Some(OpenSize::FirstImage),
            _ => None,
        }
    }

    /// Refuses what only a picture has.
    fn no_picture(&self) -> Result<(), RouterError> {
        let given = [
            ("size", !self.size.is_empty()),
            ("steps", self.steps.is_some()),
            ("guidance", self.guidance.is_some()),
            ("quality", self.quality != Quality::Unspecified),
            ("n", self.n != 1),
            ("align_image_size", self.align_image_size),
            ("previews", self.previews > 0),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((field, _)) => {
                let reason = "must be absent in mode text, which makes no picture";
                Err(RouterError::invalid(field, reason))
            }
            None => Ok(()),
        }
    }
}

impl ValidRequest {
    /// Seed of image `index`: images that differ in nothing but their seed are the same request.
    pub fn seed_of(&self, index: u32) -> u64 {
        self.seed + u64::from(index)
    }

    /// Seed of everything that chance decides before denoising.
    pub fn prefix_seed(&self) -> u64 {
        self.sampling.seed.unwrap_or(self.seed)
    }

    /// Image tokens of a picture of `size`.
    pub fn tokens_of(&self, size: Size) -> u64 {
        tokens(size, self.pixels_per_token)
    }

    /// What the client is told first.
    pub fn accepted(&self) -> Accepted {
        let found = self.open_size.is_some() || self.align_image_size;
        let open = found || self.mode == Mode::Text;
        let known = |side: u32| if open { 0 } else { side };
        Accepted {
            mode: self.mode.into(),
            request_id: self.request_id.to_string(),
            model: self.model.clone(),
            width: known(self.size.width),
            height: known(self.size.height),
            seed: self.seed,
            steps: self.steps,
            guidance: self.guidance,
            cost: self.cost,
            n: self.n,
            template: self.template.clone(),
            on_prefix_loss: self.loss.policy.into(),
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

#[cfg(test)]
mod tests;
