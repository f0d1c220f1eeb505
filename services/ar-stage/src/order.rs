//! What a request asks of this stage, understood.
use base::Failure;
use model::{
    Model, Template,
    text::{Sampling, Writing},
};
use proto::v1::{PrefillRequest, PrefillSampling, PrefillSize, PrefillTask};
use stage::StageError;

/// Most tokens of one text, whatever was asked for.
pub(crate) const MAX_NEW_TOKENS: usize = base::limits::MAX_NEW_TOKENS as usize;

/// What is done before the prefix is built, or instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Nothing.
    Draw,
    /// Text for the picture.
    Write(Writing),
    /// Text alone.
    Text,
}

/// Where the size of the picture comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    /// The caller.
    Given { height: usize, width: usize },
    /// The model names it.
    Model,
    /// The bucket of the first picture.
    FirstPicture,
}

/// A request whose fields are understood.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) prompt: String,
    /// Whose request it is; empty: nobody's in particular.
    pub(crate) tenant: String,
    pub(crate) system_prompt: Option<String>,
    /// Of the system prompt, if it was chosen by name.
    pub(crate) fingerprint: String,
    pub(crate) template: Template,
    pub(crate) task: Task,
    pub(crate) size: Size,
    pub(crate) negative_row: bool,
    pub(crate) drop_think: bool,
    /// The image takes the shape of a shown picture.
    pub(crate) align: bool,
    pub(crate) sampling: Sampling,
    pub(crate) max_new: usize,
}

fn invalid(field: &'static str, reason: &str) -> StageError {
    StageError::Other(Failure::invalid(field, format!("{field} {reason}")))
}

impl Order {
    /// Reads the request. The texts' own bounds are the layout's to check.
    pub(crate) fn new(request: &PrefillRequest, model: &Model) -> Result<Self, StageError> {
        let generation = &model.config().generation;
        let template = match request.template.as_str() {
            "" => generation.template,
            name => name.parse().map_err(|_| {
                invalid(
                    "template",
                    &format!("is {name:?}, not pretrain or instruct"),
                )
            })?,
        };
        let task = match request.task() {
            PrefillTask::Unspecified => Task::Draw,
            PrefillTask::Think => Task::Write(Writing::Think),
            PrefillTask::Recaption => Task::Write(Writing::Recaption),
            PrefillTask::ThinkRecaption => Task::Write(Writing::ThinkRecaption),
            PrefillTask::Text => Task::Text,
        };
        let size = match request.size_from() {
            PrefillSize::Model => Size::Model,
            PrefillSize::FirstImage if request.images.is_empty() => {
                return Err(invalid("size", "of the first picture needs a picture"));
            }
            PrefillSize::FirstImage => Size::FirstPicture,
            PrefillSize::Unspecified => Size::Given {
                height: request.height as usize,
                width: request.width as usize,
            },
        };
        let (system_prompt, fingerprint) = system_prompt(request, task, model)?;
        Ok(Self {
            prompt: request.prompt.clone(),
            tenant: request.tenant.clone(),
            system_prompt,
            fingerprint,
            template,
            task,
            size,
            negative_row: request.negative_row,
            drop_think: request.drop_think.unwrap_or(generation.drop_think),
            align: request.align_image_size,
            sampling: sampling(request, model)?,
            max_new: request
                .sampling
                .as_ref()
                .and_then(|sampling| sampling.max_new_tokens)
                .map_or(generation.max_new_tokens, |tokens| tokens as usize)
                .clamp(1, MAX_NEW_TOKENS),
        })
    }
}

/// The request's numbers, else the model's; a model that does not sample by itself takes the most likely
/// token unless it is given a temperature.
fn sampling(request: &PrefillRequest, model: &Model) -> Result<Sampling, StageError> {
    let generation = &model.config().generation;
    let own = if generation.do_sample {
        generation.temperature
    } else {
        0.0
    };
    let asked: PrefillSampling = request.sampling.unwrap_or_default();
    let sampling = Sampling {
        temperature: asked.temperature.unwrap_or(own),
        top_k: asked.top_k.map_or(generation.top_k, |k| k as usize),
        top_p: asked.top_p.unwrap_or(generation.top_p),
        repetition_penalty: (asked.repetition_penalty).unwrap_or(generation.repetition_penalty),
        seed: request.seed,
    };
    let finite = [
        sampling.temperature,
        sampling.top_p,
        sampling.repetition_penalty,
    ];
    if finite.iter().any(|v| !v.is_finite() || *v < 0.0) || sampling.repetition_penalty == 0.0 {
        return Err(invalid("sampling", "must be of finite, positive numbers"));
    }
    Ok(sampling)
}

/// The system text and, when it was chosen by name, its fingerprint.
fn system_prompt(
    request: &PrefillRequest,
    task: Task,
    model: &Model,
) -> Result<(Option<String>, String), StageError> {
    let prompts = model.system_prompts()?;
    let own = Some(request.system_prompt.clone()).filter(|text| !text.is_empty());
    let named = |name: &str| {
        prompts.get(name).ok_or_else(|| {
            let known: Vec<_> = prompts.iter().map(|prompt| prompt.name).collect();
            let known = match known.len() {
                0 => "it has none".to_owned(),
                _ => format!("it has {}", known.join(", ")),
            };
            let reason = format!("{name:?} is none of this model, {known}");
            invalid("system_prompt_name", &reason)
        })
    };
    let selector = request.system_prompt_name.as_str();
    // HunyuanImage-3.0: the selector of "dynamic" follows the task; tasks without one take the caller's text.
    let dynamic = match task {
        Task::Write(Writing::Think) => Some("en_think_recaption"),
        Task::Write(Writing::Recaption) => Some("en_recaption"),
        Task::Draw => Some("en_vanilla"),
        Task::Write(Writing::ThinkRecaption) | Task::Text => None,
    };
    let chosen = match selector {
        "none" => return Ok((None, String::new())),
        "" if own.is_some() => None,
        "" => prompts.get(&model.config().generation.system_prompt),
        "dynamic" => dynamic.map(named).transpose()?,
        name => Some(named(name)?),
    };
    Ok(match chosen {
        Some(prompt) => (
            Some(prompt.text().to_owned()).filter(|text| !text.is_empty()),
            prompt.fingerprint.clone(),
        ),
        None => (own, String::new()),
    })
}
