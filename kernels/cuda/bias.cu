// out = activation(x + bias) for the small matrices that depend on time only: x is the F32 result of a product.

#include <cuda_bf16.h>
#include <stdint.h>

enum Activation { kNone = 0, kGeluErf = 1, kSilu = 2, kGeluTanh = 3 };

__device__ __forceinline__ float activate(float v, int activation) {
    if (activation == kGeluErf) return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    if (activation == kSilu) return v / (1.0f + expf(-v));
    if (activation == kGeluTanh) return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    return v;
}

template <typename Out>
__device__ __forceinline__ void bias_body(Out* out, const float* x, const float* bias, uint64_t count, uint32_t width,
                                          int activation) {
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const float shift = bias ? bias[i % width] : 0.0f;
        out[i] = static_cast<Out>(activate(x[i] + shift, activation));
    }
}

extern "C" __global__ void bias_f32(float* out, const float* x, const float* bias, uint64_t count, uint32_t width,
                                    int activation) {
    bias_body(out, x, bias, count, width, activation);
}

extern "C" __global__ void bias_bf16(__nv_bfloat16* out, const float* x, const float* bias, uint64_t count,
                                     uint32_t width, int activation) {
    bias_body(out, x, bias, count, width, activation);
}
