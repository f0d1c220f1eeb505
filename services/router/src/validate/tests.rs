//! What a request may hold.
use base::{Code, Fault as _, limits::MAX_PROMPT_CHARS};
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
            mode: size_policy % 7, drop_think: steps.map(|steps| steps > 0),
            sampling: Some(Sampling {
                temperature: scale, top_k: Some(n), top_p: scale, max_new_tokens: Some(n),
                ..Sampling::default()
            }),
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

/// A PNG of 2x2 pixels.
const PICTURE: &[u8] = &[
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0, 0, 0, 0x0d, 0x49, 0x48, 0x44, 0x52, 0, 0, 0,
    2, 0, 0, 0, 2, 8, 2, 0, 0, 0, 0xfd, 0xd4, 0x9a, 0x73, 0, 0, 0, 0x10, 0x49, 0x44, 0x41, 0x54,
    0x78, 0x9c, 0x63, 0xf8, 0xcf, 0xc0, 0, 0x44, 0x0c, 0x10, 0x0a, 0, 0x1f, 0xee, 3, 0xfd, 0x8b,
    0xd6, 0x15, 0x4d, 0, 0, 0, 0, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82,
];

fn shown(bytes: &[u8]) -> proto::v1::InputImage {
    proto::v1::InputImage {
        source: Some(Shown::Data(bytes.to_vec())),
    }
}

#[test]
fn who_decides_the_size_is_told_from_what_is_given() {
    let open = |size: &str, images: usize| {
        let valid = run(GenerateRequest {
            size: size.into(),
            images: vec![shown(PICTURE); images],
            ..request()
        })
        .unwrap();
        (valid.open_size, valid.accepted().width)
    };
    assert_eq!(open("", 0), (None, 256));
    assert_eq!(open("512x128", 1), (None, 512));
    assert_eq!(open("", 3), (Some(OpenSize::FirstImage), 0));
    assert_eq!(open(AUTO_SIZE, 1), (Some(OpenSize::Model), 0));
    assert_eq!(open(AUTO_SIZE, 0), (Some(OpenSize::Model), 0));
}

#[test]
fn the_mode_is_the_models_unless_it_is_given() {
    let model = ModelInfo {
        default_mode: "think_recaption".into(),
        max_new_tokens: 100,
        ..tiny()
    };
    let mode = |mode: Mode| {
        let request = GenerateRequest {
            mode: mode.into(),
            ..request()
        };
        let valid = check(request).unwrap().resolve(&model, &Source::seeded(3));
        valid.unwrap()
    };
    assert_eq!(mode(Mode::Unspecified).mode, Mode::ThinkRecaption);
    assert_eq!(mode(Mode::Image).mode, Mode::Image);
    // Words cost, too.
    assert_eq!(mode(Mode::Think).cost, mode(Mode::Image).cost + 100);
    let words = mode(Mode::Text);
    assert_eq!((words.cost, words.rows), (100, 1));
    assert_eq!((words.accepted().width, words.accepted().height), (0, 0));
}

#[test]
fn what_a_mode_has_no_use_for_is_refused_by_name() {
    let with = |mode: Mode, field: &str, change: fn(&mut GenerateRequest)| {
        refused(field, |bad| {
            bad.mode = mode.into();
            change(bad);
        });
    };
    with(Mode::Image, "temperature", |bad| {
        bad.sampling.get_or_insert_default().temperature = Some(1.0);
    });
    with(Mode::Image, "max_new_tokens", |bad| {
        bad.sampling.get_or_insert_default().max_new_tokens = Some(1);
    });
    with(Mode::Recaption, "drop_think", |bad| {
        bad.drop_think = Some(true)
    });
    with(Mode::Text, "size", |bad| bad.size = "256x256".into());
    with(Mode::Text, "steps", |bad| bad.steps = Some(4));
    with(Mode::Text, "guidance", |bad| bad.guidance = Some(4.0));
    with(Mode::Text, "quality", |bad| bad.quality = 1);
    with(Mode::Text, "n", |bad| bad.n = 2);
}

#[test]
fn sampling_pictures_and_selectors_have_bounds() {
    let sampled = |field: &str, change: fn(&mut Sampling)| {
        refused(field, |bad| {
            bad.mode = Mode::Think.into();
            change(bad.sampling.get_or_insert_default());
        });
    };
    sampled("temperature", |s| s.temperature = Some(2.1));
    sampled("temperature", |s| s.temperature = Some(f64::NAN));
    sampled("top_p", |s| s.top_p = Some(0.0));
    sampled("top_p", |s| s.top_p = Some(1.1));
    sampled("top_k", |s| s.top_k = Some(0));
    sampled("repetition_penalty", |s| s.repetition_penalty = Some(0.1));
    sampled("sampling_seed", |s| s.seed = Some(u64::MAX));
    sampled("max_new_tokens", |s| s.max_new_tokens = Some(0));
    sampled("max_new_tokens", |s| s.max_new_tokens = Some(16_385));
    refused("mode", |bad| bad.mode = 77);
    refused("images", |bad| bad.images = vec![shown(PICTURE); 4]);
    refused("images", |bad| {
        bad.images = vec![shown(PICTURE), shown(b"")]
    });
    refused("images", |bad| bad.images = vec![shown(&PICTURE[..60])]);
    refused("images", |bad| bad.images = vec![Default::default()]);
    refused("system_prompt_name", |bad| {
        bad.system_prompt_name = "en_unified".into()
    });
    refused("system_prompt_name", |bad| {
        bad.system_prompt_name = "x".repeat(65)
    });
    refused("system_prompt_name", |bad| {
        bad.system_prompt_name = "none".into();
        bad.system_prompt = "be kind".into();
    });
    let model = ModelInfo {
        system_prompts: vec![proto::v1::SystemPrompt {
            name: "en_unified".into(),
            fingerprint: "78b97adc8e7c851e".into(),
        }],
        ..tiny()
    };
    for name in ["en_unified", "78B97ADC8E7C851E", "none", "dynamic", ""] {
        let known = GenerateRequest {
            system_prompt_name: name.into(),
            ..request()
        };
        assert!(
            check(known)
                .unwrap()
                .resolve(&model, &Source::seeded(3))
                .is_ok(),
            "{name}"
        );
    }
}
