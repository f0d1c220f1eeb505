// Rows of bf16 in registers: loads and stores of 16 bytes, sums over a row, RMS norm, e4m3 quantisation.
//
// A row is owned by `kThreads` threads, each with `kChunks` chunks of 8 elements: chunk c of thread t holds the
// elements 8 (t + c kThreads) .. + 7. Sums of squares join chunks by one tree over their numbers, whatever the threads,
// so a row's norm has the same bits from every kernel and beside any other rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace rows {

constexpr int kVector = 8;              // bf16 elements of one 16-byte access
constexpr float kE4m3Max = 448.0f;      // the largest finite e4m3 value
constexpr float kSmallestAmax = 1e-12f; // a row of zeros keeps a finite scale

struct alignas(16) Chunk {
    __nv_bfloat162 pair[4];
};

__device__ __forceinline__ Chunk load(const __nv_bfloat16* from) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    return *reinterpret_cast<const Chunk*>(&raw);
}

// Data that no block writes during the launch.
__device__ __forceinline__ Chunk load_constant(const __nv_bfloat16* from) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    return *reinterpret_cast<const Chunk*>(&raw);
}

__device__ __forceinline__ void store(__nv_bfloat16* to, const Chunk& chunk) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&chunk);
}

__device__ __forceinline__ void widen(const Chunk& chunk, float (&out)[kVector]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(chunk.pair[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ Chunk narrow(const float (&values)[kVector]) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.pair[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    return chunk;
}

// ---- reductions over the threads of a row ---------------------------------------------------------------

struct Sum {
    static constexpr float kNeutral = 0.0f;
    __device__ static float join(float a, float b) { return a + b; }
};

struct Max {
    static constexpr float kNeutral = 0.0f;  // of magnitudes
    __device__ static float join(float a, float b) { return fmaxf(a, b); }
};

// Over aligned groups of `kLanes` lanes; every lane gets the result. A butterfly: one order for all lanes.
template <class Op, int kLanes = 32>
__device__ __forceinline__ float across_lanes(float value) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
        value = Op::join(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// Over the threads of a row: a warp, or the whole block. `scratch` holds a float a warp and serves one call.
template <class Op, int kThreads>
__device__ __forceinline__ float across_row(float value, float* scratch) {
    value = across_lanes<Op>(value);
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32;
        const int lane = threadIdx.x % 32;
        if (lane == 0) scratch[threadIdx.x / 32] = value;
        __syncthreads();
        value = across_lanes<Op, kWarps <= 4 ? 4 : 16>(lane < kWarps ? scratch[lane] : Op::kNeutral);
        value = __shfl_sync(0xffffffffu, value, 0);
    }
    return value;
}

// The sum over all chunks of a row: lanes first, then the upper half of what is left to the lower half, again and again.
// Chunks of a thread are numbered like those of further warps, so that the order depends on no layout.
template <int kThreads, int kChunks>
__device__ __forceinline__ float sum_of_chunks(float (&value)[kChunks], float* scratch) {
    static_assert((kChunks & (kChunks - 1)) == 0, "halves");
#pragma unroll
    for (int c = 0; c < kChunks; ++c) value[c] = across_lanes<Sum>(value[c]);
#pragma unroll
    for (int step = kChunks / 2; step > 0; step /= 2)
#pragma unroll
        for (int c = 0; c < step; ++c) value[c] += value[c + step];
    if constexpr (kThreads == 32) return value[0];
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value[0];
    __syncthreads();
    const float sum = across_lanes<Sum, kWarps <= 4 ? 4 : 16>(lane < kWarps ? scratch[lane] : 0.0f);
    return __shfl_sync(0xffffffffu, sum, 0);
}

// ---- a row in registers ---------------------------------------------------------------------------------

template <int kThreads, int kChunks>
struct Row {
    static constexpr int kRowsPerBlock = kThreads == 32 ? 8 : 1;
    static constexpr int kBlock = kThreads * kRowsPerBlock;

    Chunk chunk[kChunks];

    __device__ static int row() { return blockIdx.x * kRowsPerBlock + threadIdx.x / kThreads; }
    // First element of chunk `c`.
    __device__ static int column(int c) { return (threadIdx.x % kThreads + c * kThreads) * kVector; }

    __device__ void clear() {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) chunk[c].pair[i] = __floats2bfloat162_rn(0.0f, 0.0f);
    }

    __device__ void load_row(const __nv_bfloat16* from, int width) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (column(c) < width) chunk[c] = load(from + column(c));
    }

    __device__ void store_row(__nv_bfloat16* to, int width) const {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (column(c) < width) store(to + column(c), chunk[c]);
    }

    // x <- bf16(bf16(x / sqrt(mean(x^2) + eps)) * weight): the normalised value is rounded before the weight.
    __device__ void normalise(const __nv_bfloat16* weight, int width, float eps, float* scratch) {
        float squares[kChunks] = {};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            float v[kVector];
            widen(chunk[c], v);
#pragma unroll
            for (int i = 0; i < kVector; ++i) squares[c] = fmaf(v[i], v[i], squares[c]);
        }
        const float mean = sum_of_chunks<kThreads>(squares, scratch) / width;
        const float inverse = rsqrtf(mean + eps);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (column(c) >= width) continue;
            float v[kVector], w[kVector];
            widen(chunk[c], v);
#pragma unroll
            for (int i = 0; i < kVector; ++i) v[i] *= inverse;
            widen(narrow(v), v);
            widen(load_constant(weight + column(c)), w);
#pragma unroll
            for (int i = 0; i < kVector; ++i) v[i] *= w[i];
            chunk[c] = narrow(v);
        }
    }

    // The row as e4m3 with one scale: value = code * scale, scale = amax / 448.
    __device__ void quantise(uint8_t* to, float* scale, int width, float* scratch) const {
        float amax = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            float v[kVector];
            widen(chunk[c], v);
#pragma unroll
            for (int i = 0; i < kVector; ++i) amax = fmaxf(amax, fabsf(v[i]));
        }
        amax = fmaxf(across_row<Max, kThreads>(amax, scratch), kSmallestAmax);
        const float inverse = kE4m3Max / amax;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (column(c) >= width) continue;
            float v[kVector];
            widen(chunk[c], v);
            uint32_t code[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = make_float2(v[2 * i] * inverse, v[2 * i + 1] * inverse);
                const uint32_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
                code[i / 2] = i % 2 == 0 ? two : code[i / 2] | two << 16;
            }
            *reinterpret_cast<uint2*>(to + column(c)) = make_uint2(code[0], code[1]);
        }
        if (threadIdx.x % kThreads == 0) *scale = amax / kE4m3Max;
    }
};

}  // namespace rows
