// Tokens to experts and back to order, without the host: offsets of the experts' rows, the row of every choice,
// and the copy of the tokens into their rows. (The way back, `combine`, is fused with the next norm: norm.cu.)
#include "hopper.cuh"

namespace {

constexpr int kPositionBlock = 512;
constexpr int kMaxExperts = 256;

struct PositionArguments {
    const uint32_t* expert;  // [tokens, top_k]; a token's experts differ
    const int* counts;       // [gridDim.x, experts], of `router_top_k` with the same tokens a block
    int* offsets;            // [experts + 1], or [experts + 2] with `shared`: then the last group has all tokens
    int* position;           // [tokens, top_k]: row of each choice, by expert, then by token
    int* token;              // [tokens top_k]: the choice's token of each row; null: not wanted
    int tokens;
    int top_k;
    int experts;
    int tokens_per_block;  // a multiple of 32, at most 1024
    int shared;
};

// Exclusive sums of total[0 .. experts) into start[0 .. experts]; by the first warp.
__device__ void scan(const int* total, int* start, int experts) {
    const int lane = threadIdx.x, each = (experts + 31) / 32;
    int own = 0;
    for (int i = 0; i < each; ++i) {
        const int e = lane * each + i;
        own += e < experts ? total[e] : 0;
    }
    int before = own;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    before -= own;
    for (int i = 0; i < each; ++i) {
        const int e = lane * each + i;
        if (e >= experts) break;
        start[e] = before;
        before += total[e];
        if (e == experts - 1) start[experts] = before;
    }
}

}  // namespace

// A block computes the base of each expert for its own tokens from the counts of all blocks; within the block a
// choice's rank is the number of earlier tokens in its expert's bit mask. Integers only: exact in any order.
extern "C" __global__ void __launch_bounds__(kPositionBlock) permute_positions(const PositionArguments a) {
    extern __shared__ uint32_t mask[];  // [experts, words]
    __shared__ int total[kMaxExperts], before[kMaxExperts], start[kMaxExperts + 1];
    const int words = a.tokens_per_block / 32;
    for (int i = threadIdx.x; i < a.experts * words; i += kPositionBlock) mask[i] = 0;
    for (int e = threadIdx.x; e < a.experts; e += kPositionBlock) total[e] = before[e] = 0;
    __syncthreads();

    const int first = blockIdx.x * a.tokens_per_block;
    const int choices = min(a.tokens_per_block, a.tokens - first) * a.top_k;
    const uint32_t* expert = a.expert + static_cast<int64_t>(first) * a.top_k;
    for (int i = threadIdx.x; i < choices; i += kPositionBlock) {
        const int token = i / a.top_k;
        atomicOr(&mask[expert[i] * words + token / 32], 1u << token % 32);
    }
    // Several threads an expert, each a share of the blocks.
    const int sharers = kPositionBlock / a.experts, share = threadIdx.x / a.experts, e = threadIdx.x % a.experts;
    if (share < sharers) {
        int all = 0, earlier = 0;
#pragma unroll 8
        for (int b = share; b < gridDim.x; b += sharers) {
            const int count = __ldg(a.counts + static_cast<int64_t>(b) * a.experts + e);
            all += count;
            earlier += b < blockIdx.x ? count : 0;
        }
        atomicAdd(&total[e], all);
        atomicAdd(&before[e], earlier);
    }
    __syncthreads();
    if (threadIdx.x < 32) scan(total, start, a.experts);
    __syncthreads();

    for (int i = threadIdx.x; i < choices; i += kPositionBlock) {
        const int token = i / a.top_k, chosen = expert[i], word = token / 32;
        int rank = __popc(mask[chosen * words + word] & ((1u << token % 32) - 1));
        for (int w = 0; w < word; ++w) rank += __popc(mask[chosen * words + w]);
        const int row = start[chosen] + before[chosen] + rank;
        a.position[static_cast<int64_t>(first) * a.top_k + i] = row;
        if (a.token != nullptr) a.token[row] = first + token;
    }
    if (blockIdx.x > 0) return;
    for (int i = threadIdx.x; i <= a.experts; i += kPositionBlock) a.offsets[i] = start[i];
    if (threadIdx.x == 0 && a.shared) a.offsets[a.experts + 1] = start[a.experts] + a.tokens;
}

struct GatherArguments {
    const uint4* from;    // [tokens, chunks]: rows of 16-byte chunks
    const float* scale;   // [tokens], or null
    const int* position;  // [tokens, top_k]
    uint4* to;            // [rows, chunks]
    float* to_scale;      // [rows], with `scale`
    int top_k;
    int chunks;
    int shared;           // row that token 0 has once more (then the next ones), or -1
    const int* kept;      // row that token `first` has once more, then the next `count - 1`; or null
    int first;
    int count;
};

// Copies a token's row to all its places: one bulk copy in, one out a place, through shared memory of a row. A warp
// a token.
extern "C" __global__ void __launch_bounds__(32) permute_gather(const GatherArguments a) {
    extern __shared__ __align__(128) uint8_t row[];
    __shared__ uint64_t barrier;
    const int token = blockIdx.x, lane = threadIdx.x;
    const uint32_t bytes = a.chunks * sizeof(uint4);
    if (lane == 0) {
        hopper::barrier_init(&barrier, 1);
        hopper::barrier_init_fence();
        hopper::barrier_expect_bytes(&barrier, bytes);
        hopper::bulk_load(row, a.from + static_cast<int64_t>(token) * a.chunks, bytes, &barrier);
    }
    const bool again = a.kept == nullptr ? a.shared >= 0 : token >= a.first && token < a.first + a.count;
    const int places = a.top_k + again;
    const int* position = a.position + static_cast<int64_t>(token) * a.top_k;
    __syncwarp();
    hopper::barrier_wait(&barrier, 0);
    for (int place = lane; place < places; place += 32) {
        const int once_more = a.kept == nullptr ? a.shared + token : *a.kept + token - a.first;
        const int to = place < a.top_k ? __ldg(position + place) : once_more;
        if (to < 0) continue;  // another rank has the expert
        hopper::bulk_store(a.to + static_cast<int64_t>(to) * a.chunks, row, bytes);
        if (a.scale != nullptr) a.to_scale[to] = a.scale[token];
    }
    hopper::store_commit();
    hopper::store_wait_read<0>();  // shared memory lives until it was read
}
