// From accumulators to memory: bias, shortcut, statistics, and the moves between channels and space.
#pragma once

#include "conv.cuh"
#include "conv_mma.cuh"

namespace conv {

// Pixels of a picture are blocks of 8 x 8 within the tile of 16 x 16; a flat tile is 256 pixels in a row.
template <bool flat>
__device__ __forceinline__ int2 pixel_of(const Tile& tile, int block, int row) {
    if (flat) return make_int2(tile.x * kTilePixels + block * kBlockRows + row, 0);
    return make_int2(tile.x * kTileSide + (block & 1) * kBlockSide + (row & 7),
                     tile.y * kTileSide + (block >> 1) * kBlockSide + (row >> 3));
}

// Element of `out` that holds column `n` of a pixel.
__device__ __forceinline__ long long out_index(const Launch& launch, const Tile& tile, int x, int y, int n) {
    const long long frame = tile.frame - launch.first_frame;
    const long long image = tile.image * launch.out_image_stride;
    if (launch.store == kPlain) {
        return image + ((frame * launch.height + y) * launch.width + x) * launch.out_channels + n;
    }
    if (launch.store == kChannelsToSpace) {
        const int sub = n / launch.out_channels;
        const int channel = n - sub * launch.out_channels;
        const long long t = frame * launch.cell_frames + (sub >> 2);
        const long long row = t * 2 * launch.height + 2 * y + (sub >> 1 & 1);
        return image + (row * 2 * launch.width + 2 * x + (sub & 1)) * launch.out_channels + channel;
    }
    const int sub = (launch.cell_frames == 2 ? (tile.frame & 1) * 4 : 0) + (y & 1) * 2 + (x & 1);
    const long long row = frame / launch.cell_frames * (launch.height / 2) + y / 2;
    return image + (row * (launch.width / 2) + x / 2) * launch.out_channels + sub * launch.c_out + n;
}

// Elements from a pixel's value to that of the pixel `pass` passes on: passes go down the rows of a block of 8 x 8,
// or 8 pixels along a flat tile. Two strides, because a cell of the inverse move spans two rows.
struct Stride {
    long long one, two;
    __device__ __forceinline__ long long at(int pass) const { return (pass >> 1) * two + (pass & 1) * one; }
};

template <bool flat>
__device__ __forceinline__ Stride out_stride(const Launch& launch) {
    const long long row = (long long)launch.width * launch.out_channels;
    if (flat) return {8 * launch.out_channels, 16 * launch.out_channels};
    if (launch.store == kPlain) return {row, 2 * row};
    if (launch.store == kChannelsToSpace) return {4 * row, 8 * row};
    return {2 * launch.c_out, row / 2};
}

// Reads the shortcut values of eight columns of `passes` pixels, fewer than eight where they repeat.
template <typename Word, int passes>
__device__ __forceinline__ void shortcut_read(const void* from, long long stride, int valid, uint4 (&raw)[passes]) {
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        if (i < valid) {
            *reinterpret_cast<Word*>(&raw[i]) =
                *reinterpret_cast<const Word*>(static_cast<const char*>(from) + i * stride * 2);
        }
    }
}

// Repeats what `shortcut_read` read to eight values.
__device__ __forceinline__ uint4 shortcut_spread(int repeat, const uint4& raw) {
    constexpr uint32_t kLow = 0x1010, kHigh = 0x3232;  // both halves of a word from one half
    if (repeat == 0) return raw;
    const uint32_t low = __byte_perm(raw.x, 0, kLow), high = __byte_perm(raw.x, 0, kHigh);
    if (repeat == 1) return make_uint4(low, high, __byte_perm(raw.y, 0, kLow), __byte_perm(raw.y, 0, kHigh));
    if (repeat == 2) return make_uint4(low, low, high, high);
    return make_uint4(low, low, low, low);
}

