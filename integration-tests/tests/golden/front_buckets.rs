//! Golden 05 and 10: the tables of legal sizes and what a wish becomes.

use model::buckets::ColonOrder;
use model::{Bucket, BucketSet, ModelConfig, ResolutionGroup, SizeRequest};
use serde_json::Value;

use crate::common::{count, in_set, json, model_dir};

/// A size as the golden requests write it.
pub(crate) fn size_request(value: &Value) -> SizeRequest {
    match value {
        Value::String(text) => SizeRequest::parse(text, ColonOrder::HeightFirst).unwrap(),
        pair => SizeRequest::Pixels {
            height: count(&pair[0]),
            width: count(&pair[1]),
        },
    }
}

fn pixels_per_token() -> usize {
    ModelConfig::from_dir(&model_dir())
        .unwrap()
        .pixels_per_token()
}

fn assert_table(group: &ResolutionGroup, table: &Value, what: &str) {
    let want: Vec<Bucket> = table
        .as_array()
        .unwrap()
        .iter()
        .map(|b| Bucket {
            ratio_index: count(&b["ratio_index"]),
            height: count(&b["height"]),
            width: count(&b["width"]),
        })
        .collect();
    assert_eq!(group.buckets(), want, "{what}");
}

fn assert_choice(got: Bucket, want: &Value, cell: usize) {
    assert_eq!(got.height, count(&want["height"]), "{want}");
    assert_eq!(got.width, count(&want["width"]), "{want}");
    assert_eq!(got.ratio_index, count(&want["ratio_index"]), "{want}");
    let grid = (count(&want["token_h"]), count(&want["token_w"]));
    assert_eq!(got.grid(cell), grid, "{want}");
}

#[test]
fn base_tables_and_choices_equal_the_reference() {
    if !in_set(&["05_buckets.json"]) {
        return;
    }
    let cell = pixels_per_token();
    for (name, case) in json("05_buckets.json").as_object().unwrap() {
        let base = name.strip_prefix("base").unwrap().parse().unwrap();
        let group = ResolutionGroup::new(base, cell, BucketSet::Base).unwrap();
        assert_eq!(group.step(), count(&case["step"]), "step of {name}");
        assert_table(&group, &case["buckets"], name);
        for (bucket, want) in group
            .buckets()
            .iter()
            .zip(case["buckets"].as_array().unwrap())
        {
            // The JSON reader may be off by the last bit of an f64.
            let difference = bucket.ratio() - want["ratio"].as_f64().unwrap();
            assert!(difference.abs() < 1e-12, "{want}");
        }
        for request in case["requests"].as_array().unwrap() {
            let wish = size_request(&request["image_size"]);
            let got = wish.snap(&group).unwrap().unwrap();
            assert_choice(got, request, cell);
            assert_eq!(count(&request["base_size"]), base);
        }
    }
}

#[test]
fn instruct_table_and_choices_equal_the_reference() {
    if !in_set(&["10_instruct_buckets.json"]) {
        return;
    }
    let golden = json("10_instruct_buckets.json");
    let cell = pixels_per_token();
    let base = count(&golden["requests"][0]["base_size"]);
    let group = ResolutionGroup::new(base, cell, BucketSet::InstructWithSubSquares).unwrap();
    assert_table(&group, &golden["buckets"], "instruct");
    let released = ResolutionGroup::new(base, cell, BucketSet::Instruct).unwrap();
    assert_table(
        &released,
        &golden["buckets"],
        "instruct without sub-squares",
    );
    for bucket in golden["buckets"].as_array().unwrap() {
        let want: Vec<(usize, usize)> = bucket["extra_hw"]
            .as_array()
            .unwrap()
            .iter()
            .map(|hw| (count(&hw[0]), count(&hw[1])))
            .collect();
        let got: Vec<(usize, usize)> = group
            .sub_sizes()
            .iter()
            .filter(|s| s.ratio_index == count(&bucket["ratio_index"]))
            .map(|s| (s.height, s.width))
            .collect();
        assert_eq!(got, want, "{bucket}");
    }
    for request in golden["requests"].as_array().unwrap() {
        let (height, width) = (count(&request["request_h"]), count(&request["request_w"]));
        assert_choice(group.nearest(height, width).unwrap(), request, cell);
    }
}
