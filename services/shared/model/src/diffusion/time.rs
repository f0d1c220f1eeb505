//! Scalars (timestep, guidance, next timestep) as vectors.

use kernels::{LinearWeight, Tensor, gelu_erf, linear};

use crate::error::ModelError;
use crate::source::Scope;

/// Width of the sinusoidal code; fixed by the architecture.
pub(crate) const CODE: usize = 256;
/// Period base of the sinusoidal code; fixed by the architecture.
const MAX_PERIOD: f64 = 10_000.0;

/// Sinusoidal code, then `Linear, GELU (erf), Linear` (HunyuanImage-3.0 specification, scalar embedding).
#[derive(Debug)]
pub struct TimeEmbedder {
    first: LinearWeight,
    second: LinearWeight,
}

impl TimeEmbedder {
    pub(crate) fn load(scope: &Scope<'_>, hidden: usize) -> Result<Self, ModelError> {
        let mlp = scope.child("mlp");
        Ok(Self {
            first: mlp.child(0).linear_bias(CODE, hidden)?,
            second: mlp.child(2).linear_bias(hidden, hidden)?,
        })
    }

    /// One vector for each scalar, `[scalars, hidden]`.
    ///
    /// # Errors
    /// `Kernel`, which would be a defect.
    pub fn forward(&self, scalars: &[f32]) -> Result<Tensor, ModelError> {
        let code: Vec<f32> = scalars.iter().flat_map(|t| code(*t)).collect();
        let code = Tensor::from_f32(&[scalars.len(), CODE], code)?;
        let inner = gelu_erf(&linear(&code, &self.first)?)?;
        Ok(linear(&inner, &self.second)?)
    }
}

/// `[cos(t f_0) .. cos(t f_127), sin(t f_0) .. sin(t f_127)]`, `f_i = 10000^(-i / 128)`, all in F32:
/// a scalar of a thousand would lose its phase in BF16.
pub(crate) fn code(scalar: f32) -> Vec<f32> {
    let half = CODE / 2;
    let decay = -(MAX_PERIOD.ln()) as f32;
    let angles = (0..half).map(|i| scalar * (decay * i as f32 / half as f32).exp());
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos(), a.sin())).unzip();
    [cos, sin].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_cosines_then_sines_of_falling_frequencies() {
        let got = code(1000.0);
        assert_eq!(got.len(), CODE);
        for i in 0..128 {
            let angle = 1000.0 * 10_000_f64.powf(-(i as f64) / 128.0);
            assert!((f64::from(got[i]) - angle.cos()).abs() < 3e-4, "cos {i}");
            assert!(
                (f64::from(got[128 + i]) - angle.sin()).abs() < 3e-4,
                "sin {i}"
            );
        }
        assert_eq!(code(0.0)[..128], [1.0; 128]);
    }
}
