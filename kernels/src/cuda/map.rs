//! Tensor maps: what the bulk copy engine must know of a tensor.

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType_enum as Data, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle,
};

use super::error::{Result, argument, shape};
use super::tensor::{GpuTensor, GpuType};

/// Dimensions the copy engine can have.
const MAX_DIMS: usize = 5;

/// A tensor as the bulk copy engine sees it; passed to kernels by value (`__grid_constant__`).
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct TensorMap(CUtensorMap);

// SAFETY: the driver defines the type as a kernel argument.
unsafe impl DeviceRepr for TensorMap {}

impl TensorMap {
    /// A map of `tensor` seen as `dims` (fastest first) with byte `strides` of all dimensions but the first,
    /// read in boxes of `boxed` elements, whose rows of 128 bytes lie swizzled in shared memory: 16-byte pieces
    /// permuted within groups of 8 rows. Elements outside are read as zero.
    pub(crate) fn new(
        tensor: &GpuTensor,
        dims: &[usize],
        strides: &[usize],
        boxed: &[usize],
    ) -> Result<Self> {
        const OP: &str = "TensorMap::new";
        if dims.is_empty() || dims.len() > MAX_DIMS || boxed.len() != dims.len() {
            return Err(shape(
                OP,
                "dims",
                "1 to 5 dimensions, as many as the box",
                dims,
            ));
        }
        if strides.len() + 1 != dims.len() || strides.iter().any(|s| !s.is_multiple_of(16)) {
            return Err(shape(OP, "strides", "multiples of 16 bytes", strides));
        }
        if !tensor.address().is_multiple_of(16) {
            return Err(argument(OP, "tensor", "is not aligned to 16 bytes"));
        }
        let element = tensor.dtype().bytes();
        let steps = std::iter::once(&element).chain(strides);
        let last: usize = dims
            .iter()
            .zip(steps)
            .map(|(n, s)| n.saturating_sub(1) * s)
            .sum();
        if last + element > tensor.bytes() {
            return Err(shape(OP, "dims", "dimensions within the tensor", dims));
        }
        let kind = match tensor.dtype() {
            GpuType::F32 => Data::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            GpuType::Bf16 => Data::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            GpuType::F16 => Data::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            GpuType::E4m3 | GpuType::U8 => Data::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            GpuType::I32 => Data::CU_TENSOR_MAP_DATA_TYPE_INT32,
        };
        let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        let strides: Vec<u64> = strides.iter().map(|s| *s as u64).collect();
        let boxed: Vec<u32> = boxed
            .iter()
            .map(|b| u32::try_from(*b).unwrap_or(0))
            .collect();
        let steps = vec![1_u32; dims.len()];
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: every array has as many entries as there are dimensions (one fewer stride), and the
        // range was held against the allocation above.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                kind,
                u32::try_from(dims.len()).unwrap_or(0),
                tensor.address() as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                boxed.as_ptr(),
                steps.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()?;
        Ok(Self(map))
    }
}
