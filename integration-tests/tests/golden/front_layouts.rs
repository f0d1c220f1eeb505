//! Golden 01 and 10: token sequences, slices, positions, rotary tables and attention.

use std::ops::Range;

use kernels::SegmentKind;
use model::layout::{CondImageGrid, ImageGrid, LayoutSegment, stop_token_ids};
use model::picture::RgbImage;
use model::positions::rope_table;
use model::preprocess::CondPicture;
use model::{
    BucketSet, LayoutInput, LayoutRules, ModelConfig, ResolutionGroup, RowKind, SequenceLayout,
    SpecialTokens, Target, TextTask, Tokenizer,
};
use serde_json::{Value, json};

use crate::common::{Tensors, assert_close, count, in_set, json as golden_json, limit, model_dir};
use crate::front_buckets::size_request;

/// Positions from here on count as "in the thousands".
const FAR: u32 = 1000;

struct Setup {
    config: ModelConfig,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    /// Only cases with conditioning images need them.
    pictures: Option<Tensors>,
}

impl Setup {
    fn load() -> Self {
        let config = ModelConfig::from_dir(&model_dir()).unwrap();
        let tokenizer = Tokenizer::from_dir(&model_dir()).unwrap();
        let special = SpecialTokens::lookup(&tokenizer, &config).unwrap();
        Self {
            config,
            tokenizer,
            special,
            pictures: in_set(&["04_vit.safetensors"]).then(|| Tensors::load("04_vit.safetensors")),
        }
    }

    /// The model's rules without its length limits, which some cases exceed on purpose.
    fn rules(&self, base_size: usize) -> LayoutRules {
        LayoutRules {
            base_size,
            max_text_tokens: usize::MAX,
            max_sequence_tokens: usize::MAX,
            ..LayoutRules::new(&self.config)
        }
    }

    fn group(&self, base: usize) -> ResolutionGroup {
        ResolutionGroup::new(base, self.config.pixels_per_token(), BucketSet::Base).unwrap()
    }

    fn cond_images(&self, case: &Value, group: &ResolutionGroup) -> Vec<CondImageGrid> {
        let Some(list) = case["inputs"]["cond_images"].as_array() else {
            return Vec::new();
        };
        list.iter()
            .map(|n| {
                let pictures = self.pictures.as_ref().unwrap();
                let (shape, data) = pictures.u8(&format!("img{}.rgb_u8", count(n)));
                let image = RgbImage {
                    height: shape[0],
                    width: shape[1],
                    data,
                };
                CondPicture::new(&image, group, &self.config.vit_processor)
                    .unwrap()
                    .grid(self.config.pixels_per_token())
            })
            .collect()
    }
}

fn task(name: &str) -> TextTask {
    match name {
        "auto" => TextTask::Auto,
        "think" => TextTask::Think,
        "recaption" => TextTask::Recaption,
        "img_ratio" => TextTask::Ratio,
        other => panic!("task {other}"),
    }
}

/// One layout per prompt of a case.
fn layouts(setup: &Setup, case: &Value) -> Vec<SequenceLayout> {
    let inputs = &case["inputs"];
    let base = count(&case["image_base_size"]);
    let group = setup.group(base);
    let cell = setup.config.pixels_per_token();
    let cond_images = setup.cond_images(case, &group);
    let target = if inputs["mode"] == "gen_image" {
        let wish = size_request(&inputs["image_size"]);
        let bucket = wish.snap(&group).unwrap().unwrap();
        let (height, width) = bucket.grid(cell);
        Target::Image(ImageGrid {
            ratio_index: bucket.ratio_index,
            height,
            width,
        })
    } else {
        Target::Text(task(inputs["bot_task"].as_str().unwrap()))
    };
    let prompts: Vec<&str> = match &inputs["prompt"] {
        Value::Array(list) => list.iter().map(|p| p.as_str().unwrap()).collect(),
        one => vec![one.as_str().unwrap()],
    };
    prompts
        .into_iter()
        .map(|prompt| {
            let input = LayoutInput {
                prompt,
                system_prompt: inputs["system_prompt"].as_str(),
                assistant_text: inputs["cot_text"].as_str(),
                template: inputs["sequence_template"]
                    .as_str()
                    .unwrap()
                    .parse()
                    .unwrap(),
                drop_think: inputs["drop_think"].as_bool().unwrap(),
                cond_images: &cond_images,
                target,
            };
            SequenceLayout::new(&setup.tokenizer, &setup.special, &setup.rules(base), &input)
                .unwrap()
        })
        .collect()
}

