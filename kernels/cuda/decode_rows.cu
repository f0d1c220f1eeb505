// Between the products of decoding: sums into the residual stream, norms, and who goes through which expert.
#include "decode.cuh"

using namespace decode;

namespace {

// Few enough that a block fits beside one of a product: the product that follows then has its first weights on their
// way everywhere.
constexpr int kRowThreads = 256;
constexpr int kRouteThreads = 256;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kVector = 8;
constexpr int kTerms = 3;          // bf16 terms of an fp32 router weight
constexpr int kLineElements = 64;  // of 128 bytes
constexpr int kMostExperts = 256;
constexpr int kBlockExperts = 16;

struct Eight {
    float v[kVector];
};

__device__ __forceinline__ Eight widened(uint4 raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.v[2 * i] = __uint_as_float(words[i] << 16);
        out.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    }
    return out;
}

__device__ __forceinline__ Eight load_bf16(const bf16* from) { return widened(__ldcg(reinterpret_cast<const uint4*>(from))); }

__device__ __forceinline__ Eight load_constant(const bf16* from) {
    return widened(__ldg(reinterpret_cast<const uint4*>(from)));
}

__device__ __forceinline__ void add_float(Eight& to, const float* from) {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(from)), b = __ldcg(reinterpret_cast<const float4*>(from) + 1);
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < kVector; ++i) to.v[i] += v[i];
}

template <class T>
__device__ __forceinline__ uint32_t pair_of(T a, T b) {
    uint16_t x, y;
    memcpy(&x, &a, 2);
    memcpy(&y, &b, 2);
    return x | static_cast<uint32_t>(y) << 16;
}

template <class Make>
__device__ __forceinline__ void store_eight(void* to, const Eight& x, Make make) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pair_of(make(x.v[2 * i]), make(x.v[2 * i + 1]));
    *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void round_bf16(Eight& x) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.v[i] = __bfloat162float(__float2bfloat16_rn(x.v[i]));
}

__device__ __forceinline__ float squares(const Eight& x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(x.v[i], x.v[i], sum);
    return sum;
}

// bf16(bf16(x inverse) w), as `rows::Row::normalise`.
__device__ __forceinline__ void normalise(Eight& x, uint4 weight, float inverse) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.v[i] *= inverse;
    round_bf16(x);
    const Eight w = widened(weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.v[i] *= w.v[i];
    round_bf16(x);
}

// What this thread has of a row of weights, if there is one.
template <int kChunks>
__device__ __forceinline__ void load_row(uint4 (&to)[kChunks], const bf16* from, int width) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (threadIdx.x + c * blockDim.x) * kVector;
        to[c] = make_uint4(0, 0, 0, 0);
        if (from != nullptr && column < width) to[c] = __ldg(reinterpret_cast<const uint4*>(from + column));
    }
}

// Over all threads of the block; everyone gets the sum.
template <int kWarpCount>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarpCount; ++w) sum += scratch[w];
    return sum;
}

struct EnterArguments {
    const bf16* x;      // [tokens, width], or with `ids` [vocab, width]
    const int* ids;     // [tokens], or null
    const float* y;     // [rows][width], or null: row `token * by_token + k * by_choice` of choice k
    bf16* out;          // [tokens, width]
    const bf16* weight; // [width], or null: no norm
    void* h;            // 16-bit [tokens, width]
    Arrival arrival;    // of y
    float eps;
    int tokens;
    int width;
    int count;          // choices, or parts, of a token
    int by_token;
    int by_choice;
    int shared;         // 1: there is a row more a token behind all of them
    int half;           // 1: h is f16, 0: bf16
};

// What is added to 8 columns of a token.
template <class Arguments>
__device__ __forceinline__ Eight summed(const Arguments& a, int token, int column) {
    Eight add = {};
    const float* row = a.y + static_cast<int64_t>(token) * a.by_token * a.width + column;
    const int64_t step = static_cast<int64_t>(a.by_choice) * a.width;
#pragma unroll 8
    for (int k = 0; k < a.count; ++k) add_float(add, row + k * step);
    if (a.shared) add_float(add, a.y + static_cast<int64_t>(a.tokens * a.count + token) * a.width + column);
    return add;
}

