//! Text to token ids and back, and the model's special tokens by name.
//!
//! Text of a request never becomes a special token: `<img>` typed by a user is encoded as the characters it
//! consists of. Special tokens enter a sequence by id only. Text that the model itself wrote is the one
//! exception ([`Tokenizer::encode_model_text`]).

use std::path::Path;

use serde_json::Value;

use crate::config::{ModelConfig, read_bounded};
use crate::error::ModelError;

/// Name of the tokenizer file inside a checkpoint directory.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Largest accepted tokenizer file.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Ratio tokens of every release.
pub const BASE_RATIOS: usize = 33;
/// Ratio tokens of the Instruct releases.
pub const EXTRA_RATIOS: usize = 37;

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Added tokens, longest first, for [`Self::encode_model_text`].
    added: Vec<(String, u32)>,
    /// Ids in use; the model's table may have more rows.
    vocab_size: usize,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a checkpoint directory.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        Self::from_bytes(&read_bounded(dir, TOKENIZER_FILE, MAX_TOKENIZER_BYTES)?)
    }

    /// Builds the tokenizer from the file's bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ModelError> {
        let mut json: Value = serde_json::from_slice(bytes)
            .map_err(|e| ModelError::Tokenizer(format!("not valid JSON: {e}")))?;
        let added = escape_added_tokens(&mut json)?;
        let text =
            serde_json::to_string(&json).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
        // `FromStr` is the one constructor that is not generic: the others would compile the whole
        // deserialiser of that crate once more, here.
        let mut inner: tokenizers::Tokenizer = text
            .parse()
            .map_err(|e: tokenizers::Error| ModelError::Tokenizer(e.to_string()))?;
        inner.set_encode_special_tokens(true);
        let vocab_size = inner.get_vocab_size(true);
        Ok(Self {
            inner,
            added,
            vocab_size,
        })
    }

    /// Number of ids in use.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of one token by its exact text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The ids of one section of text; nothing is added, no special token is recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|e| ModelError::Tokenizer(format!("cannot encode: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of text that the model wrote: special tokens in it keep their meaning.
    pub fn encode_model_text(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        let mut plain_from = 0;
        let mut at = 0;
        while at < text.len() {
            let hit = text
                .is_char_boundary(at)
                .then(|| self.added.iter().find(|(t, _)| text[at..].starts_with(t)))
                .flatten();
            match hit {
                Some((token, id)) => {
                    ids.extend(self.encode(&text[plain_from..at])?);
                    ids.push(*id);
                    at += token.len();
                    plain_from = at;
                }
                None => at += 1,
            }
        }
        ids.extend(self.encode(&text[plain_from..])?);
        Ok(ids)
    }

    /// The text of ids; ids without a token are dropped, bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        let known: Vec<u32> = ids
            .iter()
            .copied()
            .filter(|id| self.inner.id_to_token(*id).is_some())
            .collect();
        self.inner
            .decode(&known, false)
            .map_err(|e| ModelError::Tokenizer(format!("cannot decode: {e}")))
    }
}

/// Marks every added token as special, so that none of them is recognised in a caller's text, and lists them.
fn escape_added_tokens(json: &mut Value) -> Result<Vec<(String, u32)>, ModelError> {
    let tokens = json
        .get_mut("added_tokens")
        .and_then(Value::as_array_mut)
        .ok_or_else(|| ModelError::Tokenizer("has no `added_tokens` list".into()))?;
    let mut added = Vec::with_capacity(tokens.len());
    for token in tokens {
        let content = token.get("content").and_then(Value::as_str);
        let id = token
            .get("id")
            .and_then(Value::as_u64)
            .and_then(|id| u32::try_from(id).ok());
        let (Some(content), Some(id)) = (content, id) else {
            return Err(ModelError::Tokenizer(
                "an added token lacks its `content` or `id`".into(),
            ));
        };
        if content.is_empty() {
            return Err(ModelError::Tokenizer(format!("added token {id} is empty")));
        }
        added.push((content.to_owned(), id));
        token["special"] = Value::Bool(true);
    }
    added.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.0.cmp(&b.0)));
    Ok(added)
}

