//! A typed view of device memory.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use half::bf16;

use super::device::Gpu;
use super::error::{CudaError, Result, shape};
use super::memory::DeviceBuffer;
use crate::error::KernelError;
use crate::tensor::{DType, Tensor};

/// Element type on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 8-bit float of 4 exponent and 3 mantissa bits, largest value 448.
    E4m3,
    /// 32-bit integer; also counts and indices.
    I32,
    /// Bytes, and 8-bit colours.
    U8,
}

impl GpuType {
    /// Size of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::U8 => 1,
        }
    }
}

/// Contiguous row-major elements in device memory; clones and views share the buffer.
#[derive(Clone, Debug)]
pub struct GpuTensor {
    buffer: Arc<DeviceBuffer>,
    /// Bytes from the start of the buffer.
    offset: usize,
    shape: Vec<usize>,
    dtype: GpuType,
}

fn numel(op: &'static str, dims: &[usize], dtype: GpuType) -> Result<usize> {
    let count = dims.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
    count
        .filter(|n| n.checked_mul(dtype.bytes()).is_some())
        .ok_or_else(|| shape(op, "shape", "an addressable number of elements", dims))
}

impl GpuTensor {
    /// A tensor with unknown contents; `what` names it should memory run out.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::new`].
    pub fn new(gpu: &Arc<Gpu>, dims: &[usize], dtype: GpuType, what: &'static str) -> Result<Self> {
        let bytes = numel("GpuTensor::new", dims, dtype)? * dtype.bytes();
        let buffer = Arc::new(DeviceBuffer::new(gpu, bytes, what)?);
        Self::view(&buffer, 0, dims, dtype)
    }

