// Attention of one token a row over keys and values in the arena: split, rotation, head norms and the write of the
// token's key and value too. Keys are cut among blocks; the last block of a head adds the parts in their order. Cuts
// depend on a row's length alone, so that its bits do not depend on other rows.
#include "decode.cuh"

using namespace decode;

namespace {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kWarpKeys = 16;
constexpr int kStep = kAttentionWarps * kWarpKeys;  // keys of a block at a time
constexpr int kMostParts = 32;                      // of a row's keys, one a lane
constexpr int kVector = 8;

// Where a row's keys and values lie, in arena rows, and how many there were before this token.
struct Row {
    uint32_t first;      // key head 0 at layer 0
    uint32_t per_head;
    uint32_t per_layer;
    uint32_t to_value;
    int past;
    int padding[3];
};

struct AttentionArguments {
    const float* qkv;     // [tokens, kv heads, group + 2, dim]
    const float* cosine;  // [tokens, dim]
    const float* sine;
    const bf16* q_norm;   // [dim], or null
    const bf16* k_norm;
    const Row* rows;      // [tokens]
    bf16* arena;          // [rows, dim]
    void* out;            // 16-bit [tokens, query heads, dim]
    float* parts;         // [tokens, units, kMostParts][kHeads (dim + 2)]
    int* arrived;         // [tokens, units]; zero before and after
    int layer;
    int kv_heads;
    int group;            // query heads of a key head
    float eps;
    float q_scale;        // with log2(e)
    int half;
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ void widen(uint4 raw, float (&v)[kVector]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    }
}

template <int kDim, int kHeads>
struct Shared {
    float q[kHeads][kDim];
    __align__(16) bf16 fresh[2][kDim];  // this token's key and value
    float score[kHeads][kStep];
    float factor[kHeads];  // of what was summed before
    float most[kHeads], sum[kHeads];
    float out[kAttentionWarps][kHeads][kDim];
    int last;
};

// Pairs of a head that a lane has: element d of the lower half and its partner of the upper one.
template <int kDim>
struct Pairs {
    static constexpr int kCount = (kDim / 2 + 31) / 32;
    float low[kCount], high[kCount];

    template <class Load>
    __device__ __forceinline__ void load(Load from) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int d = threadIdx.x % 32 + 32 * i;
            low[i] = d < kDim / 2 ? from(d) : 0.0f;
            high[i] = d < kDim / 2 ? from(d + kDim / 2) : 0.0f;
        }
    }
};

// A head rotated and normalised by one warp, rotation first.
template <int kDim, class Store>
__device__ __forceinline__ void turn(const Pairs<kDim>& x, const Pairs<kDim>& cosine, const Pairs<kDim>& sine,
                                     const Pairs<kDim>& weight, bool norm, float eps, float scale, Store store) {
    Pairs<kDim> y;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < y.kCount; ++i) {
        y.low[i] = x.low[i] * cosine.low[i] - x.high[i] * sine.low[i];
        y.high[i] = x.high[i] * cosine.high[i] + x.low[i] * sine.high[i];
        sum += y.low[i] * y.low[i] + y.high[i] * y.high[i];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float inverse = norm ? rsqrtf(sum / kDim + eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < y.kCount; ++i) {
        const int d = threadIdx.x % 32 + 32 * i;
        if (d >= kDim / 2) continue;
        float low = y.low[i] * inverse, high = y.high[i] * inverse;
        if (norm) low *= weight.low[i], high *= weight.high[i];
        store(d, low * scale);
        store(d + kDim / 2, high * scale);
    }
}

// Steps of 64 keys that a block of a row with `past` earlier tokens does.
__device__ __forceinline__ int steps_of(int past) { return (past / kStep + kMostParts) / kMostParts; }

