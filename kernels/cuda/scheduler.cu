// The end of a step for all jobs at once: guidance over two velocities, its options, and Euler's step on fp32
// latents, with the bf16 copy that the next step's stem reads. Additions and products are rounded one by one, as the
// CPU rounds them.
#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

namespace {

constexpr int kBlock = 256;
constexpr int kWide = 1024;

// Offsets count elements.
struct alignas(16) Job {
    int32_t latents;      // of the job in the latents and in guided velocities
    int32_t cond;         // of the velocity with the prompt
    int32_t uncond;       // of the one without, or -1: no guidance
    int32_t positions;
    float guidance;
    float step;           // sigma[i + 1] - sigma[i]
    float rescale;        // 0 ..= 1: share of the guided velocity that gets the deviation of `cond`
    int32_t preserve;     // whether each position keeps the length of its conditional velocity
};

struct Arguments {
    const Job* jobs;       // [gridDim.y]
    const void* velocity;  // all rows, [.., positions, channels]
    float* guided;         // guided velocities, by `latents`; written before the step, or read with `factor`
    const float* factor;   // [jobs]: of `guided`; null in the pass that makes them
    float* latents;        // null: no step yet
    bf16* narrow;          // the new latents in bf16, or null
    int channels;
};

__device__ __forceinline__ float value(const float* from, int at) { return from[at]; }
__device__ __forceinline__ float value(const bf16* from, int at) { return __bfloat162float(from[at]); }

__device__ __forceinline__ double across_warp(double v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

__device__ __forceinline__ float guide(float cond, float uncond, float scale) {
    return __fadd_rn(uncond, __fmul_rn(scale, __fsub_rn(cond, uncond)));
}

// A warp a position, lanes over its channels.
template <class Velocity>
__device__ __forceinline__ void guide_step(const Arguments& a) {
    const Job job = a.jobs[blockIdx.y];
    const Velocity* velocity = static_cast<const Velocity*>(a.velocity);
    const int lane = threadIdx.x % 32, warps = gridDim.x * (kBlock / 32);
    const bool ready = a.factor != nullptr, guided = job.uncond >= 0 && !ready;
    for (int p = (blockIdx.x * kBlock + threadIdx.x) / 32; p < job.positions; p += warps) {
        const int at = p * a.channels;
        float stretch = ready ? a.factor[blockIdx.y] : 1.0f;
        if (guided && job.preserve) {
            double wanted = 0.0, got = 0.0;
            for (int c = lane; c < a.channels; c += 32) {
                const float cond = value(velocity, job.cond + at + c);
                const float v = guide(cond, value(velocity, job.uncond + at + c), job.guidance);
                wanted += double(cond) * cond;
                got += double(v) * v;
            }
            wanted = sqrt(across_warp(wanted)), got = sqrt(across_warp(got));
            if (got > 0.0) stretch = static_cast<float>(wanted / got);
        }
        for (int c = lane; c < a.channels; c += 32) {
            const int to = job.latents + at + c;
            float v = ready ? a.guided[to] : value(velocity, job.cond + at + c);
            if (guided) v = guide(v, value(velocity, job.uncond + at + c), job.guidance);
            v = __fmul_rn(v, stretch);
            if (a.guided != nullptr && !ready) a.guided[to] = v;
            if (a.latents == nullptr) continue;
            const float x = __fadd_rn(a.latents[to], __fmul_rn(v, job.step));
            a.latents[to] = x;
            if (a.narrow != nullptr) a.narrow[to] = __float2bfloat16_rn(x);
        }
    }
}

// Sum over the block, one order.
__device__ double across_block(double v) {
    __shared__ double part[kWide / 32];
    v = across_warp(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return across_warp(part[threadIdx.x % 32]);
}

template <class Value>
__device__ double deviation(const Value* from, int count) {
    double sum = 0.0, squares = 0.0;
    for (int i = threadIdx.x; i < count; i += kWide) sum += value(from, i);
    const double mean = across_block(sum) / count;
    for (int i = threadIdx.x; i < count; i += kWide) {
        const double d = value(from, i) - mean;
        squares += d * d;
    }
    return sqrt(across_block(squares) / (count - 1));
}

// A block a job: what brings the guided velocity to the unbiased deviation of the conditional one, by `rescale`.
template <class Velocity>
__device__ __forceinline__ void rescale_factor(const Arguments& a, float* factor) {
    const Job job = a.jobs[blockIdx.x];
    float result = 1.0f;
    if (job.rescale > 0.0f && job.uncond >= 0) {
        const int count = job.positions * a.channels;
        const double wanted = deviation(static_cast<const Velocity*>(a.velocity) + job.cond, count);
        const double got = deviation(a.guided + job.latents, count);
        const double phi = job.rescale;
        if (got != 0.0) result = static_cast<float>(phi * (wanted / got) + (1.0 - phi));
    }
    if (threadIdx.x == 0) factor[blockIdx.x] = result;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlock) guide_step_f32(const Arguments a) { guide_step<float>(a); }
extern "C" __global__ void __launch_bounds__(kBlock) guide_step_bf16(const Arguments a) { guide_step<bf16>(a); }

extern "C" __global__ void __launch_bounds__(kWide) rescale_factor_f32(const Arguments a, float* factor) {
    rescale_factor<float>(a, factor);
}
extern "C" __global__ void __launch_bounds__(kWide) rescale_factor_bf16(const Arguments a, float* factor) {
    rescale_factor<bf16>(a, factor);
}
