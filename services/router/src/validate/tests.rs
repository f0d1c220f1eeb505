//! What a request may hold.
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
fn images_of_one_request_differ_in_their_seed_and_cost_the_same() {
    let many = |n: u32, seed: Option<u64>| {
        run(GenerateRequest {
            n,
            seed,
            ..request()
        })
    };
    let one = many(0, Some(5)).unwrap();
    let ten = many(10, Some(5)).unwrap();
    assert_eq!((one.n, ten.n, ten.cost), (1, 10, 10 * one.cost));
    assert_eq!((ten.seed_of(0), ten.seed_of(9)), (5, 14));
    let last = many(10, Some(MAX_SEED - 9)).unwrap();
    assert_eq!(last.seed_of(9), MAX_SEED);
    assert_eq!(
        (ten.accepted().n, ten.accepted().template.as_str()),
        (10, "instruct")
    );
}

#[test]
fn quality_chooses_the_steps() {
    let steps = |quality: Quality, default_steps: u32| {
        let model = ModelInfo {
            default_steps,
            ..tiny()
        };
        let request = GenerateRequest {
            quality: quality.into(),
            ..request()
        };
        let checked = check(request).unwrap();
        checked.resolve(&model, &Source::seeded(1)).unwrap().steps
    };
    let all = [
        Quality::Low,
        Quality::Medium,
        Quality::High,
        Quality::Unspecified,
    ];
    assert_eq!(all.map(|quality| steps(quality, 50)), [12, 25, 50, 50]);
    assert_eq!(all.map(|quality| steps(quality, 1)), [1, 1, 1, 1]);
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
    for n in [11, u32::MAX] {
        refused("n", |r| r.n = n);
    }
    refused("seed", |r| (r.seed, r.n) = (Some(MAX_SEED), 2));
    refused("quality", |r| r.quality = 4);
    refused("quality", |r| (r.quality, r.steps) = (1, Some(8)));
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
            guidance: scale, template, system_prompt, n: n % 12, quality: size_policy % 5,
            previews: n % 5, preview_kind: size_policy % 4, priority: size_policy % 5,
            ..GenerateRequest::default()
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