// Parts of one head to its result, by one warp: `count` parts, part `i` at `parts + i * stride`.
template <int kDim, int kHeads, class Store>
__device__ __forceinline__ void join(const float* parts, int count, int head, Store store) {
    constexpr int kStride = kHeads * (kDim + 2), kEach = kDim > 32 ? kDim / 32 : 1;
    const int lane = threadIdx.x % 32;
    float most = -INFINITY, sum = 0.0f;
    if (lane < count) {
        most = __ldcg(parts + lane * kStride + kHeads * kDim + head);
        sum = __ldcg(parts + lane * kStride + kHeads * kDim + kHeads + head);
    }
    float all = most;
    for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
    const float scale = lane < count ? exp2_fast(most - all) : 0.0f;
    sum *= scale;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    float out[kEach] = {};
    const bool mine = lane * kEach < kDim;
    const float* from = parts + head * kDim + (mine ? lane * kEach : 0);
#pragma unroll 16
    for (int i = 0; i < count; ++i) {
        const float weight = __shfl_sync(~0u, scale, i);
        if constexpr (kEach == 4) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(from + i * kStride));
            out[0] = fmaf(weight, x.x, out[0]);
            out[1] = fmaf(weight, x.y, out[1]);
            out[2] = fmaf(weight, x.z, out[2]);
            out[3] = fmaf(weight, x.w, out[3]);
        } else {
#pragma unroll
            for (int e = 0; e < kEach; ++e) out[e] = fmaf(weight, __ldcg(from + i * kStride + e), out[e]);
        }
    }
    if (mine)
#pragma unroll
        for (int e = 0; e < kEach; ++e) store(head * kDim + lane * kEach + e, out[e] / sum);
}

// Sums over the 16 lanes of a key of 8 x 4 values, of which each lane gets two: those whose number is twice the lane's
// and the next. A quarter of the shuffles that one sum after the other would take.
template <int kHalf = 16>
__device__ __forceinline__ void sum_of_lanes(float (&x)[32]) {
    const bool upper = threadIdx.x & (kHalf / 2);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float sent = upper ? x[i] : x[i + kHalf];
        x[i] = (upper ? x[i + kHalf] : x[i]) + __shfl_xor_sync(~0u, sent, kHalf / 2);
    }
    if constexpr (kHalf > 2) sum_of_lanes<kHalf / 2>(x);
}

// Keys and values of a step of 64, a piece of 16 bytes a lane and round: in registers, or in shared memory where the
// next step is on its way while one is computed. A lane reads only what it has brought itself.
template <int kRounds, bool kMany>
struct Pieces;

template <int kRounds>
struct Pieces<kRounds, false> {
    uint4 k[kRounds], v[kRounds];
    __device__ __forceinline__ void bring(int r, const uint4* key, const uint4* value, bool there, int) {
        k[r] = v[r] = make_uint4(0, 0, 0, 0);
        if (!there) return;
        k[r] = __ldcg(key);
        v[r] = __ldcg(value);
    }
    __device__ __forceinline__ void end() {}
    template <int pending>
    __device__ __forceinline__ void wait() {}
    __device__ __forceinline__ uint4 key(int r, int) const { return k[r]; }
    __device__ __forceinline__ uint4 value(int r, int) const { return v[r]; }
};

extern __shared__ __align__(128) uint4 pieces[];

template <int kRounds>
struct Pieces<kRounds, true> {
    __device__ __forceinline__ static uint4* at(int side, int r, int slot) {
        return pieces + ((slot * 2 + side) * kRounds + r) * kAttentionThreads + threadIdx.x;
    }
    __device__ __forceinline__ static void copy(uint4* to, const uint4* from, bool there) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(hopper::smem_address(to)), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    }
    __device__ __forceinline__ void bring(int r, const uint4* key, const uint4* value, bool there, int slot) {
        copy(at(0, r, slot), key, there);
        copy(at(1, r, slot), value, there);
    }
    __device__ __forceinline__ void end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    template <int pending>
    __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
    }
    __device__ __forceinline__ uint4 key(int r, int slot) const { return *at(0, r, slot); }
    __device__ __forceinline__ uint4 value(int r, int slot) const { return *at(1, r, slot); }
};

