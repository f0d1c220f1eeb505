// Warpgroup matrix products of the convolutions: D[64, N] (+)= A[64, 16] . B[N, 16]^T, both operands K-major in
// shared memory, fp32 accumulators. PTX ISA: "wgmma.mma_async".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace conv {

// Accumulators of one thread: column pair 8 j + 2 (lane % 4) of row lane / 4 at [4 j], of row lane / 4 + 8 at [4 j + 2].
template <typename T, int N>
struct Mma;

#define CONV_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CONV_D16(d, i) CONV_D4(d, i), CONV_D4(d, i + 4), CONV_D4(d, i + 8), CONV_D4(d, i + 12)
#define CONV_D64(d, i) CONV_D16(d, i), CONV_D16(d, i + 16), CONV_D16(d, i + 32), CONV_D16(d, i + 48)

#define CONV_R16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CONV_R16_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CONV_R16_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define CONV_R16_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// `accumulate` 0 overwrites D.
#define CONV_MMA(T, N, TYPE, REGISTERS, OPERANDS, A, B, P)                                                         \
    template <>                                                                                                    \
    struct Mma<T, N> {                                                                                             \
        static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A    \
                         ", " B ", p, 1, 1, 0, 0;\n}"                                                              \
                         : OPERANDS                                                                                \
                         : "l"(a), "l"(b), "r"(accumulate));                                                       \
        }                                                                                                          \
    }

#define CONV_MMA_TYPE(T, TYPE)                                                                              \
    CONV_MMA(T, 32, TYPE, CONV_R16_0, CONV_D16(d, 0), "%16", "%17", "%18");                                 \
    CONV_MMA(T, 128, TYPE, CONV_R16_0 ", " CONV_R16_1 ", " CONV_R16_2 ", " CONV_R16_3, CONV_D64(d, 0), "%64", \
             "%65", "%66")

CONV_MMA_TYPE(__nv_bfloat16, "bf16");
CONV_MMA_TYPE(__half, "f16");

// ---- 16-bit element types ---------------------------------------------------------------------------------

__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}
__device__ __forceinline__ float2 unpack(__half, uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack(__half, float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ void unpack8(const uint4& raw, float (&to)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(T(), words[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

template <typename T>
__device__ __forceinline__ uint4 pack8(const float (&from)[8]) {
    return make_uint4(pack(T(), from[0], from[1]), pack(T(), from[2], from[3]), pack(T(), from[4], from[5]),
                      pack(T(), from[6], from[7]));
}

}  // namespace conv
