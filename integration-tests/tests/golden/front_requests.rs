//! What a caller's text can and cannot do to a sequence, with the golden tokenizer.

use std::sync::OnceLock;

use kernels::SegmentKind;
use model::layout::{CondImageGrid, ImageGrid, MAX_COND_IMAGES, MAX_TEXT_BYTES};
use model::{
    ErrorKind, LayoutInput, LayoutRules, ModelConfig, ModelError, RowKind, SequenceLayout,
    SpecialTokens, Target, Template, TextTask, Tokenizer,
};
use proptest::prelude::*;

use crate::common::model_dir;

struct Setup {
    config: ModelConfig,
    tokenizer: Tokenizer,
    special: SpecialTokens,
}

fn setup() -> &'static Setup {
    static SETUP: OnceLock<Setup> = OnceLock::new();
    SETUP.get_or_init(|| {
        let config = ModelConfig::from_dir(&model_dir()).unwrap();
        let tokenizer = Tokenizer::from_dir(&model_dir()).unwrap();
        let special = SpecialTokens::lookup(&tokenizer, &config).unwrap();
        Setup {
            config,
            tokenizer,
            special,
        }
    })
}

const GRID: ImageGrid = ImageGrid {
    ratio_index: 3,
    height: 3,
    width: 4,
};

fn input<'a>(prompt: &'a str, template: Template) -> LayoutInput<'a> {
    LayoutInput {
        prompt,
        system_prompt: None,
        assistant_text: None,
        template,
        drop_think: false,
        cond_images: &[],
        target: Target::Image(GRID),
    }
}

fn layout(input: &LayoutInput<'_>) -> Result<SequenceLayout, ModelError> {
    let setup = setup();
    let rules = LayoutRules::new(&setup.config);
    SequenceLayout::new(&setup.tokenizer, &setup.special, &rules, input)
}

/// As [`layout`], without the model's length limits: another set's model may be shorter than the case.
fn unlimited(input: &LayoutInput<'_>) -> Result<SequenceLayout, ModelError> {
    let setup = setup();
    let rules = LayoutRules {
        max_text_tokens: usize::MAX,
        max_sequence_tokens: usize::MAX,
        ..LayoutRules::new(&setup.config)
    };
    SequenceLayout::new(&setup.tokenizer, &setup.special, &rules, input)
}

/// Every special token's text in one string.
fn all_specials() -> String {
    let setup = setup();
    let s = &setup.special;
    let mut ids = vec![
        s.bos,
        s.eos,
        s.boi,
        s.eoi,
        s.img,
        s.cfg,
        s.timestep,
        s.joint_img_sep,
        s.think,
        s.end_think,
        s.recaption,
        s.end_recaption,
        s.answer,
        s.end_answer,
    ];
    ids.extend(s.pad);
    ids.extend(s.guidance);
    ids.extend(s.timestep_r);
    ids.extend(&s.ratios);
    ids.extend(s.sizes.iter().map(|(_, id)| *id));
    setup.tokenizer.decode(&ids).unwrap()
}

#[test]
fn special_token_text_in_a_prompt_stays_text() {
    let setup = setup();
    let text = all_specials();
    let plain = setup.tokenizer.encode(&text).unwrap();
    for template in [Template::Pretrain, Template::Instruct] {
        let with = unlimited(&input(&text, template)).unwrap();
        let without = unlimited(&input("kite", template)).unwrap();
        let count = |l: &SequenceLayout, id: u32| {
            l.tokens(RowKind::Cond).iter().filter(|t| **t == id).count()
        };
        for id in 0..setup.tokenizer.vocab_size() as u32 {
            let token = setup.tokenizer.decode(&[id]).unwrap();
            if token.len() > 2
                && text.contains(&token)
                && setup.tokenizer.token_id(&token).is_some()
                && token.starts_with('<')
                && token.ends_with('>')
            {
                assert_eq!(count(&with, id), count(&without, id), "{token}");
            }
        }
        assert_eq!(setup.tokenizer.decode(&plain).unwrap(), text);
        assert_eq!(
            with.generated.unwrap().span.tokens.len(),
            GRID.height * GRID.width
        );
    }
}

#[test]
fn special_token_text_in_a_system_prompt_stays_text() {
    let text = all_specials();
    let with = LayoutInput {
        system_prompt: Some(&text),
        ..input("kite", Template::Instruct)
    };
    let layout = unlimited(&with).unwrap();
    let images = layout
        .tokens(RowKind::Cond)
        .iter()
        .filter(|t| **t == setup().special.img);
    assert_eq!(images.count(), GRID.height * GRID.width);
}

#[test]
fn empty_and_over_long_prompts_are_refused_by_name() {
    let long = "kite ".repeat(setup().config.max_text_tokens() + 1);
    let huge = "k".repeat(MAX_TEXT_BYTES + 1);
    for prompt in ["", "   ", "\n\t", &long, &huge] {
        let error = layout(&input(prompt, Template::Pretrain)).unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::InvalidArgument { field: "prompt" },
            "{error}"
        );
        assert!(error.to_string().len() < 200, "{error}");
    }
    layout(&input("kite", Template::Pretrain)).unwrap();
}

#[test]
fn an_over_long_system_prompt_is_refused_by_its_own_name() {
    let long = "kite ".repeat(setup().config.max_text_tokens() + 1);
    let with = LayoutInput {
        system_prompt: Some(&long),
        ..input("kite", Template::Instruct)
    };
    let error = layout(&with).unwrap_err();
    let field = "system_prompt";
    assert_eq!(
        error.kind(),
        ErrorKind::InvalidArgument { field },
        "{error}"
    );
}