constexpr int kSlots = 3;  // of pieces in shared memory

// Grid: (blocks of a unit, units, tokens); a unit is `kHeads` query heads of one key head. Block b has parts b, b + blocks
// and so on; without `kMany` parts have one step, and each a block. Bits are the same either way.
template <int kDim, int kHeads, bool kMany>
__device__ __forceinline__ void run(const AttentionArguments& a) {
    constexpr int kLanes = kDim / kVector;   // of a key
    constexpr int kAtOnce = 32 / kLanes;     // keys of a warp
    constexpr int kRounds = kWarpKeys / kAtOnce;
    constexpr int kPart = kHeads * (kDim + 2);
    __shared__ Shared<kDim, kHeads> s;
    let_next_start();
    const int token = blockIdx.z, units = a.group / kHeads;
    const int kv = blockIdx.y / units, head = blockIdx.y % units * kHeads;  // the first, of the group
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Rows and keys of earlier tokens were there before the pass began.
    const int4* described = reinterpret_cast<const int4*>(a.rows + token);
    const int4 place = __ldcg(described), more = __ldcg(described + 1);
    const int past = more.x, steps = steps_of(past), keys = kStep * steps, parts = past / keys + 1;
    const int64_t base = static_cast<int64_t>(static_cast<uint32_t>(place.x)) +
                         static_cast<int64_t>(a.layer) * static_cast<uint32_t>(place.z) +
                         static_cast<int64_t>(kv) * static_cast<uint32_t>(place.y);
    bf16* key_rows = a.arena + base * kDim;
    bf16* value_rows = key_rows + static_cast<int64_t>(static_cast<uint32_t>(place.w)) * kDim;
    const int group_lane = lane % kLanes, which = lane / kLanes;

    Pieces<kRounds, kMany> brought;
    // Step `number` of this block.
    const auto first_key = [&](int number) {
        return (blockIdx.x + number / steps * gridDim.x) * keys + number % steps * kStep;
    };
    const auto bring = [&](int number) {
        const int first = first_key(number);
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
            const int key = first + warp * kWarpKeys + r * kAtOnce + which;
            const int64_t at = static_cast<int64_t>(key < past ? key : 0) * kDim;
            brought.bring(r, reinterpret_cast<const uint4*>(key_rows + at) + group_lane,
                          reinterpret_cast<const uint4*>(value_rows + at) + group_lane, key < past, number % kSlots);
        }
        brought.end();
    };
    const bool any = static_cast<int>(blockIdx.x) < parts;
    if (any) {
#pragma unroll
        for (int i = 0; i < (kMany ? kSlots - 1 : 1); ++i) bring(i);
    }
    static_assert(kHeads <= kAttentionWarps);
    Pairs<kDim> cosine, sine, q_norm, k_norm, q, k;
    cosine.load([&](int d) { return __ldcg(a.cosine + token * kDim + d); });
    sine.load([&](int d) { return __ldcg(a.sine + token * kDim + d); });
    const bool newest = any && (parts - 1) % gridDim.x == blockIdx.x;  // it has this token's key
    const bool turns_query = warp < kHeads, turns_key = newest && warp == 0;
    if (turns_query && a.q_norm != nullptr) q_norm.load([&](int d) { return __bfloat162float(a.q_norm[d]); });
    if (turns_key && a.k_norm != nullptr) k_norm.load([&](int d) { return __bfloat162float(a.k_norm[d]); });
    wait_for_previous();
    if (!any) return;
    const int mine = (parts - blockIdx.x - 1) / gridDim.x + 1;  // parts of this block
    const float* qkv = a.qkv + (static_cast<int64_t>(token) * a.kv_heads + kv) * (a.group + 2) * kDim;
    const auto projected = [&](int place) {
        return [=](int d) { return rounded(__ldcg(qkv + place * kDim + d)); };
    };
    if (turns_query) q.load(projected(head + warp));
    if (turns_key) k.load(projected(a.group));
    if (newest && warp == 1)
        for (int d = lane; d < kDim; d += 32) s.fresh[1][d] = __float2bfloat16_rn(__ldcg(qkv + (a.group + 1) * kDim + d));
    if (turns_query)
        turn<kDim>(q, cosine, sine, q_norm, a.q_norm != nullptr, a.eps, a.q_scale,
                   [&](int d, float x) { s.q[warp][d] = rounded(x); });
    if (turns_key)
        turn<kDim>(k, cosine, sine, k_norm, a.k_norm != nullptr, a.eps, 1.0f,
                   [&](int d, float x) { s.fresh[0][d] = __float2bfloat16_rn(x); });
    if (threadIdx.x < kHeads) {
        s.most[threadIdx.x] = -INFINITY;
        s.sum[threadIdx.x] = 0.0f;
    }
    __syncthreads();
    if (newest && head == 0 && threadIdx.x < 2 * kLanes) {
        const int side = threadIdx.x / kLanes, at = threadIdx.x % kLanes;
        uint4* to = reinterpret_cast<uint4*>((side ? value_rows : key_rows) + static_cast<int64_t>(past) * kDim);
        to[at] = reinterpret_cast<const uint4*>(s.fresh[side])[at];
    }
    const auto store = [&](int at, float x) {
        const int64_t to = (static_cast<int64_t>(token) * a.kv_heads * a.group + kv * a.group + head) * kDim + at;
        if (a.half) {
            static_cast<__half*>(a.out)[to] = saturated(x);
        } else {
            static_cast<bf16*>(a.out)[to] = __float2bfloat16_rn(x);
        }
    };
    const auto whole = [&](int at) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) sum += (&s.out[w][0][0])[at];
        return sum;
    };
    const int unit = token * gridDim.y + blockIdx.y;
    float* all = a.parts + static_cast<int64_t>(unit) * kMostParts * kPart;
    // Many steps have queries in registers, one alone reads them where they are.
    float4 held[kMany ? kHeads : 1][2];
    const auto query = [&](int h, int half) {
        return reinterpret_cast<const float4*>(&s.q[h][group_lane * kVector])[half];
    };
    if constexpr (kMany)
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half) held[h][half] = query(h, half);
    float out[kHeads][kVector] = {};
    const int count = kMany ? mine * steps : 1;
    for (int number = 0; number < count; ++number) {
        const int first = first_key(number), slot = number % kSlots;
        if (first > past) continue;  // the last part may have fewer steps
        if constexpr (kMany) {
            bring(number + kSlots - 1);
            brought.template wait<kSlots - 1>();
        }
        const auto fresh_or = [&](int r, int side, uint4 piece) {
            const bool fresh = first + warp * kWarpKeys + r * kAtOnce + which == past;
            return fresh ? reinterpret_cast<const uint4*>(s.fresh[side])[group_lane] : piece;
        };
        const auto keep = [&](int h, int r, float score) {
            const int in_step = warp * kWarpKeys + r * kAtOnce + which;
            s.score[h][in_step] = first + in_step <= past ? score : -INFINITY;
        };
        float dots[kRounds * kHeads];
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
            float x[kVector];
            widen(fresh_or(r, 0, brought.key(r, slot)), x);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const float4 q0 = kMany ? held[kMany ? h : 0][0] : query(h, 0);
                const float4 q1 = kMany ? held[kMany ? h : 0][1] : query(h, 1);
                float dot = q0.x * x[0];
                dot = fmaf(q0.y, x[1], dot);
                dot = fmaf(q0.z, x[2], dot);
                dot = fmaf(q0.w, x[3], dot);
                dot = fmaf(q1.x, x[4], dot);
                dot = fmaf(q1.y, x[5], dot);
                dot = fmaf(q1.z, x[6], dot);
                dots[r * kHeads + h] = fmaf(q1.w, x[7], dot);
            }
        }
        if constexpr (kRounds * kHeads == 32 && kLanes == 16) {
            sum_of_lanes(dots);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int value = 2 * group_lane + i;
                keep(value % kHeads, value / kHeads, dots[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kRounds * kHeads; ++i) {
#pragma unroll
                for (int step = kLanes / 2; step > 0; step /= 2) dots[i] += __shfl_xor_sync(~0u, dots[i], step);
                if (group_lane == 0) keep(i % kHeads, i / kHeads, dots[i]);
            }
        }
        __syncthreads();
        // The first key of a step is always there.
        for (int h = warp; h < kHeads; h += kAttentionWarps) {
            float score[kStep / 32], most = s.most[h], sum = 0.0f;
            const float before = most;
#pragma unroll
            for (int i = 0; i < kStep / 32; ++i) {
                score[i] = s.score[h][lane + 32 * i];
                most = fmaxf(most, score[i]);
            }
            for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
            for (int i = 0; i < kStep / 32; ++i) {
                const float p = exp2_fast(score[i] - most);
                s.score[h][lane + 32 * i] = p;
                sum += p;
            }
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) {
                const float factor = exp2_fast(before - most);
                s.factor[h] = factor;
                s.most[h] = most;
                s.sum[h] = fmaf(s.sum[h], factor, sum);
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const float factor = s.factor[h];
#pragma unroll
            for (int i = 0; i < kVector; ++i) out[h][i] *= factor;
        }
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
            float x[kVector];
            widen(fresh_or(r, 1, brought.value(r, slot)), x);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const float p = s.score[h][warp * kWarpKeys + r * kAtOnce + which];
#pragma unroll
                for (int i = 0; i < kVector; ++i) out[h][i] = fmaf(p, x[i], out[h][i]);
            }
        }
        const bool ends = number % steps == steps - 1 || first + kStep > past;  // the part
        if (!ends) {
            __syncthreads();
            continue;
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
#pragma unroll
                for (int step = kLanes; step < 32; step *= 2) out[h][i] += __shfl_xor_sync(~0u, out[h][i], step);
                if (which == 0) s.out[warp][h][group_lane * kVector + i] = out[h][i];
                out[h][i] = 0.0f;
            }
        __syncthreads();
        float* part = all + (blockIdx.x + number / steps * gridDim.x) * kPart;
        for (int at = threadIdx.x; at < kHeads * kDim; at += kAttentionThreads) {
            if (parts == 1) {
                store(at, whole(at) / s.sum[at / kDim]);
            } else {
                part[at] = whole(at);
            }
        }
        if (parts > 1 && threadIdx.x < kHeads) {
            part[kHeads * kDim + threadIdx.x] = s.most[threadIdx.x];
            part[kHeads * kDim + kHeads + threadIdx.x] = s.sum[threadIdx.x];
            s.most[threadIdx.x] = -INFINITY;
            s.sum[threadIdx.x] = 0.0f;
        }
        __syncthreads();
    }
    if (parts == 1) return;
    if (mine < parts) {
        if (threadIdx.x == 0) {
            // What the block wrote comes before its arrival, and what others wrote after theirs.
            __threadfence();
            s.last = atomicAdd(a.arrived + unit, mine) == parts - mine;
            if (s.last) a.arrived[unit] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!s.last) return;
    }
    for (int h = warp; h < kHeads; h += kAttentionWarps) join<kDim, kHeads>(all, parts, h, store);
}

}  // namespace

#define DECODE_ATTENTION(name, dim, heads, many)                                                           \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, many ? 2 : 4) name(const AttentionArguments a) { \
        run<dim, heads, many>(a);                                                                             \
    }

// The released model: blocks serve the four query heads of a key head.
DECODE_ATTENTION(decode_attention_128_4, 128, 4, false)
DECODE_ATTENTION(decode_attention_128_4_many, 128, 4, true)
// Any group: blocks serve a query head.
DECODE_ATTENTION(decode_attention_16, 16, 1, true)
DECODE_ATTENTION(decode_attention_32, 32, 1, true)
DECODE_ATTENTION(decode_attention_64, 64, 1, true)
DECODE_ATTENTION(decode_attention_128, 128, 1, true)
