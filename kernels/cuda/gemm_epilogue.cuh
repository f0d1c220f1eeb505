// What follows a product, in the registers that hold it: scales of quantised operands, SwiGLU, residual, rounding,
// and the way to memory.
#pragma once

#include "gemm_staging.cuh"

namespace gemm {

// Arguments of a product beside its operands.
struct Arguments {
    const int* offsets;          // [groups + 1] first row of each group, or null: one group of `rows` rows
    void* out;                   // [rows, columns] bf16 (or f32)
    const void* residual;        // [rows, columns] bf16, added; may be `out`
    const float* row_scales;     // [rows], of e4m3 rows of a
    const float* column_scales;  // [groups, n], of e4m3 rows of w
    int groups;
    int rows;
    int n;                       // rows of w of a group
    int k;
    int columns;                 // of out: n, or n / 2 with SwiGLU
    int8_t* exponents;           // [rows, blocks of 64 columns], of results that go out as e4m3
};

// The 16 rows of one warp.
struct Target {
    int group;
    int row;
    int rows;  // that belong to the group; may be negative or exceed 16
    int column;
};

constexpr int WARP_ROWS = 16;

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float2 unpack(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a *= silu(x), with silu(x) = x / 2 (1 + tanh(x / 2)): half the special functions of one with an exponential, and exact
// to 2^-11 of x, less than the rounding of what comes out.
__device__ __forceinline__ void gate(float& a, float x) {
    x *= 0.5f;
    a *= fmaf(x, tanh_fast(x), x);
}

// Scales of quantised operands. The lanes of a warp hold those of a tile's columns between them: lane 4b + q those of
// columns 2q, 2q + 1 of the n8 blocks b, b + 8, b + 16, ... Loaded before the product, used after it.
template <int COLUMNS, bool SWIGLU>
struct Scales {
    static constexpr int EACH = COLUMNS / 64;
    float2 columns[EACH];
    float low;   // of the lane's row
    float high;  // of the row eight below

    __device__ __forceinline__ void load(const Arguments& args, const Target& target) {
        const int lane = threadIdx.x & 31;
        const int r = lane / 4;
        low = r < target.rows ? args.row_scales[target.row + r] : 0.0f;
        high = r + 8 < target.rows ? args.row_scales[target.row + r + 8] : 0.0f;
        const float* of_group = args.column_scales + size_t(target.group) * args.n;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool second = SWIGLU && i >= EACH / 2;  // the gates
            const int column = target.column + (second ? i - EACH / 2 : i) * 64 + lane * 2;
            const bool real = column < args.columns;
            const float* from = of_group + (second ? args.columns : 0) + column;
            columns[i] = real ? __ldg(reinterpret_cast<const float2*>(from)) : make_float2(0.0f, 0.0f);
        }
    }
    // Scales the four sums of n8 block j.
    __device__ __forceinline__ void apply(float* v, int j) const {
        const int from = (j & 7) * 4 + (threadIdx.x & 3);
        const float x = __shfl_sync(~0u, columns[j / 8].x, from);
        const float y = __shfl_sync(~0u, columns[j / 8].y, from);
        v[0] *= x * low;
        v[1] *= y * low;
        v[2] *= x * high;
        v[3] *= y * high;
    }
};

struct NoScales {
    __device__ __forceinline__ void load(const Arguments&, const Target&) {}
    __device__ __forceinline__ void apply(float*, int) const {}
};

// fp32 sums to memory; a lane has two columns of each n8 block.
template <int BLOCKS, int N>
__device__ __forceinline__ void store_float(const float (&sums)[N], const Arguments& args, const Target& target) {
    const int lane = threadIdx.x & 31;
    const int r = lane / 4;
    float* out = static_cast<float*>(args.out);
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
        const int c = target.column + 8 * j + (lane & 3) * 2;
        if (c >= args.columns) continue;
        float2* to = reinterpret_cast<float2*>(out + size_t(target.row + r) * args.columns + c);
        if (r < target.rows) *to = make_float2(sums[4 * j], sums[4 * j + 1]);
        if (r + 8 < target.rows) to[size_t(4) * args.columns] = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
    }
}

// Box `part` of a tile of out.
__device__ __forceinline__ Window window_of(const Arguments& args, const Target& target, int part) {
    const int column = target.column + part * Staging::BOX_COLUMNS;
    return {target.row, target.rows, column, args.columns};
}

// The residual of the next two boxes, read ahead: the first two before the product, so that they arrive during it.
template <bool RESIDUAL>
struct Residual {
    uint4 pieces[2][RESIDUAL ? Staging::PIECES : 1];

    __device__ __forceinline__ void read(const Arguments& args, const Target& target, int part) {
        if constexpr (RESIDUAL) Staging::read(pieces[part & 1], args.residual, window_of(args, target, part));
    }
};

// What a kernel does with its sums. A lane holds of every 8 columns j two of its row (sums[4j], [4j + 1]) and two of
// the row eight below ([4j + 2], [4j + 3]); with SwiGLU the second half of the sums are the gates of the first.
template <int COLUMNS, bool SWIGLU, bool RESIDUAL, bool FLOAT, typename Scaling>
__device__ __forceinline__ void finish(float (&sums)[COLUMNS / 2], const Scaling& scales, Residual<RESIDUAL>& residual,
                                       const Arguments& args, const CUtensorMap* out_map, const Target& target,
                                       char* staging) {
    constexpr int OUT_BLOCKS = COLUMNS / 8 / (SWIGLU ? 2 : 1);
    constexpr int PART = Staging::BLOCKS;
    if (target.rows <= 0) return;
    if constexpr (FLOAT) store_float<OUT_BLOCKS>(sums, args, target);
#pragma unroll
    for (int part = 0; !FLOAT && part < OUT_BLOCKS; part += PART) {
        const Window window = window_of(args, target, part / PART);
        if (window.column >= args.columns) break;
        char* box = staging + (part / PART & 1) * Staging::BOX_BYTES;
        const uint32_t base = hopper::smem_address(box);
        // The boxes of the tile before were read while this one was multiplied.
        if (part == 0)
            Staging::wait<0>();
        else
            Staging::wait<1>();
        if constexpr (RESIDUAL) {
            Staging::put(base, residual.pieces[part / PART & 1], window);
            if (part + 2 * PART < OUT_BLOCKS) residual.read(args, target, part / PART + 2);
        }
#pragma unroll
        for (int j = part; j < part + PART; j += 2) {
            float* v = &sums[4 * j];
            scales.apply(v, j);
            scales.apply(v + 4, j + 1);
            if constexpr (SWIGLU) {
                float* g = v + COLUMNS / 4;
                scales.apply(g, j + OUT_BLOCKS);
                scales.apply(g + 4, j + 1 + OUT_BLOCKS);
#pragma unroll
                for (int i = 0; i < 8; ++i) gate(v[i], g[i]);
            }
            const uint32_t at = Staging::matrix_at(base, j - part);
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
        Staging::store(box, args.out, out_map, window);
    }
}

}  // namespace gemm
