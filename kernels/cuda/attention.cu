// Packed attention for heads of 128 and 4 query heads of each KV head, bf16, on Hopper.
//
// A block takes tiles of the host's list until none is left. A tile is 32 tokens of one row with the 4 query heads
// of one KV head; each of two warpgroups has 16 tokens, whose heads are the 64 rows of its products. One producer
// thread copies queries, and keys and values through a ring of slots that both warpgroups read. A warpgroup issues
// the scores of keys j + 1 before the product of keys j with the values; named barriers let the warpgroups issue in
// turn, so that one's exponentials run under the other's products.
//
// The tensor cores never wait as long as a warpgroup is ready when its turn comes, so what lies between its turns
// is kept short: probabilities are exp2(score) without a running maximum. Sums that leave the range in which
// that is exact are found at the end, and their tiles are done again by `attention_128_exact`, which keeps
// running maxima.
//
// Where few tokens with many keys make fewer tiles than there are multiprocessors, `attention_128_parts` has tiles
// with a part of the keys: without maxima, outputs and sums of parts are just added.
#include "attention_blocks.cuh"

using namespace hopper;
using namespace attention;

namespace {

// Multiplies a warpgroup's queries in place.
__device__ __forceinline__ void scale_queries(uint8_t* queries, float scale) {
    uint4* pieces = reinterpret_cast<uint4*>(queries) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kQueryBytes / 16 / 128; ++i) {
        uint4& piece = pieces[128 * i];
        piece = {scale_pair(piece.x, scale), scale_pair(piece.y, scale), scale_pair(piece.z, scale),
                 scale_pair(piece.w, scale)};
    }
}

// Scores of `W` keys; a slot is two panels of 64 columns.
template <int W>
__device__ __forceinline__ void issue_scores(float (&s)[W / 2], const uint8_t* queries, const uint8_t* keys) {
    const uint64_t a = descriptor_swizzle128(queries), b = descriptor_swizzle128(keys);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
        const int panel = k / 4, column = k % 4 * 32;
        multiply_scores(s, a + (panel * 64 * 128 + column) / 16, b + (panel * N * 128 + column) / 16, k == 0);
    }
}

// o += p . v for `W` keys. Values are "MN-major": groups of 8 tokens 1024 bytes apart, the second panel behind the
// first.
template <int W>
__device__ __forceinline__ void issue_values(float (&o)[64], const uint32_t (&p)[N / 4], const uint8_t* values) {
    const uint64_t b = descriptor_swizzle128(values) - (uint64_t(1) << 16) + (uint64_t(N * 128 >> 4) << 16);
#pragma unroll
    for (int k = 0; k < W / 16; ++k) multiply_values(o, &p[4 * k], b + k * 16 * 128 / 16);
}

__device__ __forceinline__ void add(float* to, float4 x) {
    to[0] += x.x;
    to[1] += x.y;
    to[2] += x.z;
    to[3] += x.w;
}

// Writes those of a warp's 16 rows that have a bit, through shared memory that only this warp uses.
__device__ __forceinline__ void store_output(const Arguments& a, const Tile& tile, int first_token, uint8_t* staging,
                                             const float (&o)[64], const float (&inverse)[2], uint32_t rows) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 4;
    // Pieces of 16 bytes are permuted within a row, so that rows differ in banks.
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
        const int r = 2 * i + lane / 16, piece = lane % 16;
        const uint4 value = *reinterpret_cast<const uint4*>(staging + r * 256 + ((piece ^ (r % 8)) * 16));
        if (rows >> r & 1) {
            const size_t token = tile.token + first_token + r / kGroup;
            const size_t head = token * a.query_heads + tile.kv_head * kGroup + r % kGroup;
            *reinterpret_cast<uint4*>(a.out + head * kHeadDim + piece * 8) = value;
        }
    }
    __syncwarp();
}

// A warpgroup. Its products go on from tile to tile: the last one of a tile is issued behind the first scores of
// the next.
template <Kind kKind>
struct Consumer {
    static constexpr bool kExact = kKind == Kind::kExact;
    const Shared& shared;
    const Arguments& a;
    const int w, warp, lane;
    Cursor<kSlots> ring;
    Cursor<kQueryBuffers> turn;
    Softmax<kExact> softmax;
    float o[64];
    uint32_t p[N / 4];

