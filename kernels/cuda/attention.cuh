// Arguments of the attention kernels, and the pieces of their softmax.
#pragma once

#include "hopper.cuh"

namespace attention {

constexpr int kHeadDim = 128;
// Query heads of a KV head.
constexpr int kGroup = 4;
// Tokens whose heads fill the 64 rows of a warpgroup's tile.
constexpr int kWarpgroupTokens = 64 / kGroup;

// Where keys and values lie, in arena rows (one row is one token of one head).
struct Source {
    int first;         // K of head 0 of layer 0, token 0
    int head_stride;   // from one KV head to the next
    int layer_stride;  // from one layer to the next
    int value_offset;  // from a K row to its V row
};

// A sequence: its keys are those of the prefix and then those of this step.
struct Row {
    Source prefix;
    Source fresh;
};

// Consecutive query tokens of one row with all query heads of one KV head.
struct Tile {
    int token;    // first packed token
    int tokens;   // queries; more tokens may follow in memory, which belong to other tiles
    int causal;   // of them, the first ones that see one key more each
    int visible;  // keys that token 0 sees, if it is one of the causal ones
    int full;     // keys that the others see
    int prefix;   // tokens of the prefix
    int row;
    int kv_head;

    __device__ __forceinline__ int visible_to(int i) const { return i < causal ? visible + i : full; }
    __device__ __forceinline__ int most() const {
        const int of_causal = causal > 0 ? visible + causal - 1 : 0;
        return tokens > causal ? max(of_causal, full) : of_causal;
    }
    __device__ __forceinline__ int least() const {
        const int of_causal = causal > 0 ? visible : full;
        return tokens > causal ? min(of_causal, full) : of_causal;
    }
};

__device__ __forceinline__ Tile load_tile(const Tile* tiles, int index) {
    const int4* from = reinterpret_cast<const int4*>(tiles + index);
    const int4 a = __ldg(from), b = __ldg(from + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Running softmax of the two rows (r and r + 8) that a thread has of a warpgroup's accumulator.
template <int N>
struct Softmax {
    // A row's maximum is let stand until scores exceed it by so many powers of two: exp2(8) sums exactly
    // enough in f32, and the output is rescaled in the first tiles only. The choice is made row by row, so
    // that a query's result depends on its own keys alone.
    static constexpr float kSlack = 8.0f;

    float max[2], sum[2];
    float scale;  // of scores, times log2(e)

    __device__ __forceinline__ explicit Softmax(float scale) : max{-INFINITY, -INFINITY}, sum{0, 0}, scale(scale) {}

    // Scores at and beyond `limit` of a row are no keys.
    static __device__ __forceinline__ void mask(float (&s)[N / 2], int limit0, int limit1) {
        const int first = (threadIdx.x % 4) * 2;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = first + 8 * i + j;
                if (column >= limit0) s[4 * i + j] = -INFINITY;
                if (column >= limit1) s[4 * i + 2 + j] = -INFINITY;
            }
        }
    }

    // Scores to probabilities relative to the running maximum; `factor`: what the output so far is to be
    // multiplied by. Returns whether a factor of the warp differs from 1.
    __device__ __forceinline__ bool advance(float (&s)[N / 2], float (&factor)[2]) {
        bool grown = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float high = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int i = 1; i < N / 8; ++i) high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
            high = quad_max(high);
            factor[r] = 1.0f;
            if ((high - max[r]) * scale > kSlack) {  // false for NaN: no key yet
                factor[r] = exp2_fast((max[r] - high) * scale);
                max[r] = high;
                grown = true;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float base = max[r] == -INFINITY ? 0.0f : max[r] * scale;
            float total[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& x = s[4 * i + 2 * r + j];
                    x = exp2_fast(fmaf(x, scale, -base));
                    total[j] += x;
                }
            }
            sum[r] = fmaf(sum[r], factor[r], total[0] + total[1]);
        }
        return __any_sync(0xFFFFFFFF, grown);
    }
};

template <int N>
__device__ __forceinline__ void pack_probabilities(const float (&s)[N / 2], uint32_t (&p)[N / 4]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&o)[64], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] *= factor[(i / 2) % 2];
}

}  // namespace attention
