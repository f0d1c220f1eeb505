//! A shared, contiguous, row-major buffer with a shape.

use std::sync::Arc;

use half::bf16;

use crate::cpu::recycle::Recycled;
use crate::error::{KernelError, Result};

/// Largest number of dimensions of a [`Tensor`].
const MAX_RANK: usize = 6;

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// bfloat16: the upper half of an `f32`.
    Bf16,
}

/// Where the elements live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
}

#[derive(Clone)]
enum Buffer {
    F32(Arc<Recycled>),
    Bf16(Arc<Vec<bf16>>),
}

/// Dimensions held inline, so that a view allocates nothing.
#[derive(Clone, Copy)]
struct Shape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    fn new(op: &'static str, dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_RANK {
            return Err(KernelError::Bounds {
                op,
                what: "rank",
                value: dims.len(),
                limit: MAX_RANK,
            });
        }
        let mut shape = Self {
            dims: [1; MAX_RANK],
            rank: dims.len(),
        };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    fn as_slice(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

/// A tensor: shared buffer, shape and offset. Cloning and taking views copies no elements.
///
/// The elements of a tensor are always contiguous and row-major: the last dimension varies fastest.
#[derive(Clone)]
pub struct Tensor {
    buffer: Buffer,
    shape: Shape,
    offset: usize,
    numel: usize,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tensor")
            .field("dtype", &self.dtype())
            .field("shape", &self.shape())
            .finish_non_exhaustive()
    }
}

/// Number of elements of a shape, or a typed error where it overflows what memory can address.
fn checked_numel(op: &'static str, shape: &[usize]) -> Result<usize> {
    // A Vec may not exceed isize::MAX bytes.
    const LIMIT: usize = isize::MAX as usize / size_of::<f32>();
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .filter(|&n| n <= LIMIT)
        .ok_or_else(|| KernelError::shape(op, "shape", "an addressable number of elements", shape))
}

impl Tensor {
    /// A tensor over `data`, which must hold exactly the product of `shape` elements.
    pub fn from_f32(shape: &[usize], data: Vec<f32>) -> Result<Self> {
        let numel = check_len("from_f32", shape, data.len())?;
        let buffer = Buffer::F32(Arc::new(Recycled::from(data)));
        Ok(Self {
            buffer,
            shape: Shape::new("from_f32", shape)?,
            offset: 0,
            numel,
        })
    }

    /// A bf16 tensor over `data`, which must hold exactly the product of `shape` elements.
    pub fn from_bf16(shape: &[usize], data: Vec<bf16>) -> Result<Self> {
        let numel = check_len("from_bf16", shape, data.len())?;
        let buffer = Buffer::Bf16(Arc::new(data));
        Ok(Self {
            buffer,
            shape: Shape::new("from_bf16", shape)?,
            offset: 0,
            numel,
        })
    }

    /// An `f32` tensor of zeros.
    pub fn zeros(shape: &[usize]) -> Result<Self> {
        let numel = checked_numel("zeros", shape)?;
        Self::from_f32(shape, vec![0.0; numel])
    }

