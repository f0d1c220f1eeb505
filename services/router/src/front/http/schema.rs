//! Parses what HTTP clients send, from JSON or a form, by the table of [`super::fields`]. What is not
//! in the table is refused by name.
use std::collections::BTreeMap;

use axum::body::Bytes;
use base::Failure;
use proto::v1::input_image::Source;
use serde_json::Value;

use super::{
    fields::{Endpoint, Field, Kind, fields},
    pictures,
};

/// Longest name or value that is repeated in an error, in characters.
const MAX_SHOWN: usize = 64;

/// A value as it was sent.
#[derive(Debug, Clone)]
pub(super) enum Raw {
    Json(Value),
    /// Part of a form.
    Part(Bytes),
}

/// A value that is what its field asks for.
#[derive(Debug, Clone, PartialEq)]
enum Given {
    Text(String),
    Whole(u64),
    Number(f64),
    Flag(bool),
    Words(Vec<&'static str>),
    Json(Value),
    Pictures(Vec<Source>),
}

/// A request whose fields are all known and each within its bounds.
#[derive(Debug, Default)]
pub(super) struct Fields(BTreeMap<&'static str, Given>);

impl Fields {
    /// Checks what was sent, in the order in which it was sent; JSON's null is absent.
    ///
    /// # Errors
    /// The first field that is unknown, given twice, of another type or out of bounds; then the
    /// first required one that is missing.
    pub(super) fn parse(
        endpoint: Endpoint,
        sent: impl IntoIterator<Item = (String, Raw)>,
    ) -> Result<Self, Failure> {
        let mut given = BTreeMap::new();
        for (name, raw) in sent {
            let field = find(endpoint, &name)?;
            if matches!(raw, Raw::Json(Value::Null)) {
                continue;
            }
            let value = value(field, raw)?;
            match (given.get_mut(field.name), value) {
                (None, value) => {
                    given.insert(field.name, value);
                }
                // A form repeats the field for each file.
                (Some(Given::Pictures(all)), Given::Pictures(more)) => {
                    all.extend(more);
                    count(field, all.len())?;
                }
                (Some(_), _) => return Err(invalid(field, "is given twice")),
            }
        }
        for field in fields(endpoint) {
            if field.required && !given.contains_key(field.name) {
                return Err(invalid(field, "is required"));
            }
        }
        Ok(Self(given))
    }

    pub(super) fn text(&mut self, name: &'static str) -> Option<String> {
        match self.0.remove(name) {
            Some(Given::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub(super) fn whole(&self, name: &'static str) -> Option<u64> {
        match self.0.get(name) {
            Some(Given::Whole(value)) => Some(*value),
            _ => None,
        }
    }

    pub(super) fn number(&self, name: &'static str) -> Option<f64> {
        match self.0.get(name) {
            Some(Given::Number(value)) => Some(*value),
            _ => None,
        }
    }

    pub(super) fn flag(&self, name: &'static str) -> bool {
        self.0.get(name) == Some(&Given::Flag(true))
    }

    pub(super) fn flag_given(&self, name: &'static str) -> Option<bool> {
        self.0.contains_key(name).then(|| self.flag(name))
    }

    pub(super) fn words(&self, name: &'static str) -> Option<&[&'static str]> {
        match self.0.get(name) {
            Some(Given::Words(words)) => Some(words),
            _ => None,
        }
    }

    pub(super) fn word(&self, name: &'static str) -> Option<&'static str> {
        self.words(name).and_then(|words| words.first().copied())
    }

    pub(super) fn json(&mut self, name: &'static str) -> Option<Value> {
        match self.0.remove(name) {
            Some(Given::Json(value)) => Some(value),
            _ => None,
        }
    }

    pub(super) fn pictures(&mut self, name: &'static str) -> Vec<Source> {
        match self.0.remove(name) {
            Some(Given::Pictures(pictures)) => pictures,
            _ => Vec::new(),
        }
    }
}

/// Clients write `image[]` for the files of a list.
fn find(endpoint: Endpoint, name: &str) -> Result<&'static Field, Failure> {
    let plain = name.strip_suffix("[]");
    let matches = |field: &&Field| {
        let list = matches!(field.kind, Kind::Pictures(2..));
        field.name == name || (list && Some(field.name) == plain)
    };
    fields(endpoint).find(matches).ok_or_else(|| {
        let shown: String = name.chars().take(MAX_SHOWN).collect();
        Failure::invalid(&shown, format!("{shown:?} is no field of this endpoint"))
    })
}

fn invalid(field: &Field, reason: impl AsRef<str>) -> Failure {
    Failure::invalid(field.name, format!("{} {}", field.name, reason.as_ref()))
}

fn count(field: &Field, pictures: usize) -> Result<(), Failure> {
    match field.kind {
        Kind::Pictures(most) if pictures > most => Err(invalid(
            field,
            format!("must be at most {most} pictures, got {pictures}"),
        )),
        _ => Ok(()),
    }
}

fn value(field: &Field, raw: Raw) -> Result<Given, Failure> {
    if let Kind::Pictures(_) = field.kind {
        let pictures = pictures::sent(raw).map_err(|reason| invalid(field, reason))?;
        count(field, pictures.len())?;
        return Ok(Given::Pictures(pictures));
    }
    match raw {
        Raw::Json(json) => of_json(field, json),
        Raw::Part(bytes) => {
            let text = String::from_utf8(bytes.into());
            of_text(
                field,
                text.map_err(|_| invalid(field, "must be UTF-8 text"))?,
            )
        }
    }
}

fn of_json(field: &Field, json: Value) -> Result<Given, Failure> {
    match (field.kind, json) {
        (Kind::Messages, json @ Value::Array(_)) => Ok(Given::Json(json)),
        (Kind::Flag, Value::Bool(flag)) => Ok(Given::Flag(flag)),
        (Kind::Words(known), Value::Array(list)) if list.len() <= known.len() => {
            let words = list.iter().map(|word| {
                let text = word.as_str().ok_or_else(|| wrong_type(field))?;
                one_of(field, known, text)
            });
            Ok(Given::Words(words.collect::<Result<_, _>>()?))
        }
        (Kind::Whole(..), Value::Number(number)) => {
            let shown = number.to_string();
            whole(field, number.as_u64(), &shown)
        }
        (Kind::Number(..), Value::Number(number)) => {
            let shown = number.to_string();
            real(field, number.as_f64(), &shown)
        }
        (Kind::Text(_) | Kind::Word(_) | Kind::Size, Value::String(text)) => of_text(field, text),
        _ => Err(wrong_type(field)),
    }
}

/// What a form says is always text.
fn of_text(field: &Field, text: String) -> Result<Given, Failure> {
    match field.kind {
        Kind::Text(most) => {
            // A character is at least a byte: what is short in bytes needs no counting.
            if text.len() > most && text.chars().count() > most {
                return Err(invalid(field, format!("must be at most {most} characters")));
            }
            Ok(Given::Text(text))
        }
        Kind::Size => Ok(Given::Text(text)),
        Kind::Word(known) => Ok(Given::Words(vec![one_of(field, known, &text)?])),
        Kind::Flag => match text.as_str() {
            "true" => Ok(Given::Flag(true)),
            "false" => Ok(Given::Flag(false)),
            _ => Err(wrong_type(field)),
        },
        Kind::Whole(..) => whole(field, text.parse().ok(), &text),
        Kind::Number(..) => real(field, text.parse().ok(), &text),
        Kind::Words(_) | Kind::Messages | Kind::Pictures(_) => Err(wrong_type(field)),
    }
}

fn wrong_type(field: &Field) -> Failure {
    invalid(field, format!("must be {}", field.kind.name()))
}

fn clipped(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

fn one_of(field: &Field, known: &[&'static str], text: &str) -> Result<&'static str, Failure> {
    let found = known.iter().find(|word| **word == text).copied();
    found.ok_or_else(|| {
        let (words, shown) = (known.join(", "), clipped(text));
        invalid(field, format!("must be one of {words}, got {shown:?}"))
    })
}

fn whole(field: &Field, value: Option<u64>, shown: &str) -> Result<Given, Failure> {
    match (field.kind, value) {
        (Kind::Whole(least, most), Some(value)) if (least..=most).contains(&value) => {
            Ok(Given::Whole(value))
        }
        _ => Err(out_of_bounds(field, shown)),
    }
}

fn real(field: &Field, value: Option<f64>, shown: &str) -> Result<Given, Failure> {
    match (field.kind, value) {
        // A NaN is in no range.
        (Kind::Number(least, most), Some(value)) if (least..=most).contains(&value) => {
            Ok(Given::Number(value))
        }
        _ => Err(out_of_bounds(field, shown)),
    }
}

fn out_of_bounds(field: &Field, shown: &str) -> Failure {
    invalid(
        field,
        format!("must be {}, got {}", field.kind.name(), clipped(shown)),
    )
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
