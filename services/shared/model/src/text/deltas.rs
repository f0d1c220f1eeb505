//! Text as it grows: what each new token adds to it.

use crate::error::ModelError;
use crate::tokenizer::Tokenizer;

/// Most tokens that are held back for the rest of a character; a character has at most four bytes.
const MAX_PENDING: usize = 4;

/// Tokens whose text has not been told yet, because a character is not whole.
#[derive(Clone, Debug, Default)]
pub struct Deltas {
    pending: Vec<u32>,
}

impl Deltas {
    /// What `id` adds to the text; nothing while a character is not whole.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, ModelError> {
        self.pending.push(id);
        let text = tokenizer.decode(&self.pending)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.pending.len() < MAX_PENDING {
            return Ok(String::new());
        }
        self.pending.clear();
        Ok(text)
    }

    /// What was held back, with U+FFFD for what is no character.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn rest(&mut self, tokenizer: &Tokenizer) -> Result<String, ModelError> {
        tokenizer.decode(&std::mem::take(&mut self.pending))
    }
}