fn slice(range: &Range<usize>) -> Value {
    json!([range.start, range.end])
}

fn slices<'a>(ranges: impl IntoIterator<Item = &'a Range<usize>>) -> Value {
    ranges.into_iter().map(slice).collect()
}

/// The golden's JSON for one row, from a layout.
fn described(layout: &SequenceLayout) -> Value {
    let generated: Vec<_> = layout.generated.iter().collect();
    let spans = layout.image_spans();
    json!({
        "gen_image_slices": slices(generated.iter().map(|g| &g.span.tokens)),
        "joint_image_slices": slices(layout.cond_images.iter().map(|c| &c.joint)),
        "cond_vae_image_slices": slices(layout.cond_images.iter().map(|c| &c.vae.tokens)),
        "cond_vit_image_slices": slices(layout.cond_images.iter().map(|c| &c.vit.tokens)),
        "all_image_slices": slices(spans.iter().map(|s| &s.tokens)),
        "text_slices": slices(&layout.text_slices),
        "gen_timestep_index": generated.iter().map(|g| g.timestep).collect::<Vec<_>>(),
        "cond_timestep_index":
            layout.cond_images.iter().map(|c| c.timestep).collect::<Vec<_>>(),
        "real_pos": [layout.len()],
        "rope_images": spans.iter().map(|s| json!({
            "slice": slice(&s.tokens), "token_h": s.grid_h, "token_w": s.grid_w,
        })).collect::<Vec<_>>(),
        "full_attention_blocks": slices(&layout.full_blocks()),
    })
}

#[test]
fn slices_and_indices_equal_the_reference() {
    if !in_set(&["01_layouts.json", "01_layouts.safetensors"]) {
        return;
    }
    let setup = Setup::load();
    let cases = golden_json("01_layouts.json");
    for case in cases.as_array().unwrap() {
        let layouts = layouts(&setup, case);
        let rows = count(&case["batch"]);
        assert_eq!(rows % layouts.len(), 0, "{}", case["id"]);
        for row in 0..rows {
            let layout = &layouts[row % layouts.len()];
            for (field, got) in described(layout).as_object().unwrap() {
                // The reference writes null where no row has such an index.
                if case[field].is_null() {
                    assert_eq!(got, &json!([]), "{}: {field}", case["id"]);
                } else {
                    assert_eq!(
                        got, &case[field][row],
                        "{}: {field} of row {row}",
                        case["id"]
                    );
                }
            }
        }
        let longest = layouts.iter().map(SequenceLayout::len).max().unwrap();
        assert_eq!(longest, count(&case["seq_len"]), "{}", case["id"]);
        assert_generated(&layouts, case, setup.config.pixels_per_token());
        assert_stops(&setup, case);
    }
}

fn assert_generated(layouts: &[SequenceLayout], case: &Value, cell: usize) {
    let Some(images) = case["gen_image"].as_array() else {
        return;
    };
    for (layout, want) in layouts.iter().zip(images) {
        let got = layout.generated.as_ref().unwrap();
        assert_eq!(got.ratio_index, count(&want["ratio_index"]), "{want}");
        assert_eq!(got.span.grid_h, count(&want["token_h"]), "{want}");
        assert_eq!(got.span.grid_w, count(&want["token_w"]), "{want}");
        assert_eq!(got.span.grid_h * cell, count(&want["height"]), "{want}");
        assert_eq!(got.span.grid_w * cell, count(&want["width"]), "{want}");
    }
}

fn assert_stops(setup: &Setup, case: &Value) {
    let Some(want) = case["stop_token_ids"].as_array() else {
        return;
    };
    let inputs = &case["inputs"];
    // The reference takes conditioning images by its message interface, which leaves the size to the model.
    let size_given = !inputs["image_size"].is_null() && inputs["cond_images"].is_null();
    let task = task(inputs["bot_task"].as_str().unwrap());
    let got = stop_token_ids(&setup.special, task, size_given);
    let want: Vec<u32> = want.iter().map(|v| count(v) as u32).collect();
    assert_eq!(got, want, "{}", case["id"]);
}

