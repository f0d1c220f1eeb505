//! From what a client sent to what will be run. Two steps: [`check`] needs no model, so a bad
//! request is told apart from an empty cluster; [`Checked::resolve`] fills in the model's defaults.
use base::{
    RequestId,
    limits::{MAX_GUIDANCE, MAX_IMAGES, MAX_PROMPT_CHARS, MAX_SEED, MAX_STEPS},
    rng::Source,
};
use proto::{
    size::Size,
    v1::{Accepted, GenerateRequest, ModelInfo, SizePolicy},
};

use crate::{RouterError, sizes};

/// Longest model name that is looked up, in bytes.
const MAX_MODEL_BYTES: usize = 256;
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
    /// Seed of the noise.
    pub seed: u64,
    /// Guidance scale.
    pub guidance: f64,
    /// Rows a step computes: 2 under classifier-free guidance, else 1.
    pub rows: u32,
    /// steps x rows x image tokens.
    pub cost: u64,
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
    let checked = Checked {
        request_id: request_id(&request.request_id)?,
        model: model(request.model)?,
        prompt: prompt(request.prompt)?,
        system_prompt: system_prompt(request.system_prompt)?,
        policy,
        steps: request.steps.map(steps).transpose()?,
        seed: request.seed.map(seed).transpose()?,
        guidance: request.guidance.map(guidance).transpose()?,
        template: template(request.template)?,
        size: size(request.size)?,
    };
    if request.n > MAX_IMAGES {
        let reason = format!("must be 0 or 1, got {}: this version serves 1", request.n);
        return Err(RouterError::invalid("n", reason));
    }
    Ok(checked)
}

impl Checked {
    /// Fills in what the model and chance decide.
    ///
    /// # Errors
    /// A size that the model does not make; a model whose own defaults break the bounds.
    pub fn resolve(self, model: &ModelInfo, chance: &Source) -> Result<ValidRequest, RouterError> {
        let size = sizes::choose(&model.buckets, &self.size, self.policy)?;
        let (default_steps, default_guidance) = (model.default_steps, model.default_guidance);
        let steps = self.steps.unwrap_or(default_steps.clamp(1, MAX_STEPS));
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
        Ok(ValidRequest {
            request_id: self.request_id,
            model: model.name.clone(),
            weights_id: model.weights_id.clone(),
            prompt: self.prompt,
            system_prompt: self.system_prompt,
            template,
            size,
            steps,
            seed: self.seed.unwrap_or_else(|| chance.next_u64() & MAX_SEED),
            guidance,
            rows,
            cost: cost(size, model.pixels_per_token, steps, rows),
        })
    }
}

impl ValidRequest {
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
        }
    }
}

