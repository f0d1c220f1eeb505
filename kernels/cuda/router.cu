// The router of a mixture of experts: logits in fp32 accuracy on the bf16 tensor cores, softmax, top-k.
//
// An fp32 weight is the sum of three bf16 terms to 2^-24, and a product of two bf16 is exact in fp32: with the
// activations in bf16, three passes of the tensor cores give what an fp32 product would, at a fraction of its time.
// HunyuanImage-3.0 routes in fp32; near ties would otherwise choose other experts.
#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

namespace {

constexpr int kTerms = 3;
constexpr int kExperts = 64;     // of one block
constexpr int kDepth = 64;       // elements of the inner dimension in one stage: 128-byte rows
constexpr int kRowBytes = 128;
constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset of 16-byte chunk `chunk` of row `row`: rows of 8 chunks, exchanged so that 8 rows use all banks.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

struct LogitArguments {
    const bf16* h;       // [tokens, width]
    const bf16* weight;  // [3, experts, width], of `router_split`
    float* logits;       // [gridDim.y, tokens, experts]: partial sums over the inner dimension
    int tokens;
    int experts;
    int width;           // a multiple of 8
};

template <int kTiles, int kStages>
struct Logits {
    static constexpr int kRows = kWarps * 16 * kTiles;
    static constexpr int kStageBytes = (kRows + kTerms * kExperts) * kRowBytes;

    const LogitArguments& a;
    uint32_t smem;
    int first_token;
    int first_expert;

    __device__ void fetch(int stage, int tile) {
        const uint32_t to = smem + stage * kStageBytes;
        const int chunk = threadIdx.x % 8, column = tile * kDepth + chunk * 8;
        const bool inside = column < a.width;
#pragma unroll
        for (int i = 0; i < kRows * 8 / kBlock; ++i) {
            const int row = threadIdx.x / 8 + i * (kBlock / 8), token = first_token + row;
            const bool valid = inside && token < a.tokens;
            copy_async(to + swizzled(row, chunk), valid ? a.h + static_cast<int64_t>(token) * a.width + column : a.h,
                       valid);
        }
#pragma unroll
        for (int i = 0; i < kTerms * kExperts * 8 / kBlock; ++i) {
            const int row = threadIdx.x / 8 + i * (kBlock / 8);
            const int term = row / kExperts, expert = first_expert + row % kExperts;
            const bool valid = inside && expert < a.experts;
            const int64_t at = (static_cast<int64_t>(term) * a.experts + expert) * a.width + column;
            copy_async(to + swizzled(kRows + row, chunk), valid ? a.weight + at : a.weight, valid);
        }
    }

