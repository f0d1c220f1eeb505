// The exchange between registers and rows of memory: shared memory of one warp for two boxes of 16 rows of 64 bf16.
#pragma once

#include <stdint.h>

#include "hopper.cuh"

namespace gemm {

// Where staged values lie in out: rows row .. row + rows, columns from `column` on, of `columns` that out has.
struct Window {
    int row;
    int rows;
    int column;
    int columns;
};

__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t from, uint32_t (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

// A box is laid out as the copy engine stores it with 128-byte swizzle: 16-byte pieces of a row are permuted by the
// row's number, so that no two lanes of an access meet in a bank. While one box is stored, the other is filled.
struct Staging {
    static constexpr int ROWS = 16;
    static constexpr int BOX_COLUMNS = 64;
    static constexpr int BOX_BYTES = ROWS * BOX_COLUMNS * 2;
    static constexpr int BYTES = 2 * BOX_BYTES;
    static constexpr int BLOCKS = BOX_COLUMNS / 8;  // n8 blocks of a box

    // Of 8 columns of one row.
    static __device__ __forceinline__ uint32_t at(uint32_t base, int row, int block) {
        return base + row * 128 + ((block ^ (row & 7)) << 4);
    }
    // Where this lane points for the four 8x8 matrices of rows 0..16 and the blocks `block`, `block` + 1.
    static __device__ __forceinline__ uint32_t matrix_at(uint32_t base, int block) {
        const int lane = threadIdx.x & 31;
        return at(base, lane & 15, block + (lane >> 4));
    }

    static constexpr int PIECES = 4;  // 16-byte pieces of a box that a lane moves

    // Calls `piece(which, shared address, index of the element in out)` for every piece of this lane in the window.
    template <typename Piece>
    static __device__ __forceinline__ void for_pieces(uint32_t base, const Window& window, Piece piece) {
        const int lane = threadIdx.x & 31;
        const int block = lane & 7;
        const int c = window.column + block * 8;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int r = 4 * i + (lane >> 3);
            if (r < window.rows && c < window.columns)
                piece(i, at(base, r, block), size_t(window.row + r) * window.columns + c);
        }
    }

    // Until the copy engine has read all boxes but the last `PENDING`.
    template <int PENDING>
    static __device__ __forceinline__ void wait() {
        if ((threadIdx.x & 31) == 0) hopper::store_wait_read<PENDING>();
        __syncwarp();
    }

    // Reads this lane's pieces of bf16 rows, to be put into a box later.
    static __device__ __forceinline__ void read(uint4 (&v)[PIECES], const void* from, const Window& window) {
        for_pieces(0, window, [&](int i, uint32_t, size_t index) {
            v[i] = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + index);
        });
    }
    static __device__ __forceinline__ void put(uint32_t base, const uint4 (&v)[PIECES], const Window& window) {
        for_pieces(base, window, [&](int i, uint32_t to, size_t) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[i].x), "r"(v[i].y), "r"(v[i].z),
                         "r"(v[i].w)
                         : "memory");
        });
        __syncwarp();
    }

    // Stores the window: by the copy engine, which cuts columns at the end of out, or piece by piece where rows of
    // another group follow. A narrower box goes piece by piece too. The map has `ELEMENTS` columns for one here.
    template <int WIDTH = BOX_COLUMNS, int ELEMENTS = 1>
    static __device__ __forceinline__ void store(char* staging, void* out, const CUtensorMap* map,
                                                 const Window& window) {
        if (WIDTH == BOX_COLUMNS && window.rows >= ROWS) {
            hopper::fence_async_shared();
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                hopper::store_2d(map, staging, window.column * ELEMENTS, window.row);
                hopper::store_commit();
            }
            return;
        }
        __syncwarp();
        const bool within = (threadIdx.x & 7) * 8 < WIDTH;
        for_pieces(hopper::smem_address(staging), window, [&](int, uint32_t from, size_t index) {
            if (!within) return;
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(from)
                         : "memory");
            *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(out) + index) = v;
        });
        __syncwarp();
    }
};

}  // namespace gemm
