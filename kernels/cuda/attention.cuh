// Arguments of the attention kernels, and the pieces of their softmax.
#pragma once

#include "attention_mma.cuh"
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

// What a kernel does: tiles with all their keys, tiles of which some have a part of the keys, or tiles again that the
// others could not do.
enum class Kind { kWhole, kParts, kExact };

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
    int part;     // which slots of keys; negative: all
    int sum;      // where the first part of the sum is, of which it is one

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

// Shared by the blocks of a launch; zeros before and after.
struct Scheduler {
    int next;  // tile, counted from the number of blocks on
    int finished;
    int again;  // tiles to be done again
    int next_again;
    int finished_again;
};

// A sum of parts; zero before and after a launch.
struct Sum {
    int arrived;
    int whole;  // the tile that is done again if need be
};

// The host writes eight numbers: the sum is above the tokens, the part (counted from 1) above the KV head.
__device__ __forceinline__ Tile load_tile(const int* tiles, int index) {
    const int4* from = reinterpret_cast<const int4*>(tiles) + 2 * index;
    const int4 a = __ldg(from), b = __ldg(from + 1);
    return {a.x, a.y & 0xFF, a.z, a.w, b.x, b.y, b.z, b.w & 0xFFFF, (b.w >> 16) - 1, a.y >> 8};
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

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float scale) {
    const float2 x = unpack_bf16(pair);
    return pack_bf16(x.x * scale, x.y * scale);
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

// Bits 0, 4, ..., 28 as bits 0 to 7.
__device__ __forceinline__ uint32_t every_fourth_bit(uint32_t x) {
    x &= 0x11111111;
    x = (x | x >> 3) & 0x03030303;
    x = (x | x >> 6) & 0x000F000F;
    return (x | x >> 12) & 0xFF;
}

template <int W>
struct Width {
    static constexpr int value = W;
};

// Scores at and beyond `limit` of a row (r, and r + 8) are no keys. Numbers 4 i + 0, 1 of an accumulator are row r,
// numbers 4 i + 2, 3 row r + 8.
template <int M>
__device__ __forceinline__ void mask_scores(float (&s)[M], int limit0, int limit1) {
    const int first = (threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < M / 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = first + 8 * i + j;
            if (column >= limit0) s[4 * i + j] = -INFINITY;
            if (column >= limit1) s[4 * i + 2 + j] = -INFINITY;
        }
    }
}

template <int W, int K>
__device__ __forceinline__ void pack_probabilities(const float (&s)[W / 2], uint32_t (&p)[K]) {
#pragma unroll
    for (int i = 0; i < W / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&o)[64], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] *= factor[(i / 2) % 2];
}

// Sums whose binary logarithm is smaller than this are exact enough without a running maximum: what is rounded
// to zero is less than 2^-60 of them, and values up to 2^60 do not overflow.
constexpr float kRange = 64.0f;

// Softmax of the two rows (r and r + 8) that a thread has of a warpgroup's accumulator.
template <bool kExact>
struct Softmax {
    // A row's maximum is let stand until scores exceed it by so many powers of two. The choice is made row by
    // row: a query's bits depend on its own keys alone.
    static constexpr float kSlack = 8.0f;

    float max[2];  // what probabilities are relative to
    float sum[4];  // of even and odd columns of each row

    __device__ __forceinline__ Softmax()
        : max{kExact ? -INFINITY : 0.0f, kExact ? -INFINITY : 0.0f}, sum{0, 0, 0, 0} {}

    __device__ __forceinline__ float total(int r) const { return quad_sum(sum[2 * r] + sum[2 * r + 1]); }

    // Scores, times log2(e), to exponents of two. `factor`: what the output and the sums so far are to be multiplied
    // by; returns whether one of the thread's is not 1.
    template <int M>
    __device__ __forceinline__ bool subtract_maximum(float (&s)[M], float (&factor)[2]) {
        bool grown = false;
        if constexpr (kExact) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float high = -INFINITY;
#pragma unroll
                for (int i = 0; i < M / 4; ++i) high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
                high = quad_max(high);
                factor[r] = 1.0f;
                if (high - max[r] > kSlack) {  // false for NaN: no key yet
                    factor[r] = exp2_fast(max[r] - high);
                    max[r] = high;
                    grown = true;
                }
                const float base = max[r] == -INFINITY ? 0.0f : max[r];
#pragma unroll
                for (int i = 0; i < M / 4; ++i) {
                    s[4 * i + 2 * r] -= base;
                    s[4 * i + 2 * r + 1] -= base;
                }
                sum[2 * r] *= factor[r];
                sum[2 * r + 1] *= factor[r];
            }
        }
        return grown;
    }

    // Probabilities of numbers `first` to `last` of the accumulator.
    template <int M>
    __device__ __forceinline__ void exponentiate(float (&s)[M], int first, int last) {
#pragma unroll
        for (int i = first; i < last; ++i) {
            s[i] = exp2_fast(s[i]);
            sum[i % 4] += s[i];
        }
    }
};

}  // namespace attention