// The same one value at a time, where the columns are no whole chunks; already repeated.
template <int passes>
__device__ __forceinline__ void shortcut_gather(const uint16_t* from, long long stride, int repeat, int columns,
                                                int valid, uint4 (&raw)[passes]) {
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (i < valid && k < columns) words[k / 2] |= uint32_t(from[i * stride + (k >> repeat)]) << (k % 2 * 16);
        }
        raw[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// 16-bit outputs leave through shared memory, so that a thread stores 8 channels at once.
// `ragged`: the columns are no multiple of 8 (of narrow models only), and go one by one.
template <typename T, bool flat, int N, int blocks, bool ragged>
struct HalfEpilogue {
    static constexpr int kChunks = N / 8;                     // 16-byte chunks of a row
    static constexpr int kRowsAtOnce = kWarpgroup / kChunks;  // rows a warpgroup covers in one access
    static constexpr int kPasses = kBlockRows / kRowsAtOnce;
    static_assert(N == 128 && kRowsAtOnce == kBlockSide, "a pass is one row of a block; a chunk's lanes are 16 apart");

    static __device__ __forceinline__ void run(const Launch& launch, const Tile& tile, float (&acc)[blocks][N / 2],
                                               char* staging, int warpgroup) {
        const int thread = threadIdx.x % kWarpgroup, chunk = thread % kChunks;
        const int n = tile.n * N + chunk * 8;
        const Stride stride = out_stride<flat>(launch);
        float sum[2] = {0, 0}, square[2] = {0, 0};
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            const int2 at = pixel_of<flat>(tile, warpgroup * blocks + b, thread / kChunks);
            const int valid = valid_passes(launch, at, n);
            uint4 added[kPasses];
            if (launch.shortcut) shortcut(launch, tile, at, n, valid, added);
            stage(launch, tile, acc[b], staging);
            hopper::named_sync(1 + warpgroup, kWarpgroup);
            T* out = static_cast<T*>(launch.out) + out_index(launch, tile, at.x, at.y, n);
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (i >= valid) continue;
                const int row = i * kRowsAtOnce + thread / kChunks;
                uint4 packed = *reinterpret_cast<const uint4*>(staging + row * N * 2 + ((chunk ^ (row & 7)) * 16));
                float value[8];
                unpack8<T>(packed, value);
                if (launch.shortcut) {
                    float more[8];
                    unpack8<T>(shortcut_spread(ragged ? 0 : launch.shortcut_repeat, added[i]), more);
#pragma unroll
                    for (int k = 0; k < 8; ++k) value[k] += more[k];
                    packed = pack8<T>(value);
                    unpack8<T>(packed, value);
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    sum[k / kQuad] += value[k];
                    square[k / kQuad] += value[k] * value[k];
                }
                if (ragged) {
                    store_some(out + stride.at(i), packed, launch.c_out - n);
                } else {
                    *reinterpret_cast<uint4*>(out + stride.at(i)) = packed;
                }
            }
            hopper::named_sync(1 + warpgroup, kWarpgroup);
        }
        if (launch.partials) {
            statistics(launch, tile, sum, square, reinterpret_cast<float2*>(staging), warpgroup);
        }
    }

    // Passes of a thread whose pixel lies inside: the first ones, because passes go on in one direction.
    static __device__ __forceinline__ int valid_passes(const Launch& launch, int2 at, int n) {
        if (at.x >= launch.width || n >= launch.c_out) return 0;
        return flat ? (launch.width - at.x + 7) / 8 : launch.height - at.y;
    }

    static __device__ __forceinline__ void store_some(T* to, const uint4& packed, int columns) {
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (k < columns) reinterpret_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
        }
    }

    // In flight while the accumulators are staged.
    static __device__ __forceinline__ void shortcut(const Launch& launch, const Tile& tile, int2 at, int n, int valid,
                                                    uint4 (&raw)[kPasses]) {
        const long long pixel = ((long long)tile.frame * launch.height + at.y) * launch.width + at.x;
        const T* from = static_cast<const T*>(launch.shortcut) + tile.image * launch.shortcut_image_stride +
                        pixel * launch.shortcut_channels + (n >> launch.shortcut_repeat);
        const long long stride = (long long)(flat ? 8 : launch.width) * launch.shortcut_channels;
        if (ragged) {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
            return shortcut_gather(halves, stride, launch.shortcut_repeat, launch.c_out - n, valid, raw);
        }
        switch (launch.shortcut_repeat) {
            case 0: return shortcut_read<uint4>(from, stride, valid, raw);
            case 1: return shortcut_read<uint2>(from, stride, valid, raw);
            case 2: return shortcut_read<uint32_t>(from, stride, valid, raw);
            default: return shortcut_read<uint16_t>(from, stride, valid, raw);
        }
    }

    // Accumulators plus bias into the staging rows. The chunks of a row are swizzled by the row.
    static __device__ __forceinline__ void stage(const Launch& launch, const Tile& tile, float (&acc)[N / 2],
                                                 char* staging) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
        const int row = warp * 16 + lane % 16;
        const uint32_t base = hopper::smem_address(staging) + row * N * 2;
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int column = tile.n * N + (j + h) * 8 + 2 * (lane % 4);
                float2 bias = make_float2(0, 0);
                if (launch.bias && column < launch.c_out) bias = *reinterpret_cast<const float2*>(launch.bias + column);
                const float* d = acc + 4 * (j + h);
                words[2 * h] = pack(T(), d[0] + bias.x, d[1] + bias.y);
                words[2 * h + 1] = pack(T(), d[2] + bias.x, d[3] + bias.y);
            }
            const uint32_t to = base + (((j + lane / 16) ^ (row & 7)) * 16);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                         "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }

    // One (sum, sum of squares) per quad of channels of the warpgroup's pixels, added in a fixed order.
    static __device__ __forceinline__ void statistics(const Launch& launch, const Tile& tile, float (&sum)[2],
                                                      float (&square)[2], float2* sums, int warpgroup) {
        const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
        constexpr int kQuads = N / kQuad;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            sum[q] += __shfl_xor_sync(~0u, sum[q], 16);
            square[q] += __shfl_xor_sync(~0u, square[q], 16);
            if (lane < 16) sums[thread / 32 * kQuads + lane * 2 + q] = make_float2(sum[q], square[q]);
        }
        hopper::named_sync(1 + warpgroup, kWarpgroup);
        const int n = tile.n * N + thread * kQuad;
        if (thread < kQuads && n < launch.c_out) {
            float2 total = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                total.x += sums[w * kQuads + thread].x;
                total.y += sums[w * kQuads + thread].y;
            }
            const int sub = n / launch.out_channels, quad = (n - sub * launch.out_channels) / kQuad;
            const int subs = launch.c_out / launch.out_channels;
            const int unit = (tile.spatial * kMultipliers + warpgroup) * subs + sub;
            const long long row = (long long)tile.image * (launch.out_channels / kQuad) + quad;
            launch.partials[row * launch.units + unit] = total;
        }
        hopper::named_sync(1 + warpgroup, kWarpgroup);
    }
};