    __device__ __forceinline__ Consumer(const Shared& shared, const Arguments& a)
        : shared(shared),
          a(a),
          // Told to be the same in the warp: the descriptors are then computed once, not by every lane.
          w(__shfl_sync(0xFFFFFFFF, threadIdx.x / 128 - 1, 0)),
          warp(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32 % 4, 0)),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int buffer() const { return w * kQueryBuffers + turn.slot; }
    __device__ __forceinline__ uint8_t* queries() const { return shared.base + buffer() * kQueryBytes; }
    __device__ __forceinline__ const uint8_t* slot() const { return shared.base + kRing + ring.slot * kSlotBytes; }
    __device__ __forceinline__ void wait_slot() const { barrier_wait(&shared.slot_full[ring.slot], ring.phase); }
    __device__ __forceinline__ void wait_turn() const { named_sync(kTurn + w, 256); }
    __device__ __forceinline__ void pass_turn() const { named_arrive(kTurn + (w + 1) % kConsumers, 256); }
    __device__ __forceinline__ void arrive(uint64_t* barrier) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }
    __device__ __forceinline__ void release(int slot) const { arrive(&shared.slot_empty[slot]); }

    // Token of row lane / 4 of this warp, in the tile; that of row + 8 is 2 further.
    __device__ __forceinline__ int token() const { return w * kWarpgroupTokens + warp * 4 + lane / 16; }

    __device__ __forceinline__ int next_tile() {
        barrier_wait(&shared.query_full[buffer()], turn.phase);
        const int index = shared.tile[buffer()];
        if (index >= 0 && a.scale != 1.0f) {
            scale_queries(queries(), a.scale);
            fence_async_shared();
            named_sync(kAlone + w, 128);
        }
        return index;
    }

    __device__ __forceinline__ void begin() {
        softmax = Softmax<kExact>();
#pragma unroll
        for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    }

    template <int W>
    __device__ __forceinline__ void issue_product() {
        wait_slot();
        keep(o);
        wgmma_fence();
        issue_values<W>(o, p, slot());
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_last_product(bool tailed) {
        if (tailed) {
            issue_product<kTail>();
        } else {
            issue_product<N>();
        }
    }

    __device__ __forceinline__ bool sum_parts(const Tile& tile);
    __device__ __forceinline__ void finish(int index);
    __device__ __forceinline__ void run();
};

// Leaves a warp's part for the warp that comes last, which has the sum of all parts then, in their order.
template <Kind kKind>
__device__ __forceinline__ bool Consumer<kKind>::sum_parts(const Tile& tile) {
    const int count = (Steps<kKind>(a, tile).count + a.part_slots - 1) / a.part_slots;
    float4* parts = a.parts + int64_t(tile.sum) * kPartPieces + lane;
    float4* mine = parts + tile.part * kPartPieces;
#pragma unroll
    for (int i = 0; i < 64; i += 4) __stcg(mine + 8 * i, make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]));
    float* sum = softmax.sum;
    __stcg(mine + 8 * 64, make_float4(sum[0], sum[1], sum[2], sum[3]));
    __threadfence();
    __syncwarp();
    int arrived = 0;
    if (lane == 0) arrived = atomicAdd(&a.sums[tile.sum].arrived, 1);
    if (__shfl_sync(0xFFFFFFFF, arrived, 0) + 1 < count) return false;
    __threadfence();
    if (lane == 0) a.sums[tile.sum].arrived = 0;
    begin();
    for (int part = 0; part < count; ++part, parts += kPartPieces) {
#pragma unroll
        for (int i = 0; i < 64; i += 4) add(&o[i], __ldcg(parts + 8 * i));
        add(sum, __ldcg(parts + 8 * 64));
    }
    return true;
}

