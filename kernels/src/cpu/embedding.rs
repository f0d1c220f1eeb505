//! Table look-up.

use super::recycle::Recycled;
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, DType, Tensor};

/// Rows `ids` of `table [V, H]` (f32 or bf16) as `f32 [T, H]`. An id of `V` or more is an error.
pub fn embedding(ids: &[u32], table: &Tensor) -> Result<Tensor> {
    const OP: &str = "embedding";
    table.expect_shape(OP, "table", &[ANY, ANY])?;
    let (vocab, hidden) = (table.dim(0), table.dim(1));
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(KernelError::Bounds {
            op: OP,
            what: "id",
            value: id as usize,
            limit: vocab,
        });
    }
    let mut out = Recycled::stale(ids.len() * hidden);
    if hidden > 0 {
        let rows = ids.iter().zip(out.chunks_exact_mut(hidden));
        match table.dtype() {
            DType::F32 => {
                let table = table.as_f32()?;
                for (&id, row) in rows {
                    row.copy_from_slice(&table[id as usize * hidden..][..hidden]);
                }
            }
            DType::Bf16 => {
                let table = table.as_bf16()?;
                for (&id, row) in rows {
                    for (o, v) in row.iter_mut().zip(&table[id as usize * hidden..]) {
                        *o = v.to_f32();
                    }
                }
            }
        }
    }
    Ok(Tensor::output(&[ids.len(), hidden], out))
}
