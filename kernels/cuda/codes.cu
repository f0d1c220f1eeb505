// Rows of e4m3 codes whose blocks of 64 columns have exponents of their own (gemm_codes.cuh), brought to one scale a row.
#include <cuda_fp8.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 128;
constexpr int kBlockColumns = 64;

struct Arguments {
    uint8_t* codes;          // [rows, width]; value = code * 256^exponent / 16 in each block
    const int8_t* exponents; // [rows, blocks of a row]
    float* scales;           // [rows]: of the largest exponent of the row
    const int* count;        // only so many rows, or null: `rows`
    int rows;
    int width;
};

// 2^exponent.
__device__ __forceinline__ float power(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Two codes times `factor`, at most 1; rounded to nearest.
__device__ __forceinline__ uint16_t scaled(uint16_t two, float factor) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return __nv_cvt_float2_to_fp8x2(make_float2(v.x * factor, v.y * factor), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace

// A thread a row, and the warp together where a row has to be rewritten.
extern "C" __global__ void __launch_bounds__(kThreads) codes_settle(const Arguments a) {
    const int row = blockIdx.x * kThreads + threadIdx.x, lane = threadIdx.x % 32;
    const int rows = min(a.rows, a.count != nullptr ? __ldg(a.count) : a.rows);
    const int blocks = (a.width + kBlockColumns - 1) / kBlockColumns;
    int most = -128, least = 127;
    if (row < rows) {
        const int8_t* own = a.exponents + static_cast<int64_t>(row) * blocks;
        if (blocks % 4 == 0) {
            uint32_t high = 0x80808080u, low = 0x7F7F7F7Fu;
            for (int b = 0; b < blocks; b += 4) {
                const uint32_t four = __ldg(reinterpret_cast<const uint32_t*>(own + b));
                high = __vmaxs4(high, four);
                low = __vmins4(low, four);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                most = max(most, static_cast<int8_t>(high >> 8 * i));
                least = min(least, static_cast<int8_t>(low >> 8 * i));
            }
        } else {
            for (int b = 0; b < blocks; ++b) {
                most = max(most, own[b]);
                least = min(least, own[b]);
            }
        }
        a.scales[row] = power(8 * most - 4);
    }
    for (uint32_t left = __ballot_sync(~0u, row < rows && least < most); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int64_t one = row - lane + from;
        const int largest = __shfl_sync(~0u, most, from);
        for (int b = 0; b < blocks; ++b) {
            const int below = largest - a.exponents[one * blocks + b];
            const int column = b * kBlockColumns + 2 * lane;
            if (below == 0 || column >= a.width) continue;
            uint16_t* two = reinterpret_cast<uint16_t*>(a.codes + one * a.width + column);
            *two = scaled(*two, power(-8 * min(below, 15)));
        }
    }
}
