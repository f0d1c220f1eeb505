// What the warpgroups of a block share in packed attention on tensor cores: shared memory, the order of tiles and
// slots, and the producer that fills them.
#pragma once

#include "attention.cuh"

namespace attention {

using namespace hopper;

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kSlots = 4;
constexpr int N = 128;         // keys of a slot
// Where so few keys are left, the last slot is multiplied that narrow: pictures are 1 + 128 n tokens.
constexpr int kTail = 16;
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;

// Shared memory.
constexpr int kQueryBytes = 64 * kHeadDim * 2;  // of one warpgroup
constexpr int kSlotBytes = N * kHeadDim * 2;
constexpr int kQueryBuffers = 2;
constexpr int kRing = kConsumers * kQueryBuffers * kQueryBytes;
constexpr int kStaging = kRing + kSlots * kSlotBytes;
constexpr int kBarriers = kStaging + kConsumers * kQueryBytes;

// Named barriers: a warpgroup's turn, and a warpgroup alone.
constexpr int kTurn = 1;
constexpr int kAlone = kTurn + kConsumers;

struct Arguments {
    __nv_bfloat16* out;   // [tokens, query heads * 128]
    float* lse;           // [tokens, query heads] natural logarithm of the sum, or null
    const Row* rows;
    const int* tiles;     // `tile_count`, and those that are there in parts as a whole
    Scheduler* scheduler;
    int* again;           // for each of all tiles whether it is to be done again; then the list of those
    Sum* sums;
    float4* parts;        // `kPartPieces` of each part
    int tile_count;
    int all_tiles;
    int part_slots;       // of a part
    int layer;
    int query_heads;
    float scale;          // of scores, times log2(e); 1 where queries were made with it
};

// A part has the output and the sums of one warp, as its lanes have them.
constexpr int kPartPieces = 32 * (64 + 4) / 4;

struct Shared {
    uint8_t* base;
    uint64_t* slot_full;
    uint64_t* slot_empty;
    // Of each warpgroup, and in it of each buffer; the tile is negative where none is left.
    uint64_t* query_full;
    uint64_t* query_empty;
    volatile int* tile;
};

// Position in a ring.
template <int kCount>
struct Cursor {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == kCount) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// The slots of a tile, `first` to `end`: the prefix's, then those of this step's keys.
template <Kind kKind>
struct Steps {
    int most, in_prefix, prefix_steps, count, first, end;
    __device__ __forceinline__ Steps(const Arguments& a, const Tile& tile) {
        most = tile.most();
        in_prefix = min(tile.prefix, most);
        prefix_steps = (in_prefix + N - 1) / N;
        // At least one, in which a query without keys has them all masked.
        count = max(1, prefix_steps + (most - in_prefix + N - 1) / N);
        first = 0;
        end = count;
        if (kKind == Kind::kParts && tile.part >= 0) {
            first = tile.part * a.part_slots;
            end = min(count, first + a.part_slots);
        }
    }
    // Whether the last slot has so few keys, and is not the first.
    __device__ __forceinline__ bool tailed() const {
        return end == count && end > first + 1 && end > prefix_steps && (most - in_prefix - 1) % N < kTail;
    }
};

// Tiles in the order of the list, or of the list of those that are done again.
template <Kind kKind>
struct Queue {
    static constexpr bool kExact = kKind == Kind::kExact;
    const Arguments& a;
    int at, count;
    __device__ __forceinline__ explicit Queue(const Arguments& a)
        : a(a), at(blockIdx.x), count(kExact ? a.scheduler->again : a.tile_count) {}
    __device__ __forceinline__ int tile() const {
        if (at >= count) return -1;
        return kExact ? a.again[a.all_tiles + at] : at;
    }
    __device__ __forceinline__ void next() {
        at = gridDim.x + atomicAdd(kExact ? &a.scheduler->next_again : &a.scheduler->next, 1);
    }
    // The last block leaves the scheduler as it was.
    __device__ __forceinline__ void finish() {
        Scheduler& s = *a.scheduler;
        if (atomicAdd(kExact ? &s.finished_again : &s.finished, 1) != gridDim.x - 1) return;
        if (kExact) {
            s.again = s.next_again = s.finished_again = 0;
        } else {
            s.next = s.finished = 0;
        }
    }
};

template <Kind kKind>
__device__ void produce(const Shared& shared, const CUtensorMap* queries, const CUtensorMap* arena,
                        const Arguments& a) {
    Cursor<kSlots> ring;
    Cursor<kQueryBuffers> turn;
    auto copy = [&](int row) {
        barrier_wait(&shared.slot_empty[ring.slot], ring.phase ^ 1);
        barrier_expect_bytes(&shared.slot_full[ring.slot], kSlotBytes);
        copy_3d(shared.base + kRing + ring.slot * kSlotBytes, arena, &shared.slot_full[ring.slot], 0, row, 0);
        ring.next();
    };
    // Values follow the keys of the next step, be it another tile's, as they are read.
    int values = -1;
    Queue<kKind> queue(a);
    for (int index = queue.tile(); index >= 0; index = queue.tile()) {
        const Tile tile = load_tile(a.tiles, index);
        const Row row = a.rows[tile.row];
        queue.next();
        if (kKind == Kind::kExact) a.again[index] = 0;
        for (int w = 0; w < kConsumers; ++w) {
            const int buffer = w * kQueryBuffers + turn.slot;
            barrier_wait(&shared.query_empty[buffer], turn.phase ^ 1);
            shared.tile[buffer] = index;
            barrier_expect_bytes(&shared.query_full[buffer], kQueryBytes);
            copy_4d(shared.base + buffer * kQueryBytes, queries, &shared.query_full[buffer], 0, tile.kv_head * kGroup,
                    tile.token + w * kWarpgroupTokens, 0);
        }
        turn.next();
        auto base = [&](const Source& s) { return s.first + a.layer * s.layer_stride + tile.kv_head * s.head_stride; };
        const int prefix = base(row.prefix), fresh = base(row.fresh);
        const Steps<kKind> steps(a, tile);
        for (int j = steps.first; j < steps.end; ++j) {
            const bool in_prefix = j < steps.prefix_steps;
            const int keys = in_prefix ? prefix + j * N : fresh + (j - steps.prefix_steps) * N;
            copy(keys);
            if (values >= 0) copy(values);
            values = keys + (in_prefix ? row.prefix.value_offset : row.fresh.value_offset);
        }
    }
    if (values >= 0) copy(values);
    for (int w = 0; w < kConsumers; ++w) {
        const int buffer = w * kQueryBuffers + turn.slot;
        barrier_wait(&shared.query_empty[buffer], turn.phase ^ 1);
        shared.tile[buffer] = -1;
        barrier_arrive(&shared.query_full[buffer]);
    }
    queue.finish();
}

}  // namespace attention
