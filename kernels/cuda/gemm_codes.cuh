// SwiGLU whose results go out as e4m3, so that no other pass over them is needed.
//
// A row's scale would be known only when all of its columns are, which many blocks compute. But e4m3 is a floating
// format: any scale that keeps the row's largest value within [1.75, 448] serves as well as the best one. So scales are
// 256^e / 16, each block of 64 columns takes the smallest that holds its values, and blocks of a row mostly agree: with
// e = 0 on largest values between 0.11 and 28. Where they do not, codes_settle (codes.cu) rewrites the few that took a
// smaller one.
#pragma once

#include "gemm_epilogue.cuh"
#include "gemm_schedule.cuh"

namespace gemm {

constexpr int CODE_COLUMNS = 64;  // that share an exponent, whatever the tiles of the kernel

// Smallest e with largest <= 448 * 256^e / 16, of a non-negative value.
__device__ __forceinline__ int code_exponent(float largest) {
    constexpr int MOST = 15;
    const int bits = __float_as_int(largest * (16.0f / 448.0f));
    const int log2 = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0);
    return max(-MOST, min((log2 + 7) >> 3, MOST));
}

__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// Codes of one row and 16 columns: each lane has two columns of both n8 blocks, in the halves of `pairs`, and gets
// four that lie side by side.
__device__ __forceinline__ uint32_t neighbours(uint32_t pairs) {
    const int lane = threadIdx.x & 31;
    const int from = (lane & ~3) | (lane & 1) << 1;
    const uint32_t x = __shfl_sync(~0u, pairs, from);
    const uint32_t y = __shfl_sync(~0u, pairs, from + 1);
    return __byte_perm(x, y, lane & 2 ? 0x7632 : 0x5410);
}

template <int COLUMNS, typename Scaling>
__device__ __forceinline__ void finish_codes(float (&sums)[COLUMNS / 2], const Scaling& scales, const Arguments& args,
                                             const CUtensorMap* out_map, const Target& target, char* staging) {
    constexpr int OUT_BLOCKS = COLUMNS / 16;
    constexpr int EACH = CODE_COLUMNS / 8;  // n8 blocks of an exponent
    if (target.rows <= 0) return;
    const int lane = threadIdx.x & 31;
    const uint32_t base = hopper::smem_address(staging);
    const int exponents = divide_up(args.columns, CODE_COLUMNS);
    Staging::wait<0>();
#pragma unroll
    for (int part = 0; part < OUT_BLOCKS; part += EACH) {
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = part; j < part + EACH; ++j) {
            float* v = &sums[4 * j];
            float* g = v + COLUMNS / 4;
            scales.apply(v, j);
            scales.apply(g, j + OUT_BLOCKS);
#pragma unroll
            for (int i = 0; i < 4; ++i) gate(v[i], g[i]);
            largest[0] = fmaxf(largest[0], fmaxf(fabsf(v[0]), fabsf(v[1])));
            largest[1] = fmaxf(largest[1], fmaxf(fabsf(v[2]), fabsf(v[3])));
        }
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = largest[half];
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const int exponent = code_exponent(most);
            inverse[half] = __int_as_float((127 + 4 - 8 * exponent) << 23);
            const int row = lane / 4 + 8 * half;
            const int column = target.column + part * 8;
            if ((lane & 3) == 0 && row < target.rows && column < args.columns)
                args.exponents[size_t(target.row + row) * exponents + column / CODE_COLUMNS] = exponent;
        }
#pragma unroll
        for (int j = part; j < part + EACH; j += 4) {
            uint32_t code[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* v = &sums[4 * (j + i / 2 * 2)] + i % 2 * 2;
                const float s = inverse[i % 2];
                code[i] = neighbours(pack_e4m3(v[0] * s, v[1] * s) | pack_e4m3(v[4] * s, v[5] * s) << 16);
            }
            store_matrices(Staging::matrix_at(base, j / 2), code[0], code[1], code[2], code[3]);
        }
    }
    // To the staging, two codes are one value of 16 bits.
    const Window window{target.row, target.rows, target.column / 2, args.columns / 2};
    Staging::store<OUT_BLOCKS * 4, 2>(staging, args.out, out_map, window);
}

}  // namespace gemm
