// Products of bf16 matrices, dense and grouped.
#include "gemm.cuh"

GEMM_KERNEL(gemm_bf16, 2, 2, 256, 4, STORE)
GEMM_KERNEL(gemm_bf16_swiglu, 2, 2, 256, 4, SWIGLU)
GEMM_KERNEL(gemm_bf16_add, 2, 2, 256, 4, ADD)
GEMM_KERNEL(gemm_bf16_float, 2, 2, 64, 6, FLOAT)
