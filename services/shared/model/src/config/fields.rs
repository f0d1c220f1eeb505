//! Typed reading of JSON fields: every complaint names the full path of the field.

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest size or count that any field may hold; keeps every later product inside `usize`.
const MAX_COUNT: u64 = 1 << 24;

/// One JSON object and the path that leads to it.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
}

impl<'a> Fields<'a> {
    /// The root object of a file.
    pub(super) fn root(value: &'a Value, file: &str) -> Result<Self, ModelError> {
        let map = value
            .as_object()
            .ok_or_else(|| ModelError::file(file, "is not a JSON object"))?;
        Ok(Self {
            map,
            prefix: String::new(),
        })
    }

    /// The full path of a field.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// An error about a field.
    pub(super) fn error(&self, name: &str, message: impl Into<String>) -> ModelError {
        ModelError::config(self.path(name), message)
    }

    /// The value of a field; `null` counts as absent.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// A nested object.
    pub(super) fn object(&self, name: &str) -> Result<Fields<'a>, ModelError> {
        match self.get(name) {
            None => Err(self.error(name, "is missing")),
            Some(Value::Object(map)) => Ok(Fields {
                map,
                prefix: format!("{}{name}.", self.prefix),
            }),
            Some(_) => Err(self.error(name, "is not an object")),
        }
    }

    fn count_of(&self, name: &str, value: &Value) -> Result<usize, ModelError> {
        match value.as_u64() {
            Some(n) if n <= MAX_COUNT => {
                usize::try_from(n).map_err(|_| self.error(name, "is too large"))
            }
            Some(n) => Err(self.error(name, format!("{n} is above the bound {MAX_COUNT}"))),
            None => Err(self.error(name, format!("`{value}` is not a whole number >= 0"))),
        }
    }

    /// An optional whole number >= 0.
    pub(super) fn opt_count(&self, name: &str) -> Result<Option<usize>, ModelError> {
        self.get(name).map(|v| self.count_of(name, v)).transpose()
    }

    /// A required whole number >= 1.
    pub(super) fn size(&self, name: &str) -> Result<usize, ModelError> {
        self.size_or(name, None)
    }

    /// A whole number >= 1 with an optional default.
    pub(super) fn size_or(&self, name: &str, default: Option<usize>) -> Result<usize, ModelError> {
        match (self.opt_count(name)?, default) {
            (Some(0), _) => Err(self.error(name, "must be at least 1")),
            (Some(n), _) => Ok(n),
            (None, Some(n)) => Ok(n),
            (None, None) => Err(self.error(name, "is missing")),
        }
    }

    /// A whole number in `1..=bound` with an optional default.
    pub(super) fn size_up_to(
        &self,
        name: &str,
        default: Option<usize>,
        bound: usize,
    ) -> Result<usize, ModelError> {
        match self.size_or(name, default)? {
            n if n > bound => Err(self.error(name, format!("{n} is above the bound {bound}"))),
            n => Ok(n),
        }
    }

    /// A list of whole numbers >= 1.
    pub(super) fn sizes(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        let list = self
            .get(name)
            .ok_or_else(|| self.error(name, "is missing"))?
            .as_array()
            .ok_or_else(|| self.error(name, "is not a list"))?;
        let sizes: Vec<usize> = list
            .iter()
            .map(|v| self.count_of(name, v))
            .collect::<Result<_, _>>()?;
        if sizes.is_empty() || sizes.contains(&0) {
            return Err(self.error(name, "must be a list of numbers >= 1"));
        }
        Ok(sizes)
    }

    /// One whole number per layer, given as a list of that length or as one number for all.
    pub(super) fn per_layer(&self, name: &str, layers: usize) -> Result<Vec<usize>, ModelError> {
        match self.get(name) {
            Some(Value::Array(_)) => {
                let list = self.sizes(name)?;
                if list.len() != layers {
                    return Err(self.error(
                        name,
                        format!("has {} entries for {layers} layers", list.len()),
                    ));
                }
                Ok(list)
            }
            _ => Ok(vec![self.size(name)?; layers]),
        }
    }

    /// An optional boolean.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.error(name, format!("`{other}` is not true or false"))),
        }
    }

    /// An optional finite number.
    pub(super) fn opt_number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) if x.is_finite() => Ok(Some(x)),
                _ => Err(self.error(name, format!("`{v}` is not a finite number"))),
            },
        }
    }

    /// A number > 0 with an optional default.
    pub(super) fn positive(&self, name: &str, default: Option<f64>) -> Result<f64, ModelError> {
        match self.opt_number(name)?.or(default) {
            Some(x) if x > 0.0 => Ok(x),
            Some(x) => Err(self.error(name, format!("{x} is not above 0"))),
            None => Err(self.error(name, "is missing")),
        }
    }

    /// An optional string.
    pub(super) fn opt_text(&self, name: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.error(name, format!("`{other}` is not a string"))),
        }
    }

    /// Refuses any value but `only` (absent counts as `only`).
    pub(super) fn only_text(&self, name: &str, only: &str) -> Result<(), ModelError> {
        match self.opt_text(name)? {
            Some(value) if value != only => Err(ModelError::Unimplemented(format!(
                "config field `{}` = \"{value}\" (only \"{only}\" is built)",
                self.path(name)
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a boolean that differs from `only` (absent counts as `default`).
    pub(super) fn only_flag(
        &self,
        name: &str,
        default: bool,
        only: bool,
    ) -> Result<(), ModelError> {
        if self.flag(name, default)? != only {
            return Err(ModelError::Unimplemented(format!(
                "config field `{}` = {} (only {only} is built)",
                self.path(name),
                !only
            )));
        }
        Ok(())
    }

    /// A fixed-length list of finite numbers, or a default.
    pub(super) fn triple(&self, name: &str, default: [f64; 3]) -> Result<[f64; 3], ModelError> {
        let Some(value) = self.get(name) else {
            return Ok(default);
        };
        let list: Option<Vec<f64>> = value
            .as_array()
            .and_then(|l| l.iter().map(Value::as_f64).collect());
        match list.as_deref() {
            Some([a, b, c]) => Ok([*a, *b, *c]),
            _ => Err(self.error(name, "is not a list of three numbers")),
        }
    }
}
