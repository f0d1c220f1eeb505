//! Attention of the VAE: one head as wide as the channels, over all positions.
//!
//! The products are 1x1 windows: a matrix of keys is the weight of queries. Values are made transposed, with
//! the roles of weight and pixels exchanged; their bias comes after the mixing, because a row of probabilities
//! sums to one. Positions are padded to a multiple of 8 with zeros of no weight.

use kernels::cuda::{GpuConvWeight, GpuTensor, GpuType, Moves, Pictures, Shortcut, wide_softmax};

use super::super::scratch::part_bytes;
use super::room::{Flow, Need, Room};
use super::{Affine, ELEMENT, VaeSource};
use crate::error::ModelError;

/// Queries whose scores are held at once.
const QUERIES: usize = 4096;
/// Positions are padded to a multiple of it: 16 bytes.
const POSITIONS: usize = 8;

#[derive(Debug)]
pub(super) struct Attention {
    norm: Affine,
    q: GpuConvWeight,
    k: GpuConvWeight,
    v: GpuConvWeight,
    v_bias: GpuTensor,
    out: GpuConvWeight,
}

impl Attention {
    pub(super) fn load(
        from: VaeSource<'_>,
        name: &str,
        channels: usize,
    ) -> Result<Self, ModelError> {
        let point = |part: &str| from.conv(&format!("{name}.{part}"), (channels, channels), 1);
        let (v, v_bias) = from.raw(&format!("{name}.v"), &[channels, channels, 1, 1, 1])?;
        Ok(Self {
            norm: from.affine(&format!("{name}.norm"), channels)?,
            q: point("q")?,
            k: point("k")?,
            v: GpuConvWeight::pack(&v, None, ELEMENT)?,
            v_bias,
            out: point("proj_out")?,
        })
    }

    pub(super) fn need(&self, size: [usize; 5], need: &mut Need) {
        let positions = size[1] * size[2] * size[3];
        let padded = positions.next_multiple_of(POSITIONS);
        let rows = part_bytes(padded * size[4], ELEMENT);
        let queries = positions.min(QUERIES) * padded;
        need.part(rows);
        need.part(4 * rows + part_bytes(queries, GpuType::F32) + part_bytes(queries, ELEMENT));
        need.conv([1, 1, 1, positions, size[4]], &self.out);
    }

    /// In place.
    pub(super) fn forward(&self, room: &Room, flow: Flow) -> Result<Flow, ModelError> {
        let [first, second] = flow.others();
        let channels = flow.x.size()[4];
        let positions = flow.x.pixels();
        let padded = positions.next_multiple_of(POSITIONS);
        let normed = room.parts(first)?.take(&[padded, channels], ELEMENT)?;
        let row = channels * ELEMENT.bytes();
        normed
            .buffer()
            .fill(0, positions * row, (padded - positions) * row)?;
        let front = Pictures::among_rows(&normed, (0, 0), 1, (1, positions))?;
        let line = Flow {
            x: flow.x.in_a_row(),
            buffer: flow.buffer,
            sums: flow.sums.clone(),
        };
        room.norm(&line, &self.norm, &front, false)?;

        let mut parts = room.parts(second)?;
        let mut rows = |dims: [usize; 2]| parts.take(&dims, ELEMENT);
        let (q, k) = (rows([padded, channels])?, rows([padded, channels])?);
        let (v, mixed) = (rows([channels, padded])?, rows([padded, channels])?);
        product(room, &q, &normed, &self.q)?;
        product(room, &k, &normed, &self.k)?;
        let weight = self.v.packed().reshape(&[channels, channels])?;
        product(room, &v, &weight, &GpuConvWeight::matrix(&normed, None)?)?;
        let keys = GpuConvWeight::matrix(&k, None)?;
        let values = GpuConvWeight::matrix(&v, Some(&self.v_bias))?;
        let most = positions.min(QUERIES);
        let scores = parts.take(&[most, padded], GpuType::F32)?;
        let weights = parts.take(&[most, padded], ELEMENT)?;
        let scale = (channels as f32).sqrt().recip();
        for start in (0..positions).step_by(QUERIES) {
            let count = most.min(positions - start);
            let (scores, weights) = (scores.narrow0(0, count)?, weights.narrow0(0, count)?);
            product(room, &scores, &q.narrow0(start, count)?, &keys)?;
            wide_softmax(&weights, &scores, scale, positions)?;
            product(room, &mixed.narrow0(start, count)?, &weights, &values)?;
        }
        let mixed = Pictures::among_rows(&mixed, (0, 0), 1, (1, positions))?;
        let added = Shortcut {
            pictures: &line.x,
            repeat: 1,
        };
        let sums = room.conv(&line.x, &mixed, &self.out, (Moves::None, Some(added)))?;
        Ok(Flow { sums, ..flow })
    }
}

/// `out [rows, n] = x [rows, k] . w [n, k]^T + bias`.
fn product(
    room: &Room,
    out: &GpuTensor,
    x: &GpuTensor,
    w: &GpuConvWeight,
) -> Result<(), ModelError> {
    let line = |t: &GpuTensor| Pictures::among_rows(t, (0, 0), 1, (1, t.dim(0)));
    room.plain(&line(out)?, &line(x)?, w)
}
