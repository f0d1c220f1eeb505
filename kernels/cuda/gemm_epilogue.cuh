// What follows a product, in the registers that hold it: scales of quantised operands, SwiGLU, residual, rounding.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "hopper.cuh"

namespace gemm {

// Arguments of a product beside its two operands.
struct Arguments {
    const int* offsets;         // [groups + 1] first row of each group, or null: one group of `rows` rows
    void* out;                  // [rows, columns] bf16 (or f32)
    const void* residual;       // [rows, columns] bf16, added; may be `out`
    const float* row_scales;    // [rows], of e4m3 rows of a
    const float* column_scales; // [groups, n], of e4m3 rows of w
    int groups;
    int rows;
    int n;                      // rows of w of a group
    int k;
    int columns;                // of out: n, or n / 2 with SwiGLU
};

// The 64 rows of one warpgroup.
struct Target {
    int group;
    int row;
    int rows;  // that belong to the group; may exceed 64
    int column;
};

// 16 rows of 128 bf16 that one warp exchanges so that global memory sees whole rows. 16-byte pieces of a row are
// permuted by the row's number: no two lanes of an access meet in a bank.
struct Staging {
    static constexpr int ROWS = 16;
    static constexpr int COLUMNS = 128;
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr int BYTES = ROWS * ROW_BYTES;

    static __device__ __forceinline__ uint32_t at(uint32_t base, int row, int piece) {
        return base + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
    }
    // Where this lane points for the four 8x8 matrices of rows 0..16 and columns 8 * block .. 8 * block + 16.
    static __device__ __forceinline__ uint32_t matrix_at(uint32_t base, int block) {
        const int lane = threadIdx.x & 31;
        return at(base, lane & 15, block + (lane >> 4));
    }
};

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float2 unpack(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

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

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Where the staged values lie in out: rows row .. row + rows, columns column .. limit, of `stride` columns.
struct Window {
    int row;
    int rows;
    int column;
    int limit;
    int stride;
};

// Calls `piece(shared address, index of the element in out)` for every 16 bytes of this lane in the window.
template <typename Piece>
__device__ __forceinline__ void for_pieces(uint32_t base, const Window& window, Piece piece) {
    const int lane = threadIdx.x & 31;
    const int at_piece = lane & 15;
    const int c = window.column + at_piece * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = 2 * i + (lane >> 4);
        if (r < window.rows && c < window.limit)
            piece(Staging::at(base, r, at_piece), size_t(window.row + r) * window.stride + c);
    }
}

// Stores the staged values.
__device__ __forceinline__ void flush(uint32_t base, void* out, const Window& window) {
    __syncwarp();
    for_pieces(base, window, [&](uint32_t from, size_t to) {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(from)
                     : "memory");
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(out) + to) = v;
    });
    __syncwarp();
}

// Brings the residual into the staging.
__device__ __forceinline__ void fetch(uint32_t base, const void* from, const Window& window) {
    for_pieces(base, window, [&](uint32_t to, size_t at) {
        const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + at);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    });
    __syncwarp();
}

// The scales of what one lane holds; all 1 where the operands are not quantised.
template <bool SCALES>
struct Factors {
    float low = 1.0f;   // of the lane's row
    float high = 1.0f;  // of the row eight below
    const float* columns = nullptr;

    __device__ __forceinline__ Factors(const Arguments& args, const Target& target, int row, int rows) {
        if constexpr (SCALES) {
            const int r = (threadIdx.x & 31) / 4;
            if (r < rows) low = args.row_scales[row + r];
            if (r + 8 < rows) high = args.row_scales[row + r + 8];
            columns = args.column_scales + size_t(target.group) * args.n;
        }
    }
    // Scales the four sums of one n8 block, whose columns of w this lane has from `column` on.
    __device__ __forceinline__ void apply(float* v, int column, int end) const {
        if constexpr (SCALES) {
            if (column >= end) return;
            const float2 s = __ldg(reinterpret_cast<const float2*>(columns + column));
            v[0] *= s.x * low;
            v[1] *= s.y * low;
            v[2] *= s.x * high;
            v[3] *= s.y * high;
        }
    }
};

// What a kernel does with its sums. A lane holds of every 8 columns j two of its row (sums[4j], [4j + 1]) and two of
// the row eight below ([4j + 2], [4j + 3]); with SwiGLU the second half of the sums are the gates of the first.
template <int COLUMNS, bool SWIGLU, bool RESIDUAL, bool FLOAT, bool SCALES>
__device__ __forceinline__ void finish(float (&sums)[COLUMNS / 2], const Arguments& args, const Target& target,
                                       char* staging) {
    constexpr int OUT_BLOCKS = COLUMNS / 8 / (SWIGLU ? 2 : 1);
    constexpr int PART = OUT_BLOCKS < 16 ? OUT_BLOCKS : 16;  // n8 blocks that the staging holds
    const int lane = threadIdx.x & 31;
    const int warp_row = (threadIdx.x / 32 & 3) * 16;
    const int row = target.row + warp_row;
    const int rows = target.rows - warp_row;
    if (rows <= 0) return;
    const Factors<SCALES> factors(args, target, row, rows);
    // The four finished values of block j.
    const auto values = [&](int j) {
        float* v = &sums[4 * j];
        const int column = target.column + 8 * j + (lane & 3) * 2;
        factors.apply(v, column, args.columns);
        if constexpr (SWIGLU) {
            float* gate = v + COLUMNS / 4;
            factors.apply(gate, args.columns + column, 2 * args.columns);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] *= silu(gate[i]);
        }
        return v;
    };
    if constexpr (FLOAT) {
        float* out = static_cast<float*>(args.out);
#pragma unroll
        for (int j = 0; j < OUT_BLOCKS; ++j) {
            const float* v = values(j);
            const int c = target.column + 8 * j + (lane & 3) * 2;
            const int r = lane / 4;
            if (c >= args.columns) continue;
            float2* to = reinterpret_cast<float2*>(out + size_t(row + r) * args.columns + c);
            if (r < rows) *to = make_float2(v[0], v[1]);
            if (r + 8 < rows) to[size_t(4) * args.columns] = make_float2(v[2], v[3]);
        }
        return;
    }
    const uint32_t base = hopper::smem_address(staging);
#pragma unroll
    for (int part = 0; part < OUT_BLOCKS; part += PART) {
        const int column = target.column + part * 8;
        const Window window{row, rows, column, min(args.columns, column + PART * 8), args.columns};
        if constexpr (RESIDUAL) fetch(base, args.residual, window);
#pragma unroll
        for (int j = part; j < part + PART; j += 2) {
            const uint32_t at = Staging::matrix_at(base, j - part);
            float* v = values(j);
            values(j + 1);
            if constexpr (RESIDUAL) {
                uint32_t c[4];
                load_matrices(at, c);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 add = unpack(c[i]);
                    v[2 * i] += add.x;
                    v[2 * i + 1] += add.y;
                }
            }
            store_matrices(at, pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
        }
        flush(base, args.out, window);
    }
}

}  // namespace gemm
