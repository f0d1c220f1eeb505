// Products of e4m3 matrices with a scale for each row of both, dense and grouped. The narrow kernels are for few rows.
#include "gemm.cuh"

GEMM_KERNEL(gemm_fp8, 2, 1, 256, 4, STORE)
GEMM_KERNEL(gemm_fp8_codes, 2, 1, 256, 4, CODES)
GEMM_KERNEL(gemm_fp8_add, 2, 1, 256, 4, ADD)
GEMM_KERNEL(gemm_fp8_narrow, 2, 1, 128, 6, STORE)
GEMM_KERNEL(gemm_fp8_codes_narrow, 2, 1, 128, 6, CODES)
GEMM_KERNEL(gemm_fp8_add_narrow, 2, 1, 128, 6, ADD)