    /// An output of an operation whose shape is already known to be consistent.
    pub(crate) fn output(shape: &[usize], data: Recycled) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        debug_assert!(shape.len() <= MAX_RANK);
        let mut dims = [1; MAX_RANK];
        dims[..shape.len()].copy_from_slice(shape);
        let numel = data.len();
        Self {
            buffer: Buffer::F32(Arc::new(data)),
            shape: Shape {
                dims,
                rank: shape.len(),
            },
            offset: 0,
            numel,
        }
    }

    /// The dimensions, slowest first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// Dimension `i`; 1 where the tensor has fewer dimensions.
    #[must_use]
    pub fn dim(&self, i: usize) -> usize {
        self.shape().get(i).copied().unwrap_or(1)
    }

    /// Number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shape.rank
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self.buffer {
            Buffer::F32(_) => DType::F32,
            Buffer::Bf16(_) => DType::Bf16,
        }
    }

    /// Where the elements live.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// The elements of an `f32` tensor; a typed error for any other type.
    pub fn as_f32(&self) -> Result<&[f32]> {
        self.f32_named("as_f32", "tensor")
    }

    /// The elements of a `bf16` tensor; a typed error for any other type.
    pub fn as_bf16(&self) -> Result<&[bf16]> {
        match &self.buffer {
            Buffer::Bf16(data) => Ok(&data[self.offset..self.offset + self.numel]),
            Buffer::F32(_) => Err(KernelError::DType {
                op: "as_bf16",
                what: "tensor",
                expected: DType::Bf16,
                got: DType::F32,
            }),
        }
    }

    pub(crate) fn f32_named(&self, op: &'static str, what: &'static str) -> Result<&[f32]> {
        match &self.buffer {
            Buffer::F32(data) => Ok(&data[self.offset..self.offset + self.numel]),
            Buffer::Bf16(_) => Err(KernelError::DType {
                op,
                what,
                expected: DType::F32,
                got: DType::Bf16,
            }),
        }
    }

    /// Mutable elements of an `f32` tensor. Copies first where the buffer is shared (copy on write), so
    /// no other tensor sees the change.
    pub fn as_f32_mut(&mut self) -> Result<&mut [f32]> {
        let range = self.offset..self.offset + self.numel;
        let Buffer::F32(data) = &mut self.buffer else {
            return Err(KernelError::DType {
                op: "as_f32_mut",
                what: "tensor",
                expected: DType::F32,
                got: DType::Bf16,
            });
        };
        if Arc::get_mut(data).is_none() {
            let mut copy = Recycled::stale(range.len());
            copy.copy_from_slice(&data[range.clone()]);
            *data = Arc::new(copy);
            self.offset = 0;
        }
        let (offset, numel) = (self.offset, self.numel);
        // The buffer was made unique just above; the error is unreachable and typed all the same.
        let unique = Arc::get_mut(data).ok_or(KernelError::Argument {
            op: "as_f32_mut",
            what: "tensor",
            reason: "is shared",
        })?;
        Ok(&mut unique[offset..offset + numel])
    }

    /// The elements as `f32`, in a new vector; bf16 is widened exactly.
    #[must_use]
    pub fn to_f32_vec(&self) -> Vec<f32> {
        let range = self.offset..self.offset + self.numel;
        match &self.buffer {
            Buffer::F32(data) => data[range].to_vec(),
            Buffer::Bf16(data) => data[range].iter().map(|v| v.to_f32()).collect(),
        }
    }

    /// The same elements as an `f32` tensor; shares the buffer where it is `f32` already.
    #[must_use]
    pub fn to_f32(&self) -> Self {
        match self.buffer {
            Buffer::F32(_) => self.clone(),
            Buffer::Bf16(_) => Self {
                buffer: Buffer::F32(Arc::new(Recycled::from(self.to_f32_vec()))),
                shape: self.shape,
                offset: 0,
                numel: self.numel,
            },
        }
    }

    /// A view with another shape of equally many elements.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        let numel = checked_numel("reshape", shape)?;
        if numel != self.numel {
            return Err(KernelError::shape(
                "reshape",
                "shape",
                format!("{} elements", self.numel),
                shape,
            ));
        }
        Ok(Self {
            shape: Shape::new("reshape", shape)?,
            ..self.clone()
        })
    }

    /// A view of entries `start .. start + len` along dimension 0.
    pub fn narrow0(&self, start: usize, len: usize) -> Result<Self> {
        let bound = self.dim(0);
        let end = start
            .checked_add(len)
            .filter(|&e| e <= bound && self.rank() > 0);
        if end.is_none() {
            return Err(KernelError::Bounds {
                op: "narrow0",
                what: "start + len",
                value: start.saturating_add(len),
                limit: bound,
            });
        }
        let stride = self.shape()[1..].iter().product::<usize>();
        let mut view = self.clone();
        view.shape.dims[0] = len;
        view.offset += start * stride;
        view.numel = len * stride;
        Ok(view)
    }

    /// The given `f32` tensors one after the other along dimension 0; the other dimensions must agree.
    pub fn concat0(parts: &[&Self]) -> Result<Self> {
        const OP: &str = "concat0";
        let Some(first) = parts.first().filter(|t| t.rank() > 0) else {
            return Err(KernelError::Argument {
                op: OP,
                what: "parts",
                reason: "are empty",
            });
        };
        let tail = &first.shape()[1..];
        let mut rows = 0;
        for part in parts {
            if part.rank() != first.rank() || &part.shape()[1..] != tail {
                let expected = format!("[_, {tail:?}]");
                return Err(KernelError::shape(OP, "part", expected, part.shape()));
            }
            part.f32_named(OP, "part")?;
            rows += part.dim(0);
        }
        let mut shape = first.shape.dims;
        shape[0] = rows;
        let shape = &shape[..first.rank()];
        let mut out = Recycled::stale(checked_numel(OP, shape)?);
        let mut at = 0;
        for part in parts {
            let data = part.f32_named(OP, "part")?;
            out[at..at + data.len()].copy_from_slice(data);
            at += data.len();
        }
        Ok(Self::output(shape, out))
    }

    /// Checks the shape and names the argument in the error. `usize::MAX` in `expected` accepts any size.
    pub(crate) fn expect_shape(
        &self,
        op: &'static str,
        what: &'static str,
        expected: &[usize],
    ) -> Result<()> {
        let fits = self.rank() == expected.len()
            && self
                .shape()
                .iter()
                .zip(expected)
                .all(|(&got, &want)| want == ANY || got == want);
        if fits {
            return Ok(());
        }
        let names: Vec<String> = expected
            .iter()
            .map(|&d| {
                if d == ANY {
                    "_".to_owned()
                } else {
                    d.to_string()
                }
            })
            .collect();
        Err(KernelError::shape(
            op,
            what,
            format!("[{}]", names.join(", ")),
            self.shape(),
        ))
    }
}

/// Accepts any size in [`Tensor::expect_shape`].
pub(crate) const ANY: usize = usize::MAX;

fn check_len(op: &'static str, shape: &[usize], len: usize) -> Result<usize> {
    let numel = checked_numel(op, shape)?;
    if numel == len {
        Ok(numel)
    } else {
        Err(KernelError::shape(
            op,
            "shape",
            format!("{len} elements"),
            shape,
        ))
    }
}
