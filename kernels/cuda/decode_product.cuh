// Products of few tokens with many weights, for decoding text: memory-bound, so that everything serves one steady
// stream of weights.
//
// A persistent block takes tiles of 16 weight rows. One warp copies them to a ring in shared memory, far ahead and, as
// weights do not depend on what runs before, from before the previous kernel has ended (griddepcontrol). Eight warps
// multiply: weights are the A operand of the tensor cores (e4m3 widened to f16, which is exact), tokens the columns
// of B, which stay in registers for as long as a block has the same tokens. Every warp has an eighth of each stage
// along k; their sums are added in one order. A token's result depends on its own values only: neither the number
// of tokens nor their order changes a bit.
//
// Instructions number k as they like, as long as A and B agree: a lane takes 16 bytes of a weight row at once, and
// the same elements of a token.
#pragma once

#include "decode.cuh"

namespace decode {

constexpr int kWarps = 8;  // that multiply
constexpr int kMultiplying = 32 * kWarps;
// With two columns of tokens the multiplying warpgroups take registers from that of the copying warp.
constexpr int threads_of(int nt) { return kMultiplying + (nt == 1 ? 32 : 128); }
constexpr int kCopyRegisters = 40;
constexpr int kMultiplyRegisters = 232;
constexpr int kTileRows = 16;
constexpr int kColumns = 8;  // tokens of one instruction

// The ring. A stage has the same `bytes` of 16 weight rows. Where these are whole rows they are one piece of memory and
// one copy (or two, of the halves of a SwiGLU); a warp starts a copy in some 50 cycles, and copies of 1024 bytes alone
// would reach two thirds of the memory's rate.
template <int bytes, bool kWhole>
struct Ring {
    // Eight lanes that read two rows touch all banks where rows are apart; whole rows are read in two goes.
    static constexpr int kRowStride = kWhole ? bytes : bytes + 64;
    static constexpr int kSlotBytes = kTileRows * kRowStride;
    static constexpr int kSlots = bytes == 1024 ? 10 : 12288 / bytes;
    static constexpr int kWarpBytes = bytes / kWarps;
    static constexpr int kChunks = kWarpBytes / 64;
};
constexpr int kMostSlots = 10;
constexpr int kTakenPart = 3;  // of the tiles of chosen experts, one in so many is not dealt

__device__ __forceinline__ uint32_t f16_of_e4m3(uint32_t word, int half) {
    const uint16_t two = static_cast<uint16_t>(half == 0 ? word : word >> 16);
    uint32_t out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(two));
    return out;
}

template <bool kFp8>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kFp8) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

enum class Op {
    kFloat,   // out F32 [tokens, n]
    kSwiGlu,  // first half of n times SiLU of the second half; out [rows, n / 2]
    kWeighted // out F32 [rows, n], times the gate of the row
};

struct Arguments {
    const uint8_t* weights;  // [groups, n, k]
    const float* scales;     // [groups, n], with e4m3 weights
    const void* input;       // 16-bit [tokens, k], kWeighted: [rows, k]
    void* out;
    Routing* routing;        // null: every token through group 0
    int n;
    int k;
    int tokens;
    int top_k;
    int shared;              // group that all tokens go through, or -1
};

// Which tiles and tokens a block has: first those of the group of all tokens, dealt in turn so that they are known
// before any routing is, then an equal part of most others without a gap, at last what it takes one by one: some
// multiprocessors get a fifth less of the memory's rate than others.
struct Share {
    int tiles, jobs, count;  // of a group; jobs and tiles of the group of all tokens
    int begin, end;          // of the others
    int fixed, all;          // of these, the dealt ones, and all

    __device__ __forceinline__ void of_all(const Arguments& a, int tile_count, int columns) {
        tiles = tile_count;
        jobs = a.shared >= 0 ? (a.tokens + columns - 1) / columns : 0;
        const int dealt = tiles * jobs, block = blockIdx.x;
        count = block < dealt ? (dealt - block - 1) / int(gridDim.x) + 1 : 0;
        begin = end = fixed = all = 0;
    }
    __device__ __forceinline__ void of_routed(int routed_jobs) {
        const int blocks = gridDim.x, shared = tiles * jobs;
        all = tiles * routed_jobs;
        fixed = all - all / kTakenPart;
        begin = first(blockIdx.x, blocks, shared, fixed);
        end = first(blockIdx.x + 1, blocks, shared, fixed);
    }
    // Blocks with one tile more of the group of all have one less of the others, where there are enough.
    static __device__ __forceinline__ int first(int block, int blocks, int shared, int routed) {
        if (routed < blocks) return static_cast<int>(static_cast<int64_t>(block) * routed / blocks);
        const int each = shared / blocks, more = shared % blocks;
        const int before = block * each + min(block, more);
        return static_cast<int>(static_cast<int64_t>(block) * (shared + routed) / blocks) - before;
    }
};

