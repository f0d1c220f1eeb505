//! The table and the checks of every door agree, and nothing is ignored.
use base::{Code, RequestId, limits::MAX_SEED, rng::Source};
use proptest::prelude::*;
use proto::v1::{Bucket, ModelInfo};
use serde_json::json;

use super::{
    super::{
        fields::{
            Endpoint::{Chat, Edits, Generations},
            FIELDS,
        },
        order::{Order, Said},
    },
    *,
};
use crate::validate;

fn parse(endpoint: Endpoint, json: Value) -> Result<Fields, Failure> {
    let Value::Object(map) = json else {
        panic!("not an object")
    };
    Fields::parse(
        endpoint,
        map.into_iter()
            .map(|(name, value)| (name, Raw::Json(value))),
    )
}

/// What every other door checks as well.
fn order(json: Value) -> Result<validate::ValidRequest, Failure> {
    let mut fields = parse(Generations, json)?;
    let prompt = fields.text("prompt").unwrap();
    let system = fields.text("system_prompt").unwrap_or_default();
    let said = Said {
        prompt,
        system_prompt: system,
        ..Said::default()
    };
    let order = Order::new(fields, &RequestId::generate(), said)?;
    let model = ModelInfo {
        buckets: vec![Bucket {
            ratio_index: 0,
            height: 256,
            width: 256,
        }],
        default_steps: 8,
        ..ModelInfo::default()
    };
    let checked = validate::check(order.request).map_err(|error| Failure::of(&error))?;
    let valid = checked.resolve(&model, &Source::seeded(1));
    valid.map_err(|error| Failure::of(&error))
}

/// Fields that only a mode with words has a use for.
const OF_WORDS: [&str; 6] = [
    "drop_think",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "max_new_tokens",
];

fn with(name: &str, value: Value) -> Value {
    let mut json = json!({ "prompt": "a fox" });
    if OF_WORDS.contains(&name) {
        json["mode"] = "think".into();
    }
    json[name] = value;
    json
}

fn refused(json: Value, code: Code, field: &str) {
    let error = order(json.clone()).unwrap_err();
    assert_eq!(
        (error.code, error.field.as_deref()),
        (code, Some(field)),
        "{json}: {error}"
    );
    assert!(error.message.contains(field), "{error}");
    assert!(error.message.len() < 400, "{error}");
}

#[test]
fn a_field_that_is_not_in_the_table_is_refused_by_name() {
    for name in [
        "moderation",
        "style",
        "Prompt",
        "messages",
        "image",
        "prompt[]",
        "",
    ] {
        refused(with(name, json!("x")), Code::InvalidArgument, name);
    }
    let long = "x".repeat(100_000);
    let error = parse(Chat, with(&long, json!(1))).err().unwrap();
    assert!(error.message.len() < 200);
    // Not on this endpoint, though on another.
    assert!(parse(Chat, json!({ "prompt": "x" })).is_err());
}

#[test]
fn what_is_missing_twice_or_null_is_seen() {
    let error = parse(Generations, json!({})).err().unwrap();
    assert_eq!(error.message, "prompt is required");
    let error = parse(Generations, json!({ "prompt": null })).err().unwrap();
    assert_eq!(error.message, "prompt is required");
    assert!(parse(Generations, with("seed", Value::Null)).is_ok());
    let twice = [("prompt", "a"), ("prompt", "b")];
    let twice = twice.map(|(name, text)| (name.to_owned(), Raw::Json(json!(text))));
    let error = Fields::parse(Generations, twice).err().unwrap();
    assert_eq!(error.message, "prompt is given twice");
}

/// Every bound of the table is one that the common validation has as well: the bound itself is
/// legal there, and one beyond it is refused here.
#[test]
fn the_bounds_of_the_table_are_those_of_every_door() {
    for field in fields(Generations) {
        let name = field.name;
        match field.kind {
            Kind::Whole(least, most) => {
                let legal = [json!(least), json!(most)];
                for value in legal {
                    let built = name != "partial_images" && name != "output_compression";
                    if built {
                        order(with(name, value)).unwrap_or_else(|e| panic!("{name}: {e}"));
                    }
                }
                let below = i128::from(least) - 1;
                let below = i64::try_from(below).unwrap();
                for value in [
                    json!(below),
                    json!(most + 1),
                    json!(1.5),
                    json!("1"),
                    json!([1]),
                ] {
                    refused(with(name, value), Code::InvalidArgument, name);
                }
            }
            Kind::Number(least, most) => {
                for value in [json!(least), json!(most), json!(1)] {
                    order(with(name, value)).unwrap_or_else(|e| panic!("{name}: {e}"));
                }
                for value in [
                    json!(least - 0.001),
                    json!(most + 1.0),
                    json!("2"),
                    json!(true),
                ] {
                    refused(with(name, value), Code::InvalidArgument, name);
                }
            }
            Kind::Text(most) => {
                // A selector must be one of the model's as well.
                let known = order(with(name, json!("ä".repeat(most.min(256)))));
                assert!(known.is_ok() || name == "system_prompt_name", "{known:?}");
                let long = json!("ä".repeat(most + 1));
                refused(with(name, long), Code::InvalidArgument, name);
                refused(with(name, json!(3)), Code::InvalidArgument, name);
            }
            Kind::Word(words) => {
                for word in words {
                    order(with(name, json!(word))).unwrap();
                }
                for value in [json!("transparent"), json!("url"), json!(""), json!(1)] {
                    refused(with(name, value), Code::InvalidArgument, name);
                }
            }
            Kind::Flag => {
                order(with(name, json!(true))).unwrap();
                refused(with(name, json!("true")), Code::InvalidArgument, name);
                refused(with(name, json!(1)), Code::InvalidArgument, name);
            }
            Kind::Size => {
                for size in ["auto", "256x256"] {
                    assert_eq!(order(with(name, json!(size))).unwrap().size.width, 256);
                }
                for size in ["256", "256x", "1x1", "0x0", "Auto", " auto"] {
                    refused(with(name, json!(size)), Code::InvalidArgument, name);
                }
            }
            Kind::Words(_) | Kind::Messages | Kind::Pictures(_) => panic!("{name} is not here"),
        }
    }
}

