// Fused projection to queries, keys and values: split, rotation, norm of each head, keys and values straight into
// the arena. HunyuanImage-3.0: rotation before the norm, columns grouped per key head (its query heads, its key,
// its value), half-split pairs.
#include "hopper.cuh"
#include "norm.cuh"

using bf16 = __nv_bfloat16;

namespace {

// Where the keys and values of one token lie, in arena rows of `dim` elements.
struct alignas(16) Slot {
    uint32_t first;      // key head 0 at layer 0
    uint32_t per_head;   // rows between heads
    uint32_t per_layer;  // rows between layers
    uint32_t to_value;   // rows from a key to its value
};

struct Arguments {
    const bf16* qkv;      // [tokens, (q_heads + 2 kv_heads) dim]
    const float* cosine;  // [tokens, dim]
    const float* sine;    // [tokens, dim]
    const bf16* q_norm;   // [dim], or null: not normalised
    const bf16* k_norm;   // [dim], or null
    const Slot* slots;    // [tokens]
    bf16* q;              // [tokens, q_heads, dim]
    bf16* arena;          // [rows, dim]
    uint32_t layer;
    int tokens;
    int q_heads;
    int kv_heads;
    float eps;
    float q_scale;        // of queries, before they are rounded
};

constexpr int kBlock = 128;

// A head is owned by kDim / 16 lanes: a lane has 8 elements of the first half and their partners of the second,
// so a rotation needs no other lane. A lane has the same elements of all its heads and reads its cosines once.
// The bulk copy engine brings the token's projection and table rows to shared memory: with the blocks of a
// multiprocessor some 100 KiB are on their way at a time, and no registers wait for them.
template <int kDim>
__device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ uint64_t barrier;
    constexpr int kLanes = kDim / 16;
    constexpr int kHeads = kBlock / kLanes;  // at a time
    constexpr uint32_t kTableBytes = kDim * sizeof(float);
    const int token = blockIdx.x;
    const int group = a.q_heads / a.kv_heads + 2;
    const int heads = a.kv_heads * group;
    float* tables = reinterpret_cast<float*>(memory);
    const bf16* qkv = reinterpret_cast<const bf16*>(memory + 2 * kTableBytes);
    if (threadIdx.x == 0) {
        hopper::barrier_init(&barrier, 1);
        hopper::barrier_init_fence();
        const uint32_t bytes = heads * kDim * sizeof(bf16);
        hopper::barrier_expect_bytes(&barrier, bytes + 2 * kTableBytes);
        hopper::bulk_load(memory + 2 * kTableBytes, a.qkv + static_cast<int64_t>(token) * heads * kDim, bytes, &barrier);
        hopper::bulk_load(tables, a.cosine + static_cast<int64_t>(token) * kDim, kTableBytes, &barrier);
        hopper::bulk_load(tables + kDim, a.sine + static_cast<int64_t>(token) * kDim, kTableBytes, &barrier);
    }
    const Slot slot = a.slots[token];
    const int column = threadIdx.x % kLanes * rows::kVector;
    __syncthreads();  // the barrier is there
    hopper::barrier_wait(&barrier, 0);

    float cosine[2][rows::kVector], sine[2][rows::kVector];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < rows::kVector; i += 4) {
            const float* from = tables + half * (kDim / 2) + column + i;
            *reinterpret_cast<float4*>(&cosine[half][i]) = *reinterpret_cast<const float4*>(from);
            *reinterpret_cast<float4*>(&sine[half][i]) = *reinterpret_cast<const float4*>(from + kDim);
        }
    const int start = threadIdx.x / kLanes;
#pragma unroll 1
    for (int first = 0; first < heads; first += kHeads) {
        const int head = first + start;
        const bool mine = head < heads;
        const bf16* from = qkv + (mine ? head : 0) * kDim + column;
        const rows::Chunk low = rows::load(from), high = rows::load(from + kDim / 2);
        const int kv = head / group, place = head % group;
        const bool value = place == group - 1, key = place == group - 2;
        float y0[rows::kVector], y1[rows::kVector], squares = 0.0f;
        {
            float x0[rows::kVector], x1[rows::kVector];
            rows::widen(low, x0);
            rows::widen(high, x1);
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) {
                y0[i] = x0[i] * cosine[0][i] - x1[i] * sine[0][i];
                y1[i] = x1[i] * cosine[1][i] + x0[i] * sine[1][i];
                squares += y0[i] * y0[i] + y1[i] * y1[i];
            }
        }
        // Lanes without a head take part: the shuffle wants the whole warp.
        squares = rows::across_lanes<rows::Sum, kLanes>(squares);
        if (!mine) continue;
        const bf16* weight = key ? a.k_norm : a.q_norm;
        if (!value && weight != nullptr) {
            const float inverse = rsqrtf(squares / kDim + a.eps);
            float w[rows::kVector];
            rows::widen(rows::load_constant(weight + column), w);
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) y0[i] *= inverse * w[i];
            rows::widen(rows::load_constant(weight + column + kDim / 2), w);
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) y1[i] *= inverse * w[i];
        }
        if (!key && !value) {
#pragma unroll
            for (int i = 0; i < rows::kVector; ++i) {
                y0[i] *= a.q_scale;
                y1[i] *= a.q_scale;
            }
        }
        bf16* to = a.q + (static_cast<int64_t>(token) * a.q_heads + kv * (group - 2) + place) * kDim;
        if (key || value) {
            const int64_t row = static_cast<int64_t>(slot.first) + static_cast<int64_t>(kv) * slot.per_head +
                                static_cast<int64_t>(a.layer) * slot.per_layer + (value ? slot.to_value : 0);
            to = a.arena + row * kDim;
        }
        rows::store(to + column, value ? low : rows::narrow(y0));
        rows::store(to + column + kDim / 2, value ? high : rows::narrow(y1));
    }
}

}  // namespace

// One instance a head dimension; a block of 128 threads a token, with shared memory for the token's projection and
// two rows of tables.
#define ROPE_KERNEL(dim)                                                                                \
    extern "C" __global__ void __launch_bounds__(kBlock, 7) qkv_rope_norm_write_##dim(const Arguments a) { \
        run<dim>(a);                                                                                    \
    }

ROPE_KERNEL(16)
ROPE_KERNEL(32)
ROPE_KERNEL(64)
ROPE_KERNEL(128)
ROPE_KERNEL(256)
