// Matrix instructions of the products: one warpgroup, 64 rows of A times N rows of B, both K-major in shared
// memory with 128-byte swizzle. 32 bytes of K per instruction: 16 values of bf16, 32 of e4m3.
// PTX ISA: "wgmma.mma_async", "Register fragments for wgmma".
#pragma once

#include "hopper.cuh"

namespace gemm {

#define GEMM_R8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define GEMM_R32(d, i) GEMM_R8(d, i), GEMM_R8(d, i + 8), GEMM_R8(d, i + 16), GEMM_R8(d, i + 24)

#define GEMM_D128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define GEMM_D64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The accumulators are overwritten where `accumulate` is 0.
__device__ __forceinline__ void multiply_bf16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" GEMM_D128 "}, %128, %129, p, 1, 1, 0, 0;\n}"
        : GEMM_R32(d, 0), GEMM_R32(d, 32), GEMM_R32(d, 64), GEMM_R32(d, 96)
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply_e4m3(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" GEMM_D128 "}, %128, %129, p, 1, 1;\n}"
        : GEMM_R32(d, 0), GEMM_R32(d, 32), GEMM_R32(d, 64), GEMM_R32(d, 96)
        : "l"(a), "l"(b), "r"(accumulate));
}

// 128 rows of B instead of 256.
__device__ __forceinline__ void multiply_bf16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" GEMM_D64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
        : GEMM_R32(d, 0), GEMM_R32(d, 32)
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" GEMM_D64 "}, %64, %65, p, 1, 1;\n}"
        : GEMM_R32(d, 0), GEMM_R32(d, 32)
        : "l"(a), "l"(b), "r"(accumulate));
}

#undef GEMM_R8
#undef GEMM_R32
#undef GEMM_D128
#undef GEMM_D64

}  // namespace gemm
