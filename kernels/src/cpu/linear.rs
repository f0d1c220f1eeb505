//! Linear layers.

use super::gemm::{Dense, Init, Packed, gemm};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// The weight of a linear layer, prepared once: `[N, K]` in the checkpoint, packed for the CPU here.
///
/// A bf16 weight stays bf16 in memory; the result equals that of the widened weight, bit for bit.
#[derive(Clone)]
pub struct LinearWeight {
    pub(crate) packed: Packed,
    pub(crate) bias: Option<Vec<f32>>,
}

impl std::fmt::Debug for LinearWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinearWeight")
            .field("n", &self.n())
            .field("k", &self.k())
            .field("bias", &self.bias.is_some())
            .finish_non_exhaustive()
    }
}

impl LinearWeight {
    /// From a checkpoint tensor `w [N, K]` (f32 or bf16) and an optional bias `[N]`.
    pub fn new(w: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        const OP: &str = "linear weight";
        w.expect_shape(OP, "w", &[ANY, ANY])?;
        let (n, k) = (w.dim(0), w.dim(1));
        if n == 0 || k == 0 {
            return Err(KernelError::shape(
                OP,
                "w",
                "[at least 1, at least 1]",
                w.shape(),
            ));
        }
        if let Some(bias) = bias {
            bias.expect_shape(OP, "bias", &[n])?;
        }
        let packed = Packed::new(w, n, k, None)?;
        Ok(Self {
            packed,
            bias: bias.map(Tensor::to_f32_vec),
        })
    }

    /// Output features.
    #[must_use]
    pub fn n(&self) -> usize {
        self.packed.n
    }

    /// Input features.
    #[must_use]
    pub fn k(&self) -> usize {
        self.packed.k
    }

    /// The weight `[N, K]` that this was made from, in its type; narrow ones in f32. For moving a weight to
    /// another rank.
    pub fn to_tensor(&self) -> Result<Tensor> {
        self.packed.unpack()
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.packed.bytes() + self.bias.as_ref().map_or(0, |b| size_of_val(b.as_slice()))
    }

    pub(crate) fn init(&self) -> Init<'_> {
        self.bias.as_deref().map_or(Init::Zero, Init::Bias)
    }
}

/// `x [T, K]` to `[T, N]`: `y = x w^T + bias`.
pub fn linear(x: &Tensor, w: &LinearWeight) -> Result<Tensor> {
    const OP: &str = "linear";
    x.expect_shape(OP, "x", &[ANY, w.k()])?;
    let rows = Dense {
        data: x.f32_named(OP, "x")?,
        k: w.k(),
    };
    let out = gemm(&rows, &w.packed, w.init(), x.dim(0));
    Ok(Tensor::output(&[x.dim(0), w.n()], out))
}
