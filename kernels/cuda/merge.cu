// Joining what ranks, or parts of the keys, computed: the rows of the experts that a rank holds, the sum of their
// results per token, and attention over parts of the keys.
#include "norm.cuh"

using bf16 = __nv_bfloat16;

namespace {

constexpr int kKeepThreads = 256;
constexpr int kSumThreads = 512;
constexpr int kTogether = 8;  // choices whose rows are read at once
constexpr int kMergeThreads = 256;

struct KeepArguments {
    const int* offsets;  // [all experts + 1]
    int* position;       // [choices]: row of each among those of all experts; becomes that among the kept, or -1
    int* kept;           // [last - first + 1], and one more with `shared` above 0
    int choices;
    int first;           // experts first .. last are kept
    int last;
    int shared;          // rows of the group behind them
};

struct SumArguments {
    const bf16* rows;      // [rows, width]
    const int* position;   // [tokens, top_k], -1: another rank has it
    const float* gate;     // [tokens, top_k]
    const int* shared_row; // first row of the shared expert, or null
    bf16* out;             // [tokens, width]
    int tokens;
    int top_k;
    int width;
    int shared_first;      // tokens that have a row of the shared expert
    int shared_count;
};

struct MergeArguments {
    bf16* out;            // [tokens, heads, dim], becomes the merged result
    float* lse;           // [tokens, heads], likewise
    const bf16* other;    // [tokens, heads, dim]
    const float* other_lse;
    int rows;             // tokens * heads
    int dim;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kKeepThreads) experts_keep(const KeepArguments a) {
    const int begin = a.offsets[a.first], end = a.offsets[a.last];
    const int at = blockIdx.x * kKeepThreads + threadIdx.x;
    if (at < a.choices) {
        const int row = a.position[at];
        a.position[at] = row >= begin && row < end ? row - begin : -1;
    }
    if (blockIdx.x > 0) return;
    const int count = a.last - a.first;
    for (int i = threadIdx.x; i <= count; i += kKeepThreads) a.kept[i] = a.offsets[a.first + i] - begin;
    if (threadIdx.x == 0 && a.shared > 0) a.kept[count + 1] = end - begin + a.shared;
}

// A block a token: choices in slot order, then the shared row, in fp32; rounded once.
extern "C" __global__ void __launch_bounds__(kSumThreads) experts_sum(const SumArguments a) {
    const int token = blockIdx.x;
    const int* position = a.position + static_cast<int64_t>(token) * a.top_k;
    const float* gate = a.gate + static_cast<int64_t>(token) * a.top_k;
    const int place = token - a.shared_first;
    const bool shared = a.shared_row != nullptr && place >= 0 && place < a.shared_count;
    const int64_t shared_row = shared ? static_cast<int64_t>(*a.shared_row) + place : 0;
    for (int column = threadIdx.x * rows::kVector; column < a.width; column += blockDim.x * rows::kVector) {
        float sum[rows::kVector] = {};
        const auto read = [&](int64_t row) { return rows::load_constant(a.rows + row * a.width + column); };
        const auto add = [&](const rows::Chunk& part, float weight) {
            float v[rows::kVector];
            rows::widen(part, v);
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) sum[i] = fmaf(weight, v[i], sum[i]);
        };
        for (int base = 0; base < a.top_k; base += kTogether) {
            // Loads are issued before the first use.
            rows::Chunk part[kTogether];
            int row[kTogether];
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
                row[k] = base + k < a.top_k ? __ldg(position + base + k) : -1;
                if (row[k] >= 0) part[k] = read(row[k]);
            }
#pragma unroll
            for (int k = 0; k < kTogether; ++k)
                if (row[k] >= 0) add(part[k], __ldg(gate + base + k));
        }
        if (shared) add(read(shared_row), 1.0f);
        rows::store(a.out + static_cast<int64_t>(token) * a.width + column, rows::narrow(sum));
    }
}

// Eight elements a thread: weights exp(lse - max), which are 0 for a part that saw no key.
extern "C" __global__ void __launch_bounds__(kMergeThreads) attention_merge(const MergeArguments a) {
    const int each = a.dim / rows::kVector;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
    const int64_t row = at / each;
    if (row >= a.rows) return;
    const float one = a.lse[row], two = a.other_lse[row];
    const float most = fmaxf(one, two);
    const bool none = most == -INFINITY;
    const float u = none ? 0.0f : expf(one - most), v = none ? 0.0f : expf(two - most);
    const float inverse = none ? 0.0f : 1.0f / (u + v);
    const int64_t place = at * rows::kVector;
    float x[rows::kVector], y[rows::kVector];
    rows::widen(rows::load(a.out + place), x);
    rows::widen(rows::load_constant(a.other + place), y);
#pragma unroll
    for (int i = 0; i < rows::kVector; ++i) {
        // What a part without keys left in its rows has no say.
        const float left = u > 0.0f ? u * x[i] : 0.0f, right = v > 0.0f ? v * y[i] : 0.0f;
        x[i] = (left + right) * inverse;
    }
    rows::store(a.out + place, rows::narrow(x));
    // The threads of a row lie in one warp where `each` divides 32, which the caller sees to.
    __syncwarp();
    if (at % each == 0) a.lse[row] = none ? -INFINITY : most + logf(u + v);
}
