// Products of bf16 matrices, dense and grouped.
#include "gemm.cuh"

GEMM_KERNEL(GEMM_PAIRED, gemm_bf16, 2, 256, 4, true, 0, gemm::Finish::STORE)
GEMM_KERNEL(GEMM_PAIRED, gemm_bf16_swiglu, 2, 256, 4, true, 0, gemm::Finish::SWIGLU)
GEMM_KERNEL(GEMM_PAIRED, gemm_bf16_add, 2, 256, 4, true, 0, gemm::Finish::ADD)
GEMM_KERNEL(GEMM_PAIRED, gemm_bf16_float, 2, 64, 6, true, 0, gemm::Finish::FLOAT)