    /// A view of `buffer` from byte `offset`, which must be a multiple of the element size.
    ///
    /// # Errors
    /// `Argument` when it does not fit.
    pub fn view(
        buffer: &Arc<DeviceBuffer>,
        offset: usize,
        dims: &[usize],
        dtype: GpuType,
    ) -> Result<Self> {
        const OP: &str = "GpuTensor::view";
        let bytes = numel(OP, dims, dtype)? * dtype.bytes();
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > buffer.bytes()) || !offset.is_multiple_of(dtype.bytes()) {
            return Err(CudaError::Argument(KernelError::Bounds {
                op: OP,
                what: "offset + bytes",
                value: offset.saturating_add(bytes),
                limit: buffer.bytes(),
            }));
        }
        Ok(Self {
            buffer: buffer.clone(),
            offset,
            shape: dims.to_vec(),
            dtype,
        })
    }

    /// Elements of the host, in their type, copied to the device.
    ///
    /// # Errors
    /// Those of [`GpuTensor::new`].
    pub fn from_host(gpu: &Arc<Gpu>, tensor: &Tensor, what: &'static str) -> Result<Self> {
        match tensor.dtype() {
            DType::F32 => Self::from_f32(gpu, tensor.shape(), tensor.as_f32()?, what),
            DType::Bf16 => {
                let out = Self::new(gpu, tensor.shape(), GpuType::Bf16, what)?;
                out.write_bytes(bytes_of(tensor.as_bf16()?))?;
                Ok(out)
            }
        }
    }

    /// Elements of the host rounded to bf16 on the way (bf16 ones are copied as they are).
    ///
    /// # Errors
    /// Those of [`GpuTensor::new`].
    pub fn bf16_from_host(gpu: &Arc<Gpu>, tensor: &Tensor, what: &'static str) -> Result<Self> {
        if tensor.dtype() == DType::Bf16 {
            return Self::from_host(gpu, tensor, what);
        }
        let narrow: Vec<bf16> = tensor
            .as_f32()?
            .iter()
            .map(|v| bf16::from_f32(*v))
            .collect();
        let out = Self::new(gpu, tensor.shape(), GpuType::Bf16, what)?;
        out.write_bytes(bytes_of(&narrow))?;
        Ok(out)
    }

    /// `f32` elements copied to the device.
    ///
    /// # Errors
    /// Those of [`GpuTensor::new`]; `Argument` when the number of elements is not that of `dims`.
    pub fn from_f32(
        gpu: &Arc<Gpu>,
        dims: &[usize],
        data: &[f32],
        what: &'static str,
    ) -> Result<Self> {
        let out = Self::new(gpu, dims, GpuType::F32, what)?;
        out.write_bytes(bytes_of(data))?;
        Ok(out)
    }

    /// `i32` elements copied to the device.
    ///
    /// # Errors
    /// Those of [`GpuTensor::from_f32`].
    pub fn from_i32(
        gpu: &Arc<Gpu>,
        dims: &[usize],
        data: &[i32],
        what: &'static str,
    ) -> Result<Self> {
        let out = Self::new(gpu, dims, GpuType::I32, what)?;
        out.write_bytes(bytes_of(data))?;
        Ok(out)
    }

    /// The dimensions, slowest first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Dimension `i`; 1 where the tensor has fewer dimensions.
    #[must_use]
    pub fn dim(&self, i: usize) -> usize {
        self.shape.get(i).copied().unwrap_or(1)
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> GpuType {
        self.dtype
    }

    /// Size of the elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.bytes()
    }

    /// The GPU that has it.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.buffer.gpu()
    }

    /// The buffer it is a view of.
    #[must_use]
    pub fn buffer(&self) -> &Arc<DeviceBuffer> {
        &self.buffer
    }

    /// Bytes from the start of its buffer.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Where its first element is on the device.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.buffer.address() + self.offset as CUdeviceptr
    }

    /// A view with another shape of equally many elements.
    ///
    /// # Errors
    /// `Argument` when the number of elements differs.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        if numel("reshape", dims, self.dtype)? != self.numel() {
            let expected = format!("{} elements", self.numel());
            return Err(shape("reshape", "shape", expected, dims));
        }
        Ok(Self {
            shape: dims.to_vec(),
            ..self.clone()
        })
    }

    /// A view of entries `start .. start + len` along dimension 0.
    ///
    /// # Errors
    /// `Argument` when they are not there.
    pub fn narrow0(&self, start: usize, len: usize) -> Result<Self> {
        let fits = start.checked_add(len).is_some_and(|end| end <= self.dim(0));
        if !fits || self.shape.is_empty() {
            return Err(CudaError::Argument(KernelError::Bounds {
                op: "narrow0",
                what: "start + len",
                value: start.saturating_add(len),
                limit: self.dim(0),
            }));
        }
        let stride: usize = self.shape[1..].iter().product();
        let mut view = self.clone();
        view.shape[0] = len;
        view.offset += start * stride * self.dtype.bytes();
        Ok(view)
    }

    /// Refuses another type or shape by name; `usize::MAX` in `dims` accepts any size.
    pub(crate) fn expect(
        &self,
        op: &'static str,
        what: &'static str,
        dims: &[usize],
        dtype: GpuType,
    ) -> Result<()> {
        if self.dtype != dtype {
            let expected = format!("{dtype:?} elements, not {:?}", self.dtype);
            return Err(shape(op, what, expected, &self.shape));
        }
        let same = |(got, want): (&usize, &usize)| *want == usize::MAX || got == want;
        if self.shape.len() == dims.len() && self.shape.iter().zip(dims).all(same) {
            return Ok(());
        }
        let name = |d: &usize| {
            if *d == usize::MAX {
                "_".into()
            } else {
                d.to_string()
            }
        };
        let names: Vec<String> = dims.iter().map(name).collect();
        Err(shape(
            op,
            what,
            format!("[{}]", names.join(", ")),
            &self.shape,
        ))
    }

    /// Replaces all elements, in stream order.
    ///
    /// # Errors
    /// `Argument` when the size differs, or what the driver says.
    pub fn write_bytes(&self, data: &[u8]) -> Result<()> {
        if data.len() != self.bytes() {
            let expected = format!("{} bytes, not {}", self.bytes(), data.len());
            return Err(shape("write_bytes", "data", expected, &self.shape));
        }
        self.buffer.write(self.offset, data)
    }

    /// Copies all elements of another tensor of the same size and type, in stream order.
    ///
    /// # Errors
    /// `Argument` when they differ in size or type.
    pub fn copy_from(&self, from: &Self) -> Result<()> {
        if from.dtype != self.dtype || from.numel() != self.numel() {
            let expected = format!("{:?} of {} elements", self.dtype, self.numel());
            return Err(shape("copy_from", "from", expected, &from.shape));
        }
        self.buffer
            .copy_from(self.offset, &from.buffer, from.offset, self.bytes())
    }

    /// All elements as bytes, after everything enqueued before.
    ///
    /// # Errors
    /// A kernel that failed before, or what the driver says.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut data = vec![0; self.bytes()];
        self.buffer.read(self.offset, &mut data)?;
        Ok(data)
    }

    /// All elements of an `F32`, `Bf16` or `F16` tensor as `f32`, on the host.
    ///
    /// # Errors
    /// `Argument` for another type; those of [`GpuTensor::to_bytes`].
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        let bytes = self.to_bytes()?;
        Ok(match self.dtype {
            GpuType::F32 => words(&bytes).map(f32::from_le_bytes).collect(),
            GpuType::Bf16 => halves(&bytes)
                .map(|b| bf16::from_le_bytes(b).to_f32())
                .collect(),
            GpuType::F16 => halves(&bytes)
                .map(|b| half::f16::from_le_bytes(b).to_f32())
                .collect(),
            _ => return Err(shape("to_f32_vec", "tensor", "floats", &self.shape)),
        })
    }

    /// All elements of an `I32` tensor, on the host.
    ///
    /// # Errors
    /// Those of [`GpuTensor::to_f32_vec`].
    pub fn to_i32_vec(&self) -> Result<Vec<i32>> {
        if self.dtype != GpuType::I32 {
            return Err(shape("to_i32_vec", "tensor", "integers", &self.shape));
        }
        Ok(words(&self.to_bytes()?).map(i32::from_le_bytes).collect())
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks::<4>().0.iter().copied()
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = [u8; 2]> {
    bytes.as_chunks::<2>().0.iter().copied()
}

/// Plain numbers as they lie in memory; devices are little-endian, and so are the hosts that have one.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` types have no padding and every byte of them is initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Types without padding or invalid bytes.
///
/// # Safety
/// Every byte of a value is initialised.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: a number.
unsafe impl Plain for f32 {}
// SAFETY: a number.
unsafe impl Plain for i32 {}
// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for bf16 {}
// SAFETY: an array of numbers.
unsafe impl<const N: usize> Plain for [u32; N] {}
// SAFETY: an array of numbers.
unsafe impl<const N: usize> Plain for [i32; N] {}
