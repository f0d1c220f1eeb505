// Hopper primitives that the kernels share: barriers, bulk tensor copies, warpgroup matrix instructions.
// PTX ISA: "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg". Compiled for sm_90a only.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

namespace hopper {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier -------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives at the barrier at the same place in block `rank` of the cluster. Orders nothing that was written before:
// a release at the scope of the cluster would wait for all of this thread's memory accesses.
__device__ __forceinline__ void barrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(barrier)),
        "r"(rank)
        : "memory");
}

// The same for an expectation of bytes, and the store that meets it: a word at the same place in block `rank`.
__device__ __forceinline__ void barrier_expect_bytes_remote(uint64_t* barrier, uint32_t bytes, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %1;\n}" ::"r"(smem_address(barrier)),
        "r"(bytes), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void store_remote(int* to, int value, uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 word, remote;\n"
        "mapa.shared::cluster.u32 word, %0, %3;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [word], %1, [remote];\n}" ::"r"(smem_address(to)),
        "r"(value), "r"(smem_address(barrier)), "r"(rank)
        : "memory");
}

#ifdef HOPPER_BOUNDED_WAITS
// For finding deadlocks: a wait that polls too often ends the kernel with an error.
#define HOPPER_WAIT(SCOPE)                                                                                     \
    uint32_t done = 0;                                                                                         \
    for (uint32_t polls = 0; !done; ++polls) {                                                                 \
        asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity" SCOPE ".shared::cta.b64 done, [%1], %2;\n" \
                     "selp.u32 %0, 1, 0, done;\n}"                                                             \
                     : "=r"(done)                                                                              \
                     : "r"(smem_address(barrier)), "r"(parity)                                                 \
                     : "memory");                                                                              \
        if (polls > (1u << 22)) __trap();                                                                      \
    }
#else
#define HOPPER_WAIT(SCOPE)                                                              \
    asm volatile(                                                                       \
        "{\n.reg .pred done;\n"                                                         \
        "WAIT:\n"                                                                       \
        "mbarrier.try_wait.parity" SCOPE ".shared::cta.b64 done, [%0], %1;\n"           \
        "@done bra DONE;\n"                                                             \
        "bra WAIT;\n"                                                                   \
        "DONE:\n}" ::"r"(smem_address(barrier)),                                        \
        "r"(parity)                                                                     \
        : "memory");
#endif

// Waits until the phase of `parity` has completed.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) { HOPPER_WAIT("") }

// The same where other blocks of the cluster arrive.
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
    HOPPER_WAIT(".acquire.cluster")
}

#undef HOPPER_WAIT

// Barrier among `threads` threads of the block; ids 1..15.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- bulk tensor copies ---------------------------------------------------------------------------------

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

__device__ __forceinline__ void copy_2d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}

// To the same place of every block of the cluster in `mask`; each block's barrier counts its bytes.
__device__ __forceinline__ void copy_2d_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                                  uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "h"(mask), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void copy_3d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void copy_4d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                        int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void copy_5d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                        int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
        "%7}], [%2];" ::"r"(smem_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void store_2d(const CUtensorMap* map, const void* from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(smem_address(from)), "r"(c0), "r"(c1)
                 : "memory");
}

// Plain runs of memory, in multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `pending` groups of stores still read shared memory.
template <int pending>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Shared memory written by ordinary stores, before the copy engine or the tensor cores read it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroup matrix instructions ----------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across a wait.
template <int N>
__device__ __forceinline__ void keep(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Descriptor of a K-major tile with 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
// `pointer` is 1024-byte aligned, plus at most 96 bytes within the row (a step along K).
__device__ __forceinline__ uint64_t descriptor_swizzle128(const void* pointer) {
    const uint64_t address = (smem_address(pointer) & 0x3FFFF) >> 4;
    return address | (uint64_t(1) << 16) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

template <int registers>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace hopper
