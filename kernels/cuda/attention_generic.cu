// Packed attention for any head size that is a multiple of 8, up to 256, and any number of query heads of a
// KV head: for the small models of tests and for the image encoder. A warp computes one query of one head;
// a lane scores one of 32 keys at a time, and then has some of the output's columns.
#include "attention.cuh"

using namespace attention;

namespace {

constexpr int kWarps = 8;
constexpr int kMostDim = 256;
// Columns of a lane: pairs, 64 columns apart.
constexpr int kPairs = kMostDim / 64;

struct GenericArguments {
    const __nv_bfloat16* q;      // [tokens, query heads, dim], tokens `q_stride` elements apart
    const __nv_bfloat16* arena;  // rows of `dim` elements
    __nv_bfloat16* out;          // [tokens, query heads * dim]
    float* lse;                  // [tokens, query heads], or null
    const Row* rows;
    const int* tiles;
    int q_stride;
    int token_stride;  // arena rows from one token of a head to the next
    int dim;
    int group;         // query heads of a KV head
    int query_heads;
    int layer;
    float scale;       // times log2(e)
};

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
    return x;
}

// q . k with q in shared memory.
__device__ __forceinline__ float dot(const float* q, const __nv_bfloat16* k, int dim) {
    float total = 0;
    for (int d = 0; d < dim; d += 8) {
        const uint4 eight = __ldg(reinterpret_cast<const uint4*>(k + d));
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_bf16(pairs[i]);
            total = fmaf(q[d + 2 * i], pair.x, total);
            total = fmaf(q[d + 2 * i + 1], pair.y, total);
        }
    }
    return total;
}

// Output and softmax of one query; a lane has columns 2 * lane + 64 * i and the next.
struct Query {
    float2 o[kPairs];
    float max, sum;

    // `keys` keys of one source, `k` the first of them.
    __device__ __forceinline__ void see(const GenericArguments& a, const float* q, const __nv_bfloat16* k,
                                        int64_t value_offset, int keys) {
        const int lane = threadIdx.x % 32;
        const int64_t step = int64_t(a.token_stride) * a.dim;
        for (int first = 0; first < keys; first += 32) {
            const int count = min(32, keys - first);
            const __nv_bfloat16* rows = k + first * step;
            const float score = lane < count ? dot(q, rows + lane * step, a.dim) * a.scale : -INFINITY;
            const float high = fmaxf(max, warp_max(score));
            const float factor = exp2_fast(max - high), p = exp2_fast(score - high);
            max = high;
            sum = fmaf(sum, factor, warp_sum(p));
            // As the tensor cores see them.
            const float rounded = __bfloat162float(__float2bfloat16_rn(p));
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                o[i].x *= factor;
                o[i].y *= factor;
            }
            for (int j = 0; j < count; ++j) {
                const float weight = __shfl_sync(0xFFFFFFFF, rounded, j);
                const __nv_bfloat16* v = rows + value_offset + j * step;
#pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                    const int column = 2 * lane + 64 * i;
                    if (column >= a.dim) continue;
                    const float2 pair = unpack_bf16(__ldg(reinterpret_cast<const uint32_t*>(v + column)));
                    o[i].x = fmaf(weight, pair.x, o[i].x);
                    o[i].y = fmaf(weight, pair.y, o[i].y);
                }
            }
        }
    }
};

}  // namespace

// One block for each tile.
extern "C" __global__ void __launch_bounds__(kWarps * 32) attention_generic(const GenericArguments a) {
    __shared__ float queries[kWarps][kMostDim];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Tile tile = load_tile(a.tiles, blockIdx.x);
    const Row row = a.rows[tile.row];
    auto base = [&](const Source& s) {
        const int64_t row = s.first + int64_t(a.layer) * s.layer_stride + int64_t(tile.kv_head) * s.head_stride;
        return a.arena + row * a.dim;
    };
    const __nv_bfloat16 *prefix = base(row.prefix), *fresh = base(row.fresh);
    for (int i = warp; i < tile.tokens * a.group; i += kWarps) {
        const int token = i / a.group, head = tile.kv_head * a.group + i % a.group;
        const __nv_bfloat16* q = a.q + int64_t(tile.token + token) * a.q_stride + head * a.dim;
        for (int d = lane; d < a.dim; d += 32) queries[warp][d] = __bfloat162float(q[d]);
        __syncwarp();
        Query query = {};
        query.max = -INFINITY;
        const int visible = tile.visible_to(token), in_prefix = min(tile.prefix, visible);
        query.see(a, queries[warp], prefix, int64_t(row.prefix.value_offset) * a.dim, in_prefix);
        query.see(a, queries[warp], fresh, int64_t(row.fresh.value_offset) * a.dim, visible - in_prefix);
        const float inverse = query.sum > 0.0f ? 1.0f / query.sum : 0.0f;
        const int64_t at = int64_t(tile.token + token) * a.query_heads + head;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
            const int column = 2 * lane + 64 * p;
            if (column >= a.dim) continue;
            *reinterpret_cast<uint32_t*>(a.out + at * a.dim + column) =
                pack_bf16(query.o[p].x * inverse, query.o[p].y * inverse);
        }
        if (a.lse != nullptr && lane == 0) {
            a.lse[at] = query.sum > 0.0f ? (query.max + log2f(query.sum)) * 0.69314718f : -INFINITY;
        }
        __syncwarp();
    }
}
