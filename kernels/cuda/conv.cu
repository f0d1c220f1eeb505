// Implicit-GEMM convolution for sm_90a: 3x3 and 3x3x3 with zero padding, and 1x1.
//
// A block computes tiles of 256 pixels x N output channels. One warp keeps two rings of shared memory full: pixels
// and weights. For a 3x3 window the pixel buffer holds the tile with its halo, 18 x 18 pixels x 64 channels, and all
// nine taps multiply from it: an instruction's 8 x 8 pixels begin at any pixel of the buffer, because the swizzle of
// a row follows its address. So pixels are read from memory once per 64 channels and time tap, not nine times, and
// the copy engine fills what lies outside the picture with zeros: that is the padding.
// Taps in time that fall outside the clip are zero for a whole tile and are skipped.

#include <type_traits>

#include "conv_epilogue.cuh"

namespace conv {

enum class Window { Halo, Flat };
enum class Out { Half, Ragged, Wide };  // 16 bits, the same with columns that are no multiple of 8, fp32 or colours

template <Window window, int N, Out out>
struct Shape {
    static constexpr bool kFlat = window == Window::Flat;
    static constexpr int kTaps = kFlat ? 1 : 9;  // in the plane: products per pixel buffer
    static constexpr int kPitch = kFlat ? kBlockSide : kTileSide + 2;
    static constexpr int kPixelRows = kFlat ? kTilePixels : kPitch * kPitch;
    static constexpr int kPixelBytes = kPixelRows * 128;
    static constexpr int kPixelStride = (kPixelBytes + 1023) / 1024 * 1024;
    static constexpr int kWeightBytes = N * 128;
    static constexpr int kPixelStages = kFlat ? 4 : 2;
    static constexpr int kWeightStages = kFlat ? 4 : 6;
    static constexpr int kStagingBytes = out == Out::Wide ? 0 : kMultipliers * kBlockRows * N * 2;
    static constexpr int kBarriers = 2 * (kPixelStages + kWeightStages);
    static constexpr int kSharedBytes = 1024 + kPixelStages * kPixelStride + kWeightStages * kWeightBytes +
                                        kStagingBytes + kBarriers * 8;
    static_assert(kSharedBytes <= 232448, "more than a block may have");
};

// Places within the block's shared memory.
template <class S>
struct Shared {
    char *pixels, *weights, *staging;
    uint64_t *pixels_full, *pixels_empty, *weights_full, *weights_empty;

    __device__ __forceinline__ explicit Shared(char* raw) {
        // The swizzle repeats every 1024 bytes of address.
        const uint32_t address = hopper::smem_address(raw);
        pixels = raw + ((address + 1023) / 1024 * 1024 - address);
        weights = pixels + S::kPixelStages * S::kPixelStride;
        staging = weights + S::kWeightStages * S::kWeightBytes;
        pixels_full = reinterpret_cast<uint64_t*>(staging + S::kStagingBytes);
        pixels_empty = pixels_full + S::kPixelStages;
        weights_full = pixels_empty + S::kPixelStages;
        weights_empty = weights_full + S::kWeightStages;
    }
};

template <Window window, class S>
__device__ __forceinline__ void load(const Launch& launch, const CUtensorMap* pixels, const CUtensorMap* weights,
                                     const Shared<S>& shared, int columns) {
    Ring<S::kPixelStages> pixel_ring;
    Ring<S::kWeightStages> weight_ring;
    const int steps = (launch.c_in + kChannelStep - 1) / kChannelStep;
    const int tiles = tile_count(launch);
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(launch, index);
        const int x = S::kFlat ? tile.x * kTilePixels : tile.x * kTileSide - 1;
        const int y = S::kFlat ? 0 : tile.y * kTileSide - 1;
        for (int time = tile.first_time; time <= tile.last_time; ++time) {
            const int plane = tile.image * launch.frames + tile.frame + time;
            const int first_tap = launch.time_taps == 3 ? (time + 1) * S::kTaps : 0;
            for (int step = 0; step < steps; ++step) {
                char* to = shared.pixels + pixel_ring.stage * S::kPixelStride;
                uint64_t* full = shared.pixels_full + pixel_ring.stage;
                hopper::barrier_wait(shared.pixels_empty + pixel_ring.stage, pixel_ring.phase ^ 1);
                hopper::barrier_expect_bytes(full, S::kPixelBytes);
                hopper::copy_4d(to, pixels, full, step * kChannelStep, x, y, plane);
                pixel_ring.advance();
                for (int tap = 0; tap < S::kTaps; ++tap) {
                    const int stage = weight_ring.stage;
                    hopper::barrier_wait(shared.weights_empty + stage, weight_ring.phase ^ 1);
                    hopper::barrier_expect_bytes(shared.weights_full + stage, S::kWeightBytes);
                    hopper::copy_3d(shared.weights + stage * S::kWeightBytes, weights, shared.weights_full + stage,
                                    step * kChannelStep, tile.n * columns, first_tap + tap);
                    weight_ring.advance();
                }
            }
        }
    }
}

// Descriptor of 64 pixels: rows of 128 bytes, groups of 8 rows `pitch` rows apart.
__device__ __forceinline__ uint64_t pixel_descriptor(const char* pointer, int pitch) {
    const uint64_t address = (hopper::smem_address(pointer) & 0x3FFFF) >> 4;
    return address | (uint64_t(1) << 16) | (uint64_t(pitch * 8) << 32) | (uint64_t(1) << 62);
}

