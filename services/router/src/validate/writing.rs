//! The fields that are about what the model reads and writes before it draws, or instead.
use base::limits::{MAX_NEW_TOKENS, MAX_PICTURES, MAX_SEED};
use ingest::Limits;
use proto::v1::{InputImage, Mode, ModelInfo, Sampling, input_image::Source};

use crate::RouterError;

/// Most likely tokens that `top_k` may name.
pub(crate) const MAX_TOP_K: u32 = 1 << 20;
/// Bounds of `temperature`.
pub(crate) const TEMPERATURE: (f64, f64) = (0.0, 2.0);
/// Bounds of `top_p`: 0 would leave no token.
pub(crate) const TOP_P: (f64, f64) = (1e-6, 1.0);
/// Bounds of `repetition_penalty`.
pub(crate) const REPETITION_PENALTY: (f64, f64) = (0.5, 2.0);
/// Longest selector of a system prompt, in characters.
pub(crate) const MAX_SELECTOR_CHARS: usize = 64;
/// Longest address of a picture, in bytes.
const MAX_URL_BYTES: usize = 2_048;

/// A mode's number on the wire, as its name.
pub(super) fn mode(number: i32) -> Result<Mode, RouterError> {
    Mode::try_from(number).map_err(|_| {
        let known = "IMAGE, THINK, RECAPTION, THINK_RECAPTION or TEXT";
        RouterError::invalid("mode", format!("must be {known}, got number {number}"))
    })
}

/// The mode of a request that names none.
pub(crate) fn default_mode(model: &ModelInfo) -> Mode {
    match model.default_mode.as_str() {
        "think" => Mode::Think,
        "recaption" => Mode::Recaption,
        "think_recaption" => Mode::ThinkRecaption,
        _ => Mode::Image,
    }
}

/// Number, and as far as they are here, the files.
pub(super) fn images(images: Vec<InputImage>) -> Result<Vec<Source>, RouterError> {
    if images.len() > MAX_PICTURES {
        let reason = format!("must be at most {MAX_PICTURES}, got {}", images.len());
        return Err(RouterError::invalid("images", reason));
    }
    let mut sources = Vec::with_capacity(images.len());
    for (index, image) in images.into_iter().enumerate() {
        let source = image.source.unwrap_or_else(|| Source::Data(Vec::new()));
        match &source {
            Source::Data(bytes) => file(index, bytes)?,
            Source::Url(url) if url.len() > MAX_URL_BYTES => {
                let reason = format!("[{index}] must be a URL of at most {MAX_URL_BYTES} bytes");
                return Err(RouterError::invalid("images", reason));
            }
            Source::Url(_) => {}
        }
        sources.push(source);
    }
    Ok(sources)
}

/// A file must be a whole picture, by its container.
pub(crate) fn file(index: usize, bytes: &[u8]) -> Result<(), RouterError> {
    let name = format!("[{index}]");
    ingest::header(&name, bytes, &Limits::default())
        .map(drop)
        .map_err(|error| RouterError::invalid("images", error.to_string()))
}

/// Each number within its bounds.
pub(super) fn sampling(sampling: &Sampling) -> Result<(), RouterError> {
    let within = |field: &'static str, value: Option<f64>, (least, most): (f64, f64)| match value {
        // A NaN is in no range.
        Some(value) if !(least..=most).contains(&value) => {
            let reason = format!("must be a number from {least} to {most}, got {value}");
            Err(RouterError::invalid(field, reason))
        }
        _ => Ok(()),
    };
    within("temperature", sampling.temperature, TEMPERATURE)?;
    within("top_p", sampling.top_p, TOP_P)?;
    let penalty = sampling.repetition_penalty;
    within("repetition_penalty", penalty, REPETITION_PENALTY)?;
    let whole = |field: &'static str, value: Option<u64>, least: u64, most: u64| match value {
        Some(value) if !(least..=most).contains(&value) => {
            let reason = format!("must be {least} to {most}, got {value}");
            Err(RouterError::invalid(field, reason))
        }
        _ => Ok(()),
    };
    let (top_k, limit) = (sampling.top_k, sampling.max_new_tokens);
    whole("top_k", top_k.map(u64::from), 1, MAX_TOP_K.into())?;
    whole("sampling_seed", sampling.seed, 0, MAX_SEED)?;
    whole(
        "max_new_tokens",
        limit.map(u64::from),
        1,
        MAX_NEW_TOKENS.into(),
    )
}

/// A selector, without regard to the model.
pub(super) fn selector(name: String, system_prompt: &str) -> Result<String, RouterError> {
    if name.len() > MAX_SELECTOR_CHARS * 4 || name.chars().count() > MAX_SELECTOR_CHARS {
        let reason = format!("must be at most {MAX_SELECTOR_CHARS} characters");
        return Err(RouterError::invalid("system_prompt_name", reason));
    }
    if !name.is_empty() && name != "dynamic" && !system_prompt.is_empty() {
        let reason = "must be absent or \"dynamic\" when system_prompt is given";
        return Err(RouterError::invalid("system_prompt_name", reason));
    }
    Ok(name)
}

/// Whether the model ships what a selector names.
pub(super) fn known_selector(name: &str, model: &ModelInfo) -> Result<(), RouterError> {
    let fixed = ["", "none", "dynamic"].contains(&name);
    let known = model
        .system_prompts
        .iter()
        .any(|prompt| prompt.name == name || prompt.fingerprint.eq_ignore_ascii_case(name));
    if fixed || known {
        return Ok(());
    }
    let names = model.system_prompts.iter().map(|prompt| &prompt.name);
    let names: Vec<_> = ["none", "dynamic"]
        .into_iter()
        .chain(names.map(String::as_str))
        .collect();
    let reason = format!("must be one of {}, got {name:?}", names.join(", "));
    Err(RouterError::invalid("system_prompt_name", reason))
}

/// No field is ignored: those that a mode has no use for must be absent. `writes`: a text is made.
pub(super) fn useful(
    mode: Mode,
    sampling: &Sampling,
    drop_think: Option<bool>,
) -> Result<(), RouterError> {
    let writes = mode != Mode::Image;
    let of_text = [
        ("temperature", sampling.temperature.is_some()),
        ("top_k", sampling.top_k.is_some()),
        ("top_p", sampling.top_p.is_some()),
        ("repetition_penalty", sampling.repetition_penalty.is_some()),
        ("max_new_tokens", sampling.max_new_tokens.is_some()),
    ];
    for (field, given) in of_text {
        if given && !writes {
            let reason = "must be absent in mode image, which writes nothing";
            return Err(RouterError::invalid(field, reason));
        }
    }
    let thinks = matches!(mode, Mode::Think | Mode::ThinkRecaption);
    if drop_think == Some(true) && !thinks {
        let reason = "must be absent or false in a mode that does not think";
        return Err(RouterError::invalid("drop_think", reason));
    }
    Ok(())
}
