// Grouped matrix product: out[r, :] = a[r, :] . w[g]^T for the rows r in offsets[g]..offsets[g + 1], with a [rows, k],
// w [groups, n, k], fp32 accumulation, and what follows the product done in registers (gemm_epilogue.cuh).
//
// A persistent kernel of three warpgroups: one warp copies tiles of 128 rows of a and COLUMNS rows of w into a ring of
// stages, two warpgroups multiply (64 rows each) and store. Two blocks form a pair that shares one operand: each
// copies half of it to both. A warpgroup whose 64 rows lie behind the group's end does not multiply.
#pragma once

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
    ADD,       // plus the residual, bf16
    FLOAT,     // fp32
};

// A kernel: bytes of an element, rows of w of a tile, stages of the ring, whether blocks work in pairs, and by how
// many stages the second warpgroup starts later (so that one multiplies while the other stores).
template <int ELEMENT, int WIDTH, int RING, bool PAIRED, int LATE, Finish FINISH>
struct Product {
    static constexpr int ELEMENT_BYTES = ELEMENT;
    static constexpr int COLUMNS = WIDTH;
    static constexpr int STAGES = RING;
    static constexpr int SKEW = LATE;
    static constexpr bool PAIR = PAIRED;
    static constexpr bool SWIGLU = FINISH == Finish::SWIGLU;
    static constexpr int OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;  // columns of out of a tile

    static __device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int accumulate) {
        if constexpr (ELEMENT == 2)
            multiply_bf16(d, a, b, accumulate);
        else
            multiply_e4m3(d, a, b, accumulate);
    }
    static __device__ __forceinline__ void finish(float (&d)[COLUMNS / 2], const Arguments& args,
                                                  const Target& target, char* staging) {
        gemm::finish<COLUMNS, SWIGLU, FINISH == Finish::ADD, FINISH == Finish::FLOAT, ELEMENT == 1>(d, args, target,
                                                                                                    staging);
    }
};

template <typename Traits>
struct Shape {
    static constexpr int B_HALF_BYTES = Traits::COLUMNS / 2 * STAGE_K_BYTES;
    static constexpr int STAGE_BYTES = 2 * A_HALF_BYTES + 2 * B_HALF_BYTES;
    static constexpr int STAGING_BYTES = WARPS_WORKING * Staging::BYTES;
    // Tiles must start at multiples of 1024 bytes; dynamic shared memory need not.
    static constexpr int SHARED_BYTES = Traits::STAGES * STAGE_BYTES + STAGING_BYTES + 1024;
};

struct Barriers {
    uint64_t full[8];
    uint64_t empty[8];
};

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

// Copies every stage of every tile; one thread.
template <typename Traits>
__device__ __forceinline__ void copy_tiles(const CUtensorMap* a_map, const CUtensorMap* b_map, const Arguments& args,
                                           const Groups& groups, Barriers& barriers, char* stages, uint32_t rank) {
    using S = Shape<Traits>;
    constexpr bool PAIR = Traits::PAIR;
    constexpr int STAGE_K = STAGE_K_BYTES / Traits::ELEMENT_BYTES;
    constexpr uint16_t BOTH = 3;
    const int items = groups.first_item[args.groups];
    const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
    Place<Traits::STAGES> place;
    int group = 0;
    for (int item = blockIdx.x / (PAIR ? 2 : 1); item < items; item += gridDim.x / (PAIR ? 2 : 1)) {
        const Tile tile = find_tile<PAIR>(groups, item, group, column_tiles, rank);
        group = tile.group;
        if (tile.skip) continue;
        const bool one_half = tile.rows <= HALF_ROWS;
        const uint32_t bytes = (one_half ? 1 : 2) * A_HALF_BYTES + 2 * S::B_HALF_BYTES;
        // Rows of w: of the tile's first half, and of its second (the gate's, for SwiGLU).
        const int b_first = tile.group * args.n + tile.column_tile * Traits::OUT_COLUMNS;
        const int b_second = b_first + (Traits::SWIGLU ? args.columns : Traits::COLUMNS / 2);
        for (int k = 0; k < args.k; k += STAGE_K) {
            uint64_t* full = &barriers.full[place.stage];
            char* a = stages + place.stage * S::STAGE_BYTES;
            char* b = a + 2 * A_HALF_BYTES;
            barrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
            barrier_expect_bytes(full, bytes);
            if (PAIR && tile.shared_rows) {
                if (rank == 0 || !one_half)
                    copy_2d_multicast(a + rank * A_HALF_BYTES, a_map, full, k, tile.row + rank * HALF_ROWS, BOTH);
            } else {
                copy_2d(a, a_map, full, k, tile.row);
                if (!one_half) copy_2d(a + A_HALF_BYTES, a_map, full, k, tile.row + HALF_ROWS);
            }
            if (PAIR && !tile.shared_rows) {
                copy_2d_multicast(b + rank * S::B_HALF_BYTES, b_map, full, k, rank ? b_second : b_first, BOTH);
            } else {
                copy_2d(b, b_map, full, k, b_first);
                copy_2d(b + S::B_HALF_BYTES, b_map, full, k, b_second);
            }
            place.advance();
        }
    }
}