template <typename T, Window window, int N, Out out>
__device__ __forceinline__ void multiply(const Launch& launch, const Shared<Shape<window, N, out>>& shared,
                                         int warpgroup) {
    using S = Shape<window, N, out>;
    constexpr int kBlocks = kTilePixels / kBlockRows / kMultipliers;
    using Epilogue = std::conditional_t<out == Out::Wide, FloatEpilogue<S::kFlat, N, kBlocks>,
                                        HalfEpilogue<T, S::kFlat, N, kBlocks, out == Out::Ragged>>;
    constexpr int kUnit = 128 / 16;  // a pixel row in the descriptor's unit of 16 bytes
    Ring<S::kPixelStages> pixel_ring;
    Ring<S::kWeightStages> weight_ring;
    const int lane = threadIdx.x % 32;
    const int steps = (launch.c_in + kChannelStep - 1) / kChannelStep;
    const int tiles = tile_count(launch);
    float acc[kBlocks][N / 2];
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(launch, index);
        const int buffers = (tile.last_time - tile.first_time + 1) * steps;
        int accumulate = 0, weights_held = -1, pixels_held = -1;
        for (int buffer = 0; buffer < buffers; ++buffer) {
            hopper::barrier_wait(shared.pixels_full + pixel_ring.stage, pixel_ring.phase);
            // First pixel of this warpgroup: flat tiles are 256 rows, others two blocks side by side.
            const char* first = shared.pixels + pixel_ring.stage * S::kPixelStride +
                                (S::kFlat ? warpgroup * kBlocks * kBlockRows : warpgroup * kBlockSide * S::kPitch) * 128;
            uint64_t pixels = pixel_descriptor(first, S::kPitch);
#pragma unroll
            for (int tap = 0; tap < S::kTaps; ++tap) {
                hopper::barrier_wait(shared.weights_full + weight_ring.stage, weight_ring.phase);
                const uint64_t weights =
                    hopper::descriptor_swizzle128(shared.weights + weight_ring.stage * S::kWeightBytes);
                const int offset = (tap / 3 * S::kPitch + tap % 3) * kUnit;
                hopper::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kChannelStep / 16; ++k) {
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b) {
                        const int block = b * (S::kFlat ? kBlockRows : kBlockSide) * kUnit;
                        Mma<T, N>::run(acc[b], pixels + offset + block + 2 * k, weights + 2 * k, accumulate);
                    }
                    accumulate = 1;
                }
                hopper::wgmma_commit();
                // One batch stays in flight; what the one before it read goes back to the loader.
                hopper::wgmma_wait<1>();
                if (lane == 0 && weights_held >= 0) hopper::barrier_arrive(shared.weights_empty + weights_held);
                if (lane == 0 && tap == 0 && pixels_held >= 0) {
                    hopper::barrier_arrive(shared.pixels_empty + pixels_held);
                }
                weights_held = weight_ring.stage;
                weight_ring.advance();
            }
            pixels_held = pixel_ring.stage;
            pixel_ring.advance();
        }
        hopper::wgmma_wait<0>();
        if (lane == 0) {
            hopper::barrier_arrive(shared.weights_empty + weights_held);
            hopper::barrier_arrive(shared.pixels_empty + pixels_held);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) hopper::keep(acc[b]);
        Epilogue::run(launch, tile, acc, shared.staging + warpgroup * kBlockRows * N * 2, warpgroup);
    }
}

template <typename T, Window window, int N, Out out>
__device__ __forceinline__ void run(const CUtensorMap* pixels, const CUtensorMap* weights, const Launch& launch) {
    using S = Shape<window, N, out>;
    extern __shared__ char raw[];
    const Shared<S> shared(raw);
    constexpr int kWarps = kMultipliers * kWarpgroup / 32;
    if (threadIdx.x == 0) {
        hopper::tensor_map_prefetch(pixels);
        hopper::tensor_map_prefetch(weights);
        for (int i = 0; i < S::kPixelStages; ++i) {
            hopper::barrier_init(shared.pixels_full + i, 1);
            hopper::barrier_init(shared.pixels_empty + i, kWarps);
        }
        for (int i = 0; i < S::kWeightStages; ++i) {
            hopper::barrier_init(shared.weights_full + i, 1);
            hopper::barrier_init(shared.weights_empty + i, kWarps);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        hopper::registers_give<24>();
        if (threadIdx.x == 0) load<window, S>(launch, pixels, weights, shared, N);
    } else {
        hopper::registers_take<240>();
        multiply<T, window, N, out>(launch, shared, __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup - 1, 0));
    }
}

}  // namespace conv

#define CONV_KERNEL(NAME, T, WINDOW, N, OUT)                                                                  \
    extern "C" __global__ void __launch_bounds__(conv::kThreads, 1)                                           \
        NAME(const __grid_constant__ CUtensorMap pixels, const __grid_constant__ CUtensorMap weights,         \
             const __grid_constant__ conv::Launch launch) {                                                   \
        conv::run<T, conv::Window::WINDOW, N, conv::Out::OUT>(&pixels, &weights, launch);                     \
    }

#define CONV_KERNELS(SUFFIX, T)                             \
    CONV_KERNEL(conv_halo_##SUFFIX, T, Halo, 128, Half)     \
    CONV_KERNEL(conv_ragged_##SUFFIX, T, Halo, 128, Ragged) \
    CONV_KERNEL(conv_halo_wide_##SUFFIX, T, Halo, 32, Wide) \
    CONV_KERNEL(conv_flat_##SUFFIX, T, Flat, 128, Half)     \
    CONV_KERNEL(conv_flat_wide_##SUFFIX, T, Flat, 128, Wide)

CONV_KERNELS(bf16, __nv_bfloat16)
CONV_KERNELS(f16, __half)
