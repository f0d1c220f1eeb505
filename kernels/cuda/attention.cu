// Packed attention for 32 query and 8 KV heads of 128, bf16, on Hopper.
//
// A block takes tiles of the host's list until none is left. A tile is `kConsumers * 16` tokens of one row with
// the 4 query heads of one KV head: warpgroup w has 16 tokens, whose heads are the 64 rows of its products.
// One producer thread copies queries, and keys and values through a ring of slots that the warpgroups share.
// A warpgroup issues the scores of keys j + 1 before the product of keys j with the values, so that its softmax
// runs under that product; named barriers let one warpgroup issue after the other, so that one's softmax also
// runs under the other's products.
#include "attention.cuh"
#include "attention_mma.cuh"

using namespace hopper;
using namespace attention;

namespace {

constexpr int kQueryBytes = 64 * kHeadDim * 2;  // of one warpgroup
constexpr int kOrderBarrier = 1;  // the first of the named barriers, one per warpgroup

template <int kConsumers, int N, int kSlots, bool kOverlap>
struct Shape {
    static constexpr int kSlotBytes = N * kHeadDim * 2;
    static constexpr int kQueries = 0;
    static constexpr int kRing = kQueries + kConsumers * kQueryBytes;
    static constexpr int kStaging = kRing + kSlots * kSlotBytes;
    static constexpr int kBarriers = kStaging + kConsumers * kQueryBytes;
    static constexpr int kBytes = kBarriers + (2 * kSlots + 2 * kConsumers) * 8 + kConsumers * 8;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    // Together at most what the block has at its start: 168 * 384 or 128 * 512.
    static constexpr int kRegisters = kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
};

// Position in the ring.
template <int kSlots>
struct Cursor {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Arguments {
    __nv_bfloat16* out;   // [tokens, query heads * 128]
    float* lse;           // [tokens, query heads] natural logarithm of the sum, or null
    const Row* rows;
    const Tile* tiles;
    int* scheduler;       // next tile and finished blocks; zero before the first launch, and zeroed by each
    int tile_count;
    int layer;
    int query_heads;
    float scale;          // times log2(e)
};

struct Shared {
    uint8_t* base;
    uint64_t* slot_full;
    uint64_t* slot_empty;
    uint64_t* query_full;
    uint64_t* query_empty;
    volatile int* tile;  // of each warpgroup
};

template <class S, int kConsumers, int N, int kSlots, bool kOverlap>
__device__ void produce(const Shared& shared, const CUtensorMap* queries, const CUtensorMap* arena,
                        const Arguments& a) {
    Cursor<kSlots> ring;
    uint32_t query_phase = 1;
    int index = blockIdx.x;
    auto copy = [&](int row) {
        barrier_wait(&shared.slot_empty[ring.slot], ring.phase ^ 1);
        barrier_expect_bytes(&shared.slot_full[ring.slot], S::kSlotBytes);
        copy_3d(shared.base + S::kRing + ring.slot * S::kSlotBytes, arena, &shared.slot_full[ring.slot], 0, row, 0);
        ring.next();
    };
    while (index < a.tile_count) {
        const Tile tile = load_tile(a.tiles, index);
        const Row row = a.rows[tile.row];
        const int after = gridDim.x + atomicAdd(a.scheduler, 1);
        for (int w = 0; w < kConsumers; ++w) {
            barrier_wait(&shared.query_empty[w], query_phase);
            shared.tile[w] = index;
            barrier_expect_bytes(&shared.query_full[w], kQueryBytes);
            copy_4d(shared.base + S::kQueries + w * kQueryBytes, queries, &shared.query_full[w], 0,
                    tile.kv_head * kGroup, tile.token + w * kWarpgroupTokens, 0);
        }
        query_phase ^= 1;
        auto base = [&](const Source& s) { return s.first + a.layer * s.layer_stride + tile.kv_head * s.head_stride; };
        const int prefix = base(row.prefix), fresh = base(row.fresh);
        const int most = tile.most(), in_prefix = min(tile.prefix, most);
        const int prefix_steps = (in_prefix + N - 1) / N;
        const int steps = max(1, prefix_steps + (most - in_prefix + N - 1) / N);
        // Keys run one tile ahead of values where the products do.
        constexpr int kAhead = kOverlap ? 1 : 0;
        for (int j = 0; j < steps + kAhead; ++j) {
            if (j < steps) copy(j < prefix_steps ? prefix + j * N : fresh + (j - prefix_steps) * N);
            const int v = j - kAhead;
            if (v >= 0) {
                copy(v < prefix_steps ? prefix + row.prefix.value_offset + v * N
                                      : fresh + row.fresh.value_offset + (v - prefix_steps) * N);
            }
        }
        index = after;
    }
    for (int w = 0; w < kConsumers; ++w) {
        barrier_wait(&shared.query_empty[w], query_phase);
        shared.tile[w] = -1;
        barrier_arrive(&shared.query_full[w]);
    }
    if (atomicAdd(a.scheduler + 1, 1) == gridDim.x - 1) {
        a.scheduler[0] = 0;
        a.scheduler[1] = 0;
    }
}

// Values [N tokens][128] as the second operand: tokens are the inner dimension of the product, so the tile is
// "MN-major": groups of 8 tokens 1024 bytes apart, the second 64 columns N * 128 bytes behind the first.
template <int N>
__device__ __forceinline__ uint64_t values_descriptor(uint32_t address) {
    return ((address & 0x3FFFF) >> 4) | (uint64_t(N * 128 >> 4) << 16) | (uint64_t(1024 >> 4) << 32) |
           (uint64_t(1) << 62);
}

template <int N>
__device__ __forceinline__ void issue_scores(float (&s)[N / 2], const uint8_t* queries, const uint8_t* keys) {
    const uint64_t a = descriptor_swizzle128(queries), b = descriptor_swizzle128(keys);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
        const int half = k / 4, step = k % 4;
        multiply_scores(s, a + (half * 64 * 128 + step * 32) / 16, b + (half * N * 128 + step * 32) / 16, k == 0);
    }
}

template <int N>
__device__ __forceinline__ void issue_values(float (&o)[64], const uint32_t (&p)[N / 4], const uint8_t* values) {
    const uint64_t b = values_descriptor<N>(smem_address(values));
#pragma unroll
    for (int k = 0; k < N / 16; ++k) multiply_values(o, &p[4 * k], b + k * 2048 / 16);
}

// Writes a warp's 16 rows, through shared memory that only this warp uses, in pieces of 16 bytes.
__device__ __forceinline__ void store_output(const Arguments& a, const Tile& tile, int first_token, uint8_t* staging,
                                             const float (&o)[64], const float (&inverse)[2]) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int at = ((i ^ row) * 16) + (lane % 4) * 4;
        *reinterpret_cast<uint32_t*>(staging + row * 256 + at) =
            pack_bf16(o[4 * i] * inverse[0], o[4 * i + 1] * inverse[0]);
        *reinterpret_cast<uint32_t*>(staging + (row + 8) * 256 + at) =
            pack_bf16(o[4 * i + 2] * inverse[1], o[4 * i + 3] * inverse[1]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = 2 * i + lane / 16, chunk = lane % 16;
        const int token = first_token + r / kGroup;
        const uint4 value = *reinterpret_cast<const uint4*>(staging + r * 256 + ((chunk ^ (r % 8)) * 16));
        if (token < tile.tokens) {
            const size_t head = size_t(tile.token + token) * a.query_heads + tile.kv_head * kGroup + r % kGroup;
            *reinterpret_cast<uint4*>(a.out + head * kHeadDim + chunk * 8) = value;
        }
    }
    __syncwarp();
}

