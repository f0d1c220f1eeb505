// Products of e4m3 matrices with a scale for each row of both, dense and grouped.
#include "gemm.cuh"

GEMM_KERNEL(gemm_fp8, 2, 1, 256, 4, STORE)
GEMM_KERNEL(gemm_fp8_swiglu, 2, 1, 256, 4, SWIGLU)
GEMM_KERNEL(gemm_fp8_add, 2, 1, 256, 4, ADD)
