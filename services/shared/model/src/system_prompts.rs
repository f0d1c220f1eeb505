//! The system prompts that a model directory ships, by name and fingerprint.
//!
//! HunyuanImage-3.0: the texts are string constants of `system_prompt.py` beside the weights. They are read
//! as data: an assignment of one string literal to a known name, and nothing else of the file.

use std::io::ErrorKind;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::config::read_bounded;
use crate::error::ModelError;

/// Name of the file inside a checkpoint directory.
pub const SYSTEM_PROMPT_FILE: &str = "system_prompt.py";
/// Largest accepted file.
const MAX_BYTES: u64 = 1 << 20;

/// Selectors and the constants that hold their texts.
const NAMES: [(&str, &str); 4] = [
    ("en_vanilla", "t2i_system_prompt_en_vanilla"),
    ("en_recaption", "t2i_system_prompt_en_recaption"),
    ("en_think_recaption", "t2i_system_prompt_en_think_recaption"),
    ("en_unified", "unified_system_prompt_en"),
];

/// One system prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemPrompt {
    /// Selector, for example `en_unified`.
    pub name: &'static str,
    /// First 16 hex digits of the SHA-256 of the stripped text.
    pub fingerprint: String,
    /// As the file has it.
    pub raw: String,
}

impl SystemPrompt {
    /// The text without white space around it, as requests use it.
    pub fn text(&self) -> &str {
        self.raw.trim()
    }
}

/// The system prompts of a model; a directory without the file has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemPrompts(Vec<SystemPrompt>);

impl SystemPrompts {
    /// Reads the file of a checkpoint directory, if there is one.
    ///
    /// # Errors
    /// `CheckpointFile` when it cannot be read, or a known name does not hold one string literal.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join(SYSTEM_PROMPT_FILE);
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            _ => {}
        }
        let bytes = read_bounded(dir, SYSTEM_PROMPT_FILE, MAX_BYTES)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| ModelError::file(SYSTEM_PROMPT_FILE, "is not UTF-8"))?;
        Self::parse(&text)
    }

    /// Reads the constants.
    ///
    /// # Errors
    /// `CheckpointFile` as in [`SystemPrompts::from_dir`].
    pub fn parse(source: &str) -> Result<Self, ModelError> {
        let mut prompts = Vec::new();
        for (name, constant) in NAMES {
            let Some(value) = assigned(source, constant) else {
                continue;
            };
            let raw = literal(value).ok_or_else(|| {
                let message = format!("`{constant}` is not one string literal");
                ModelError::file(SYSTEM_PROMPT_FILE, message)
            })?;
            let digest = Sha256::digest(raw.trim());
            let hex = digest.iter().take(8).map(|byte| format!("{byte:02x}"));
            prompts.push(SystemPrompt {
                name,
                fingerprint: hex.collect(),
                raw,
            });
        }
        Ok(Self(prompts))
    }

    /// By name or by fingerprint.
    pub fn get(&self, selector: &str) -> Option<&SystemPrompt> {
        let named = |prompt: &&SystemPrompt| {
            prompt.name == selector || prompt.fingerprint.eq_ignore_ascii_case(selector)
        };
        self.0.iter().find(named)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &SystemPrompt> {
        self.0.iter()
    }
}

/// What stands behind `name =` at the start of a line.
fn assigned<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    source.match_indices(name).find_map(|(at, _)| {
        let line_start = at == 0 || source[..at].ends_with('\n');
        let rest = source[at + name.len()..].trim_start_matches(' ');
        let value = rest.strip_prefix('=').filter(|v| !v.starts_with('='));
        line_start.then_some(value?.trim_start())
    })
}

/// The value of the string literal that `text` starts with.
fn literal(text: &str) -> Option<String> {
    let (raw, text) = match text.strip_prefix(['r', 'R']) {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let quote = ["\"\"\"", "'''", "\"", "'"]
        .into_iter()
        .find(|quote| text.starts_with(quote))?;
    let mut rest = &text[quote.len()..];
    let mut value = String::new();
    loop {
        if let Some(after) = rest.strip_prefix(quote) {
            // Literals side by side would be one string.
            let next = after.trim_start_matches([' ', '\\', '\n', '\r', '\t']);
            return (!next.starts_with(['"', '\''])).then_some(value);
        }
        let character = rest.chars().next()?;
        rest = &rest[character.len_utf8()..];
        match character {
            '\\' if !raw => {
                let escaped = rest.chars().next()?;
                rest = &rest[escaped.len_utf8()..];
                match escaped {
                    'n' => value.push('\n'),
                    't' => value.push('\t'),
                    'r' => value.push('\r'),
                    '\n' => {}
                    '\\' | '"' | '\'' => value.push(escaped),
                    _ => return None,
                }
            }
            '\n' if quote.len() == 1 => return None,
            other => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
# Prompts.
other = """t2i_system_prompt_en_vanilla = 'no'"""
t2i_system_prompt_en_vanilla = """
Draw \"this\".
"""

t2i_system_prompt_en_recaption = 'Rewrite\nit.'
unified_system_prompt_en='''both
lines'''

def get_system_prompt(name):
    return unified_system_prompt_en
"#;

    #[test]
    fn constants_are_read_and_named_by_fingerprint() {
        let prompts = SystemPrompts::parse(FILE).unwrap();
        let names: Vec<_> = prompts.iter().map(|prompt| prompt.name).collect();
        assert_eq!(names, ["en_vanilla", "en_recaption", "en_unified"]);
        let vanilla = prompts.get("en_vanilla").unwrap();
        assert_eq!(vanilla.raw, "\nDraw \"this\".\n");
        assert_eq!(vanilla.text(), "Draw \"this\".");
        assert_eq!(prompts.get(&vanilla.fingerprint), Some(vanilla));
        assert_eq!(prompts.get("en_recaption").unwrap().raw, "Rewrite\nit.");
        assert_eq!(prompts.get("en_unified").unwrap().text(), "both\nlines");
        assert_eq!(prompts.get("en_think_recaption"), None);
    }

    #[test]
    fn a_fingerprint_is_the_digest_of_the_stripped_text() {
        let prompts = SystemPrompts::parse("unified_system_prompt_en = ' abc '").unwrap();
        // SHA-256 of "abc", from FIPS 180.
        let unified = prompts.get("en_unified").unwrap();
        assert_eq!(unified.fingerprint, "ba7816bf8f01cfea");
    }

    #[test]
    fn what_is_no_literal_is_refused_and_a_directory_without_the_file_has_none() {
        for value in ["f(x)", "'a' 'b'", "'open", "\"\"\"open", "'\\x41'", ""] {
            let source = format!("unified_system_prompt_en = {value}");
            assert!(SystemPrompts::parse(&source).is_err(), "{value}");
        }
        let nowhere = SystemPrompts::from_dir(Path::new("nowhere")).unwrap();
        assert_eq!(nowhere.iter().count(), 0);
    }
}
