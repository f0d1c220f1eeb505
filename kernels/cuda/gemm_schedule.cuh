// Which tile a block works on. The work items follow from the groups' offsets, read on the device, so that no step
// waits for the host. Clusters take them in order as they become free: items that share rows or weights then start
// close together in time and find them in L2. (Dealt out in turn, clusters fall out of step, and 2.5 times as much is
// read from memory; the energy of that costs 6 % of the rate of a card at its power limit.)
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
    int rows;           // rows that belong to the group, at most TILE_ROWS
    int column_tile;    // which tile of the group's columns
    bool shared_rows;   // both blocks of a cluster have the same rows, else the same columns
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// A row number that cannot lead outside the operands.
__device__ __forceinline__ int within(int row, int rows) { return max(0, min(row, rows)); }

// Work items of `row_tiles` tiles of rows, for blocks alone or in clusters of 2.
template <int CLUSTER>
__device__ __forceinline__ int count_items(int row_tiles, int column_tiles) {
    if (CLUSTER == 1) return row_tiles * column_tiles;
    return row_tiles / 2 * column_tiles + (row_tiles & 1) * divide_up(column_tiles, 2);
}

// Fills the table; all of warp 0 calls it. `offsets` is [groups + 1], or null for one group of `rows` rows.
template <int CLUSTER>
__device__ __forceinline__ void load_groups(Groups& table, const int* offsets, int groups, int rows,
                                            int column_tiles) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int base = 0; base < groups; base += 32) {
        const int g = base + lane;
        const bool real = g < groups;
        const int begin = !real || !offsets ? 0 : within(offsets[g], rows);
        const int end = !real ? begin : offsets ? within(offsets[g + 1], rows) : rows;
        const int items = end > begin ? count_items<CLUSTER>(divide_up(end - begin, TILE_ROWS), column_tiles) : 0;
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

// The tile of `item` for the block of `rank` in a cluster of 1 or 2.
//
// Groups come one after another. In a group, bands of BAND_TILES row tiles; in a band, the columns CLUSTER tiles at a
// time; within those, row tiles in twos (the blocks share the weights), and a last row tile without a neighbour is
// done by a cluster that shares the rows. `group` is where the search starts: items only grow.
template <int CLUSTER>
__device__ __forceinline__ Tile find_tile(const Groups& table, int item, int group, int column_tiles, uint32_t rank) {
    while (table.first_item[group + 1] <= item) ++group;
    Tile tile;
    tile.group = group;
    int index = item - table.first_item[group];
    const int begin = table.first_row[group];
    const int end = table.first_row[group + 1];
    const int row_tiles = divide_up(end - begin, TILE_ROWS);
    const int in_band = count_items<CLUSTER>(BAND_TILES, column_tiles);
    const int band = index / in_band;
    index -= band * in_band;
    const int tall = min(BAND_TILES, row_tiles - band * BAND_TILES);
    int row_tile;
    if (CLUSTER == 1) {
        tile.column_tile = index / tall;
        row_tile = index - tile.column_tile * tall;
        tile.shared_rows = false;
    } else {
        const int twos = tall / 2;
        const int column = index / tall * 2;
        index -= column / 2 * tall;
        // Of a single last column there is one item for each two.
        const int pairs = column + 1 < column_tiles ? 2 * twos : twos;
        const int second = index >= twos;
        tile.shared_rows = index >= pairs;
        row_tile = tile.shared_rows ? tall - 1 : (index - second * twos) * 2 + rank;
        tile.column_tile = column + (tile.shared_rows ? int(rank) : second);
    }
    tile.row = begin + (band * BAND_TILES + row_tile) * TILE_ROWS;
    tile.rows = min(TILE_ROWS, end - tile.row);
    return tile;
}

}  // namespace gemm
