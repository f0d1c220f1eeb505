// Layer norm of rows, alone or behind a residual sum with a bias: what a vision encoder has between its products.
#include "norm.cuh"

using bf16 = __nv_bfloat16;

namespace {

struct Arguments {
    bf16* x;              // [rows, width]; written with `y`
    const bf16* y;        // [rows, width], or null: x += y + bias first
    const float* bias;    // [width], or null
    const float* weight;  // [width]
    const float* shift;   // [width]
    float eps;
    bf16* out;            // [rows, width]
    int rows;
    int width;
};

__device__ __forceinline__ void load_floats(const float* from, float (&to)[rows::kVector]) {
#pragma unroll
    for (int i = 0; i < rows::kVector; i += 4)
        *reinterpret_cast<float4*>(&to[i]) = __ldg(reinterpret_cast<const float4*>(from + i));
}

template <int kThreads, int kChunks>
__device__ __forceinline__ void run(const Arguments& a) {
    using Row = rows::Row<kThreads, kChunks>;
    __shared__ float scratch[2][32];
    const int index = Row::row();
    if (index >= a.rows) return;  // whole warps, and whole blocks where a row is a block
    const int64_t at = static_cast<int64_t>(index) * a.width;
    Row row;
    row.clear();
    row.load_row(a.x + at, a.width);
    if (a.y != nullptr) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = Row::column(c);
            if (column >= a.width) continue;
            float v[rows::kVector], y[rows::kVector], bias[rows::kVector] = {};
            rows::widen(row.chunk[c], v);
            rows::widen(rows::load_constant(a.y + at + column), y);
            if (a.bias != nullptr) load_floats(a.bias + column, bias);
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) v[i] += y[i] + bias[i];
            row.chunk[c] = rows::narrow(v);
        }
        row.store_row(a.x + at, a.width);
    }
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        float v[rows::kVector];
        rows::widen(row.chunk[c], v);
#pragma unroll
        for (int i = 0; i < rows::kVector; ++i) sum += v[i];
    }
    const float mean = rows::across_row<rows::Sum, kThreads>(sum, scratch[0]) / a.width;
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        if (Row::column(c) >= a.width) continue;
        float v[rows::kVector];
        rows::widen(row.chunk[c], v);
#pragma unroll
        for (int i = 0; i < rows::kVector; ++i) squares = fmaf(v[i] - mean, v[i] - mean, squares);
    }
    const float inverse = rsqrtf(rows::across_row<rows::Sum, kThreads>(squares, scratch[1]) / a.width + a.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = Row::column(c);
        if (column >= a.width) continue;
        float v[rows::kVector], weight[rows::kVector], shift[rows::kVector];
        rows::widen(row.chunk[c], v);
        load_floats(a.weight + column, weight);
        load_floats(a.shift + column, shift);
#pragma unroll
        for (int i = 0; i < rows::kVector; ++i) v[i] = fmaf((v[i] - mean) * inverse, weight[i], shift[i]);
        row.chunk[c] = rows::narrow(v);
    }
    row.store_row(a.out + at, a.width);
}

}  // namespace

// A width class each: multiples of 8 up to 8 * threads * chunks. 8 rows a block in the first, else one.
extern "C" __global__ void __launch_bounds__(256) layer_norm_256(const Arguments a) { run<32, 1>(a); }
extern "C" __global__ void __launch_bounds__(256) layer_norm_2048(const Arguments a) { run<256, 1>(a); }
extern "C" __global__ void __launch_bounds__(512) layer_norm_8192(const Arguments a) { run<512, 2>(a); }
