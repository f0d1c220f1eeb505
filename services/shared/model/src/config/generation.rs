//! `generation_config.json`: what a request gets when it does not say otherwise.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use super::fields::Fields;
use crate::error::ModelError;

/// The order of roles and separators around a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Template {
    /// No roles and no separators (base model).
    Pretrain,
    /// `User: ` … `Assistant: ` with `<answer>` around the image (Instruct models).
    Instruct,
}

impl Template {
    /// The name as configs and requests spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pretrain => "pretrain",
            Self::Instruct => "instruct",
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Template {
    type Err = ModelError;

    fn from_str(s: &str) -> Result<Self, ModelError> {
        match s {
            "pretrain" => Ok(Self::Pretrain),
            "instruct" => Ok(Self::Instruct),
            other => Err(ModelError::invalid(
                "template",
                format!("`{other}` is neither pretrain nor instruct"),
            )),
        }
    }
}

/// Defaults of generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scale.
    pub guidance: f64,
    /// Shift of the sigma schedule.
    pub flow_shift: f64,
    /// Sequence template.
    pub template: Template,
    /// Which system prompt: a selector such as `None`, `en_unified`, `custom`.
    pub system_prompt: String,
    /// The task that runs when a request names none.
    pub bot_task: String,
    /// Whether think text is dropped before denoising.
    pub drop_think: bool,
    /// Most text tokens of one request (template, prompt, assistant text); pictures do not count.
    pub max_length: Option<usize>,
    /// Most tokens one text pass may add.
    pub max_new_tokens: usize,
    /// Sample (`true`) or take the most likely token (`false`).
    pub do_sample: bool,
    /// Softmax temperature of sampling.
    pub temperature: f64,
    /// Sample among this many most likely tokens.
    pub top_k: usize,
    /// Sample among the most likely tokens that together reach this probability.
    pub top_p: f64,
    /// 1 means off.
    pub repetition_penalty: f64,
}

impl GenerationConfig {
    pub(super) fn parse(value: &Value) -> Result<Self, ModelError> {
        let f = Fields::root(value, super::GENERATION_FILE)?;
        let template = match f.opt_text("sequence_template")? {
            None => Template::Pretrain,
            Some(name) => name
                .parse()
                .map_err(|_| f.error("sequence_template", format!("`{name}` is unknown")))?,
        };
        Ok(Self {
            steps: f.size_or("diff_infer_steps", Some(50))?,
            guidance: f.positive("diff_guidance_scale", Some(7.5))?,
            flow_shift: f.positive("flow_shift", Some(3.0))?,
            template,
            system_prompt: f.opt_text("use_system_prompt")?.unwrap_or("None").into(),
            bot_task: f.opt_text("bot_task")?.unwrap_or("image").into(),
            drop_think: f.flag("drop_think", false)?,
            max_length: f.opt_count("max_length")?.filter(|n| *n > 0),
            max_new_tokens: f.size_or("max_new_tokens", Some(2048))?,
            do_sample: f.flag("do_sample", false)?,
            temperature: f.positive("temperature", Some(1.0))?,
            top_k: f.size_or("top_k", Some(1024))?,
            top_p: f.positive("top_p", Some(1.0))?,
            repetition_penalty: f.positive("repetition_penalty", Some(1.0))?,
        })
    }
}
