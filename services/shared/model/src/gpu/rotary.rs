//! Rotary tables of packed rows. Those of text are kept on the device: its positions are its indices, and a
//! long prompt's sines would take the host longer than a layer takes the device.

use kernels::Tensor;
use kernels::cuda::{GpuTensor, GpuType};

use super::GpuModel;
use super::deal::Piece;
use crate::error::ModelError;
use crate::input::RowInput;
use crate::positions::{positions, rope_table};

/// Positions that are made at once, at least.
const LEAST: usize = 4096;

/// Cosines and sines, F32 `[tokens, head_dim]`.
#[derive(Clone, Debug)]
pub(crate) struct Rotary {
    pub(crate) cos: GpuTensor,
    pub(crate) sin: GpuTensor,
}

impl Rotary {
    fn part(&self, start: usize, tokens: usize) -> Result<Self, ModelError> {
        Ok(Self {
            cos: self.cos.narrow0(start, tokens)?,
            sin: self.sin.narrow0(start, tokens)?,
        })
    }
}

impl GpuModel {
    /// The table of `pieces` of the rows, whose ends were checked against the model's positions.
    pub(super) fn rotary(
        &mut self,
        inputs: &[RowInput<'_>],
        pieces: &[Piece],
    ) -> Result<Rotary, ModelError> {
        if inputs.iter().any(|row| !row.images.is_empty()) {
            return self.rotary_of(inputs, pieces);
        }
        let ends = inputs.iter().map(|row| row.start + row.ids.len());
        let text = self.text_rotary(ends.max().unwrap_or(0))?;
        let part = |piece: &Piece| {
            let start = inputs[piece.row].start + piece.tokens.start;
            text.part(start, piece.tokens.len())
        };
        if let [piece] = pieces {
            return part(piece);
        }
        let tokens = pieces.iter().map(|piece| piece.tokens.len()).sum();
        let new = || {
            let dims = [tokens, self.config.head_dim];
            GpuTensor::new(&self.gpu, &dims, GpuType::F32, "rotary table")
        };
        let all = Rotary {
            cos: new()?,
            sin: new()?,
        };
        let mut at = 0;
        for piece in pieces.iter().filter(|piece| !piece.tokens.is_empty()) {
            let (from, to) = (part(piece)?, all.part(at, piece.tokens.len())?);
            to.cos.copy_from(&from.cos)?;
            to.sin.copy_from(&from.sin)?;
            at += piece.tokens.len();
        }
        Ok(all)
    }

    /// That of at least the first `end` positions of text.
    fn text_rotary(&mut self, end: usize) -> Result<Rotary, ModelError> {
        let known = self.text_positions.take();
        let table = match known.filter(|known| known.cos.dim(0) >= end) {
            Some(known) => known,
            None => {
                let most = self.config.max_position_embeddings;
                let made = end.next_power_of_two().max(LEAST).min(most.max(end));
                self.upload_rotary(&positions(0..made, &[])?)?
            }
        };
        self.text_positions = Some(table.clone());
        Ok(table)
    }

    fn rotary_of(&self, inputs: &[RowInput<'_>], pieces: &[Piece]) -> Result<Rotary, ModelError> {
        let mut places = Vec::new();
        for piece in pieces {
            let row = &inputs[piece.row];
            let (start, end) = (row.start + piece.tokens.start, row.start + piece.tokens.end);
            places.extend(positions(start..end, row.images)?);
        }
        self.upload_rotary(&places)
    }

    fn upload_rotary(&self, places: &[crate::positions::Position]) -> Result<Rotary, ModelError> {
        let table = rope_table(places, self.config.head_dim, self.config.rope_theta)?;
        let upload = |t: &Tensor| GpuTensor::from_host(&self.gpu, t, "rotary table");
        Ok(Rotary {
            cos: upload(&table.cos)?,
            sin: upload(&table.sin)?,
        })
    }
}