struct Barriers {
    uint64_t full[kMostSlots];
    uint64_t empty[kMostSlots];
    int tile[kMostSlots];  // of all tiles of chosen experts, -1: there are no more
};

// `bytes` of a weight row make a stage, NK stages a row.
template <bool kFp8, int NT, int NK, int bytes, Op op>
struct Product : Ring<bytes, NK == 1 && (bytes > 1024)> {
    static constexpr bool kWhole = NK == 1 && bytes > 1024;
    using Slots = Ring<bytes, kWhole>;
    using Slots::kChunks;
    using Slots::kRowStride;
    using Slots::kSlotBytes;
    using Slots::kSlots;
    using Slots::kWarpBytes;
    static constexpr int kStageBytes = bytes;
    // Sums of every other instruction, so that two are on their way.
    static constexpr int kChains = 2;
    static constexpr int kElement = kFp8 ? 1 : 2;
    static constexpr int kJobTokens = NT * kColumns;
    static constexpr int kRegisters = kWarpBytes / (kFp8 ? 8 : 16);  // of a stage of one token
    static constexpr int kPartBytes = kWarps * NT * 32 * 16;

    const Arguments& a;
    uint8_t* ring;
    float4* parts;
    Routing& table;  // where the multiplying warps have the routing
    Barriers& barriers;
    Share share;

    __device__ __forceinline__ Product(const Arguments& arguments, uint8_t* memory, Barriers& b)
        : a(arguments),
          ring(memory),
          parts(reinterpret_cast<float4*>(memory + kSlots * kSlotBytes)),
          table(*reinterpret_cast<Routing*>(memory + kSlots * kSlotBytes + 2 * kPartBytes)),
          barriers(b) {
        const int rows = op == Op::kSwiGlu ? a.n / 2 : a.n, each = op == Op::kSwiGlu ? kTileRows / 2 : kTileRows;
        share.of_all(a, (rows + each - 1) / each, kJobTokens);
    }

    // Row `i` of a tile. What is behind the last one is read again and not stored.
    __device__ __forceinline__ int weight_row(int tile, int i) const {
        if constexpr (op == Op::kSwiGlu) return min(tile * 8 + i % 8, a.n / 2 - 1) + (i < 8 ? 0 : a.n / 2);
        return min(tile * kTileRows + i, a.n - 1);
    }

    // ---- the copying warp