// The input of a layer: an embedding, or what the experts of the layer before add to the stream; and its norm.
// A block a token, with `kChunks` chunks of 8 elements a thread.
template <int kChunks>
__device__ __forceinline__ void enter(const EnterArguments& a) {
    __shared__ float scratch[kRowThreads / 32];
    let_next_start();
    uint4 weight[kChunks];
    load_row(weight, a.weight, a.width);
    wait_for_previous();
    wait_for_parts(a.arrival);
    const int token = blockIdx.x;
    const int64_t from = static_cast<int64_t>(a.ids != nullptr ? read_int(a.ids + token) : token) * a.width;
    Eight x[kChunks];
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (threadIdx.x + c * kRowThreads) * kVector;
        if (column >= a.width) continue;
        x[c] = load_bf16(a.x + from + column);
        if (a.y != nullptr) {
            const Eight add = summed(a, token, column);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[c].v[i] += add.v[i];
        }
        round_bf16(x[c]);
        store_eight(a.out + static_cast<int64_t>(token) * a.width + column, x[c],
                    [](float v) { return __float2bfloat16_rn(v); });
        sum += squares(x[c]);
    }
    if (a.weight == nullptr) return;
    sum = block_sum<kRowThreads / 32>(sum, scratch);
    const float inverse = rsqrtf(sum / a.width + a.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (threadIdx.x + c * kRowThreads) * kVector;
        if (column >= a.width) continue;
        normalise(x[c], weight[c], inverse);
        uint16_t* to = static_cast<uint16_t*>(a.h) + static_cast<int64_t>(token) * a.width + column;
        if (a.half) {
            store_eight(to, x[c], [](float v) { return saturated(v); });
        } else {
            store_eight(to, x[c], [](float v) { return __float2bfloat16_rn(v); });
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRowThreads, 4) decode_enter(const EnterArguments a) { enter<2>(a); }
extern "C" __global__ void __launch_bounds__(kRowThreads, 2) decode_enter_wide(const EnterArguments a) { enter<4>(a); }

namespace {

struct RouteArguments {
    const bf16* x;       // [tokens, width]
    const float* y;      // [parts, tokens, width]: the output projection, of each rank
    bf16* out;           // [tokens, width]: x + y; not x
    const bf16* weight;  // [width]
    void* h;             // 16-bit [tokens, width]: the norm of out
    const bf16* router;  // [3, experts, width]: terms of fp32 weights
    float* logits;       // [tokens, experts]
    int* arrived;        // [1 + tokens]: of all, and of a token, what is through; zero before and after
    Routing* routing;
    Arrival arrival;     // of y
    float eps;
    int parts;
    int tokens;
    int width;
    int experts;
    int top_k;
    int renormalise;
    int columns;         // most tokens of a job
    int half;
};

struct Chosen {
    int of_warp[kRouteWarps][kMostExperts];  // choices of an expert among those of a warp
    int first[kMostExperts];
    int job[kMostExperts];
    int count[kMostExperts];
};

// Softmax over the experts of one token and its `top_k` largest, by one warp. Equals: the lowest number.
template <int kEach>
__device__ __forceinline__ void choose(const RouteArguments& a, int token) {
    const int lane = threadIdx.x % 32;
    float p[kEach], largest = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int expert = lane + 32 * i;
        p[i] = expert < a.experts ? __ldcg(a.logits + token * a.experts + expert) : -INFINITY;
        largest = fmaxf(largest, p[i]);
    }
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        p[i] = lane + 32 * i < a.experts ? expf(p[i] - largest) : 0.0f;
        sum += p[i];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    // Probabilities order as their bits do; 0 is what is taken or absent.
    uint32_t key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        key[i] = lane + 32 * i < a.experts ? (__float_as_uint(p[i] / sum) & 0x7fffffffu) + 1 : 0;
    float norm = 0.0f, mine = 0.0f;
    for (int k = 0; k < a.top_k; ++k) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        uint32_t at = ~0u;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i)
            if (key[i] == best) at = lane + 32 * i;
        at = __reduce_min_sync(~0u, at);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (at == lane + 32 * i) key[i] = 0;
        const float value = __uint_as_float(best - 1);
        norm += value;
        if (lane == k) mine = value;
        if (lane == 0) a.routing->chosen[token * a.top_k + k] = at;
    }
    if (lane < a.top_k)
        a.routing->gate[token * a.top_k + lane] = a.renormalise ? mine / fmaxf(norm, 1.1920929e-7f) : mine;
}

