// Small moves around the convolutions of the VAE and of the decoder's stem and head.

#include "conv_mma.cuh"

namespace vae {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(__half* to, float value) { *to = __float2half_rn(value); }
__device__ __forceinline__ float load(float value) { return value; }
__device__ __forceinline__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }

// Combines (maximum, sum of exp2(x - maximum)) of two parts of a row.
__device__ __forceinline__ float2 merge(float2 a, float2 b) {
    const float top = fmaxf(a.x, b.x);
    if (top == -INFINITY) return a;
    return make_float2(top, a.y * exp2f(a.x - top) + b.y * exp2f(b.x - top));
}

// The first `left` of four values; the others count for nothing.
__device__ __forceinline__ float4 masked(float4 v, int left) {
    return make_float4(left > 0 ? v.x : -INFINITY, left > 1 ? v.y : -INFINITY, left > 2 ? v.z : -INFINITY,
                       left > 3 ? v.w : -INFINITY);
}

// y[row] = softmax(scale * x[row][0..valid]), zero behind; one block per row, x fp32 [rows][columns], columns a
// multiple of 4, scale > 0.
template <typename T>
__device__ __forceinline__ void softmax_rows(const float* x, T* y, int columns, int valid, float scale) {
    __shared__ float2 shared[kWarps];
    const float4* from = reinterpret_cast<const float4*>(x + (long long)blockIdx.x * columns);
    uint2* to = reinterpret_cast<uint2*>(y + (long long)blockIdx.x * columns);
    const float factor = scale * 1.4426950408889634f;  // log2 e
    float2 state = make_float2(-INFINITY, 0);
    for (int i = threadIdx.x; 4 * i < valid; i += kThreads) {
        const float4 v = masked(from[i], valid - 4 * i);
        const float top = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) * factor;
        const float sum = exp2f(fmaf(v.x, factor, -top)) + exp2f(fmaf(v.y, factor, -top)) +
                          exp2f(fmaf(v.z, factor, -top)) + exp2f(fmaf(v.w, factor, -top));
        state = merge(state, make_float2(top, sum));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        state = merge(state, make_float2(__shfl_xor_sync(~0u, state.x, offset),
                                         __shfl_xor_sync(~0u, state.y, offset)));
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = state;
    __syncthreads();
    state = shared[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) state = merge(state, shared[w]);
    const float inverse = 1.0f / state.y;
    for (int i = threadIdx.x; i < columns / 4; i += kThreads) {
        const float4 v = masked(from[i], valid - 4 * i);
        const float a = exp2f(fmaf(v.x, factor, -state.x)) * inverse, b = exp2f(fmaf(v.y, factor, -state.x)) * inverse;
        const float c = exp2f(fmaf(v.z, factor, -state.x)) * inverse, d = exp2f(fmaf(v.w, factor, -state.x)) * inverse;
        to[i] = make_uint2(conv::pack(T(), a, b), conv::pack(T(), c, d));
    }
}

// Planar fp32 [channels][pixels] -> channels-last [frames][pixels][wide] of x * scale + shift; channels from
// `channels` on are zero, all frames are equal.
template <typename T>
__device__ __forceinline__ void to_channels_last(const float* x, T* y, int channels, int wide, long long pixels,
                                                 int frames, float scale, float shift) {
    const long long count = pixels * wide;
    for (long long i = (long long)blockIdx.x * kThreads + threadIdx.x; i < count; i += (long long)gridDim.x * kThreads) {
        const int c = i % wide;
        const float value = c < channels ? x[c * pixels + i / wide] * scale + shift : 0.0f;
        for (int frame = 0; frame < frames; ++frame) store(y + frame * count + i, value);
    }
}

// [pixels][channels] -> [pixels][channels / group]: means of consecutive channels.
template <typename T>
__device__ __forceinline__ void channel_means(const T* x, T* y, long long count, int group) {
    for (long long i = (long long)blockIdx.x * kThreads + threadIdx.x; i < count; i += (long long)gridDim.x * kThreads) {
        float sum = 0;
        for (int k = 0; k < group; ++k) sum += float(x[i * group + k]);
        store(y + i, sum / group);
    }
}

// Checkpoint order [out][in][taps] -> [taps][out][wide], zero where a channel is missing.
template <typename S, typename T>
__device__ __forceinline__ void pack_weight(const S* w, T* y, int out, int in, int wide, int taps) {
    const long long count = (long long)taps * out * wide;
    for (long long i = (long long)blockIdx.x * kThreads + threadIdx.x; i < count; i += (long long)gridDim.x * kThreads) {
        const int c = i % wide;
        const long long row = i / wide % out, tap = i / wide / out;
        store(y + i, c < in ? load(w[(row * in + c) * taps + tap]) : 0.0f);
    }
}

}  // namespace vae

#define VAE_KERNELS(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(vae::kThreads)                                                    \
        softmax_rows_##SUFFIX(const float* x, T* y, int columns, int valid, float scale) {                                    \
        vae::softmax_rows<T>(x, y, columns, valid, scale);                                                                \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(vae::kThreads)                                                    \
        to_channels_last_##SUFFIX(const float* x, T* y, int channels, int wide, long long pixels, int frames,      \
                                  float scale, float shift) {                                                      \
        vae::to_channels_last<T>(x, y, channels, wide, pixels, frames, scale, shift);                              \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(vae::kThreads)                                                    \
        channel_means_##SUFFIX(const T* x, T* y, long long count, int group) {                                     \
        vae::channel_means<T>(x, y, count, group);                                                                 \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(vae::kThreads)                                                    \
        conv_pack_f32_##SUFFIX(const float* w, T* y, int out, int in, int wide, int taps) {                        \
        vae::pack_weight<float, T>(w, y, out, in, wide, taps);                                                     \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(vae::kThreads)                                                    \
        conv_pack_bf16_##SUFFIX(const __nv_bfloat16* w, T* y, int out, int in, int wide, int taps) {               \
        vae::pack_weight<__nv_bfloat16, T>(w, y, out, in, wide, taps);                                             \
    }

VAE_KERNELS(bf16, __nv_bfloat16)
VAE_KERNELS(f16, __half)