/// The ids of the tokens that layouts are made of, looked up by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `<|startoftext|>`
    pub bos: u32,
    /// `<|endoftext|>`
    pub eos: u32,
    /// `<pad>`; packed batches never use it.
    pub pad: Option<u32>,
    /// `<boi>`: begin of an image.
    pub boi: u32,
    /// `<eoi>`: end of an image.
    pub eoi: u32,
    /// `<img>`: one image token.
    pub img: u32,
    /// `<cfg>`: stands for dropped text in the unconditional row.
    pub cfg: u32,
    /// `<timestep>`
    pub timestep: u32,
    /// `<guidance>` (distilled models).
    pub guidance: Option<u32>,
    /// `<timestep_r>` (meanflow models).
    pub timestep_r: Option<u32>,
    /// `<joint_img_sep>`: between the VAE and the ViT tokens of a conditioning image.
    pub joint_img_sep: u32,
    /// `<think>`
    pub think: u32,
    /// `</think>`
    pub end_think: u32,
    /// `<recaption>`
    pub recaption: u32,
    /// `</recaption>`
    pub end_recaption: u32,
    /// `<answer>`
    pub answer: u32,
    /// `</answer>`
    pub end_answer: u32,
    /// `<img_size_N>` by `N`.
    pub sizes: Vec<(usize, u32)>,
    /// `<img_ratio_k>` at position `k`; the ids need not be contiguous.
    pub ratios: Vec<u32>,
}

/// Base sizes that have a token in some release.
const SIZES: [usize; 12] = [
    64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
];

impl SpecialTokens {
    /// Looks every token up.
    ///
    /// # Errors
    /// A token that this model needs is absent, or has an id beyond the model's embedding table.
    pub fn lookup(tokenizer: &Tokenizer, config: &ModelConfig) -> Result<Self, ModelError> {
        let need = |name: &str| {
            let id = tokenizer
                .token_id(name)
                .ok_or_else(|| ModelError::Tokenizer(format!("has no token `{name}`")))?;
            if id as usize >= config.vocab_size {
                return Err(ModelError::Tokenizer(format!(
                    "token `{name}` has id {id}, the model has {} rows",
                    config.vocab_size
                )));
            }
            Ok(id)
        };
        let when = |needed: bool, name: &str| match needed {
            true => need(name).map(Some),
            false => Ok(tokenizer.token_id(name)),
        };
        let ratios = if config.extra_ratios {
            EXTRA_RATIOS
        } else {
            BASE_RATIOS
        };
        need(&size_name(config.image_base_size))?;
        let sizes = SIZES.iter().copied().chain([config.image_base_size]);
        Ok(Self {
            bos: need("<|startoftext|>")?,
            eos: need("<|endoftext|>")?,
            pad: tokenizer.token_id("<pad>"),
            boi: need("<boi>")?,
            eoi: need("<eoi>")?,
            img: need("<img>")?,
            cfg: need("<cfg>")?,
            timestep: need("<timestep>")?,
            guidance: when(config.cfg_distilled, "<guidance>")?,
            timestep_r: when(config.use_meanflow, "<timestep_r>")?,
            joint_img_sep: need("<joint_img_sep>")?,
            think: need("<think>")?,
            end_think: need("</think>")?,
            recaption: need("<recaption>")?,
            end_recaption: need("</recaption>")?,
            answer: need("<answer>")?,
            end_answer: need("</answer>")?,
            sizes: sizes
                .filter_map(|n| tokenizer.token_id(&size_name(n)).map(|id| (n, id)))
                .collect(),
            ratios: (0..ratios)
                .map(|k| need(&format!("<img_ratio_{k}>")))
                .collect::<Result<_, _>>()?,
        })
    }

    /// The `<img_size_N>` token of a base size.
    pub fn size(&self, base: usize) -> Result<u32, ModelError> {
        self.sizes
            .iter()
            .find(|(n, _)| *n == base)
            .map(|(_, id)| *id)
            .ok_or_else(|| ModelError::Tokenizer(format!("has no token `{}`", size_name(base))))
    }

    /// The `<img_ratio_k>` token of a ratio index.
    pub fn ratio(&self, index: usize) -> Result<u32, ModelError> {
        self.ratios
            .get(index)
            .copied()
            .ok_or_else(|| ModelError::Tokenizer(format!("has no token `<img_ratio_{index}>`")))
    }

    /// The ratio index of a token, if it is a ratio token.
    pub fn ratio_index(&self, id: u32) -> Option<usize> {
        self.ratios.iter().position(|r| *r == id)
    }
}

fn size_name(base: usize) -> String {
    format!("<img_size_{base}>")
}
