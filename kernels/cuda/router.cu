// The router of a mixture of experts: logits in fp32 accuracy on the bf16 tensor cores, softmax, top-k.
//
// An fp32 weight is the sum of three bf16 terms to 2^-24, and a product of two bf16 is exact in fp32: with the
// activations in bf16, three passes of the tensor cores give what an fp32 product would, at a fraction of its time.
// HunyuanImage-3.0 routes in fp32; near ties would otherwise choose other experts.
#include "hopper.cuh"

using bf16 = __nv_bfloat16;

namespace {

constexpr int kTerms = 3;
constexpr int kTokens = 128;   // of one block: two consumer warpgroups of 64
constexpr int kExperts = 64;   // likewise, each of three terms
constexpr int kDepth = 64;     // elements of the inner dimension in one stage
constexpr int kRowBytes = 128; // of one stage
constexpr int kStages = 5;
constexpr int kStageBytes = (kTokens + kTerms * kExperts) * kRowBytes;
constexpr int kThreads = 384;  // a producer warpgroup and the consumers
// Stages that the tensor cores sum from zero. fp32 additions do the rest, in this order: the pieces of a half one
// after the other, then the halves. It is the same whether a block adds the pieces of a half or `router_top_k` does,
// as where there are too few tokens to fill the GPU otherwise: a token's logits do not depend on the number of tokens.
constexpr int kPromote = 4;
constexpr int kHalves = 2;

struct LogitArguments {
    float* logits;  // [gridDim.y, tokens, experts]: partial sums over the inner dimension
    int tokens;
    int experts;
    int width;      // a multiple of 8
    int pieces;     // of each half of the inner dimension: 1, or one of each `kPromote` stages
};

#define ROUTER_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ROUTER_D(i) ROUTER_D4(i), ROUTER_D4(i + 4), ROUTER_D4(i + 8), ROUTER_D4(i + 12)

// 64 rows of A times the 192 rows of B, both K-major with 128-byte swizzle; starts from zero unless `accumulate`.
__device__ __forceinline__ void multiply_192(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, %96, %97, p, 1, 1, 0, 0;\n}"
        : ROUTER_D(0), ROUTER_D(16), ROUTER_D(32), ROUTER_D(48), ROUTER_D(64), ROUTER_D(80)
        : "l"(a), "l"(b), "r"(accumulate));
}

struct Barriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];
};

__device__ __forceinline__ void produce(const CUtensorMap* h, const CUtensorMap* weight, const LogitArguments& a,
                                        uint8_t* stages, Barriers& barriers, int begin, int end) {
    for (int tile = begin; tile < end; ++tile) {
        const int stage = (tile - begin) % kStages, round = (tile - begin) / kStages;
        if (round > 0) hopper::barrier_wait(&barriers.empty[stage], (round - 1) & 1);
        uint8_t* to = stages + stage * kStageBytes;
        hopper::barrier_expect_bytes(&barriers.full[stage], kStageBytes);
        hopper::copy_2d(to, h, &barriers.full[stage], tile * kDepth, blockIdx.x * kTokens);
        for (int term = 0; term < kTerms; ++term)
            hopper::copy_2d(to + (kTokens + term * kExperts) * kRowBytes, weight, &barriers.full[stage], tile * kDepth,
                            term * a.experts + blockIdx.z * kExperts);
    }
}

__device__ __forceinline__ void consume(const LogitArguments& a, const uint8_t* stages, Barriers& barriers, int begin,
                                        int end) {
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    float acc[96], total[32] = {};
    for (int tile = begin; tile < end; ++tile) {
        const int stage = (tile - begin) % kStages, since = (tile - begin) % kPromote;
        const uint8_t* from = stages + stage * kStageBytes;
        hopper::barrier_wait(&barriers.full[stage], (tile - begin) / kStages & 1);
        hopper::keep(acc);
        hopper::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
            multiply_192(acc, hopper::descriptor_swizzle128(from + group * 64 * kRowBytes + k * 32),
                         hopper::descriptor_swizzle128(from + kTokens * kRowBytes + k * 32), since > 0 || k > 0);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        hopper::keep(acc);
        if (thread == 0) hopper::barrier_arrive(&barriers.empty[stage]);
        if (since == kPromote - 1 || tile == end - 1) {
#pragma unroll
            for (int i = 0; i < 32; ++i) total[i] += acc[i] + (acc[i + 32] + acc[i + 64]);  // small terms first
        }
    }
    float* to = a.logits + static_cast<int64_t>(blockIdx.y) * a.tokens * a.experts;
    const int row = blockIdx.x * kTokens + group * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int token = row + i % 4 / 2 * 8, expert = blockIdx.z * kExperts + i / 4 * 8 + thread % 4 * 2 + i % 2;
        if (token < a.tokens && expert < a.experts) to[static_cast<int64_t>(token) * a.experts + expert] = total[i];
    }
}

struct TopKArguments {
    const float* logits;  // parts [parts], each [tokens, experts] with the strides below
    int64_t part_stride;
    int64_t token_stride;
    int halves;
    int pieces;  // parts of a half, which are added first
    int tokens;
    int experts;
    int top_k;
    int renormalise;
    uint32_t* expert;      // [tokens, top_k], in descending probability
    float* weight;         // [tokens, top_k]
    int* counts;           // [gridDim.x, experts]: choices by the tokens of a block; null: not wanted
    int tokens_per_block;
};

