// What the kernels of decoding text share: who goes through which expert, kernels that overlap, 16-bit activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stddef.h>

#include "hopper.cuh"

namespace decode {

using bf16 = __nv_bfloat16;

constexpr int kMostTokens = 32;
constexpr int kMostChoices = 256;
// Inner values of experts are stored in f16 divided by this, which leaves values up to a million.
constexpr float kInnerScale = 16.0f;
constexpr float kHalfMax = 65504.0f;

// Who goes through which expert; written by `decode_route`. A row is a choice: token * top_k + place.
struct Routing {
    int jobs;
    int next[2];   // tile of the first and of the second halves that is to be taken; zero before they start
    int padding;
    int4 job[kMostChoices];    // expert, first entry, entries
    int2 entry[kMostChoices];  // token and row, by expert and then by token
    float gate[kMostChoices];  // by row
    int chosen[kMostChoices];  // experts by row, until they are arranged
};
constexpr int kTableBytes = 16 + kMostChoices * (16 + 8 + 4);  // of it, what products read
static_assert(offsetof(Routing, chosen) == kTableBytes);

// Values that other kernels wrote, perhaps since this one was started: past the first-level cache.
__device__ __forceinline__ int read_int(const int* from) { return __ldcg(from); }

// ---- programmatic dependent launch ------------------------------------------------------------------------

// Until the kernels before this one have ended and what they wrote can be read. At once if it was launched plainly.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may take what is free of the multiprocessors.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- parts of other ranks ---------------------------------------------------------------------------------

// Parts of sums that the other ranks' kernels write into this device's memory, and how many blocks of each rank
// have, ever.
struct Arrival {
    const unsigned* count;        // [ranks], null: nobody else writes
    int* failed;                  // set when somebody did not come in time
    unsigned target;              // of each count
    unsigned patience;            // milliseconds
    int ranks;
    int me;
};

__device__ __forceinline__ unsigned arrived(const unsigned* count) {
    unsigned out;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(out) : "l"(count) : "memory");
    return out;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t out;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(out));
    return out;
}

// Until all parts are there, by all threads of the block. Counts wrap round.
__device__ __forceinline__ void wait_for_parts(const Arrival& a) {
    if (a.count == nullptr) return;
    const int rank = threadIdx.x;
    if (rank < a.ranks && rank != a.me && static_cast<int>(arrived(a.count + rank) - a.target) < 0) {
        const uint64_t end = nanoseconds() + static_cast<uint64_t>(a.patience) * 1000000;
        while (static_cast<int>(arrived(a.count + rank) - a.target) < 0) {
            // Whoever was given up once is not waited for again.
            if (__ldcg(a.failed) == 0 && nanoseconds() < end) continue;
            atomicExch(a.failed, 1);
            break;
        }
    }
    __syncthreads();
}

// ---- numbers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ __half saturated(float x) { return __float2half_rn(fminf(fmaxf(x, -kHalfMax), kHalfMax)); }

// The 16-bit type of activations beside weights of either type.
template <bool kFp8>
struct Activation;
template <>
struct Activation<true> {
    using Type = __half;
    __device__ static Type of(float x) { return saturated(x); }
};
template <>
struct Activation<false> {
    using Type = bf16;
    __device__ static Type of(float x) { return __float2bfloat16_rn(x); }
};

}  // namespace decode
