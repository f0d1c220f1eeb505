//! YAML of JSON values: block style, strings as JSON strings wherever they could be read as something else.
use std::fmt::Write as _;

use serde_json::Value;

/// The document, with a line end.
pub(crate) fn text(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => block(&mut out, value, 0),
        Value::Array(list) if !list.is_empty() => block(&mut out, value, 0),
        scalar => {
            let _ = writeln!(out, "{}", word(scalar));
        }
    }
    out
}

fn block(out: &mut String, value: &Value, depth: usize) {
    let pad = "  ".repeat(depth);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                entry(out, &format!("{pad}{}:", plain(key)), value, depth + 1);
            }
        }
        Value::Array(list) => {
            for value in list {
                let mut inner = String::new();
                match value {
                    Value::Object(map) if !map.is_empty() => block(&mut inner, value, depth + 1),
                    other => entry(&mut inner, &format!("{pad}  "), other, depth + 1),
                }
                // The first line of an element stands beside its dash.
                let rest = inner.trim_start();
                let _ = write!(out, "{pad}- {rest}");
            }
        }
        _ => {}
    }
}

fn entry(out: &mut String, head: &str, value: &Value, depth: usize) {
    let nested = match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    };
    if nested {
        let _ = writeln!(out, "{head}");
        block(out, value, depth);
    } else {
        let gap = if head.ends_with(' ') { "" } else { " " };
        let _ = writeln!(out, "{head}{gap}{}", word(value));
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::String(text) => plain(text),
        Value::Object(_) => "{}".to_owned(),
        Value::Array(_) => "[]".to_owned(),
        other => other.to_string(),
    }
}

/// A string without quotes where no reader could take it for anything else.
fn plain(text: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "_-./@+".contains(c);
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let words = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let reserved = words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if starts && !reserved && text.chars().all(safe) {
        text.to_owned()
    } else {
        Value::String(text.to_owned()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_nest_and_what_could_be_misread_is_quoted() {
        let value = json!({
            "id": "m-1", "state": "yes", "number": "7", "size": "256x256", "n": 3, "none": null,
            "load": {"running": 1, "more": {}},
            "list": [{"a": 1, "b": [1, "x: y"]}, "two", []],
        });
        let expected = "\
id: m-1
list:
  - a: 1
    b:
      - 1
      - \"x: y\"
  - two
  - []
load:
  more: {}
  running: 1
\"n\": 3
none: null
number: \"7\"
size: \"256x256\"
state: \"yes\"
";
        let got = text(&value);
        // Keys stand in the order that the value has, which depends on how serde_json is built.
        let sorted = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(|line| line.trim().to_owned()).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&got), sorted(expected), "{got}");
        assert_eq!(text(&json!([])), "[]\n");
    }
}
