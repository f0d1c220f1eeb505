//! Golden 06: greedy text, with and without a cache.

use model::backbone::NoProbe;
use model::input::RowInput;
use model::layout::{LayoutInput, Target};
use model::{KvCache, Model, RowKind, RowTokens, SequenceLayout};
use serde_json::Value;

use crate::back_prefill::task;
use crate::back_support::{ctx, limit, models, words};
use crate::common::{Tensors, assert_close, count, in_set, json};

fn layout(model: &Model, case: &Value) -> SequenceLayout {
    let words = words(model, case);
    let input = LayoutInput {
        prompt: words.prompt,
        system_prompt: words.system_prompt,
        assistant_text: None,
        template: words.template,
        drop_think: false,
        cond_images: &[],
        target: Target::Text(task(case["bot_task"].as_str().unwrap())),
    };
    model.layout(&input).unwrap()
}

/// Logits after the last of `ids`, everything computed anew.
fn uncached(model: &Model, ids: &[u32]) -> Vec<f32> {
    let row = RowInput {
        start: 0,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache = KvCache::new(model.info().kv, ids.len()).unwrap();
    let hidden = model
        .run_rows(&ctx(), &[row], &mut [&mut cache], &mut NoProbe)
        .unwrap();
    let backbone = model.backbone().unwrap();
    let last = hidden.narrow0(ids.len() - 1, 1).unwrap();
    backbone
        .logits(&backbone.final_norm(&last).unwrap())
        .unwrap()
        .to_f32_vec()
}

#[test]
fn greedy_text_equals_the_reference_token_for_token() {
    if !in_set(&["06_ar_text.json", "06_ar_text.safetensors"]) {
        return;
    }
    let file = Tensors::load("06_ar_text.safetensors");
    for case in json("06_ar_text.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let want_ids = file.ids(&format!("{id}.new_ids")).1;
        assert_eq!(want_ids.len(), count(&case["new_tokens"]));
        for (name, model) in models() {
            let what = format!("06 {id} {name}");
            let layout = layout(model, case);
            let mut ids = layout.tokens(RowKind::Cond).to_vec();
            assert_eq!(
                ids,
                file.ids(&format!("{id}.prompt_ids")).1,
                "{what}: prompt ids"
            );
            let row = RowTokens::new(&layout, RowKind::Cond);
            let mut pass = model
                .start_text(&ctx(), &[&row], want_ids.len())
                .unwrap()
                .remove(0);
            let (mut cached, mut fresh) = (Vec::new(), Vec::new());
            for want in &want_ids {
                cached.extend_from_slice(pass.logits());
                fresh.extend(uncached(model, &ids));
                assert_eq!(pass.most_likely(), *want, "{what}: token {}", ids.len());
                ids.push(*want);
                model.step_text(&ctx(), &mut [&mut pass], &[*want]).unwrap();
            }
            for (key, got) in [("logits_cached", cached), ("logits_uncached", fresh)] {
                let want = file.f32(&format!("{id}.{key}")).1;
                assert_close(&format!("{what} {key}"), &got, &want, limit::STATE);
            }
        }
    }
}

#[test]
fn text_stops_where_the_reference_stops() {
    if !in_set(&["06_ar_text.json", "06_ar_text.safetensors"]) {
        return;
    }
    for case in json("06_ar_text.json").as_array().unwrap() {
        let ids = |field: &str| -> Vec<u32> {
            let list = case[field].as_array().unwrap();
            list.iter()
                .map(|v| u32::try_from(v.as_u64().unwrap()).unwrap())
                .collect()
        };
        for (name, model) in models() {
            let layout = layout(model, case);
            let row = RowTokens::new(&layout, RowKind::Cond);
            let limit = count(&case["new_tokens"]);
            let got = model
                .write_greedy(&ctx(), &row, limit, &ids("stop_token_ids"))
                .unwrap();
            assert_eq!(got, ids("natural_stop_new_ids"), "06 {} {name}", case["id"]);
        }
    }
}

#[test]
fn texts_written_together_equal_texts_written_alone() {
    if !in_set(&["06_ar_text.json", "06_ar_text.safetensors"]) {
        return;
    }
    let cases = json("06_ar_text.json");
    let (_, model) = models()[0];
    let layouts: Vec<SequenceLayout> = cases
        .as_array()
        .unwrap()
        .iter()
        .map(|case| layout(model, case))
        .collect();
    let rows: Vec<RowTokens<'_>> = layouts
        .iter()
        .map(|layout| RowTokens::new(layout, RowKind::Cond))
        .collect();
    let refs: Vec<&RowTokens<'_>> = rows.iter().collect();
    let steps = 4;
    let mut together = model.start_text(&ctx(), &refs, steps).unwrap();
    let mut alone: Vec<_> = refs
        .iter()
        .map(|row| model.start_text(&ctx(), &[row], steps).unwrap().remove(0))
        .collect();
    for _ in 0..steps {
        let ids: Vec<u32> = together.iter().map(|pass| pass.most_likely()).collect();
        let mut packed: Vec<_> = together.iter_mut().collect();
        model.step_text(&ctx(), &mut packed, &ids).unwrap();
        for ((pass, id), joined) in alone.iter_mut().zip(&ids).zip(&together) {
            model.step_text(&ctx(), &mut [&mut *pass], &[*id]).unwrap();
            assert_eq!(pass.logits(), joined.logits());
        }
    }
}