/// Both rows of every layout, conditional ones first, padded to one length.
fn padded_rows(setup: &Setup, layouts: &[SequenceLayout], rows: usize, length: usize) -> Vec<u32> {
    let kinds = [RowKind::Cond, RowKind::Uncond];
    (0..rows)
        .flat_map(|row| {
            let layout = &layouts[row % layouts.len()];
            let mut ids = layout.tokens(kinds[row / layouts.len()]).to_vec();
            ids.resize(length, setup.special.pad.unwrap_or(0));
            ids
        })
        .collect()
}

#[test]
fn token_ids_equal_the_reference() {
    if !in_set(&["01_layouts.json", "01_layouts.safetensors"]) {
        return;
    }
    let setup = Setup::load();
    let tensors = Tensors::load("01_layouts.safetensors");
    for case in golden_json("01_layouts.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let layouts = layouts(&setup, case);
        let (shape, want) = tensors.ids(&format!("{id}.tokens"));
        let got = padded_rows(&setup, &layouts, shape[0], shape[1]);
        assert_eq!(got, want, "{id}");
        if let Some(text) = case["decoded_row0"].as_str() {
            let decoded = setup.tokenizer.decode(&got[..shape[1]]).unwrap();
            assert_eq!(with_counted_images(&decoded), text, "{id}");
        }
    }
}

/// Writes each run of image tokens the way the golden file does.
fn with_counted_images(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("<img>") {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let mut run = 0;
        while let Some(after) = rest.strip_prefix("<img>") {
            rest = after;
            run += 1;
        }
        out.push_str(&format!("[<img>]{{{run}}}"));
    }
    out + rest
}

#[test]
fn positions_equal_the_reference() {
    if !in_set(&["01_layouts.json", "01_layouts.safetensors"]) {
        return;
    }
    let setup = Setup::load();
    let tensors = Tensors::load("01_layouts.safetensors");
    for case in golden_json("01_layouts.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let layouts = layouts(&setup, case);
        let (shape, want) = tensors.i32(&format!("{id}.positions_yx"));
        for row in 0..shape[0] {
            let got: Vec<i32> = layouts[row % layouts.len()]
                .positions(0..shape[1])
                .unwrap()
                .iter()
                .flat_map(|p| [p.y as i32, p.x as i32])
                .collect();
            let at = row * shape[1] * 2;
            assert_eq!(got, want[at..at + shape[1] * 2], "{id}: row {row}");
        }
    }
}

#[test]
fn rotary_tables_equal_the_reference() {
    if !in_set(&["01_layouts.json", "01_layouts.safetensors"]) {
        return;
    }
    let setup = Setup::load();
    let tensors = Tensors::load("01_layouts.safetensors");
    let names = tensors.names();
    let mut worst: [(f32, &str); 2] = [(0.0, "near positions"), (0.0, "far positions")];
    for case in golden_json("01_layouts.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let layouts = layouts(&setup, case);
        let prefix = format!("{id}.cos");
        for name in names.iter().filter(|n| n.starts_with(&prefix)) {
            let (shape, cos) = tensors.f32(name);
            let (_, sin) = tensors.f32(&name.replace(".cos", ".sin"));
            let rows_name = format!("{id}.rope_rows");
            let dim = shape[shape.len() - 1];
            let (batch, picked) = if tensors.has(&rows_name) {
                let (_, rows) = tensors.i32(&rows_name);
                (1, rows.iter().map(|r| *r as usize).collect::<Vec<_>>())
            } else {
                (shape[0], (0..shape[1]).collect())
            };
            for row in 0..batch {
                let all = layouts[row % layouts.len()]
                    .positions(0..picked.iter().max().unwrap() + 1)
                    .unwrap();
                for (i, token) in picked.iter().enumerate() {
                    let position = all[*token];
                    let table = rope_table(&[position], dim, setup.config.rope_theta).unwrap();
                    let at = (row * picked.len() + i) * dim;
                    let far = usize::from(position.y.max(position.x) >= FAR);
                    for (got, want) in [(&table.cos, &cos), (&table.sin, &sin)] {
                        let difference =
                            crate::common::max_abs(got.as_f32().unwrap(), &want[at..at + dim]);
                        worst[far].0 = worst[far].0.max(difference);
                    }
                }
            }
        }
    }
    for ((difference, what), limit) in worst.into_iter().zip([limit::ROPE, limit::ROPE_FAR]) {
        assert_close(
            &format!("rotary tables, {what}"),
            &[difference],
            &[0.0],
            limit,
        );
    }
}