    __device__ __forceinline__ void copy_tile(int group, int tile, int& done, uint64_t policy, int number = 0) {
        const int lane = threadIdx.x % 32, row_bytes = a.k * kElement;
        if constexpr (kWhole) {
            constexpr int kHalves = op == Op::kSwiGlu ? 2 : 1, kRows = kTileRows / kHalves;
            if (lane > 0) return;
            const int slot = done % kSlots, round = done / kSlots;
            ++done;
            const uint32_t here = min(kRows, a.n / kHalves - tile * kRows) * bytes;
            if (round > 0) hopper::barrier_wait(&barriers.empty[slot], (round - 1) & 1);
            barriers.tile[slot] = number;
            hopper::barrier_expect_bytes(&barriers.full[slot], here * kHalves);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const int64_t row = static_cast<int64_t>(group) * a.n + half * (a.n / 2) + tile * kRows;
                copy_bytes(ring + slot * kSlotBytes + half * kRows * kRowStride, a.weights + row * bytes, here,
                           &barriers.full[slot], policy);
            }
            return;
        }
        const int64_t row = static_cast<int64_t>(group) * a.n + weight_row(tile, lane % kTileRows);
        const uint8_t* from = a.weights + row * row_bytes;
        for (int stage = 0; stage < NK; ++stage, ++done) {
            const int slot = done % kSlots, round = done / kSlots;
            const int here = min(kStageBytes, row_bytes - stage * kStageBytes);
            if (lane == 0) {
                if (round > 0) hopper::barrier_wait(&barriers.empty[slot], (round - 1) & 1);
                barriers.tile[slot] = number;
                hopper::barrier_expect_bytes(&barriers.full[slot], here * kTileRows);
            }
            __syncwarp();
            if (lane < kTileRows)
                copy_bytes(ring + slot * kSlotBytes + lane * kRowStride, from + stage * kStageBytes, here,
                           &barriers.full[slot], policy);
        }
    }

    static __device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t count, uint64_t* barrier,
                                                      uint64_t policy) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
            "%4;" ::"r"(hopper::smem_address(to)),
            "l"(from), "r"(count), "r"(hopper::smem_address(barrier)), "l"(policy)
            : "memory");
    }

    __device__ __forceinline__ void copy() {
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        // Who looks for choices must not find those of the layer before; nobody else looks before it waits.
        if (op != Op::kSwiGlu && threadIdx.x % 32 == 0) let_next_start();
        int done = 0;
        for (int i = 0; i < share.count; ++i)
            copy_tile(max(a.shared, 0), (blockIdx.x + i * gridDim.x) / share.jobs, done, policy);
        if (op == Op::kSwiGlu) {
            wait_for_previous();
            if (threadIdx.x % 32 == 0) let_next_start();
        }
        if (a.routing == nullptr) return;
        share.of_routed(read_int(&a.routing->jobs));
        int job = -1, group = 0;
        const auto copy_routed = [&](int at) {
            const int of = at / share.tiles;
            if (of != job) group = read_int(&a.routing->job[of].x);
            job = of;
            copy_tile(group, at - of * share.tiles, done, policy, at);
        };
        for (int at = share.begin; at < share.end; ++at) copy_routed(at);
        int* next = &a.routing->next[op == Op::kSwiGlu ? 0 : 1];
        const auto take = [&] { return threadIdx.x % 32 == 0 ? atomicAdd(next, 1) : 0; };
        for (int taken = take();;) {
            const int at = share.fixed + __shfl_sync(~0u, taken, 0);
            if (at >= share.all) break;
            taken = take();  // on its way while this one waits for room
            copy_routed(at);
        }
        if (threadIdx.x % 32 == 0) {
            const int slot = done % kSlots, round = done / kSlots;
            if (round > 0) hopper::barrier_wait(&barriers.empty[slot], (round - 1) & 1);
            barriers.tile[slot] = -1;
            hopper::barrier_arrive(&barriers.full[slot]);
        }
    }

    // ---- the multiplying warps

    uint32_t b[NT][NK][kRegisters];
    int rows[NT][2];     // where this lane's two columns go, -1: nowhere
    float gates[NT][2];

    // Tokens of a job of everyone (`routed` false) or of an expert.
    __device__ __forceinline__ void load_tokens(bool routed, int job) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        int first = job * kJobTokens, count = a.tokens - first;
        if (routed) {
            const int4 of = table.job[job];
            first = of.y;
            count = of.z;
        }
        using Type = typename Activation<kFp8>::Type;
        const Type* input = static_cast<const Type*>(a.input);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const int column = nt * kColumns + g;
            const bool there = column < count;
            int row = first + column;
            if (there) {
                if (routed) {
                    const int2 entry = table.entry[row];
                    row = op == Op::kWeighted ? entry.y : entry.x;
                } else if (op == Op::kWeighted) {
                    row += a.tokens * a.top_k;
                }
            }
            const Type* from = input + static_cast<int64_t>(row) * a.k;
            // One token goes into all its experts: it is there already.
            const bool known = op == Op::kSwiGlu && routed && a.tokens == 1 && share.count > 0;
            if (!known) load_inputs(nt, from, there);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int mine = nt * kColumns + 2 * t + i;
                rows[nt][i] = -1;
                gates[nt][i] = 1.0f;
                if (mine >= count) continue;
                rows[nt][i] = first + mine;
                if (routed) {
                    rows[nt][i] = table.entry[first + mine].y;
                    gates[nt][i] = table.gate[rows[nt][i]];
                } else if (op != Op::kFloat) {
                    rows[nt][i] += a.tokens * a.top_k;
                }
            }
        }
    }

    // This lane's part of column `nt * kColumns + lane / 4`; zeros where there is none.
    __device__ __forceinline__ void load_inputs(int nt, const typename Activation<kFp8>::Type* from, bool there) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int stage = 0; stage < NK; ++stage)