// Writes what is finished of a tile.
template <Kind kKind>
__device__ __forceinline__ void Consumer<kKind>::finish(int index) {
    const Tile tile = load_tile(a.tiles, index);
    if constexpr (kKind == Kind::kParts) {
        if (w * kWarpgroupTokens + warp * 4 >= tile.tokens) return;
        if (tile.part >= 0) {
            if (!sum_parts(tile)) return;
            index = a.sums[tile.sum].whole;
        }
    }
    float inverse[2];
    bool ours[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = softmax.total(r), logarithm = softmax.max[r] + log2f(sum);
        const int at = token() + 2 * r;
        inverse[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
        // Also false where a score is not a number.
        const bool in_range = tile.visible_to(at) == 0 || fabsf(logarithm) < kRange;
        ours[r] = at < tile.tokens && !(kExact && in_range);
        if (!kExact && at < tile.tokens && !in_range && atomicExch(&a.again[index], 1) == 0) {
            a.again[a.all_tiles + atomicAdd(&a.scheduler->again, 1)] = index;
        }
        if (a.lse != nullptr && lane % 4 == 0 && ours[r]) {
            const size_t head = size_t(tile.token + at) * a.query_heads + tile.kv_head * kGroup + lane / 4 % kGroup;
            a.lse[head] = sum > 0.0f ? logarithm * 0.69314718f : -INFINITY;
        }
    }
    const uint32_t rows = every_fourth_bit(__ballot_sync(0xFFFFFFFF, ours[0])) |
                          every_fourth_bit(__ballot_sync(0xFFFFFFFF, ours[1])) << 8;
    store_output(a, tile, w * kWarpgroupTokens + warp * 4, shared.base + kStaging + w * kQueryBytes + warp * 4096, o,
                 inverse, rows);
}

template <Kind kKind>
__device__ __forceinline__ void Consumer<kKind>::run() {
    int previous = -1;
    bool tailed = false;
    for (int index = next_tile(); index >= 0; index = next_tile()) {
        const Tile tile = load_tile(a.tiles, index);
        const Steps<kKind> steps(a, tile);
        const int least = tile.least();
        const int visible[2] = {tile.visible_to(token()), tile.visible_to(token() + 2)};
        float s[N / 2];
        auto soften = [&](auto& s, int j, float(&factor)[2]) {
            constexpr int W = 2 * sizeof(s) / sizeof(float);
            const bool prefix = j < steps.prefix_steps;
            const int start = prefix ? j * N : steps.in_prefix + (j - steps.prefix_steps) * N;
            const int end = prefix ? steps.in_prefix : steps.most;
            if (start + W > min(end, least)) mask_scores(s, min(visible[0], end) - start, min(visible[1], end) - start);
            return softmax.subtract_maximum(s, factor);
        };
        auto issue = [&](auto& s) {
            constexpr int W = 2 * sizeof(s) / sizeof(float);
            wait_slot();
            wait_turn();
            keep(s);
            wgmma_fence();
            issue_scores<W>(s, queries(), slot());
            wgmma_commit();
            ring.next();
        };
        // Probabilities of step j, whose scores have been issued before a product. Both are done on return.
        auto step = [&](auto& s, int j, int key_slot) {
            constexpr int W = 2 * sizeof(s) / sizeof(float);
            float factor[2];
            pass_turn();
            wgmma_wait<1>();
            keep(s);
            release(key_slot);
            const bool grown = soften(s, j, factor);
            // The product is done about when a part of the exponentials is. Without a branch the assembler would
            // wait for it before them; without maxima the first case never happens.
            constexpr int kPart = W / 4;
            softmax.exponentiate(s, 0, kPart);
            keep(s);
            if (kExact ? __any_sync(0xFFFFFFFF, grown) : a.tile_count < 0) {
                asm volatile("wgmma.wait_group.sync.aligned 0; // and rescale" ::: "memory");
                keep(o);
                if (kExact) rescale(o, factor);
            } else {
                wgmma_wait<0>();
                keep(o);
            }
            softmax.exponentiate(s, kPart, W / 2);
            release(ring.slot);
            ring.next();
            pack_probabilities<W>(s, p);
        };
        {
            // The first scores, and the last product of the tile before.
            float factor[2];
            const int key_slot = ring.slot;
            issue(s);
            if (previous >= 0) issue_last_product(tailed);
            pass_turn();
            wgmma_wait<0>();
            keep(s);
            keep(o);
            release(key_slot);
            if (previous >= 0) {
                release(ring.slot);
                ring.next();
                finish(previous);
            }
            begin();
            soften(s, steps.first, factor);
            softmax.exponentiate(s, 0, N / 2);
            pack_probabilities<N>(s, p);
        }
        tailed = steps.tailed();
        previous = index;
        const int whole = steps.end - (tailed ? 1 : 0);
        for (int j = steps.first + 1; j < whole; ++j) {
            const int key_slot = ring.slot;
            issue(s);
            issue_product<N>();
            step(s, j, key_slot);
        }
        float few[kTail / 2];
        if (tailed) {
            const int key_slot = ring.slot;
            issue(few);
            issue_product<N>();
            step(few, whole, key_slot);
        }
        arrive(&shared.query_empty[buffer()]);
        turn.next();
    }
    if (previous < 0) return;
    issue_last_product(tailed);
    wgmma_wait<0>();
    keep(o);
    release(ring.slot);
    finish(previous);
}

template <Kind kKind>
__device__ __forceinline__ void consume(const Shared& shared, const Arguments& a) {
    Consumer<kKind> consumer(shared, a);
    if (consumer.w == kConsumers - 1) consumer.pass_turn();
    consumer.run();
}

template <Kind kKind>
__device__ __forceinline__ void attend(const CUtensorMap* queries, const CUtensorMap* arena, const Arguments& a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared shared;
    shared.base = memory;
    shared.slot_full = reinterpret_cast<uint64_t*>(memory + kBarriers);
    shared.slot_empty = shared.slot_full + kSlots;
    shared.query_full = shared.slot_empty + kSlots;
    shared.query_empty = shared.query_full + kConsumers * kQueryBuffers;
    shared.tile = reinterpret_cast<volatile int*>(shared.query_empty + kConsumers * kQueryBuffers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(&shared.slot_full[i], 1);
            barrier_init(&shared.slot_empty[i], kConsumers * 4);
        }
        for (int i = 0; i < kConsumers * kQueryBuffers; ++i) {
            barrier_init(&shared.query_full[i], 1);
            barrier_init(&shared.query_empty[i], 4);
        }
        barrier_init_fence();
        tensor_map_prefetch(queries);
        tensor_map_prefetch(arena);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<kProducerRegisters>();
        if (threadIdx.x == 0) produce<kKind>(shared, queries, arena, a);
    } else {
        registers_take<kConsumerRegisters>();
        consume<kKind>(shared, a);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_128(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap arena,
                  const __grid_constant__ Arguments a) {
    attend<Kind::kWhole>(&queries, &arena, a);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_128_parts(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap arena,
                        const __grid_constant__ Arguments a) {
    attend<Kind::kParts>(&queries, &arena, a);
}

// The tiles that the kernel before left, usually none.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_128_exact(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap arena,
                        const __grid_constant__ Arguments a) {
    if (a.scheduler->again == 0) return;
    attend<Kind::kExact>(&queries, &arena, a);
}
