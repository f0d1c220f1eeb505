//! The config file: TOML, one section a role. A section or key that is not in the table is an error.
use std::{collections::BTreeMap, path::Path};

use toml::{Table, Value};

use super::Role;
use crate::error::OmniError;

/// Largest config file read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A parsed file; sections are checked when they are asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConfigFile {
    sections: Table,
}

impl ConfigFile {
    /// Reads `path`; no path, no settings.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, OmniError> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let bad =
            |reason: String| OmniError::Config(format!("config file {}: {reason}", path.display()));
        let size = std::fs::metadata(path)
            .map_err(|e| bad(e.to_string()))?
            .len();
        if size > MAX_FILE_BYTES {
            return Err(bad(format!("is larger than {MAX_FILE_BYTES} bytes")));
        }
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        Self::parse(&text).map_err(|error| bad(error.to_string()))
    }

    /// Parses the text and checks every section, also those of other roles.
    pub(crate) fn parse(text: &str) -> Result<Self, OmniError> {
        let sections: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = text[..error.span().map_or(0, |span| span.start.min(text.len()))]
                .matches('\n')
                .count()
                + 1;
            OmniError::Config(format!("line {line}: {}", error.message()))
        })?;
        for name in sections.keys() {
            if !Role::ALL.iter().any(|role| role.section() == name) {
                return Err(OmniError::Config(format!("unknown section [{name}]")));
            }
        }
        let file = Self { sections };
        for role in Role::ALL {
            file.section(role)?;
        }
        Ok(file)
    }

    /// The values of a role's section as text.
    pub(crate) fn section(&self, role: Role) -> Result<BTreeMap<String, String>, OmniError> {
        let name = role.section();
        let table = match self.sections.get(name) {
            None => return Ok(BTreeMap::new()),
            Some(Value::Table(table)) => table,
            Some(_) => return Err(OmniError::Config(format!("{name} must be a section"))),
        };
        table
            .iter()
            .map(|(key, value)| {
                if !role.settings().any(|setting| setting.key == key) {
                    return Err(OmniError::Config(format!("unknown key {key} in [{name}]")));
                }
                let text = match value {
                    Value::String(text) => text.clone(),
                    Value::Integer(number) => number.to_string(),
                    _ => {
                        return Err(OmniError::Config(format!(
                            "{key} in [{name}] must be a string or a whole number"
                        )));
                    }
                };
                Ok((key.clone(), text))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_sections_keys_and_types_are_refused_by_name() {
        for (text, culprit) in [
            ("[dit]\n", "[dit]"),
            ("[router]\nlisten_on = \"x\"\n", "listen_on"),
            ("[router]\nlisten = 1.5\n", "listen"),
            ("router = 1\n", "router"),
            ("[router\n", "line 1"),
        ] {
            let error = ConfigFile::parse(text).unwrap_err();
            assert!(error.to_string().contains(culprit), "{text:?}: {error}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = ConfigFile::read(Some(Path::new("/nonexistent/omni.toml"))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/omni.toml"));
    }
}