template <class S, int kConsumers, int N, int kSlots, bool kOverlap>
__device__ void consume(const Shared& shared, const Arguments& a) {
    const int w = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint8_t* queries = shared.base + S::kQueries + w * kQueryBytes;
    const uint8_t* slots = shared.base + S::kRing;
    const int mine = kOrderBarrier + w, following = kOrderBarrier + (w + 1) % kConsumers;
    Cursor<kSlots> ring;
    uint32_t query_phase = 0;
    if (w == kConsumers - 1) named_arrive(following, 256);
    auto release = [&](int slot) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.slot_empty[slot]);
    };
    while (true) {
        barrier_wait(&shared.query_full[w], query_phase);
        const int index = shared.tile[w];
        if (index < 0) break;
        const Tile tile = load_tile(a.tiles, index);
        const int most = tile.most(), least = tile.least(), in_prefix = min(tile.prefix, most);
        const int prefix_steps = (in_prefix + N - 1) / N;
        const int steps = max(1, prefix_steps + (most - in_prefix + N - 1) / N);
        const int token = w * kWarpgroupTokens + warp * 4 + lane / 16;  // of row lane / 4 of this warp
        const int visible0 = tile.visible_to(token), visible1 = tile.visible_to(token + 2);
        Softmax<N> softmax(a.scale);
        float o[64];
        float s[N / 2];
        uint32_t p[N / 4];
        float factor[2];
#pragma unroll
        for (int i = 0; i < 64; ++i) o[i] = 0.0f;
        auto mask = [&](int j) {
            const bool prefix = j < prefix_steps;
            const int start = prefix ? j * N : in_prefix + (j - prefix_steps) * N;
            const int end = prefix ? in_prefix : most;
            if (start + N > min(end, least)) {
                Softmax<N>::mask(s, min(visible0, end) - start, min(visible1, end) - start);
            }
        };
        if constexpr (kOverlap) {
            barrier_wait(&shared.slot_full[ring.slot], ring.phase);
            named_sync(mine, 256);
            keep(s);
            wgmma_fence();
            issue_scores<N>(s, queries, slots + ring.slot * S::kSlotBytes);
            wgmma_commit();
            named_arrive(following, 256);
            wgmma_wait<0>();
            keep(s);
            release(ring.slot);
            ring.next();
            mask(0);
            softmax.advance(s, factor);
            pack_probabilities<N>(s, p);
            for (int j = 1; j < steps; ++j) {
                barrier_wait(&shared.slot_full[ring.slot], ring.phase);
                const int key_slot = ring.slot;
                named_sync(mine, 256);
                keep(s);
                keep(o);
                wgmma_fence();
                issue_scores<N>(s, queries, slots + ring.slot * S::kSlotBytes);
                wgmma_commit();
                ring.next();
                barrier_wait(&shared.slot_full[ring.slot], ring.phase);
                wgmma_fence();
                issue_values<N>(o, p, slots + ring.slot * S::kSlotBytes);
                wgmma_commit();
                named_arrive(following, 256);
                wgmma_wait<1>();
                keep(s);
                release(key_slot);
                mask(j);
                const bool grown = softmax.advance(s, factor);
                keep(s);
                const bool some = __any_sync(0xFFFFFFFF, grown || softmax.sum[0] + softmax.sum[1] < 0.0f);
                if (some) {
                    asm volatile("wgmma.wait_group.sync.aligned 0; // and rescale" ::: "memory");
                    keep(o);
                    rescale(o, factor);
                } else {
                    wgmma_wait<0>();
                    keep(o);
                }
                release(ring.slot);
                ring.next();
                pack_probabilities<N>(s, p);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.query_empty[w]);
            barrier_wait(&shared.slot_full[ring.slot], ring.phase);
            keep(o);
            wgmma_fence();
            issue_values<N>(o, p, slots + ring.slot * S::kSlotBytes);
            wgmma_commit();
            wgmma_wait<0>();
            keep(o);
            release(ring.slot);
            ring.next();
        } else {
            for (int j = 0; j < steps; ++j) {
                barrier_wait(&shared.slot_full[ring.slot], ring.phase);
                named_sync(mine, 256);
                keep(s);
                wgmma_fence();
                issue_scores<N>(s, queries, slots + ring.slot * S::kSlotBytes);
                wgmma_commit();
                named_arrive(following, 256);
                wgmma_wait<0>();
                keep(s);
                release(ring.slot);
                ring.next();
                mask(j);
                const bool grown = softmax.advance(s, factor);
                pack_probabilities<N>(s, p);
                if (grown) rescale(o, factor);
                if (j == steps - 1) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&shared.query_empty[w]);
                }
                barrier_wait(&shared.slot_full[ring.slot], ring.phase);
                keep(o);
                wgmma_fence();
                issue_values<N>(o, p, slots + ring.slot * S::kSlotBytes);
                wgmma_commit();
                wgmma_wait<0>();
                keep(o);
                release(ring.slot);
                ring.next();
            }
        }
        query_phase ^= 1;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.sum[r]);
            inverse[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
            const int at = token + 2 * r;
            if (a.lse != nullptr && lane % 4 == 0 && at < tile.tokens) {
                const float log_sum = sum > 0.0f ? (softmax.max[r] * softmax.scale + log2f(sum)) * 0.69314718f : -INFINITY;
                a.lse[size_t(tile.token + at) * a.query_heads + tile.kv_head * kGroup + lane / 4 % kGroup] = log_sum;
            }
        }
        store_output(a, tile, w * kWarpgroupTokens + warp * 4,
                     shared.base + S::kStaging + w * kQueryBytes + warp * 4096, o, inverse);
    }
}