#[test]
fn segments_say_what_the_reference_mask_says() {
    if !in_set(&["01_layouts.json", "01_layouts.safetensors"]) {
        return;
    }
    let setup = Setup::load();
    let tensors = Tensors::load("01_layouts.safetensors");
    for case in golden_json("01_layouts.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let name = format!("{id}.mask_packed");
        if !tensors.has(&name) {
            continue;
        }
        let layouts = layouts(&setup, case);
        let (shape, want) = tensors.u8(&name);
        for row in 0..shape[0] {
            let layout = &layouts[row % layouts.len()];
            let mut keys: Vec<usize> = (1..=shape[1]).collect();
            for LayoutSegment { tokens, kind } in layout.segments(0..layout.len()).unwrap() {
                if kind == SegmentKind::Full {
                    keys[tokens.clone()].fill(tokens.end);
                }
            }
            for (query, visible) in keys.iter().enumerate() {
                let at = (row * shape[1] + query) * shape[2];
                for key in 0..shape[1] {
                    let bit = want[at + key / 8] >> (key % 8) & 1 == 1;
                    assert_eq!(
                        bit,
                        key < *visible,
                        "{id}: row {row}, query {query}, key {key}"
                    );
                }
            }
        }
    }
}

#[test]
fn guidance_and_second_timestep_layouts_equal_the_reference() {
    if !in_set(&[
        "10_instruct_layouts.json",
        "10_instruct_layouts.safetensors",
    ]) {
        return;
    }
    let setup = Setup::load();
    let tensors = Tensors::load("10_instruct_layouts.safetensors");
    for case in golden_json("10_instruct_layouts.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let rules = LayoutRules {
            guidance_token: case["add_guidance_token"].as_bool().unwrap(),
            timestep_r_token: case["add_timestep_r_token"].as_bool().unwrap(),
            ..setup.rules(count(&case["base_size"]))
        };
        let input = LayoutInput {
            prompt: case["prompt"].as_str().unwrap(),
            system_prompt: case["system_prompt"].as_str(),
            assistant_text: case["cot_text"].as_str(),
            template: case["sequence_template"].as_str().unwrap().parse().unwrap(),
            drop_think: false,
            cond_images: &[],
            target: Target::Image(ImageGrid {
                ratio_index: count(&case["ratio_index"]),
                height: count(&case["token_h"]),
                width: count(&case["token_w"]),
            }),
        };
        let layout = SequenceLayout::new(&setup.tokenizer, &setup.special, &rules, &input).unwrap();
        let (shape, want) = tensors.ids(&format!("{id}.tokens"));
        assert_eq!(shape[0], count(&case["cfg_factor"]), "{id}");
        let layouts = std::slice::from_ref(&layout);
        assert_eq!(
            padded_rows(&setup, layouts, shape[0], shape[1]),
            want,
            "{id}"
        );
        assert_instruct_indices(&layout, case, shape[0]);
    }
}

fn assert_instruct_indices(layout: &SequenceLayout, case: &Value, rows: usize) {
    let image = layout.generated.as_ref().unwrap();
    for row in 0..rows {
        let uncond = row > 0;
        for (field, got) in [
            ("gen_timestep_index", Some(image.timestep)),
            ("guidance_index", image.guidance),
            ("timestep_r_index", image.timestep_r),
            ("think_recaption_end_pos", layout.assistant_end),
            ("uncond_cfg_start_pos", layout.first_cfg.filter(|_| uncond)),
        ] {
            let want = if case[field].is_null() {
                &Value::Null
            } else {
                &case[field][row][0]
            };
            assert_eq!(&json!(got), want, "{}: {field} of row {row}", case["id"]);
        }
        assert_eq!(
            slice(&image.span.tokens),
            case["gen_image_slices"][row][0],
            "{}",
            case["id"]
        );
    }
}