// Choices by expert and then by token, and the jobs they make: all by one block, a choice a thread.
__device__ __forceinline__ void arrange(const RouteArguments& a, Chosen& chosen) {
    static_assert(kRouteThreads >= kMostChoices);
    const int entries = a.tokens * a.top_k, me = threadIdx.x, warp = me / 32, lane = me % 32;
    const int mine = me < entries ? __ldcg(a.routing->chosen + me) : -1;
    for (int i = me; i < kRouteWarps * kMostExperts; i += kRouteThreads) (&chosen.of_warp[0][0])[i] = 0;
    __syncthreads();
    const uint32_t alike = __match_any_sync(~0u, mine);
    int place = __popc(alike & ((1u << lane) - 1));
    if (mine >= 0 && place == 0) chosen.of_warp[warp][mine] = __popc(alike);
    __syncthreads();
    if (mine >= 0)
        for (int w = 0; w < warp; ++w) place += chosen.of_warp[w][mine];
    for (int expert = me; expert < a.experts; expert += kRouteThreads) {
        int count = 0;
#pragma unroll
        for (int w = 0; w < kRouteWarps; ++w) count += chosen.of_warp[w][expert];
        chosen.count[expert] = count;
    }
    __syncthreads();
    if (me < 32) {
        int base = 0, job = 0;
        for (int from = 0; from < a.experts; from += 32) {
            const int expert = from + me;
            const int count = expert < a.experts ? chosen.count[expert] : 0, jobs = (count + a.columns - 1) / a.columns;
            int counts = count, all = jobs;
            for (int step = 1; step < 32; step *= 2) {
                const int x = __shfl_up_sync(~0u, counts, step), y = __shfl_up_sync(~0u, all, step);
                if (me >= step) counts += x, all += y;
            }
            if (expert < a.experts) {
                chosen.first[expert] = base + counts - count;
                chosen.job[expert] = job + all - jobs;
            }
            base += __shfl_sync(~0u, counts, 31);
            job += __shfl_sync(~0u, all, 31);
        }
        if (me == 0) {
            a.routing->jobs = job;
            a.routing->next[0] = a.routing->next[1] = 0;
        }
    }
    __syncthreads();
    if (me < entries) {
        const int expert = mine, first = chosen.first[expert];
        a.routing->entry[first + place] = make_int2(me / a.top_k, me);
        if (place % a.columns == 0)
            a.routing->job[chosen.job[expert] + place / a.columns] =
                make_int4(expert, first + place, min(a.columns, chosen.count[expert] - place), 0);
    }
}

// The stream behind attention, its norm, router logits in fp32, and the routing. Grid: (tokens, experts / each),
// `each` at most 16; `kChunks` chunks of 8 elements a thread, `kEach` experts a lane.
template <int kChunks, int kEach>
__device__ __forceinline__ void route(const RouteArguments& a, int each) {
    __shared__ float scratch[kRouteWarps], parts[kBlockExperts][kRouteWarps];
    __shared__ Chosen chosen;
    __shared__ int last;
    let_next_start();
    const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.y * each, experts = min(each, a.experts - first);
    const int64_t term = static_cast<int64_t>(a.experts) * a.width;
    uint4 weight[kChunks];
    load_row(weight, a.weight, a.width);
    // Weights come to the second-level cache meanwhile.
    for (int e = 0; e < experts; ++e)
        for (int at = threadIdx.x * kLineElements; at < kTerms * a.width; at += kRouteThreads * kLineElements)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(a.router + at / a.width * term +
                                                          static_cast<int64_t>(first + e) * a.width + at % a.width));
    wait_for_previous();
    wait_for_parts(a.arrival);
    const int64_t at = static_cast<int64_t>(token) * a.width;
    Eight x[kChunks];
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (threadIdx.x + c * kRouteThreads) * kVector;
        x[c] = {};
        if (column >= a.width) continue;
        x[c] = load_bf16(a.x + at + column);
        for (int part = 0; part < a.parts; ++part)
            add_float(x[c], a.y + static_cast<int64_t>(part) * a.tokens * a.width + at + column);
        round_bf16(x[c]);
        if (blockIdx.y == 0) store_eight(a.out + at + column, x[c], [](float v) { return __float2bfloat16_rn(v); });
        sum += squares(x[c]);
    }
    sum = block_sum<kRouteWarps>(sum, scratch);
    const float inverse = rsqrtf(sum / a.width + a.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (threadIdx.x + c * kRouteThreads) * kVector;
        if (column >= a.width) continue;
        normalise(x[c], weight[c], inverse);
        if (blockIdx.y > 0) continue;
        uint16_t* to = static_cast<uint16_t*>(a.h) + at + column;
        if (a.half) {
            store_eight(to, x[c], [](float v) { return saturated(v); });
        } else {
            store_eight(to, x[c], [](float v) { return __float2bfloat16_rn(v); });
        }
    }