#pragma unroll
            for (int c = 0; c < kRegisters / 4; ++c) {
                // With e4m3 weights two loads for the 16 elements of each 64 bytes of weights, else one for 8.
                const int chunk = kFp8 ? c / 2 : c;
                const int byte = stage * kStageBytes + threadIdx.x / 32 * kWarpBytes + chunk * 64 + t * 16;
                const int element = byte / kElement + (kFp8 ? c % 2 * 8 : 0);
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (there && element < a.k) eight = __ldcg(reinterpret_cast<const uint4*>(from + element));
                b[nt][stage][4 * c] = eight.x;
                b[nt][stage][4 * c + 1] = eight.y;
                b[nt][stage][4 * c + 2] = eight.z;
                b[nt][stage][4 * c + 3] = eight.w;
            }
    }

    __device__ __forceinline__ void multiply_tile(float (&sum)[NT][4], int& done) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int offset = lane / 4 * kRowStride + warp * kWarpBytes + lane % 4 * 16;
        float chain[kChains][NT][4] = {};
#pragma unroll
        for (int stage = 0; stage < NK; ++stage, ++done) {
            const int slot = done % kSlots;
            hopper::barrier_wait(&barriers.full[slot], done / kSlots & 1);
            const uint8_t* from = ring + slot * kSlotBytes + offset;
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const uint4 low = *reinterpret_cast<const uint4*>(from + c * 64);
                const uint4 high = *reinterpret_cast<const uint4*>(from + 8 * kRowStride + c * 64);
                const uint32_t l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
                for (int step = 0; step < (kFp8 ? 4 : 2); ++step) {
                    uint32_t w[4];
                    if constexpr (kFp8) {
                        w[0] = f16_of_e4m3(l[step], 0);
                        w[1] = f16_of_e4m3(h[step], 0);
                        w[2] = f16_of_e4m3(l[step], 1);
                        w[3] = f16_of_e4m3(h[step], 1);
                    } else {
                        w[0] = l[2 * step];
                        w[1] = h[2 * step];
                        w[2] = l[2 * step + 1];
                        w[3] = h[2 * step + 1];
                    }
                    const int at = c * (kRegisters / kChunks) + 2 * step;
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
                        multiply<kFp8>(chain[step % kChains][nt], w, b[nt][stage][at], b[nt][stage][at + 1]);
                }
            }
            __syncwarp();
            if (lane == 0) hopper::barrier_arrive(&barriers.empty[slot]);
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[nt][i] = chain[0][nt][i] + chain[1][nt][i];
    }

    // Sums of all warps in their order, by one of them; the others go on.
    __device__ __forceinline__ void finish_tile(float (&sum)[NT][4], float2 scale, int tile, int number) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float4* part = parts + number % 2 * (kPartBytes / 16);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            part[(warp * NT + nt) * 32 + lane] = make_float4(sum[nt][0], sum[nt][1], sum[nt][2], sum[nt][3]);
        hopper::named_sync(1, kMultiplying);
        if (warp != number % kWarps) return;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            float4 all = part[nt * 32 + lane];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) {
                const float4 one = part[(w * NT + nt) * 32 + lane];
                all.x += one.x;
                all.y += one.y;
                all.z += one.z;
                all.w += one.w;
            }
            store(tile, nt, 0, all.x * scale.x, all.z * scale.y);
            store(tile, nt, 1, all.y * scale.x, all.w * scale.y);
        }
    }

    // The two rows of this lane for its column `i`.
    __device__ __forceinline__ void store(int tile, int nt, int i, float low, float high) {
        const int row = rows[nt][i], g = threadIdx.x % 32 / 4;
        if (row < 0) return;
        if constexpr (op == Op::kSwiGlu) {
            const int inner = a.n / 2, column = tile * 8 + g;
            if (column >= inner) return;
            const float value = low * high / (1.0f + __expf(-high));
            static_cast<typename Activation<kFp8>::Type*>(a.out)[static_cast<int64_t>(row) * inner + column] =
                Activation<kFp8>::of(kFp8 ? value / kInnerScale : value);
        } else {
            float* out = static_cast<float*>(a.out) + static_cast<int64_t>(row) * a.n;
            const int column = tile * kTileRows + g;
            const float factor = op == Op::kWeighted ? gates[nt][i] * (kFp8 ? kInnerScale : 1.0f) : 1.0f;
            if (column < a.n) out[column] = low * factor;
            if (column + 8 < a.n) out[column + 8] = high * factor;
        }
    }

    // Of this lane's two weight rows, for the warp that will need them; on their way while the tile is multiplied.
    __device__ __forceinline__ float2 load_scales(int group, int tile, int number) const {
        if (!kFp8 || threadIdx.x / 32 != number % kWarps) return make_float2(1.0f, 1.0f);
        const float* scales = a.scales + static_cast<int64_t>(group) * a.n;
        const int g = threadIdx.x % 32 / 4;
        return make_float2(__ldg(scales + weight_row(tile, g)), __ldg(scales + weight_row(tile, g + 8)));
    }

    // The routing into shared memory: one way to the second-level cache for all.
    __device__ __forceinline__ void load_table() {
        const uint4* from = reinterpret_cast<const uint4*>(a.routing);
        for (int i = threadIdx.x; i < kTableBytes / 16; i += kMultiplying)
            reinterpret_cast<uint4*>(&table)[i] = __ldcg(from + i);
        hopper::named_sync(1, kMultiplying);
    }

    __device__ __forceinline__ void multiply_all() {
        // The second halves start once the first ones know the routing.
        if (op == Op::kWeighted) load_table();
        wait_for_previous();
        int done = 0, number = 0, job = -1;
        float sum[NT][4];
        for (int i = 0; i < share.count; ++i, ++number) {
            const int at = blockIdx.x + i * gridDim.x, of = at % share.jobs, tile = at / share.jobs;
            if (of != job) load_tokens(false, of);
            job = of;
            const float2 scale = load_scales(max(a.shared, 0), tile, number);
            multiply_tile(sum, done);
            finish_tile(sum, scale, tile, number);
        }
        if (a.routing == nullptr) return;
        if (op == Op::kSwiGlu) load_table();
        share.of_routed(table.jobs);
        job = -1;
        for (int at = share.begin;; ++number) {
            if (number >= share.count + share.end - share.begin) {
                hopper::barrier_wait(&barriers.full[done % kSlots], done / kSlots & 1);
                at = barriers.tile[done % kSlots];
                if (at < 0) break;
            }
            const int of = at / share.tiles, tile = at - of * share.tiles;
            if (of != job) load_tokens(true, of);
            job = of;
            const float2 scale = load_scales(table.job[of].x, tile, number);
            multiply_tile(sum, done);
            finish_tile(sum, scale, tile, number);
            ++at;
        }
    }
};

