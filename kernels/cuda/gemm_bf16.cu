// Products of bf16 matrices, dense and grouped. The narrow kernels are for few rows: more blocks read weights.
#include "gemm.cuh"

GEMM_KERNEL(gemm_bf16, 2, 2, 256, 4, STORE)
GEMM_KERNEL(gemm_bf16_swiglu, 2, 2, 256, 4, SWIGLU)
GEMM_KERNEL(gemm_bf16_add, 2, 2, 256, 4, ADD)
GEMM_KERNEL(gemm_bf16_float, 2, 2, 256, 4, FLOAT)
GEMM_KERNEL(gemm_bf16_narrow, 2, 2, 128, 6, STORE)
GEMM_KERNEL(gemm_bf16_swiglu_narrow, 2, 2, 128, 6, SWIGLU)
GEMM_KERNEL(gemm_bf16_add_narrow, 2, 2, 128, 6, ADD)
GEMM_KERNEL(gemm_bf16_float_narrow, 2, 2, 128, 6, FLOAT)
