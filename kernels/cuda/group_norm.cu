// Group normalisation, channels-last: partial sums -> coefficients per channel -> one pass over the tensor.
//
// Partial sums come from the convolution that wrote the tensor, or from `group_norm_sums` where none did. They are
// added in a fixed order, in double precision, so a picture's statistics do not depend on what else is in a launch.

#include "conv_mma.cuh"

namespace group_norm {

constexpr int kThreads = 256;
constexpr int kChunk = 8;            // channels a thread reads at once: 16 bytes
constexpr int kSlab = 256;           // channels of a block of `sums`
constexpr int kApplyPixels = 4;      // pixels a thread of `apply` has in flight

// x [images][pixels][channels] -> partials [images][channels][gridDim.x], one (sum, sum of squares) per block.
template <typename T>
__device__ __forceinline__ void sums(const T* x, long long image_stride, long long pixels, int channels,
                                     float2* partials) {
    __shared__ float2 shared[kThreads * kChunk];
    const int image = blockIdx.z, first = blockIdx.y * kSlab;
    const int chunks = (min(kSlab, channels - first)) / kChunk;
    const int lanes = kThreads / chunks, lane = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    const long long per_block = (pixels + gridDim.x - 1) / gridDim.x;
    const long long begin = blockIdx.x * per_block, end = min(pixels, begin + per_block);
    const T* from = x + image * image_stride + first + chunk * kChunk;
    float sum[kChunk] = {}, square[kChunk] = {};
    if (lane < lanes) {
#pragma unroll 4
        for (long long p = begin + lane; p < end; p += lanes) {
            float value[kChunk];
            conv::unpack8<T>(*reinterpret_cast<const uint4*>(from + p * channels), value);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                sum[i] += value[i];
                square[i] += value[i] * value[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) shared[i * kThreads + threadIdx.x] = make_float2(sum[i], square[i]);
    __syncthreads();
    for (int c = threadIdx.x; c < chunks * kChunk; c += kThreads) {
        float2 total = make_float2(0, 0);
        for (int l = 0; l < lanes; ++l) {
            const float2 part = shared[c % kChunk * kThreads + l * chunks + c / kChunk];
            total.x += part.x;
            total.y += part.y;
        }
        partials[((long long)image * channels + first + c) * gridDim.x + blockIdx.x] = total;
    }
}

// Partials [images][channels / per][units] -> coefficients [images][channels] of y = x * a + b. One block per
// group and image. `scale` and `shift` are [images] rows `modulation_stride` apart, or null.
template <typename T>
__device__ __forceinline__ void coefficients(const float2* partials, int per, int units, int channels, int groups,
                                             long long pixels, float eps, const float* weight, const float* bias,
                                             const T* scale, const T* shift, long long modulation_stride,
                                             float2* out) {
    __shared__ double shared[2][kThreads];
    const int group = blockIdx.x, image = blockIdx.y, size = channels / groups;
    const long long rows = size / per;
    const float2* from = partials + ((long long)image * (channels / per) + group * rows) * units;
    double sum = 0, square = 0;
    for (long long i = threadIdx.x; i < rows * units; i += kThreads) {
        const float2 part = from[i];
        sum += part.x;
        square += part.y;
    }
    shared[0][threadIdx.x] = sum;
    shared[1][threadIdx.x] = square;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            shared[0][threadIdx.x] += shared[0][threadIdx.x + half];
            shared[1][threadIdx.x] += shared[1][threadIdx.x + half];
        }
        __syncthreads();
    }
    const double count = double(pixels) * size, mean = shared[0][0] / count;
    const double variance = fmax(shared[1][0] / count - mean * mean, 0.0);
    const double inverse = 1.0 / sqrt(variance + double(eps));
    for (int i = threadIdx.x; i < size; i += kThreads) {
        const int c = group * size + i;
        double a = inverse * weight[c], b = bias[c] - mean * a;
        if (scale) {
            const double s = 1.0 + double(float(scale[image * modulation_stride + c]));
            a *= s;
            b = b * s + double(float(shift[image * modulation_stride + c]));
        }
        out[(long long)image * channels + c] = make_float2(float(a), float(b));
    }
}

// x [images][pixels][channels] -> y: x * a + b, then SiLU where asked for. y may be x.
template <typename T>
__device__ __forceinline__ void apply(const T* x, long long x_image_stride, T* y, long long y_image_stride,
                                      long long pixels, int channels, const float2* coefficients, int silu) {
    // A row of threads covers the channels of one pixel, or `kThreads` chunks of it at a time.
    const int chunks = channels / kChunk, across = min(chunks, kThreads);
    const int lanes = kThreads / across, lane = threadIdx.x / across;
    const int chunk = blockIdx.y * across + threadIdx.x % across;
    if (lane >= lanes || chunk >= chunks) return;
    const int image = blockIdx.z;
    float a[kChunk], b[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        const float2 both = coefficients[(long long)image * channels + chunk * kChunk + i];
        a[i] = both.x;
        b[i] = both.y;
    }
    const T* from = x + image * x_image_stride + chunk * kChunk;
    T* to = y + image * y_image_stride + chunk * kChunk;
    const long long stride = (long long)gridDim.x * lanes;
    for (long long p = (long long)blockIdx.x * lanes + lane; p < pixels; p += kApplyPixels * stride) {
        uint4 raw[kApplyPixels];
#pragma unroll
        for (int k = 0; k < kApplyPixels; ++k) {
            if (p + k * stride < pixels) raw[k] = *reinterpret_cast<const uint4*>(from + (p + k * stride) * channels);
        }
#pragma unroll
        for (int k = 0; k < kApplyPixels; ++k) {
            float value[kChunk];
            conv::unpack8<T>(raw[k], value);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const float v = fmaf(value[i], a[i], b[i]);
                value[i] = silu ? __fdividef(v, 1.0f + __expf(-v)) : v;
            }
            if (p + k * stride < pixels) {
                *reinterpret_cast<uint4*>(to + (p + k * stride) * channels) = conv::pack8<T>(value);
            }
        }
    }
}

}  // namespace group_norm

#define GROUP_NORM_KERNELS(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(group_norm::kThreads) group_norm_sums_##SUFFIX(                    \
        const T* x, long long image_stride, long long pixels, int channels, float2* partials) {                     \
        group_norm::sums<T>(x, image_stride, pixels, channels, partials);                                           \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(group_norm::kThreads) group_norm_apply_##SUFFIX(                   \
        const T* x, long long x_image_stride, T* y, long long y_image_stride, long long pixels, int channels,       \
        const float2* coefficients, int silu) {                                                                     \
        group_norm::apply<T>(x, x_image_stride, y, y_image_stride, pixels, channels, coefficients, silu);           \
    }

// T is the type of the modulation.
#define GROUP_NORM_COEFFICIENTS(SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(group_norm::kThreads) group_norm_coefficients_##SUFFIX(            \
        const float2* partials, int per, int units, int channels, int groups, long long pixels, float eps,          \
        const float* weight, const float* bias, const T* scale, const T* shift, long long modulation_stride,        \
        float2* out) {                                                                                              \
        group_norm::coefficients<T>(partials, per, units, channels, groups, pixels, eps, weight, bias, scale,       \
                                    shift, modulation_stride, out);                                                 \
    }

GROUP_NORM_KERNELS(bf16, __nv_bfloat16)
GROUP_NORM_KERNELS(f16, __half)
GROUP_NORM_COEFFICIENTS(bf16, __nv_bfloat16)
GROUP_NORM_COEFFICIENTS(f16, __half)
GROUP_NORM_COEFFICIENTS(f32, float)