template <bool kFp8, int NT, int NK, int bytes, Op op>
__device__ __forceinline__ void product(const Arguments& a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Barriers barriers;
    using Slots = Ring<bytes, NK == 1 && (bytes > 1024)>;
    if (a.k * (kFp8 ? 1 : 2) % bytes != 0) {
        // Behind short rows there are numbers that vanish.
        for (int i = threadIdx.x; i < Slots::kSlots * Slots::kSlotBytes / 16; i += threads_of(NT))
            reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
        hopper::fence_async_shared();
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < Slots::kSlots; ++i) {
            hopper::barrier_init(&barriers.full[i], 1);
            hopper::barrier_init(&barriers.empty[i], kWarps);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();
    Product<kFp8, NT, NK, bytes, op> part(a, memory, barriers);
    if (threadIdx.x >= kMultiplying) {
        if constexpr (NT > 1) hopper::registers_give<kCopyRegisters>();
        if (threadIdx.x < kMultiplying + 32) part.copy();
    } else {
        if constexpr (NT > 1) hopper::registers_take<kMultiplyRegisters>();
        part.multiply_all();
    }
}

}  // namespace decode

#define DECODE_PRODUCT(name, fp8, nt, nk, bytes, op)                                                        \
    extern "C" __global__ void __launch_bounds__(decode::threads_of(nt), 1) name(const decode::Arguments a) { \
        decode::product<fp8, nt, nk, bytes, decode::Op::op>(a);                                             \
    }
// Rows of `nk` stages, as of the released sizes, and short ones.
#define DECODE_PRODUCTS(name, fp8, op, nk, bytes)        \
    DECODE_PRODUCT(name##_8, fp8, 1, nk, bytes, op)      \
    DECODE_PRODUCT(name##_16, fp8, 2, nk, bytes, op)     \
    DECODE_PRODUCT(name##_short_8, fp8, 1, 1, 1024, op)  \
    DECODE_PRODUCT(name##_short_16, fp8, 2, 1, 1024, op)
// Rows of one stage that is a part of a released row: what a rank has of one.
#define DECODE_CUT(name, fp8, op, bytes)       \
    DECODE_PRODUCT(name##_8, fp8, 1, 1, bytes, op) \
    DECODE_PRODUCT(name##_16, fp8, 2, 1, bytes, op)