#pragma unroll 2
    for (int e = 0; e < experts; ++e) {
        const bf16* row = a.router + static_cast<int64_t>(first + e) * a.width;
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (threadIdx.x + c * kRouteThreads) * kVector;
            if (column >= a.width) continue;
            const Eight w0 = load_constant(row + column), w1 = load_constant(row + term + column),
                        w2 = load_constant(row + 2 * term + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i) dot = fmaf(x[c].v[i], w0.v[i] + (w1.v[i] + w2.v[i]), dot);
        }
        for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
        if (lane == 0) parts[e][warp] = dot;
    }
    __syncthreads();
    if (threadIdx.x < experts) {
        float dot = 0.0f;
#pragma unroll
        for (int w = 0; w < kRouteWarps; ++w) dot += parts[threadIdx.x][w];
        a.logits[token * a.experts + first + threadIdx.x] = dot;
        __threadfence();
    }
    __syncthreads();
    // The last block of a token chooses for it, the last of these arranges all choices.
    if (threadIdx.x == 0) {
        last = atomicAdd(a.arrived + 1 + token, 1) == static_cast<int>(gridDim.y) - 1;
        if (last) a.arrived[1 + token] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    if (warp == 0) choose<kEach>(a, token);
    if (a.tokens > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(a.arrived, 1) == a.tokens - 1;
            if (last) *a.arrived = 0;
            __threadfence();
        }
        __syncthreads();
        if (!last) return;
    }
    __syncthreads();
    arrange(a, chosen);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRouteThreads, 4) decode_route(const RouteArguments a, int each) {
    route<2, 2>(a, each);
}
extern "C" __global__ void __launch_bounds__(kRouteThreads, 2) decode_route_wide(const RouteArguments a, int each) {
    route<4, 8>(a, each);
}

namespace {

constexpr int kSpreadThreads = 128;
constexpr int kMostOthers = 7;

struct SpreadArguments {
    const float* y;  // as of EnterArguments; null: the own part is there already
    float* own;      // [tokens, width]: this rank's part
    float* other[kMostOthers];      // where it goes in the memory of other devices
    unsigned* arrived[kMostOthers];  // what counts this rank's blocks there
    int others;
    int tokens;
    int width;
    int count;
    int by_token;
    int by_choice;
    int shared;
};

}  // namespace

// Sums what this rank has of each token, and tells the others. Grid: (tokens, parts of a row); each block counts once.
extern "C" __global__ void __launch_bounds__(kSpreadThreads) decode_spread(const SpreadArguments a) {
    let_next_start();
    wait_for_previous();
    const int token = blockIdx.x, column = (blockIdx.y * kSpreadThreads + threadIdx.x) * kVector;
    if (column < a.width) {
        const int64_t at = static_cast<int64_t>(token) * a.width + column;
        Eight part = {};
        if (a.y != nullptr) {
            part = summed(a, token, column);
        } else {
            add_float(part, a.own + at);
        }
        const float4 low = make_float4(part.v[0], part.v[1], part.v[2], part.v[3]);
        const float4 high = make_float4(part.v[4], part.v[5], part.v[6], part.v[7]);
        const auto store = [&](float* to) {
            reinterpret_cast<float4*>(to + at)[0] = low;
            reinterpret_cast<float4*>(to + at)[1] = high;
        };
        if (a.y != nullptr) store(a.own);
#pragma unroll
        for (int i = 0; i < kMostOthers; ++i)
            if (i < a.others) store(a.other[i]);
    }
    __syncthreads();
    if (threadIdx.x < a.others) {
        __threadfence_system();
        asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(a.arrived[threadIdx.x]) : "memory");
    }
}

namespace {

constexpr int kLikeliestThreads = 1024;

struct LikeliestArguments {
    const float* logits;  // [rows, width]
    int* out;             // [rows]
    int width;
};

}  // namespace

// The number of the largest logit of each row, the first among equals: a block a row.
extern "C" __global__ void __launch_bounds__(kLikeliestThreads) decode_likeliest(const LikeliestArguments a) {
    __shared__ unsigned long long best[kLikeliestThreads / 32];
    const float* row = a.logits + static_cast<int64_t>(blockIdx.x) * a.width;
    // Ordered as floats are, and the lower number above: NaN loses.
    unsigned long long most = 0;
    for (int i = threadIdx.x; i < a.width; i += kLikeliestThreads) {
        const float x = row[i];
        uint32_t bits = __float_as_uint(x);
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        if (x != x) bits = 0;
        most = max(most, static_cast<unsigned long long>(bits) << 32 | (0xFFFFFFFFu - i));
    }
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    most = best[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x == 0) a.out[blockIdx.x] = static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(most));
}
