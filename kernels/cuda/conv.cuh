// Convolutions as matrix products: what a launch is told, and which piece of the output a block computes.
//
// Pixels are rows, output channels are columns, and K runs over taps and input channels. Tensors are channels-last
// [image][frame][y][x][channel]; stride 1, zero padding of half the kernel, so that a picture keeps its size.
#pragma once

#include <stdint.h>

#include "hopper.cuh"

namespace conv {

constexpr int kChannelStep = 64;        // input channels of one step along K: 128 bytes, one swizzled row
constexpr int kWarpgroup = 128;         // threads
constexpr int kMultipliers = 2;         // warpgroups that multiply
constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;
constexpr int kBlockRows = 64;          // pixels of one matrix instruction
constexpr int kTilePixels = 256;        // pixels of a tile, 2 x 64 for each of two warpgroups
constexpr int kTileSide = 16;           // a tile of a picture is 16 x 16 pixels
constexpr int kBlockSide = 8;           // the 64 pixels of an instruction are 8 x 8
constexpr int kQuad = 4;                // channels summed into one partial of the statistics

enum Store : int {
    kPlain = 0,
    // Channel sub * out_channels + c goes to sub-position sub = (t * 2 + y) * 2 + x of the pixel's cell.
    kChannelsToSpace = 1,
    // The inverse: the pixel's sub-position picks a band of c_out channels of the cell.
    kSpaceToChannels = 2,
};

// Mirrored by the host, field for field.
struct Launch {
    int images, frames, height, width;
    int first_frame;        // frames before it are not computed and not stored
    int c_in, c_out;
    int time_taps;          // 1 or 3
    int tiles_y, tiles_x, tiles_n;
    int group;              // spatial tiles that share a pass over the weights
    int store;              // Store
    int cell_frames;        // 1, or 2 where cells span frames
    int out_channels;       // channels of a stored pixel
    int shortcut_channels;  // channels of a shortcut pixel
    int shortcut_repeat;    // log2 of how often each shortcut channel is repeated
    int rgb;                // 1: `out` is 8-bit colour, clamp(v / 2 + 1 / 2) * 255
    int units;              // partial sums per quad and image
    long long shortcut_image_stride;  // elements
    long long out_image_stride;       // elements
    const float* bias;                // [c_out] or null
    const void* shortcut;             // or null
    void* out;
    float2* partials;  // [image][out_channels / 4][units] of (sum, sum of squares), or null
};

struct Tile {
    int image, frame, y, x, n;
    int spatial;  // index within the image, the same whatever else is in the launch
    int first_time, last_time;  // taps in time that lie inside the clip
};

// Tiles in order: groups of spatial tiles, within a group all columns of one band of output channels. Frames with
// more taps inside the clip come first, so that the last wave is the cheap one.
__device__ __forceinline__ Tile tile_at(const Launch& launch, int index) {
    const int frames = launch.frames - launch.first_frame;
    const int per_frame = launch.tiles_y * launch.tiles_x;
    const int spatial_tiles = launch.images * frames * per_frame;
    const int group = index / (launch.group * launch.tiles_n);
    const int within = index - group * launch.group * launch.tiles_n;
    const int size = min(launch.group, spatial_tiles - group * launch.group);
    const int spatial = group * launch.group + within % size;
    Tile tile;
    tile.n = within / size;
    int order = spatial / (launch.images * per_frame);
    const int rest = spatial - order * launch.images * per_frame;
    if (launch.first_frame == 0 && launch.time_taps == 3 && frames > 2) {
        order = order < frames - 2 ? order + 1 : (order == frames - 2 ? 0 : frames - 1);
    }
    tile.frame = launch.first_frame + order;
    tile.image = rest / per_frame;
    const int place = rest - tile.image * per_frame;
    tile.y = place / launch.tiles_x;
    tile.x = place - tile.y * launch.tiles_x;
    tile.spatial = order * per_frame + place;
    tile.first_time = launch.time_taps == 3 ? max(-1, -tile.frame) : 0;
    tile.last_time = launch.time_taps == 3 ? min(1, launch.frames - 1 - tile.frame) : 0;
    return tile;
}

__device__ __forceinline__ int tile_count(const Launch& launch) {
    return launch.images * (launch.frames - launch.first_frame) * launch.tiles_y * launch.tiles_x * launch.tiles_n;
}

// Position in a ring of buffers.
template <int stages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace conv
