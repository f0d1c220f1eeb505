//! The decoder: layers over packed rows, and the embeddings at both of its ends.
//!
//! This module knows tokens, rows and hidden states. It knows no picture, no timestep and no request.

mod layer;
mod probe;
mod row;

use kernels::{LinearWeight, RopeTable, Tensor, embedding, linear, rms_norm};

use self::layer::{Layer, Pass};
pub use self::probe::{NoProbe, Probe, Site};
use self::row::Packing;
pub use self::row::{Row, RowKv, RowSegment, segments};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::Scope;

/// The decoder layers with the token embedding, and the text head where text is wanted.
#[derive(Debug)]
pub struct Backbone {
    embedding: Tensor,
    layers: Vec<Layer>,
    head: Option<TextHead>,
}

/// Final norm and vocabulary projection: text only, never before the image head.
#[derive(Debug)]
struct TextHead {
    norm: Tensor,
    eps: f32,
    projection: LinearWeight,
}

impl Backbone {
    pub(crate) fn load(
        root: &Scope<'_>,
        config: &ModelConfig,
        with_text_head: bool,
    ) -> Result<Self, ModelError> {
        let model = root.child("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let layers = model.child("layers");
        let head = with_text_head.then(|| {
            Ok::<_, ModelError>(TextHead {
                norm: model.child("ln_f").f32("weight", &[hidden])?,
                eps: config.rms_norm_eps as f32,
                projection: root.child("lm_head").linear(hidden, vocab)?,
            })
        });
        Ok(Self {
            embedding: model.child("wte").tensor("weight", &[vocab, hidden])?,
            layers: (0..config.num_layers())
                .map(|l| Layer::load(&layers.child(l), config, l))
                .collect::<Result<_, _>>()?,
            head: head.transpose()?,
        })
    }

    /// Token embeddings, `[ids, hidden]`.
    ///
    /// # Errors
    /// `Kernel` when an id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor, ModelError> {
        Ok(embedding(ids, &self.embedding)?)
    }

    /// Runs all layers over packed rows: `x` and the result are `[tokens, hidden]`, `rope` has one entry
    /// for each packed token. The result is the raw residual stream, without a final norm.
    ///
    /// # Errors
    /// `Internal` when segments do not cover a row or a cache is full, `Kernel` when shapes disagree.
    pub fn forward<P: Probe>(
        &self,
        mut x: Tensor,
        rows: &mut [Row<'_>],
        rope: &RopeTable,
        probe: &mut P,
    ) -> Result<Tensor, ModelError> {
        let packing = Packing::new(rows)?;
        let mut pass = Pass {
            rows: &mut *rows,
            packing: &packing,
            rope,
        };
        for layer in &self.layers {
            layer.forward(&mut x, &mut pass, probe)?;
        }
        advance(rows);
        Ok(x)
    }

    /// Like [`Backbone::forward`], but only to fill the rows' caches: the last layer stops at its keys
    /// and values, since nobody reads its output.
    ///
    /// # Errors
    /// Those of [`Backbone::forward`].
    pub fn fill<P: Probe>(
        &self,
        mut x: Tensor,
        rows: &mut [Row<'_>],
        rope: &RopeTable,
        probe: &mut P,
    ) -> Result<(), ModelError> {
        let packing = Packing::new(rows)?;
        let mut pass = Pass {
            rows: &mut *rows,
            packing: &packing,
            rope,
        };
        if let Some((last, before)) = self.layers.split_last() {
            for layer in before {
                layer.forward(&mut x, &mut pass, probe)?;
            }
            last.forward_kv_only(&x, &mut pass, probe)?;
        }
        advance(rows);
        Ok(())
    }

    /// Final norm of hidden states `[tokens, hidden]`.
    ///
    /// # Errors
    /// `Internal` when the model was opened without its text head.
    pub fn final_norm(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        let head = self.head()?;
        Ok(rms_norm(hidden, &head.norm, head.eps)?)
    }

    /// Vocabulary logits `[tokens, vocab]` of normed hidden states.
    ///
    /// # Errors
    /// `Internal` when the model was opened without its text head.
    pub fn logits(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        Ok(linear(normed, &self.head()?.projection)?)
    }

    fn head(&self) -> Result<&TextHead, ModelError> {
        self.head.as_ref().ok_or_else(|| {
            ModelError::Internal("the text head was not loaded (LoadOptions.text)".into())
        })
    }
}

fn advance(rows: &mut [Row<'_>]) {
    for row in rows {
        if let RowKv::Append(cache) = &mut row.kv {
            cache.advance(row.tokens);
        }
    }
}
