//! The OpenAPI document is the one that is checked in.
use std::collections::BTreeSet;

use integration_tests::{cluster::Up, web, workspace_root};
use serde_json::Value;

use crate::conform::assert_conforms;

#[test]
fn the_checked_in_document_is_what_the_table_says() {
    let path = workspace_root().join("proto/openapi/openapi.json");
    let text = std::fs::read_to_string(path).unwrap();
    let checked_in: Value = serde_json::from_str(&text).unwrap();
    assert!(
        checked_in == router::openapi(),
        "write it again: cargo run -p omni -- openapi > proto/openapi/openapi.json"
    );
}

/// Every reference leads somewhere, and every schema is referred to.
#[test]
fn the_document_is_closed() {
    let document = router::openapi();
    let mut referred = BTreeSet::new();
    let mut open = vec![&document];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(to)) = map.get("$ref") {
                    assert!(document.pointer(&to[1..]).is_some(), "{to}");
                    referred.insert(to.clone());
                }
                open.extend(map.values());
            }
            Value::Array(list) => open.extend(list),
            _ => {}
        }
    }
    for name in document["components"]["schemas"]
        .as_object()
        .unwrap()
        .keys()
    {
        assert!(
            referred.contains(&format!("#/components/schemas/{name}")),
            "{name}"
        );
    }
}

#[tokio::test]
async fn models_are_listed_as_the_document_says() {
    let up = Up::shared();
    let listed = web::get(up.http(), "/v1/models").await.json();
    assert_conforms("Models", &listed);
    let name = listed["data"][0]["id"].as_str().unwrap();
    let one = web::get(up.http(), &format!("/v1/models/{name}"))
        .await
        .json();
    assert_conforms("Model", &one);
    let sizes = one["omni"]["sizes"].as_array().unwrap();
    assert!(sizes.contains(&"256x256".into()), "{sizes:?}");
}
