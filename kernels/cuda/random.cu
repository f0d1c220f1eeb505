// Reproducible random weights made on the device: value i of a stream is the SplitMix64 output function over
// a counter, as on the CPU, so that both have the same weights of the same seed.

#include <cuda_bf16.h>
#include <stdint.h>

// Value `index` of stream `key` in [-1, 1).
__device__ __forceinline__ float unit(uint64_t key, uint64_t index) {
    uint64_t z = key + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return static_cast<float>(z >> 40) / 8388608.0f - 1.0f;
}

extern "C" __global__ void random_bf16(__nv_bfloat16* out, uint64_t count, uint64_t key, float scale) {
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        out[i] = __float2bfloat16_rn(unit(key, i) * scale);
    }
}