template <int kConsumers, int N, int kSlots, bool kOverlap>
__device__ __forceinline__ void attend(const CUtensorMap* queries, const CUtensorMap* arena, const Arguments& a) {
    using S = Shape<kConsumers, N, kSlots, kOverlap>;
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared shared;
    shared.base = memory;
    shared.slot_full = reinterpret_cast<uint64_t*>(memory + S::kBarriers);
    shared.slot_empty = shared.slot_full + kSlots;
    shared.query_full = shared.slot_empty + kSlots;
    shared.query_empty = shared.query_full + kConsumers;
    shared.tile = reinterpret_cast<volatile int*>(shared.query_empty + kConsumers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(&shared.slot_full[i], 1);
            barrier_init(&shared.slot_empty[i], kConsumers * 4);
        }
        for (int i = 0; i < kConsumers; ++i) {
            barrier_init(&shared.query_full[i], 1);
            barrier_init(&shared.query_empty[i], 4);
        }
        barrier_init_fence();
        tensor_map_prefetch(queries);
        tensor_map_prefetch(arena);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<S::kProducerRegisters>();
        if (threadIdx.x == 0) produce<S, kConsumers, N, kSlots, kOverlap>(shared, queries, arena, a);
    } else {
        registers_take<S::kRegisters>();
        consume<S, kConsumers, N, kSlots, kOverlap>(shared, a);
    }
}

}  // namespace

#define ATTENTION(name, consumers, n, slots, overlap)                                                           \
    extern "C" __global__ void __launch_bounds__((consumers + 1) * 128, 1)                                      \
        name(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap arena,            \
             const __grid_constant__ Arguments a) {                                                             \
        attend<consumers, n, slots, overlap>(&queries, &arena, a);                                              \
    }

#ifndef ATTENTION_VARIANTS
ATTENTION(attention_128, 2, 128, 4, true)
#else
ATTENTION_VARIANTS
#endif
