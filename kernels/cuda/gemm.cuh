// Grouped matrix product: out[r, :] = a[r, :] . w[g]^T for the rows r in offsets[g]..offsets[g + 1], with a [rows, k],
// w [groups, n, k], fp32 accumulation, and what follows the product done in registers (gemm_epilogue.cuh).
//
// A persistent kernel of three warpgroups: one warp copies tiles of 128 rows of a and COLUMNS rows of w into a ring of
// stages, two warpgroups multiply (64 rows each) and store. Two blocks of a cluster share one operand: each copies half
// of it to both, so that less is read from L2. A warpgroup whose 64 rows lie behind the group's end does not multiply.
#pragma once

#include <type_traits>

#include "gemm_codes.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_multiply.cuh"
#include "gemm_schedule.cuh"
#include "hopper.cuh"

namespace gemm {

using namespace hopper;

constexpr int THREADS = 384;          // the copying warpgroup, then two that multiply
constexpr int STAGE_K_BYTES = 128;    // bytes along k of a stage: one swizzle row
constexpr int COPY_REGISTERS = 56;    // setmaxnreg: 56 * 128 + 224 * 256 <= 65536
constexpr int WORK_REGISTERS = 224;
constexpr int A_HALF_BYTES = HALF_ROWS * STAGE_K_BYTES;
constexpr int WARPS_WORKING = 8;

// What follows the product.
enum class Finish {
    STORE,     // bf16
    SWIGLU,    // the first half of w's rows times SiLU of the second half, bf16
    CODES,     // the same as e4m3 (gemm_codes.cuh)
    ADD,       // plus the residual, bf16
    FLOAT,     // fp32
};

// A kernel: bytes of an element, rows of w of a tile, stages of the ring, blocks of a cluster.
template <int ELEMENT, int WIDTH, int RING, int BLOCKS, Finish FINISH>
struct Product {
    static constexpr int ELEMENT_BYTES = ELEMENT;
    static constexpr int COLUMNS = WIDTH;
    static constexpr int STAGES = RING;
    static constexpr int CLUSTER = BLOCKS;
    static_assert(CLUSTER == 1 || CLUSTER == 2, "one operand is shared by two blocks");
    static constexpr bool CODES = FINISH == Finish::CODES;
    static constexpr bool SWIGLU = CODES || FINISH == Finish::SWIGLU;
    static constexpr bool RESIDUAL = FINISH == Finish::ADD;
    static constexpr bool FLOAT = FINISH == Finish::FLOAT;
    static constexpr int OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;  // columns of out of a tile
    static_assert(FLOAT || CODES || OUT_COLUMNS % Staging::BOX_COLUMNS == 0, "tiles of out are whole boxes");
    using Sums = float[COLUMNS / 2];
    using Scaling = std::conditional_t<ELEMENT == 1, Scales<COLUMNS, SWIGLU>, NoScales>;

