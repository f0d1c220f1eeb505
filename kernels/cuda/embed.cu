// Around the layers: rows moved by index (token embeddings, special tokens in and out of packed rows), the code of
// scalars, and latents as the stem sees them.
#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

namespace {

constexpr int kBlock = 256;

struct CopyArguments {
    const uint4* from;      // [from_rows, chunks]: rows of 16-byte chunks
    uint4* to;              // [to_rows, chunks]
    const int* from_index;  // [rows], or null: row i
    const int* to_index;    // [rows], or null: row i
    int64_t from_rows;
    int64_t to_rows;
    int rows;
    int chunks;
    int threads_per_row;  // a power of two, at most the block
};

// A source that does not exist shows: bytes of all ones are NaN in bf16 and e4m3.
__device__ __forceinline__ uint4 missing() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

}  // namespace

// to[to_index[i]] = from[from_index[i]]. A row whose target does not exist is not written.
extern "C" __global__ void __launch_bounds__(kBlock) copy_rows(const CopyArguments a) {
    const int row = blockIdx.x * (kBlock / a.threads_per_row) + threadIdx.x / a.threads_per_row;
    if (row >= a.rows) return;
    const int64_t source = a.from_index ? a.from_index[row] : row, target = a.to_index ? a.to_index[row] : row;
    if (target < 0 || target >= a.to_rows) return;
    const bool exists = source >= 0 && source < a.from_rows;
    const uint4* from = a.from + source * a.chunks;
    uint4* to = a.to + target * a.chunks;
    const int step = a.threads_per_row;
    for (int c = threadIdx.x % step; c < a.chunks; c += 2 * step) {
        const bool two = c + step < a.chunks;
        const uint4 v0 = exists ? __ldg(from + c) : missing();
        const uint4 v1 = exists && two ? __ldg(from + c + step) : missing();
        to[c] = v0;
        if (two) to[c + step] = v1;
    }
}

// [cos(t f_0) .., sin(t f_0) ..] of each scalar t, f_i = 10000^(-i / half), all in fp32 and rounded at the end: a
// scalar of a thousand would lose its phase in bf16. HunyuanImage-3.0: scalar embedding.
template <class Out>
__device__ __forceinline__ void scalar_code(const float* scalar, Out* out, int scalars, int half, float decay) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= scalars * half) return;
    const int row = i / half, column = i % half;
    const float angle = scalar[row] * expf(decay * static_cast<float>(column) / static_cast<float>(half));
    Out* to = out + static_cast<int64_t>(row) * 2 * half + column;
    to[0] = static_cast<Out>(cosf(angle));
    to[half] = static_cast<Out>(sinf(angle));
}

extern "C" __global__ void scalar_code_f32(const float* scalar, float* out, int scalars, int half, float decay) {
    scalar_code(scalar, out, scalars, half, decay);
}

extern "C" __global__ void scalar_code_bf16(const float* scalar, bf16* out, int scalars, int half, float decay) {
    scalar_code(scalar, out, scalars, half, decay);
}

extern "C" __global__ void __launch_bounds__(kBlock) narrow_to_bf16(const float* from, bf16* to, int64_t count) {
    const int64_t step = int64_t(gridDim.x) * kBlock * 4;
    for (int64_t i = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * 4; i < count; i += step) {
        if (i + 4 <= count) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(from + i));
            __nv_bfloat162 two[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
            *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>(two);
        } else {
            for (int64_t j = i; j < count; ++j) to[j] = __float2bfloat16_rn(from[j]);
        }
    }
}