// Says that this warp no longer reads a stage: to both blocks of a pair, whose copies write it.
template <bool PAIR>
__device__ __forceinline__ void release(uint64_t* empty) {
    const uint32_t lane = threadIdx.x & 31;
    if (PAIR) {
        if (lane < 2) barrier_arrive_remote(empty, lane);
    } else if (lane == 0) {
        barrier_arrive(empty);
    }
}

// Multiplies and stores the 64 rows that warpgroup `half` has of every tile.
template <typename Traits>
__device__ __forceinline__ void work_tiles(const Arguments& args, const Groups& groups, Barriers& barriers,
                                           char* stages, char* staging, uint32_t rank, int half) {
    using S = Shape<Traits>;
    constexpr bool PAIR = Traits::PAIR;
    constexpr int STAGE_K = STAGE_K_BYTES / Traits::ELEMENT_BYTES;
    const int items = groups.first_item[args.groups];
    const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
    const int steps = divide_up(args.k, STAGE_K);
    Place<Traits::STAGES> place;
    int group = 0;
    bool first = true;
    float sums[Traits::COLUMNS / 2];
    for (int item = blockIdx.x / (PAIR ? 2 : 1); item < items; item += gridDim.x / (PAIR ? 2 : 1)) {
        const Tile tile = find_tile<PAIR>(groups, item, group, column_tiles, rank);
        group = tile.group;
        if (tile.skip) continue;
        if (tile.rows <= half * HALF_ROWS || tile.column_tile >= column_tiles) {
            for (int step = 0; step < steps; ++step) {
                barrier_wait(&barriers.full[place.stage], place.parity);
                release<PAIR>(&barriers.empty[place.stage]);
                place.advance();
            }
            continue;
        }
        if (Traits::SKEW && half == 1 && first && steps > Traits::SKEW) barrier_wait(&barriers.full[Traits::SKEW], 0);
        first = false;
        uint64_t* last_empty = nullptr;
        for (int step = 0; step < steps; ++step) {
            char* a = stages + place.stage * S::STAGE_BYTES;
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
                release<PAIR>(last_empty);
            }
            last_empty = &barriers.empty[place.stage];
            place.advance();
        }
        wgmma_wait<0>();
        keep(sums);
        release<PAIR>(last_empty);
        const Target target{tile.group, tile.row + half * HALF_ROWS, tile.rows - half * HALF_ROWS,
                            tile.column_tile * Traits::OUT_COLUMNS};
        Traits::finish(sums, args, target, staging);
    }
}

template <typename Traits>
__device__ __forceinline__ void run(const CUtensorMap* a_map, const CUtensorMap* b_map, const Arguments& args) {
    using S = Shape<Traits>;
    constexpr bool PAIR = Traits::PAIR;
    extern __shared__ char dynamic[];
    __shared__ Groups groups;
    __shared__ Barriers barriers;
    char* stages = dynamic + (-smem_address(dynamic) & 1023);
    char* staging = stages + Traits::STAGES * S::STAGE_BYTES;
    const uint32_t rank = PAIR ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
        const int column_tiles = divide_up(args.columns, Traits::OUT_COLUMNS);
        load_groups(groups, args.offsets, args.groups, args.rows, PAIR ? divide_up(column_tiles, 2) : column_tiles);
    } else if (warp == 1 && (threadIdx.x & 31) == 0) {
        tensor_map_prefetch(a_map);
        tensor_map_prefetch(b_map);
        for (int s = 0; s < Traits::STAGES; ++s) {
            barrier_init(&barriers.full[s], 1);
            barrier_init(&barriers.empty[s], WARPS_WORKING * (PAIR ? 2 : 1));
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (PAIR) cluster_sync();
    if (warp < 4) {
        registers_give<COPY_REGISTERS>();
        if (warp == 0 && (threadIdx.x & 31) == 0)
            copy_tiles<Traits>(a_map, b_map, args, groups, barriers, stages, rank);
        __syncwarp();
    } else {
        registers_take<WORK_REGISTERS>();
        work_tiles<Traits>(args, groups, barriers, stages, staging + (warp - 4) * Staging::BYTES, rank, warp / 4 - 1);
    }
    // The neighbour's copies and arrivals reach into this block until it has ended too.
    if (PAIR) cluster_sync();
}

// A kernel `name`; the last arguments are those of Product.
#define GEMM_KERNEL(cluster, name, ...)                                                                          \
    extern "C" __global__ void cluster __launch_bounds__(gemm::THREADS, 1)                                       \
        name(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap w, const gemm::Arguments args) { \
        gemm::run<gemm::Product<__VA_ARGS__>>(&a, &w, args);                                                     \
    }
#define GEMM_PAIRED __cluster_dims__(2, 1, 1)
#define GEMM_ALONE

}  // namespace gemm
