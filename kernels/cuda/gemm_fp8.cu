// Products of e4m3 matrices with a scale for each row of both, dense and grouped.
#include "gemm.cuh"

GEMM_KERNEL(GEMM_PAIRED, gemm_fp8, 1, 256, 4, true, 0, gemm::Finish::STORE)
GEMM_KERNEL(GEMM_PAIRED, gemm_fp8_swiglu, 1, 256, 4, true, 0, gemm::Finish::SWIGLU)
GEMM_KERNEL(GEMM_PAIRED, gemm_fp8_add, 1, 256, 4, true, 0, gemm::Finish::ADD)
