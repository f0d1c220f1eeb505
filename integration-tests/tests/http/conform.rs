//! As much of JSON Schema as the OpenAPI document uses.
use serde_json::Value;

/// Checks `value` against the schema `name` of the document.
pub(crate) fn assert_conforms(name: &str, value: &Value) {
    let document = router::openapi();
    let schema = &document["components"]["schemas"][name];
    assert!(schema.is_object(), "{name} is no schema");
    let mut faults = Vec::new();
    check(&document, schema, value, name, &mut faults);
    assert!(faults.is_empty(), "{faults:#?}\nin {value:#}");
}

fn check(document: &Value, schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(reference.strip_prefix('#').unwrap());
        let target = target.unwrap_or_else(|| panic!("{reference} leads nowhere"));
        return check(document, target, value, at, faults);
    }
    let mut rule = |holds: bool, what: &dyn std::fmt::Display| {
        if !holds {
            faults.push(format!("{at}: {what}, got {value:.80}"));
        }
    };
    let types = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    let fits = types.is_empty() || types.iter().any(|name| is_a(value, name));
    rule(fits, &format!("must be {types:?}"));
    if let Some(list) = schema["enum"].as_array() {
        rule(list.contains(value), &"not in the enum");
    }
    if let Some(only) = schema.get("const") {
        rule(value == only, &format!("must be {only}"));
    }
    if let (Some(least), Some(number)) = (schema["minimum"].as_f64(), value.as_f64()) {
        rule(number >= least, &format!("must be at least {least}"));
    }
    let properties = schema["properties"].as_object();
    for (name, inner) in value.as_object().into_iter().flatten() {
        match properties.and_then(|all| all.get(name)) {
            Some(schema) => check(document, schema, inner, &format!("{at}.{name}"), faults),
            None if schema["additionalProperties"] == false => {
                faults.push(format!("{at}.{name} is not in the document"));
            }
            None => {}
        }
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        let name = name.as_str().unwrap();
        if value.is_object() && value.get(name).is_none() {
            faults.push(format!("{at}.{name} is missing"));
        }
    }
    if let Some(items) = schema.get("items") {
        for (index, inner) in value.as_array().into_iter().flatten().enumerate() {
            check(document, items, inner, &format!("{at}[{index}]"), faults);
        }
    }
}

fn is_a(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("no type {other}"),
    }
}