// fp32 or 8-bit colour straight from the accumulators: four lanes write 32 bytes of a row.
template <bool flat, int N, int blocks>
struct FloatEpilogue {
    static __device__ __forceinline__ void run(const Launch& launch, const Tile& tile, float (&acc)[blocks][N / 2],
                                               char*, int warpgroup) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp * 16 + half * 8 + lane / 4;
                const int2 at = pixel_of<flat>(tile, warpgroup * blocks + b, row);
                if (at.x >= launch.width || at.y >= launch.height) continue;
                const long long to = out_index(launch, tile, at.x, at.y, 0);
#pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    const int n = tile.n * N + j * 8 + 2 * (lane % 4);
                    put(launch, to, n, acc[b][4 * j + 2 * half], acc[b][4 * j + 2 * half + 1]);
                }
            }
        }
    }

    // Columns n and n + 1, n even.
    static __device__ __forceinline__ void put(const Launch& launch, long long to, int n, float first, float second) {
        if (n >= launch.c_out) return;
        const bool both = n + 1 < launch.c_out;
        if (launch.bias) {
            first += launch.bias[n];
            if (both) second += launch.bias[n + 1];
        }
        if (N < 128 && launch.rgb) {
            uint8_t* out = static_cast<uint8_t*>(launch.out) + to + n;
            out[0] = level(first);
            if (both) out[1] = level(second);
            return;
        }
        float* out = static_cast<float*>(launch.out) + to + n;
        if (both && launch.c_out % 2 == 0) {
            *reinterpret_cast<float2*>(out) = make_float2(first, second);
        } else {
            out[0] = first;
            if (both) out[1] = second;
        }
    }

    static __device__ __forceinline__ uint8_t level(float value) {
        const float unit = fminf(fmaxf(value * 0.5f + 0.5f, 0.0f), 1.0f);
        return static_cast<uint8_t>(__float2int_rn(unit * 255.0f));
    }
};

}  // namespace conv
