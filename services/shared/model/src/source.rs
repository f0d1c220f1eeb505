//! Where weights come from while a model is being built: a checkpoint or a random generator.

use std::ops::Range;

use kernels::{Conv2dWeight, Conv3dWeight, DType, LinearWeight, Tensor};

use crate::error::ModelError;

/// Hands out weights by their checkpoint name.
pub(crate) trait WeightSource: Send + Sync {
    /// The tensor `name`, whose shape must be `shape`; F32 or BF16, as stored.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError>;

    /// Bytes of a value of the tensor `name`, as stored.
    fn value_bytes(&self, name: &str) -> usize;

    /// The tensor `name` widened to F32.
    fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        Ok(self.tensor(name, shape)?.to_f32())
    }
}

/// Reads modules under a common name prefix.
#[derive(Clone)]
pub(crate) struct Scope<'a> {
    source: &'a dyn WeightSource,
    prefix: String,
}

impl<'a> Scope<'a> {
    pub(crate) fn root(source: &'a dyn WeightSource) -> Self {
        Self {
            source,
            prefix: String::new(),
        }
    }

    /// The scope `prefix.name`.
    pub(crate) fn child(&self, name: impl std::fmt::Display) -> Self {
        Self {
            source: self.source,
            prefix: format!("{}{name}.", self.prefix),
        }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The tensor as stored.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.source.tensor(&self.name(name), shape)
    }

    /// The tensor in F32.
    pub(crate) fn f32(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.source.tensor_f32(&self.name(name), shape)
    }

    /// `weight [out, in]` without bias.
    pub(crate) fn linear(&self, input: usize, output: usize) -> Result<LinearWeight, ModelError> {
        let weight = self.tensor("weight", &[output, input])?;
        Ok(LinearWeight::new(&weight, None)?)
    }

    /// The given output features of `weight [out, in]`, one range after the other, without bias.
    pub(crate) fn linear_rows(
        &self,
        input: usize,
        output: usize,
        rows: &[Range<usize>],
    ) -> Result<LinearWeight, ModelError> {
        if rows == std::slice::from_ref(&(0..output)) {
            return self.linear(input, output);
        }
        let weight = self.tensor("weight", &[output, input])?;
        let pieces = rows.iter().map(|r| r.start * input..r.end * input);
        let kept = rows.iter().map(Range::len).sum();
        let part = gather(&weight, &[kept, input], pieces)?;
        Ok(LinearWeight::new(&part, None)?)
    }

    /// The given input features of `weight [out, in]`, without bias.
    pub(crate) fn linear_columns(
        &self,
        input: usize,
        output: usize,
        columns: &Range<usize>,
    ) -> Result<LinearWeight, ModelError> {
        if *columns == (0..input) {
            return self.linear(input, output);
        }
        let weight = self.tensor("weight", &[output, input])?;
        let row = |r: usize| r * input + columns.start..r * input + columns.end;
        let part = gather(&weight, &[output, columns.len()], (0..output).map(row))?;
        Ok(LinearWeight::new(&part, None)?)
    }

    /// `weight [out, in]` and `bias [out]`.
    pub(crate) fn linear_bias(
        &self,
        input: usize,
        output: usize,
    ) -> Result<LinearWeight, ModelError> {
        let weight = self.tensor("weight", &[output, input])?;
        let bias = self.f32("bias", &[output])?;
        Ok(LinearWeight::new(&weight, Some(&bias))?)
    }

    /// `weight [out, in, k, k]` and `bias [out]`.
    pub(crate) fn conv2d(
        &self,
        input: usize,
        output: usize,
        k: usize,
    ) -> Result<Conv2dWeight, ModelError> {
        let weight = self.tensor("weight", &[output, input, k, k])?;
        let bias = self.f32("bias", &[output])?;
        Ok(Conv2dWeight::new(&weight, Some(&bias))?)
    }

    /// `weight [out, in, k, k, k]` and `bias [out]`.
    pub(crate) fn conv3d(
        &self,
        input: usize,
        output: usize,
        k: usize,
    ) -> Result<Conv3dWeight, ModelError> {
        let weight = self.tensor("weight", &[output, input, k, k, k])?;
        let bias = self.f32("bias", &[output])?;
        Ok(Conv3dWeight::new(&weight, Some(&bias))?)
    }

    /// The same for input of a single frame: the frames before and after it are zero padding, so only the
    /// middle tap along time is kept.
    pub(crate) fn conv3d_of_one_frame(
        &self,
        input: usize,
        output: usize,
        k: usize,
    ) -> Result<Conv3dWeight, ModelError> {
        let weight = self.tensor("weight", &[output, input, k, k, k])?;
        let (bias, plane) = (self.f32("bias", &[output])?, k * k);
        let middle = |filter: usize| {
            let from = (filter * k + k / 2) * plane;
            from..from + plane
        };
        let taps = (0..output * input).map(middle);
        let weight = gather(&weight, &[output, input, 1, k, k], taps)?;
        Ok(Conv3dWeight::new(&weight, Some(&bias))?)
    }

    /// `weight [n]` and `bias [n]` of a normalisation.
    pub(crate) fn affine(&self, n: usize) -> Result<Affine, ModelError> {
        Ok(Affine {
            weight: self.f32("weight", &[n])?,
            bias: self.f32("bias", &[n])?,
        })
    }
}

/// The elements of `whole` in `pieces`, as a tensor of the same type.
fn gather(
    whole: &Tensor,
    shape: &[usize],
    pieces: impl Iterator<Item = Range<usize>>,
) -> Result<Tensor, ModelError> {
    Ok(match whole.dtype() {
        DType::F32 => {
            let data = whole.as_f32()?;
            let kept: Vec<&[f32]> = pieces.map(|piece| &data[piece]).collect();
            Tensor::from_f32(shape, kept.concat())?
        }
        DType::Bf16 => {
            let data = whole.as_bf16()?;
            let kept: Vec<_> = pieces.map(|piece| &data[piece]).collect();
            Tensor::from_bf16(shape, kept.concat())?
        }
    })
}

/// Scale and shift of a normalisation, both `[n]`, F32.
#[derive(Clone, Debug)]
pub(crate) struct Affine {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
}
