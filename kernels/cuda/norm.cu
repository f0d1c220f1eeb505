// RMS norm over the hidden dimension, alone or behind what adds to the residual stream, with an e4m3 copy of the
// result where asked for: rms_norm, add_rms_norm, combine (the end of a mixture of experts), quantize_rows.
//
// Memory-bound: every kernel reads each input row and writes each output row once. A row stays in registers
// between the residual sum, the norm and the quantisation.
#include "norm.cuh"

using bf16 = __nv_bfloat16;

namespace {

// What a launch does to a row, besides its norm.
enum class Source {
    kPlain,    // the row of x
    kAdd,      // x += y, then that
    kCombine,  // x += sum over choices of gate * y[position] (+ y[shared]), then that
};

struct Arguments {
    bf16* x;              // [tokens, width]; written unless kPlain
    const bf16* y;        // kAdd: [tokens, width]; kCombine: [rows, width]
    const int* position;  // kCombine: [tokens, top_k], row of y of each choice
    const float* gate;    // kCombine: [tokens, top_k]
    int top_k;
    int shared;           // kCombine: row of y that is added to token 0 (then the next ones), or -1
    const bf16* weight;   // [width], or null: no norm, the row itself goes out
    float eps;
    bf16* h;              // [tokens, width], or null
    uint8_t* code;        // e4m3 [tokens, width], or null
    float* scale;         // [tokens], with `code`
    int tokens;
    int width;
};

// The sum over choices in slot order, then the shared row, then x; one rounding. `kTopK` 0: any number.
template <int kTopK>
__device__ __forceinline__ rows::Chunk combined(const Arguments& a, int token, int column, int width, rows::Chunk x) {
    const int top_k = kTopK > 0 ? kTopK : a.top_k;
    const int* position = a.position + static_cast<int64_t>(token) * top_k;
    const float* gate = a.gate + static_cast<int64_t>(token) * top_k;
    float sum[rows::kVector] = {};
    rows::Chunk shared;
    if (a.shared >= 0) shared = rows::load_constant(a.y + static_cast<int64_t>(a.shared + token) * width + column);
    const auto add = [&](const rows::Chunk& part, float weight) {
        float v[rows::kVector];
        rows::widen(part, v);
#pragma unroll
        for (int i = 0; i < rows::kVector; ++i) sum[i] = fmaf(weight, v[i], sum[i]);
    };
    if constexpr (kTopK > 0) {
        // All loads are issued before the first use.
        rows::Chunk part[kTopK];
#pragma unroll
        for (int k = 0; k < kTopK; ++k)
            part[k] = rows::load_constant(a.y + static_cast<int64_t>(__ldg(position + k)) * width + column);
#pragma unroll
        for (int k = 0; k < kTopK; ++k) add(part[k], __ldg(gate + k));
    } else {
        for (int k = 0; k < top_k; ++k)
            add(rows::load_constant(a.y + static_cast<int64_t>(position[k]) * width + column), gate[k]);
    }
    if (a.shared >= 0) add(shared, 1.0f);
    float v[rows::kVector];
    rows::widen(x, v);
#pragma unroll
    for (int i = 0; i < rows::kVector; ++i) v[i] += sum[i];
    return rows::narrow(v);
}

// `kWidth` 0: any width that fits.
template <int kThreads, int kChunks, int kWidth, Source source, int kTopK>
__device__ __forceinline__ void run(const Arguments& a) {
    using Row = rows::Row<kThreads, kChunks>;
    const int width = kWidth > 0 ? kWidth : a.width;
    __shared__ float scratch[2][32];
    const int token = Row::row();
    if (token >= a.tokens) return;  // whole warps, and whole blocks where a row is a block
    const int64_t at = static_cast<int64_t>(token) * width;
    Row row;
    row.clear();
    row.load_row(a.x + at, width);
    if constexpr (source != Source::kPlain) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = Row::column(c);
            if (column >= width) continue;
            if constexpr (source == Source::kAdd) {
                float v[rows::kVector], y[rows::kVector];
                rows::widen(row.chunk[c], v);
                rows::widen(rows::load_constant(a.y + at + column), y);
#pragma unroll
                for (int i = 0; i < rows::kVector; ++i) v[i] += y[i];
                row.chunk[c] = rows::narrow(v);
            } else {
                row.chunk[c] = combined<kTopK>(a, token, column, width, row.chunk[c]);
            }
        }
        row.store_row(a.x + at, width);
    }
    if (a.weight != nullptr) row.normalise(a.weight, width, a.eps, scratch[0]);
    if (a.h != nullptr) row.store_row(a.h + at, width);
    if (a.code != nullptr) row.quantise(a.code + at, a.scale + token, width, scratch[1]);
}

}  // namespace

// One instance a width class: `width` is a multiple of 8 and at most 8 * threads * chunks, or the one it is made for.
// The grid has a block for each `Row::kRowsPerBlock` tokens: 8 where threads is 32, else 1. `blocks` of them fit a
// multiprocessor, which bounds the registers: some 64 KiB of loads in flight fill the memory.
#define NORM_KERNEL(name, threads, chunks, width, blocks, source, top_k)                                \
    extern "C" __global__ void __launch_bounds__(rows::Row<threads, chunks>::kBlock, blocks) name(      \
        const Arguments a) {                                                                            \
        run<threads, chunks, width, source, top_k>(a);                                                  \
    }

#define NORM_KERNELS(suffix, threads, chunks, width, blocks)                                   \
    NORM_KERNEL(rms_norm_##suffix, threads, chunks, width, blocks, Source::kPlain, 0)          \
    NORM_KERNEL(add_rms_norm_##suffix, threads, chunks, width, blocks, Source::kAdd, 0)

#define COMBINE_KERNELS(suffix, threads, chunks, width, blocks)                                \
    NORM_KERNEL(combine_##suffix, threads, chunks, width, blocks, Source::kCombine, 0)         \
    NORM_KERNEL(combine_top8_##suffix, threads, chunks, width, blocks, Source::kCombine, 8)

NORM_KERNELS(256, 32, 1, 0, 4)
COMBINE_KERNELS(256, 32, 1, 0, 4)
NORM_KERNELS(2048, 256, 1, 0, 4)
COMBINE_KERNELS(2048, 256, 1, 0, 4)
NORM_KERNELS(4096, 128, 4, 0, 9)
COMBINE_KERNELS(4096, 512, 1, 0, 2)
NORM_KERNELS(8192, 512, 2, 0, 2)
COMBINE_KERNELS(8192, 512, 2, 0, 2)
// The width of HunyuanImage-3.0, also where only the codes go out.
NORM_KERNELS(is_4096, 256, 2, 4096, 6)
COMBINE_KERNELS(is_4096, 512, 1, 4096, 2)
NORM_KERNEL(rms_norm_codes_4096, 128, 4, 4096, 8, Source::kPlain, 0)