constexpr int kMaxExperts = 256;
constexpr int kLanes = 8;  // of a token

template <class T, class Op>
__device__ __forceinline__ T across_token(T value, Op op) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// The logits of one token that lane `lane` of it has, those of the experts lane, lane + 8, ..
template <int kEach>
__device__ __forceinline__ void load_logits(const TopKArguments& a, int token, int lane, float (&p)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) p[i] = 0.0f;
    if (token >= a.tokens) return;
    const float* from = a.logits + token * a.token_stride + lane;
    for (int half = 0; half < a.halves; ++half) {
        float sum[kEach] = {};
#pragma unroll 8
        for (int piece = 0; piece < a.pieces; ++piece, from += a.part_stride)
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (lane + kLanes * i < a.experts) sum[i] += __ldg(from + kLanes * i);
#pragma unroll
        for (int i = 0; i < kEach; ++i) p[i] += sum[i];
    }
}

// Up to 8 kEach experts and 8 kChoices choices; 4 tokens a warp.
template <int kEach, int kChoices>
__device__ __forceinline__ void top_k(const TopKArguments& a) {
    __shared__ int counts[kMaxExperts];
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const auto greater = [](auto x, auto y) { return max(x, y); };
    const auto smaller = [](auto x, auto y) { return min(x, y); };
    const auto add = [](float x, float y) { return x + y; };
    const int lane = threadIdx.x % kLanes;
    const int begin = blockIdx.x * a.tokens_per_block, end = min(begin + a.tokens_per_block, a.tokens);
    for (int first = begin; first < end; first += blockDim.x / kLanes) {
        const int token = first + threadIdx.x / kLanes;
        float p[kEach];
        load_logits(a, token < end ? token : a.tokens, lane, p);
        float largest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (lane + kLanes * i < a.experts) largest = fmaxf(largest, p[i]);
        largest = across_token(largest, greater);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            p[i] = lane + kLanes * i < a.experts ? expf(p[i] - largest) : 0.0f;
            sum += p[i];
        }
        sum = across_token(sum, add);
        // Bits of a non-negative float order as the float does; 0 is left for experts that are taken or absent.
        uint32_t key[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            key[i] = lane + kLanes * i < a.experts ? (__float_as_uint(p[i] / sum) & 0x7fffffffu) + 1 : 0;
        float chosen[kChoices], norm = 0.0f;
        uint32_t index[kChoices];
        for (int k = 0; k < a.top_k; ++k) {
            uint32_t best = 0, at = ~0u;
#pragma unroll
            for (int i = 0; i < kEach; ++i) best = max(best, key[i]);
            best = across_token(best, greater);
#pragma unroll
            for (int i = kEach - 1; i >= 0; --i)
                if (key[i] == best) at = lane + kLanes * i;
            at = across_token(at, smaller);  // the lowest index among equals
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (at == lane + kLanes * i) key[i] = 0;
            const float value = __uint_as_float(best - 1);
            norm += value;
#pragma unroll
            for (int c = 0; c < kChoices; ++c)
                if (k == lane + kLanes * c) chosen[c] = value, index[c] = at;
        }
#pragma unroll
        for (int c = 0; c < kChoices; ++c) {
            const int k = lane + kLanes * c;
            if (token >= end || k >= a.top_k) continue;
            const int64_t slot = static_cast<int64_t>(token) * a.top_k + k;
            a.expert[slot] = index[c];
            a.weight[slot] = a.renormalise ? chosen[c] / fmaxf(norm, 1.1920929e-7f) : chosen[c];
            atomicAdd(&counts[index[c]], 1);
        }
    }
    if (a.counts == nullptr) return;
    __syncthreads();
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) a.counts[blockIdx.x * a.experts + e] = counts[e];
}

}  // namespace

// The three terms of fp32 weights: `to [3, count]`.
extern "C" __global__ void router_split(const float* from, bf16* to, int64_t count) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
        float rest = from[i];
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            const bf16 part = __float2bfloat16_rn(rest);
            to[term * count + i] = part;
            rest -= __bfloat162float(part);
        }
    }
}

// Grid: (blocks of 128 tokens, parts, blocks of 64 experts).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    router_logits(const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap weight, const LogitArguments a) {
    extern __shared__ uint8_t memory[];
    __shared__ Barriers barriers;
    uint8_t* stages = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    const int tiles = (a.width + kDepth - 1) / kDepth, per_half = (tiles + kHalves - 1) / kHalves;
    const int half = blockIdx.y / a.pieces * per_half, half_end = min(half + per_half, tiles);
    const int begin = half + blockIdx.y % a.pieces * kPromote;
    const int end = a.pieces == 1 ? half_end : min(begin + kPromote, half_end);
    if (threadIdx.x == 0) {
        hopper::tensor_map_prefetch(&h);
        hopper::tensor_map_prefetch(&weight);
        for (int i = 0; i < kStages; ++i) {
            hopper::barrier_init(&barriers.full[i], 1);
            hopper::barrier_init(&barriers.empty[i], 2);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) produce(&h, &weight, a, stages, barriers, begin, end);
    } else {
        consume(a, stages, barriers, begin, end);
    }
}

extern "C" __global__ void __launch_bounds__(512) router_top_k_64(const TopKArguments a) { top_k<8, 1>(a); }
extern "C" __global__ void __launch_bounds__(512) router_top_k_256(const TopKArguments a) { top_k<32, 4>(a); }