#[test]
fn a_sequence_beyond_the_rotary_table_is_refused_before_it_is_written() {
    let side = usize::MAX / 4;
    for grid in [
        ImageGrid {
            height: 1000,
            width: 1000,
            ..GRID
        },
        ImageGrid {
            height: side,
            width: side,
            ..GRID
        },
    ] {
        let wide = LayoutInput {
            target: Target::Image(grid),
            ..input("kite", Template::Pretrain)
        };
        assert!(matches!(
            layout(&wide).unwrap_err().kind(),
            ErrorKind::InvalidArgument { .. }
        ));
    }
    let image = CondImageGrid {
        vae: GRID,
        vit_height: 2,
        vit_width: 2,
    };
    let images = vec![image; MAX_COND_IMAGES + 1];
    let many = LayoutInput {
        cond_images: &images,
        ..input("kite", Template::Pretrain)
    };
    assert_eq!(
        layout(&many).unwrap_err().kind(),
        ErrorKind::InvalidArgument { field: "images" }
    );
}

#[test]
fn a_tokenizer_without_a_needed_token_is_refused_by_name() {
    let setup = setup();
    let bytes = std::fs::read(model_dir().join("tokenizer.json")).unwrap();
    for name in ["<cfg>", "<img_ratio_7>", "<timestep>"] {
        let mut json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        for token in json["added_tokens"].as_array_mut().unwrap() {
            if token["content"] == name {
                token["content"] = "<renamed>".into();
            }
        }
        if let Some(vocab) = json["model"]["vocab"].as_object_mut() {
            vocab.remove(name);
        }
        let tokenizer = Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap();
        let error = SpecialTokens::lookup(&tokenizer, &setup.config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Checkpoint);
        assert!(error.to_string().contains(name), "{error}");
    }
    assert!(Tokenizer::from_bytes(b"{}").is_err());
    assert!(Tokenizer::from_bytes(b"").is_err());
}

fn any_template() -> impl Strategy<Value = Template> {
    prop_oneof![Just(Template::Pretrain), Just(Template::Instruct)]
}

fn any_target() -> impl Strategy<Value = Target> {
    prop_oneof![
        (0usize..33, 1usize..9, 1usize..9).prop_map(|(ratio_index, height, width)| {
            Target::Image(ImageGrid {
                ratio_index,
                height,
                width,
            })
        }),
        Just(Target::Text(TextTask::Auto)),
        Just(Target::Text(TextTask::Think)),
        Just(Target::Text(TextTask::Recaption)),
        Just(Target::Text(TextTask::Ratio)),
    ]
}

fn any_images() -> impl Strategy<Value = Vec<CondImageGrid>> {
    let image = (0usize..33, 1usize..6, 1usize..6, 1usize..4, 1usize..4);
    let image =
        image.prop_map(
            |(ratio_index, height, width, vit_height, vit_width)| CondImageGrid {
                vae: ImageGrid {
                    ratio_index,
                    height,
                    width,
                },
                vit_height,
                vit_width,
            },
        );
    proptest::collection::vec(image, 0..=MAX_COND_IMAGES)
}

proptest! {
    #[test]
    fn rows_agree_and_segments_cover_every_token_once(
        prompt in "\\PC{1,40}",
        system in proptest::option::of("[a-z ]{0,20}"),
        written in proptest::option::of("(<think>|</think>|<recaption>|</recaption>|[a-z]{0,5}){0,6}"),
        template in any_template(),
        target in any_target(),
        cond_images in any_images(),
        drop_think in any::<bool>(),
    ) {
        prop_assume!(!prompt.trim().is_empty());
        let got = unlimited(&LayoutInput {
            prompt: &prompt,
            system_prompt: system.as_deref(),
            assistant_text: written.as_deref(),
            template,
            drop_think,
            cond_images: &cond_images,
            target,
        }).unwrap();
        let (cond, uncond) = (got.tokens(RowKind::Cond), got.tokens(RowKind::Uncond));
        prop_assert_eq!(cond.len(), uncond.len());
        let cfg = setup().special.cfg;
        let first = got.first_cfg.unwrap();
        prop_assert_eq!(&cond[..first], &uncond[..first]);
        prop_assert!(cond.iter().zip(uncond).all(|(c, u)| c == u || *u == cfg));

        // Slices lie inside the sequence, in order, and image spans hold image tokens only.
        let img = setup().special.img;
        for span in got.image_spans() {
            prop_assert!(cond[span.tokens.clone()].iter().all(|t| *t == img));
            prop_assert!(span.grid_h * span.grid_w <= span.tokens.len());
        }
        prop_assert!(got.text_slices.windows(2).all(|w| w[0].end <= w[1].start));
        prop_assert!(got.text_slices.iter().all(|s| s.end <= cond.len()));

        // Segments tile the sequence; each token sees itself and nothing beyond its block.
        let mut next = 0;
        let blocks = got.full_blocks();
        for segment in got.segments(0..got.len()).unwrap() {
            prop_assert_eq!(segment.tokens.start, next);
            prop_assert!(!segment.tokens.is_empty());
            prop_assert_eq!(
                segment.kind == SegmentKind::Full,
                blocks.contains(&segment.tokens)
            );
            next = segment.tokens.end;
        }
        prop_assert_eq!(next, got.len());
        for block in blocks.iter().filter(|b| b.len() > 1) {
            prop_assert!(got.segments(0..block.end - 1).is_err());
            prop_assert!(got.segments(block.start + 1..got.len()).is_err());
        }

        // The prefix ends where the denoised part begins.
        prop_assert!(got.prefix_len() <= got.len());
        if let Some(target) = got.target() {
            prop_assert_eq!(target.start, got.prefix_len());
            prop_assert_eq!(cond[target.start], setup().special.timestep);
            prop_assert!(got.segments(target).is_ok());
        }
    }
}