    // Adds one stage to `total`. The tensor cores sum 64 elements from zero; fp32 additions do the rest, since the
    // accumulators of the tensor cores cut off instead of rounding.
    __device__ void compute(int stage, float (&total)[kTiles][8][4]) {
        const uint32_t from = smem + stage * kStageBytes;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float acc[kTiles][8][4] = {};
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
            uint32_t left[kTiles][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
                load_matrices(left[m], from + swizzled((warp * kTiles + m) * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term)  // small terms first
#pragma unroll
                for (int n = 0; n < 8; n += 2) {
                    uint32_t right[4];
                    const int row = kRows + term * kExperts + n * 8 + lane / 16 * 8 + lane % 8;
                    load_matrices(right, from + swizzled(row, 2 * k + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < kTiles; ++m) {
                        multiply(acc[m][n], left[m], right[0], right[1]);
                        multiply(acc[m][n + 1], left[m], right[2], right[3]);
                    }
                }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] += acc[m][n][i];
    }

    __device__ void store(const float (&total)[kTiles][8][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float* to = a.logits + static_cast<int64_t>(blockIdx.y) * a.tokens * a.experts;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = first_token + (warp * kTiles + m) * 16 + lane / 4 + i / 2 * 8;
                    const int expert = first_expert + n * 8 + lane % 4 * 2 + i % 2;
                    if (token < a.tokens && expert < a.experts)
                        to[static_cast<int64_t>(token) * a.experts + expert] = total[m][n][i];
                }
    }

    __device__ void run() {
        const int tiles = (a.width + kDepth - 1) / kDepth;
        const int per_part = (tiles + gridDim.y - 1) / gridDim.y;
        const int begin = blockIdx.y * per_part, end = min(begin + per_part, tiles);
        float total[kTiles][8][4] = {};
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) {
            if (begin + s < end) fetch(s, begin + s);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        for (int tile = begin; tile < end; ++tile) {
            asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
            __syncthreads();  // the stage is there for all, and the one that is fetched next was read by all
            const int next = tile + kStages - 1;
            if (next < end) fetch((next - begin) % kStages, next);
            asm volatile("cp.async.commit_group;" ::: "memory");
            compute((tile - begin) % kStages, total);
        }
        store(total);
    }
};

template <int kTiles, int kStages>
__device__ __forceinline__ void logits(const LogitArguments& a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    using Work = Logits<kTiles, kStages>;
    Work work{a, smem_address(memory), static_cast<int>(blockIdx.x) * Work::kRows,
              static_cast<int>(blockIdx.z) * kExperts};
    work.run();
}

struct TopKArguments {
    const float* logits;  // parts [parts], each [tokens, experts] with the strides below
    int64_t part_stride;
    int64_t token_stride;
    int parts;
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
constexpr int kAtOnce = 4;  // parts of a logit that are loaded together

// A warp a token; lane l has the experts l, l + 32, ..
template <int kEach>
__device__ __forceinline__ void top_k(const TopKArguments& a) {
    __shared__ int counts[kMaxExperts];
    const int lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const int begin = blockIdx.x * a.tokens_per_block, end = min(begin + a.tokens_per_block, a.tokens);
    for (int token = begin + threadIdx.x / 32; token < end; token += blockDim.x / 32) {
        float p[kEach] = {};
        for (int first = 0; first < a.parts; first += kAtOnce) {
            float part[kEach][kAtOnce];
#pragma unroll
            for (int i = 0; i < kEach; ++i)
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const bool there = lane + 32 * i < a.experts && first + j < a.parts;
                    const int64_t at = token * a.token_stride + (first + j) * a.part_stride + lane + 32 * i;
                    part[i][j] = there ? __ldg(a.logits + at) : 0.0f;
                }
#pragma unroll
            for (int i = 0; i < kEach; ++i)
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) p[i] += part[i][j];
        }
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (lane + 32 * i < a.experts) largest = fmaxf(largest, p[i]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            p[i] = lane + 32 * i < a.experts ? expf(p[i] - largest) : 0.0f;
            sum += p[i];
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        // Bits of a non-negative float order as the float does; 0 is left for experts that are taken or absent.
        uint32_t key[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            p[i] /= sum;
            key[i] = lane + 32 * i < a.experts ? (__float_as_uint(p[i]) & 0x7fffffffu) + 1 : 0;
        }
        float chosen = 0.0f, norm = 0.0f;
        uint32_t index = 0;
        for (int k = 0; k < a.top_k; ++k) {
            uint32_t best = 0;
#pragma unroll
            for (int i = 0; i < kEach; ++i) best = max(best, key[i]);
            best = __reduce_max_sync(~0u, best);
            uint32_t at = ~0u;  // the lowest index among equals
#pragma unroll
            for (int i = kEach - 1; i >= 0; --i)
                if (key[i] == best) at = lane + 32 * i;
            at = __reduce_min_sync(~0u, at);
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (at == lane + 32 * i) key[i] = 0;
            const float value = __uint_as_float(best - 1);
            norm += value;
            if (lane == k) chosen = value, index = at;
        }
        if (lane < a.top_k) {
            const int64_t slot = static_cast<int64_t>(token) * a.top_k + lane;
            a.expert[slot] = index;
            a.weight[slot] = a.renormalise ? chosen / fmaxf(norm, 1.1920929e-7f) : chosen;
            atomicAdd(&counts[index], 1);
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

// Grid: (blocks of 128 or 256 tokens, parts, blocks of 64 experts). The parts are fixed by the caller and not by
// the number of tokens, so that a token's sums have one order.
extern "C" __global__ void __launch_bounds__(kBlock) router_logits_128(const LogitArguments a) { logits<1, 4>(a); }
extern "C" __global__ void __launch_bounds__(kBlock) router_logits_256(const LogitArguments a) { logits<2, 3>(a); }

extern "C" __global__ void __launch_bounds__(1024) router_top_k_64(const TopKArguments a) { top_k<2>(a); }
extern "C" __global__ void __launch_bounds__(1024) router_top_k_256(const TopKArguments a) { top_k<8>(a); }