    static __device__ __forceinline__ void multiply(Sums& d, uint64_t a, uint64_t b, int accumulate) {
        if constexpr (ELEMENT == 2)
            multiply_bf16(d, a, b, accumulate);
        else
            multiply_e4m3(d, a, b, accumulate);
    }
};

template <typename Traits>
struct Shape {
    static constexpr int B_HALF_BYTES = Traits::COLUMNS / 2 * STAGE_K_BYTES;
    static constexpr int STAGE_BYTES = 2 * A_HALF_BYTES + 2 * B_HALF_BYTES;
};

constexpr int MAX_STAGES = 8;
constexpr int TICKETS = 1;  // work items that are drawn before they are needed: while the tile before is copied

struct Barriers {
    uint64_t full[MAX_STAGES];
    uint64_t empty[MAX_STAGES];
    uint64_t ticket_full[TICKETS];
    uint64_t ticket_empty[TICKETS];
    int next_item[MAX_STAGES];  // with the last stage of a tile: the item after it
    int ticket[TICKETS];
};

// Work items given out beyond the first of each cluster; 0 between launches, of which one runs at a time.
static __device__ int drawn_items;

// A place in the ring of stages; `parity` is that of the pass over the ring.
template <int STAGES>
struct Place {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Draws work items for the cluster; one thread of its first block.
template <typename Traits>
__device__ __forceinline__ void draw_items(int items, Barriers& barriers) {
    const int clusters = gridDim.x / Traits::CLUSTER;
    const int last = max(items - clusters, 0) + clusters - 1;  // every cluster draws one item that is not there
    Place<TICKETS> place;
    int item = blockIdx.x / Traits::CLUSTER;
    const bool idle = item >= items;
    do {
        barrier_wait(&barriers.ticket_empty[place.stage], place.parity ^ 1);
        const int drawn = atomicAdd(&drawn_items, 1);
        if (drawn == last) drawn_items = 0;
        item = clusters + drawn;
        for (uint32_t rank = 0; rank < Traits::CLUSTER && !idle; ++rank) {
            uint64_t* full = &barriers.ticket_full[place.stage];
            barrier_expect_bytes_remote(full, sizeof(int), rank);
            store_remote(&barriers.ticket[place.stage], item, full, rank);
        }
        place.advance();
    } while (item < items && !idle);
}

// Copies one stage of a tile.
template <typename Traits>
__device__ __forceinline__ void copy_stage(const CUtensorMap* a_map, const CUtensorMap* b_map, const Tile& tile,
                                           int b_first, int b_second, int k, uint64_t* full, char* a, uint32_t rank) {
    using S = Shape<Traits>;
    constexpr uint16_t BOTH = 3;
    const bool one_half = tile.rows <= HALF_ROWS;
    char* b = a + 2 * A_HALF_BYTES;
    barrier_expect_bytes(full, (one_half ? 1 : 2) * A_HALF_BYTES + 2 * S::B_HALF_BYTES);
    if (Traits::CLUSTER == 2 && tile.shared_rows) {
        if (rank == 0 || !one_half)
            copy_2d_multicast(a + rank * A_HALF_BYTES, a_map, full, k, tile.row + rank * HALF_ROWS, BOTH);
    } else {
        copy_2d(a, a_map, full, k, tile.row);
        if (!one_half) copy_2d(a + A_HALF_BYTES, a_map, full, k, tile.row + HALF_ROWS);
    }
    if (Traits::CLUSTER == 2 && !tile.shared_rows) {
        copy_2d_multicast(b + rank * S::B_HALF_BYTES, b_map, full, k, rank ? b_second : b_first, BOTH);
    } else {
        copy_2d(b, b_map, full, k, b_first);
        copy_2d(b + S::B_HALF_BYTES, b_map, full, k, b_second);
    }
}

// Copies every stage of every tile; one thread of each block.
template <typename Traits>
__device__ __forceinline__ void copy_tiles(const CUtensorMap* a_map, const CUtensorMap* b_map, const Arguments& args,
                                           const Groups& groups, Barriers& barriers, char* stages, uint32_t rank) {
    constexpr int STAGE_K = STAGE_K_BYTES / Traits::ELEMENT_BYTES;
    const int items = groups.first_item[args.groups];
    const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
    Place<Traits::STAGES> place;
    Place<TICKETS> ticket;
    int group = 0;
    for (int item = blockIdx.x / Traits::CLUSTER; item < items;) {
        const Tile tile = find_tile<Traits::CLUSTER>(groups, item, group, column_tiles, rank);
        group = tile.group;
        // Rows of w: of the tile's first half, and of its second (the gate's, for SwiGLU).
        const int b_first = tile.group * args.n + tile.column_tile * Traits::OUT_COLUMNS;
        const int b_second = b_first + (Traits::SWIGLU ? args.columns : Traits::COLUMNS / 2);
        for (int k = 0; k < args.k; k += STAGE_K) {
            barrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
            if (k + STAGE_K >= args.k) {
                barrier_wait_cluster(&barriers.ticket_full[ticket.stage], ticket.parity);
                item = *static_cast<volatile int*>(&barriers.ticket[ticket.stage]);
                // The arrival needs the item, which is never negative: it must not overtake the read, since the next
                // ticket comes from another multiprocessor and waits for nothing else.
                barrier_arrive_remote(&barriers.ticket_empty[ticket.stage], item < 0);
                ticket.advance();
                barriers.next_item[place.stage] = item;
            }
            copy_stage<Traits>(a_map, b_map, tile, b_first, b_second, k, &barriers.full[place.stage],
                               stages + place.stage * Shape<Traits>::STAGE_BYTES, rank);
            place.advance();
        }
    }
}

// Says that this warp no longer reads a stage: to all blocks of a cluster, whose copies may write it.
template <int CLUSTER>
__device__ __forceinline__ void release(uint64_t* empty) {
    const uint32_t lane = threadIdx.x & 31;
    if (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_remote(empty, lane);
    } else if (lane == 0) {
        barrier_arrive(empty);
    }
}

// Multiplies the 64 rows of warpgroup `half` of a tile. The products of the last stage are still under way; returns
// that stage.
template <typename Traits>
__device__ __forceinline__ int multiply_tile(typename Traits::Sums& sums, Barriers& barriers, const char* stages,
                                             Place<Traits::STAGES>& place, int steps, int half) {
    int last = 0;
    for (int step = 0; step < steps; ++step) {
        const char* a = stages + place.stage * Shape<Traits>::STAGE_BYTES;
        const uint64_t a_at = descriptor_swizzle128(a + half * A_HALF_BYTES);
        const uint64_t b_at = descriptor_swizzle128(a + 2 * A_HALF_BYTES);
        barrier_wait(&barriers.full[place.stage], place.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 32 bytes along k each: 2 in the descriptor's unit of 16 bytes
            Traits::multiply(sums, a_at + 2 * i, b_at + 2 * i, step | i);
        wgmma_commit();
        // The stage before: its products are done once only this stage's are pending.
        if (step > 0) {
            wgmma_wait<1>();
            release<Traits::CLUSTER>(&barriers.empty[last]);
        }
        last = place.stage;
        place.advance();
    }
    return last;
}

// Multiplies and stores the 64 rows that warpgroup `half` has of every tile.
template <typename Traits>
__device__ __forceinline__ void work_tiles(const Arguments& args, const CUtensorMap* out_map, const Groups& groups,
                                           Barriers& barriers, const char* stages, char* staging, uint32_t rank,
                                           int half) {
    constexpr int CLUSTER = Traits::CLUSTER;
    const int items = groups.first_item[args.groups];
    const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
    const int steps = divide_up(args.k, STAGE_K_BYTES / Traits::ELEMENT_BYTES);
    const int first_row = half * HALF_ROWS + (threadIdx.x / 32 & 3) * WARP_ROWS;
    Place<Traits::STAGES> place;
    typename Traits::Sums sums;
    int item = blockIdx.x / CLUSTER;
    if (item >= items) return;
    Tile tile = find_tile<CLUSTER>(groups, item, 0, column_tiles, rank);
    while (item < items) {
        const Target target{tile.group, tile.row + first_row, tile.rows - first_row,
                            tile.column_tile * Traits::OUT_COLUMNS};
        if (tile.rows > half * HALF_ROWS && tile.column_tile < column_tiles) {
            typename Traits::Scaling scales;
            scales.load(args, target);
            Residual<Traits::RESIDUAL> residual;
            residual.read(args, target, 0);
            residual.read(args, target, 1);
            const int last = multiply_tile<Traits>(sums, barriers, stages, place, steps, half);
            // Found while the tensor cores still work on this tile.
            item = *static_cast<volatile int*>(&barriers.next_item[last]);
            tile = find_tile<CLUSTER>(groups, min(item, items - 1), tile.group, column_tiles, rank);
            wgmma_wait<0>();
            keep(sums);
            release<CLUSTER>(&barriers.empty[last]);
            if constexpr (Traits::CODES)
                finish_codes<Traits::COLUMNS>(sums, scales, args, out_map, target, staging);
            else
                finish<Traits::COLUMNS, Traits::SWIGLU, Traits::RESIDUAL, Traits::FLOAT>(
                    sums, scales, residual, args, out_map, target, staging);
            continue;
        }
        for (int step = 0; step < steps; ++step) {
            barrier_wait(&barriers.full[place.stage], place.parity);
            if (step + 1 == steps) item = *static_cast<volatile int*>(&barriers.next_item[place.stage]);
            release<CLUSTER>(&barriers.empty[place.stage]);
            place.advance();
        }
        tile = find_tile<CLUSTER>(groups, min(item, items - 1), tile.group, column_tiles, rank);
    }
    Staging::wait<0>();
}

template <typename Traits>
__device__ __forceinline__ void run(const CUtensorMap* a_map, const CUtensorMap* b_map, const CUtensorMap* out_map,
                                    const Arguments& args) {
    using S = Shape<Traits>;
    constexpr int CLUSTER = Traits::CLUSTER;
    extern __shared__ char dynamic[];
    __shared__ Groups groups;
    __shared__ Barriers barriers;
    // Tiles start at multiples of 1024 bytes; dynamic shared memory need not.
    char* stages = dynamic + (-smem_address(dynamic) & 1023);
    char* staging = stages + Traits::STAGES * S::STAGE_BYTES;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
        const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
        load_groups<CLUSTER>(groups, args.offsets, args.groups, args.rows, column_tiles);
    } else if (warp == 1 && (threadIdx.x & 31) == 0) {
        tensor_map_prefetch(a_map);
        tensor_map_prefetch(b_map);
        for (int s = 0; s < Traits::STAGES; ++s) {
            barrier_init(&barriers.full[s], 1);
            barrier_init(&barriers.empty[s], WARPS_WORKING * CLUSTER);
        }
        for (int t = 0; t < TICKETS; ++t) {
            barrier_init(&barriers.ticket_full[t], 1);
            barrier_init(&barriers.ticket_empty[t], CLUSTER);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    if (warp < 4) {
        registers_give<COPY_REGISTERS>();
        if (warp == 0 && (threadIdx.x & 31) == 0)
            copy_tiles<Traits>(a_map, b_map, args, groups, barriers, stages, rank);
        else if (warp == 1 && rank == 0 && (threadIdx.x & 31) == 0)
            draw_items<Traits>(groups.first_item[args.groups], barriers);
        __syncwarp();
    } else {
        registers_take<WORK_REGISTERS>();
        char* own = staging + (warp - 4) * Staging::BYTES;
        work_tiles<Traits>(args, out_map, groups, barriers, stages, own, rank, warp / 4 - 1);
    }
    // The neighbour's copies and arrivals reach into this block until it has ended too.
    if (CLUSTER > 1) cluster_sync();
}

// A kernel `name`; the other arguments are those of Product.
#define GEMM_KERNEL(name, blocks, element, columns, stages, what)                                        \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(gemm::THREADS, 1)        \
        name(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap w,               \
             const __grid_constant__ CUtensorMap out, const gemm::Arguments args) {                      \
        using Traits = gemm::Product<element, columns, stages, blocks, gemm::Finish::what>;              \
        gemm::run<Traits>(&a, &w, &out, args);                                                           \
    }

}  // namespace gemm