#[test]
fn fields_that_contradict_each_other_are_refused() {
    let json = json!({ "prompt": "x", "quality": "low", "steps": 4 });
    refused(json, Code::InvalidArgument, "quality");
    assert!(order(json!({ "prompt": "x", "quality": "auto", "steps": 4 })).is_ok());
    let json = json!({ "prompt": "x", "seed": MAX_SEED, "n": 2 });
    refused(json, Code::InvalidArgument, "seed");
    let png = json!({ "prompt": "x", "output_compression": 50 });
    refused(png, Code::InvalidArgument, "output_compression");
    for legal in [
        json!({ "prompt": "x", "output_compression": 100 }),
        json!({ "prompt": "x", "output_compression": 0, "output_format": "jpeg" }),
        json!({ "prompt": "x", "partial_images": 0, "stream": true }),
    ] {
        order(legal).unwrap();
    }
    let json = json!({ "prompt": "x", "partial_images": 1 });
    refused(json, Code::InvalidArgument, "partial_images");
}

#[test]
fn a_form_says_the_same_as_json() {
    let form = [
        ("prompt", "a fox"),
        ("n", "3"),
        ("seed", "9223372036854775805"),
        ("guidance", "2.5"),
        ("stream", "false"),
        ("steps", "7"),
        ("size", "256x256"),
    ];
    let parts = form.map(|(name, text)| (name.to_owned(), Raw::Part(Bytes::from(text))));
    let mut fields = Fields::parse(Generations, parts).unwrap();
    assert_eq!(fields.text("prompt").unwrap(), "a fox");
    assert_eq!(
        (fields.whole("n"), fields.whole("steps")),
        (Some(3), Some(7))
    );
    assert_eq!(fields.whole("seed"), Some(MAX_SEED - 2));
    assert_eq!(
        (fields.number("guidance"), fields.flag("stream")),
        (Some(2.5), false)
    );
    for (name, text) in [
        ("n", "three"),
        ("n", "11"),
        ("guidance", "NaN"),
        ("stream", "yes"),
    ] {
        let parts = [("prompt", "x"), (name, text)];
        let parts = parts.map(|(name, text)| (name.to_owned(), Raw::Part(Bytes::from(text))));
        let error = Fields::parse(Generations, parts).err().unwrap();
        assert_eq!(error.field.as_deref(), Some(name), "{error}");
    }
    let parts = [("prompt".to_owned(), Raw::Part(Bytes::from_static(&[0xff])))];
    assert!(Fields::parse(Generations, parts).is_err());
}

#[test]
fn files_of_a_form_are_a_list_of_bounded_length() {
    let part = |name: &str| (name.to_owned(), Raw::Part(Bytes::from_static(b"x")));
    let parse = |names: &[&str]| {
        let prompt = ("prompt".to_owned(), Raw::Part(Bytes::from_static(b"x")));
        Fields::parse(Edits, names.iter().map(|name| part(name)).chain([prompt]))
    };
    let mut all = parse(&["image[]", "image[]", "image"]).unwrap();
    assert_eq!(all.pictures("image").len(), 3);
    for names in [
        &["image"; 4][..],
        &["image", "mask", "mask"],
        &["image", "mask[]"],
    ] {
        let error = parse(names).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
    }
    assert_eq!(parse(&[]).err().unwrap().field.as_deref(), Some("image"));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::vec((".{0,8}", inner), 0..3)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_value_of_any_field_is_taken_or_blamed(at in 0..FIELDS.len(), json in any_json()) {
        let name = FIELDS[at].name;
        if let Err(error) = order(with(name, json)) {
            prop_assert!(error.field.is_some(), "{error}");
            prop_assert!(error.message.len() < 500, "{error}");
        }
    }
}