/// steps x rows x image tokens: what a request costs the denoiser.
pub fn cost(size: Size, pixels_per_token: u32, steps: u32, rows: u32) -> u64 {
    let side = |pixels: u32| u64::from(pixels.div_ceil(pixels_per_token.max(1)));
    let tokens = side(size.width) * side(size.height);
    tokens
        .saturating_mul(u64::from(steps))
        .saturating_mul(u64::from(rows))
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
    if name.len() > MAX_MODEL_BYTES {
        let reason = format!("must be at most {MAX_MODEL_BYTES} bytes");
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

fn seed(seed: u64) -> Result<u64, RouterError> {
    if seed > MAX_SEED {
        return Err(RouterError::invalid(
            "seed",
            format!("must be 0 to {MAX_SEED}, got {seed}"),
        ));
    }
    Ok(seed)
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
        let shown: String = name.chars().take(MAX_MODEL_BYTES).collect();
        let reason = format!("must be \"{known}\", got {shown:?}");
        return Err(RouterError::invalid("template", reason));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _};
    use proptest::prelude::*;
    use proto::v1::Bucket;

    use super::*;

    fn tiny() -> ModelInfo {
        ModelInfo {
            name: "tiny".into(),
            weights_id: "w".into(),
            buckets: vec![
                Bucket {
                    ratio_index: 0,
                    height: 256,
                    width: 256,
                },
                Bucket {
                    ratio_index: 1,
                    height: 128,
                    width: 512,
                },
            ],
            default_steps: 8,
            default_guidance: 5.0,
            default_template: "instruct".into(),
            pixels_per_token: 16,
            ..ModelInfo::default()
        }
    }

    fn request() -> GenerateRequest {
        GenerateRequest {
            prompt: "a red fox".into(),
            ..GenerateRequest::default()
        }
    }

    fn run(request: GenerateRequest) -> Result<ValidRequest, RouterError> {
        check(request)?.resolve(&tiny(), &Source::seeded(3))
    }

    fn refused(field: &str, change: impl FnOnce(&mut GenerateRequest)) {
        let mut bad = request();
        change(&mut bad);
        let error = run(bad).unwrap_err();
        assert_eq!(
            (error.code(), error.field()),
            (Code::InvalidArgument, Some(field)),
            "{error}"
        );
        assert!(error.to_string().starts_with(field), "{error}");
        assert!(error.to_string().len() < 600, "{error}");
    }

    #[test]
    fn what_is_left_open_comes_from_the_model_and_is_answered() {
        let valid = run(request()).unwrap();
        assert_eq!(valid.size.to_string(), "256x256");
        assert_eq!((valid.steps, valid.guidance, valid.rows), (8, 5.0, 2));
        assert_eq!(valid.template, "instruct");
        assert!(valid.seed <= MAX_SEED);
        assert_eq!(valid.cost, 8 * 2 * 16 * 16);
        let accepted = valid.accepted();
        assert_eq!((accepted.width, accepted.seed), (256, valid.seed));
        assert!(!accepted.request_id.is_empty());
    }

    #[test]
    fn what_is_given_is_kept() {
        let valid = run(GenerateRequest {
            request_id: "r_1-A".into(),
            size: "512x128".into(),
            steps: Some(200),
            seed: Some(MAX_SEED),
            guidance: Some(0.0),
            template: "pretrain".into(),
            n: 1,
            ..request()
        })
        .unwrap();
        assert_eq!(valid.request_id.as_str(), "r_1-A");
        assert_eq!((valid.size.width, valid.size.height), (512, 128));
        assert_eq!((valid.steps, valid.seed, valid.rows), (200, MAX_SEED, 1));
        assert_eq!(valid.template, "pretrain");
    }

    #[test]
    fn one_row_when_guidance_changes_nothing_or_is_distilled() {
        let rows = |guidance: f64, distilled: bool| {
            let model = ModelInfo {
                cfg_distilled: distilled,
                ..tiny()
            };
            let request = GenerateRequest {
                guidance: Some(guidance),
                ..request()
            };
            check(request)
                .unwrap()
                .resolve(&model, &Source::seeded(1))
                .unwrap()
                .rows
        };
        assert_eq!(
            [rows(0.0, false), rows(1.0, false), rows(1.5, false)],
            [1, 1, 2]
        );
        assert_eq!(rows(5.0, true), 1);
    }

    #[test]
    fn every_field_has_bounds_and_is_named() {
        refused("prompt", |r| r.prompt = String::new());
        refused("prompt", |r| r.prompt = "ä".repeat(MAX_PROMPT_CHARS + 1));
        refused("prompt", |r| r.prompt = "a".repeat(5 * MAX_PROMPT_CHARS));
        refused("system_prompt", |r| {
            r.system_prompt = "a".repeat(MAX_PROMPT_CHARS + 1)
        });
        for steps in [0, -1, 201, i32::MIN, i32::MAX] {
            refused("steps", |r| r.steps = Some(steps));
        }
        for seed in [1 << 63, u64::MAX] {
            refused("seed", |r| r.seed = Some(seed));
        }
        for scale in [
            f64::NAN,
            -3.0,
            -f64::MIN_POSITIVE,
            1e9,
            100.5,
            f64::INFINITY,
        ] {
            refused("guidance", |r| r.guidance = Some(scale));
        }
        for n in [2, u32::MAX] {
            refused("n", |r| r.n = n);
        }
        refused("template", |r| r.template = "chat".into());
        refused("template", |r| r.template = "x".repeat(100_000));
        refused("request_id", |r| r.request_id = "a b".into());
        refused("request_id", |r| r.request_id = "a".repeat(65));
        refused("model", |r| r.model = "m".repeat(257));
        for size in ["0x0", "255x256", "1024x", "100000x10000", "1024x1024"] {
            refused("size", |r| r.size = size.into());
        }
        for policy in [-1, 3, i32::MAX] {
            refused("size_policy", |r| r.size_policy = policy);
        }
    }

    #[test]
    fn the_bounds_themselves_are_legal() {
        let longest = "ä".repeat(MAX_PROMPT_CHARS);
        assert_eq!(
            run(GenerateRequest {
                prompt: longest,
                ..request()
            })
            .unwrap()
            .steps,
            8
        );
        for scale in [0.0, 1.0, MAX_GUIDANCE] {
            assert!(
                run(GenerateRequest {
                    guidance: Some(scale),
                    ..request()
                })
                .is_ok()
            );
        }
    }

    #[test]
    fn a_size_that_is_no_size_needs_no_model_to_be_refused() {
        for size in ["0x0", "1024x", "100000x10000", "1x2x3"] {
            let error = check(GenerateRequest {
                size: size.into(),
                ..request()
            })
            .unwrap_err();
            assert_eq!(error.field(), Some("size"));
        }
    }

    prop_compose! {
        fn any_request()(
            texts in proptest::array::uniform6(".{0,40}"),
            size in "[0-9x-]{0,14}",
            numbers in any::<(i32, Option<i32>, Option<u64>, u32)>(),
            scale in proptest::option::of(proptest::num::f64::ANY),
        ) -> GenerateRequest {
            let [request_id, model, prompt, template, system_prompt, _] = texts;
            let (size_policy, steps, seed, n) = numbers;
            GenerateRequest {
                request_id, model, prompt, size, size_policy: size_policy % 4, steps, seed,
                guidance: scale, template, system_prompt, n: n % 3,
            }
        }
    }

    proptest! {
        #[test]
        fn any_request_is_valid_within_bounds_or_names_a_field(request in any_request()) {
            match run(request) {
                Ok(valid) => {
                    prop_assert!((1..=MAX_STEPS).contains(&valid.steps));
                    prop_assert!((0.0..=MAX_GUIDANCE).contains(&valid.guidance));
                    prop_assert!(valid.seed <= MAX_SEED && valid.rows <= 2 && valid.cost > 0);
                    let made = |b: &Bucket| sizes::size_of(b) == valid.size;
                    prop_assert!(tiny().buckets.iter().any(made));
                }
                Err(error) => {
                    prop_assert_eq!(error.code(), Code::InvalidArgument);
                    prop_assert!(error.field().is_some());
                }
            }
        }
    }
}
