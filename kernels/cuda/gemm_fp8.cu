// Products of e4m3 matrices with a scale for each row of both, dense and grouped. The narrow kernels are for few rows.
#include "gemm.cuh"

GEMM_KERNEL(gemm_fp8, 2, 1, 256, 4, STORE)
GEMM_KERNEL(gemm_fp8_swiglu, 2, 1, 256, 4, SWIGLU)
GEMM_KERNEL(gemm_fp8_add, 2, 1, 256, 4, ADD)
GEMM_KERNEL(gemm_fp8_narrow, 2, 1, 128, 6, STORE)
GEMM_KERNEL(gemm_fp8_swiglu_narrow, 2, 1, 128, 6, SWIGLU)
GEMM_KERNEL(gemm_fp8_add_narrow, 2, 1, 128, 6, ADD)
