// Which tile a block works on: every block walks the same list of work items, read from the groups' offsets on
// the device, so that no step waits for the host.
#pragma once

#include <stdint.h>

namespace gemm {

constexpr int TILE_ROWS = 128;   // rows of A of a tile: 64 for each of the two consumer warpgroups
constexpr int HALF_ROWS = 64;    // rows of a warpgroup
constexpr int BAND_TILES = 16;   // row tiles that share one pass over the weights: their rows of A stay in L2
constexpr int MAX_GROUPS = 128;  // groups whose offsets fit the table in shared memory

// The groups, in shared memory.
struct Groups {
    int first_item[MAX_GROUPS + 1];  // work items before each group
    int first_row[MAX_GROUPS + 1];   // rows before each group
};

// Part of a product that one block computes.
struct Tile {
    int group;
    int row;            // first row
    int rows;           // rows that belong to the group, at most TILE_ROWS; 0 where the block only helps its pair
    int column_tile;    // which tile of the group's columns
    bool shared_rows;   // of a pair: both blocks have the same rows and other columns, else the reverse
    bool skip;          // nothing to do for either block of a pair
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// A row number that cannot lead outside the operands.
__device__ __forceinline__ int within(int row, int rows) { return max(0, min(row, rows)); }

// Fills the table; all of warp 0 calls it. `offsets` is [groups + 1], or null for one group of `rows` rows.
// `per_row_tile`: work items for each tile of rows.
__device__ __forceinline__ void load_groups(Groups& table, const int* offsets, int groups, int rows,
                                            int per_row_tile) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int base = 0; base < groups; base += 32) {
        const int g = base + lane;
        const bool real = g < groups;
        const int begin = !real || !offsets ? 0 : within(offsets[g], rows);
        const int end = !real ? begin : offsets ? within(offsets[g + 1], rows) : rows;
        const int items = end > begin ? divide_up(end - begin, TILE_ROWS) * per_row_tile : 0;
        int sum = items;  // inclusive over the lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (real) {
            table.first_item[g] = before + sum - items;
            table.first_row[g] = begin;
            if (g == groups - 1) {
                table.first_item[groups] = before + sum;
                table.first_row[groups] = end;
            }
        }
        before += __shfl_sync(~0u, sum, 31);
    }
}

// The tile of `item` for the block of `rank` in a pair (blocks that work alone: `PAIR` false, rank 0).
//
// Groups come one after another. In a group, bands of BAND_TILES row tiles; in a band, the columns two tiles at a
// time; within those, row tiles in twos (a pair of blocks shares the weights), and a last row tile without a
// neighbour is done by a pair that shares the rows. `group` is where the search starts: items only grow.
template <bool PAIR>
__device__ __forceinline__ Tile find_tile(const Groups& table, int item, int group, int column_tiles, uint32_t rank) {
    while (table.first_item[group + 1] <= item) ++group;
    Tile tile;
    tile.group = group;
    int index = item - table.first_item[group];
    const int begin = table.first_row[group];
    const int end = table.first_row[group + 1];
    const int row_tiles = divide_up(end - begin, TILE_ROWS);
    const int across = PAIR ? divide_up(column_tiles, 2) : column_tiles;
    const int band = index / (BAND_TILES * across);
    index -= band * BAND_TILES * across;
    const int tall = min(BAND_TILES, row_tiles - band * BAND_TILES);
    const int column = index / tall;
    index -= column * tall;
    int row_tile;
    if (!PAIR) {
        row_tile = index;
        tile.column_tile = column;
        tile.shared_rows = false;
    } else if (index < (tall & ~1)) {
        const int twos = tall / 2;
        const int second = index >= twos;
        row_tile = (index - second * twos) * 2 + rank;
        tile.column_tile = column * 2 + second;
        tile.shared_rows = false;
    } else {
        row_tile = tall - 1;
        tile.column_tile = column * 2 + rank;
        tile.shared_rows = true;
    }
    tile.row = begin + (band * BAND_TILES + row_tile) * TILE_ROWS;
    tile.rows = min(TILE_ROWS, end - tile.row);
    tile.skip = PAIR && !tile.shared_rows && tile.column_tile >= column_tiles;
    return tile;
}

}  // namespace gemm
