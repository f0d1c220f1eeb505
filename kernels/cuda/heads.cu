// A fused projection as the attention on the tensor cores wants it, and back. That kernel has heads of 128 elements and
// four query heads for each key head: smaller heads get zeros behind them, and where all tokens see the same keys, four
// tokens of one head can take the places of four query heads.
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr int kDim = 128;
constexpr int kGroup = 4;

struct SplitArguments {
    const float* sums;     // [tokens, 3, heads, dim]: queries, keys, values
    const float* bias;     // [3, heads, dim], or null
    __nv_bfloat16* q;      // [groups, heads, 4, 128]
    __nv_bfloat16* arena;  // [2, heads, room, 128]: keys, values
    int tokens;
    int groups;            // of four tokens
    int room;              // tokens of a head of the arena
    int heads;
    int dim;
};

struct JoinArguments {
    const __nv_bfloat16* from;  // [groups, heads, 4, 128]
    __nv_bfloat16* to;          // [tokens, heads, dim]
    int tokens;
    int heads;
    int dim;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256) split_heads(const SplitArguments a) {
    const int64_t count = static_cast<int64_t>(a.room) * 3 * a.heads * kDim;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const int d = i % kDim;
        const int64_t row = i / kDim;
        const int head = row % a.heads, part = row / a.heads % 3;
        const int token = static_cast<int>(row / a.heads / 3);
        float value = 0.0f;
        if (token < a.tokens && d < a.dim) {
            const int column = (part * a.heads + head) * a.dim + d;
            value = a.sums[static_cast<int64_t>(token) * 3 * a.heads * a.dim + column];
            if (a.bias != nullptr) value += a.bias[column];
        }
        const __nv_bfloat16 narrow = __float2bfloat16_rn(value);
        if (part > 0) {
            a.arena[(static_cast<int64_t>((part - 1) * a.heads + head) * a.room + token) * kDim + d] = narrow;
        } else if (token < a.groups * kGroup) {
            const int64_t group = static_cast<int64_t>(token / kGroup) * a.heads + head;
            a.q[(group * kGroup + token % kGroup) * kDim + d] = narrow;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) join_heads(const JoinArguments a) {
    const int64_t count = static_cast<int64_t>(a.tokens) * a.heads * a.dim;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const int d = i % a.dim;
        const int64_t row = i / a.dim;
        const int head = row % a.heads, token = static_cast<int>(row / a.heads);
        const int64_t group = static_cast<int64_t>(token / kGroup) * a.heads + head;
        a.to[i] = a.from[(group * kGroup + token % kGroup) * kDim + d];
    }
}
