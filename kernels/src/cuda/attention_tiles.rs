//! The host's part of packed attention: segments are checked and cut into the tiles that blocks take.

use super::error::{Result, argument};
use super::launch::int;
use super::rope::KvSlot;
use crate::cpu::rope::AttnHeads;
use crate::error::KernelError;
use crate::{Segment, SegmentKind};

pub(super) const OP: &str = "AttentionPlan";
/// Numbers of a row and of a tile on the device.
pub(super) const WORDS: usize = 8;
/// Arena rows that a copy of keys reads at once; runs have room for a multiple of them.
pub(super) const KEY_TILE: usize = 128;
/// Tokens of a segment whose keys are cut into parts, at most: with 4 heads, the 16 rows of a warp.
const FEW: usize = 4;
/// Slots of [`KEY_TILE`] keys that a part has at least.
const LEAST_SLOTS: usize = 2;
/// Bits of a tile's tokens and of its KV head on the device; what is above them are sum and part.
const TOKEN_BITS: u32 = 8;
const HEAD_BITS: u32 = 16;

/// Keys and values of consecutive tokens of a row, all heads and layers, in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRun {
    /// Where token 0 is; the others follow it, one arena row each.
    pub at: KvSlot,
    /// Number of tokens.
    pub tokens: usize,
}

/// A row of a packed batch on the device: its keys are those of the prefix and then the fresh ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuAttnRow {
    /// Tokens of earlier calls, read where they lie.
    pub prefix: Option<KvRun>,
    /// Tokens of this call.
    pub fresh: KvRun,
}

impl GpuAttnRow {
    fn prefix_tokens(&self) -> usize {
        self.prefix.map_or(0, |p| p.tokens)
    }

    fn keys(&self) -> usize {
        self.prefix_tokens() + self.fresh.tokens
    }

    /// The row as the kernels read it.
    fn words(&self) -> [u32; WORDS] {
        let nowhere = KvSlot {
            first: 0,
            per_head: 0,
            per_layer: 0,
            to_value: 0,
        };
        let p = self.prefix.map_or(nowhere, |p| p.at);
        let f = self.fresh.at;
        [
            p.first,
            p.per_head,
            p.per_layer,
            p.to_value,
            f.first,
            f.per_head,
            f.per_layer,
            f.to_value,
        ]
    }
}

/// What the arena has, and how many layers runs have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) arena_rows: usize,
    pub(super) layers: usize,
    /// Arena rows from one token of a head to the next.
    pub(super) token_stride: usize,
}

/// The tables of a step: rows, and tiles with the longest first.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) rows: Vec<[u32; WORDS]>,
    pub(super) tiles: Vec<[u32; WORDS]>,
    /// Tiles that `tiles` has in parts, as a whole.
    pub(super) whole: Vec<[u32; WORDS]>,
    /// For each part how many have arrived (0), and its tile counted from the first of `tiles`.
    pub(super) sums: Vec<[u32; 2]>,
    /// Slots of keys that a part has.
    pub(super) part_slots: usize,
}

/// How a kernel cuts queries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Tokens of a tile.
    pub(super) tokens: usize,
    /// Whether a segment may leave tokens out or see no key.
    pub(super) partial: bool,
    /// For keys of few tokens to be cut too: into how many parts, about.
    pub(super) parts: Option<usize>,
}

/// Checks everything that the kernels rely on, then cuts.
pub(super) fn tables(
    heads: AttnHeads,
    extent: Extent,
    rows: &[GpuAttnRow],
    segments: &[Segment],
    (tokens, cut): (usize, Cut),
) -> Result<Tables> {
    for row in rows {
        for run in row.prefix.iter().chain([&row.fresh]) {
            check_run(heads, extent, run)?;
        }
    }
    check_segments(rows, segments, tokens, cut.partial)?;
    int(OP, "heads", heads.kv << HEAD_BITS)?;
    let mut cutting = Cutting {
        cut,
        costs: Vec::new(),
        tables: Tables {
            rows: rows.iter().map(GpuAttnRow::words).collect(),
            part_slots: part_slots(heads, rows, segments, cut),
            ..Tables::default()
        },
    };
    for (index, row) in rows.iter().enumerate() {
        for head in 0..heads.kv {
            for s in segments.iter().filter(|s| s.row == index) {
                cutting.segment(s, row, head);
            }
        }
    }
    cutting.finish()
}

fn bounds(what: &'static str, value: usize, limit: usize) -> KernelError {
    KernelError::Bounds {
        op: OP,
        what,
        value,
        limit,
    }
}

/// The last value of the run lies in the arena.
fn check_run(heads: AttnHeads, extent: Extent, run: &KvRun) -> Result<()> {
    let far = |count: usize, stride: usize| count.saturating_sub(1).saturating_mul(stride);
    let at = run.at;
    let end = (at.first as usize + at.to_value as usize)
        .saturating_add(far(heads.kv, at.per_head as usize))
        .saturating_add(far(extent.layers, at.per_layer as usize))
        .saturating_add(far(run.tokens, extent.token_stride))
        .saturating_add(1);
    if end > extent.arena_rows {
        return Err(bounds("end of a run", end, extent.arena_rows).into());
    }
    Ok(())
}

fn check_segments(
    rows: &[GpuAttnRow],
    segments: &[Segment],
    tokens: usize,
    partial: bool,
) -> Result<()> {
    let mut covered = vec![false; tokens];
    for s in segments {
        let row = rows
            .get(s.row)
            .ok_or_else(|| bounds("segment.row", s.row, rows.len()))?;
        let queries = covered
            .get_mut(s.q.clone())
            .ok_or_else(|| bounds("segment.q", s.q.end.max(s.q.start), tokens))?;
        if queries.iter().any(|c| *c) {
            return Err(argument(OP, "segments", "cover a token twice"));
        }
        queries.fill(true);
        let (first, last) = match s.kind {
            SegmentKind::Causal => (s.q_pos.saturating_add(1), s.q_pos.saturating_add(s.q.len())),
            SegmentKind::Full => (s.keys, s.keys),
        };
        if last > row.keys() {
            return Err(bounds("segment keys", last, row.keys()).into());
        }
        if first == 0 && !partial && !s.q.is_empty() {
            return Err(argument(OP, "segments", "have a query that sees no key"));
        }
    }
    if !partial && covered.contains(&false) {
        return Err(argument(OP, "segments", "leave a token uncovered"));
    }
    Ok(())
}

/// Slots of keys of row `row` that queries which see `most` keys have.
fn slots(row: &GpuAttnRow, most: usize) -> usize {
    let in_prefix = row.prefix_tokens().min(most);
    in_prefix.div_ceil(KEY_TILE) + (most - in_prefix).div_ceil(KEY_TILE)
}

/// The size of parts; 0 where nothing is cut into them.
fn part_slots(heads: AttnHeads, rows: &[GpuAttnRow], segments: &[Segment], cut: Cut) -> usize {
    let few = segments.iter().filter(|s| s.q.len() <= FEW);
    let of_head: usize = few.map(|s| slots(&rows[s.row], most(s))).sum();
    let part = |parts: usize| (heads.kv * of_head).div_ceil(parts.max(1));
    cut.parts.map_or(0, |parts| part(parts).max(LEAST_SLOTS))
}

/// Keys that the last query of a segment sees.
fn most(s: &Segment) -> usize {
    match s.kind {
        SegmentKind::Causal => s.q_pos + s.q.len(),
        SegmentKind::Full => s.keys,
    }
}

/// Tables that are being made.
struct Cutting {
    cut: Cut,
    /// Slots of each tile, and the tile.
    costs: Vec<(usize, [u32; WORDS])>,
    tables: Tables,
}

impl Cutting {
    /// The tiles of a segment and one KV head.
    fn segment(&mut self, s: &Segment, row: &GpuAttnRow, head: usize) {
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let (prefix, step) = (row.prefix_tokens(), self.cut.tokens);
        for at in s.q.clone().step_by(step) {
            let tokens = step.min(s.q.end - at);
            let (causal, visible, full, most) = match s.kind {
                SegmentKind::Causal => {
                    let visible = s.q_pos + (at - s.q.start) + 1;
                    (tokens, visible, 0, visible + tokens - 1)
                }
                SegmentKind::Full => (0, 0, s.keys, s.keys),
            };
            let slots = slots(row, most);
            let tile = [at, tokens, causal, visible, full, prefix, s.row, head].map(narrow);
            let part = self.tables.part_slots;
            if part > 0 && s.q.len() <= FEW && slots > part {
                self.parts(tile, slots);
            } else {
                self.costs.push((slots, tile));
            }
        }
    }

    /// A tile in parts, each of which says where the first is.
    fn parts(&mut self, tile: [u32; WORDS], slots: usize) {
        let sum = self.tables.sums.len() as u32;
        let size = self.tables.part_slots;
        for (part, first) in (0..slots).step_by(size).enumerate() {
            let mut piece = tile;
            piece[1] |= sum << TOKEN_BITS;
            piece[7] |= (part as u32 + 1) << HEAD_BITS;
            self.costs.push((size.min(slots - first), piece));
            self.tables.sums.push([0, self.tables.whole.len() as u32]);
        }
        self.tables.whole.push(tile);
    }

    fn finish(mut self) -> Result<Tables> {
        int(OP, "parts", self.tables.sums.len() << TOKEN_BITS)?;
        // Tiles of one head stay together, so that their keys are in the cache.
        self.costs
            .sort_by_key(|(slots, _)| std::cmp::Reverse(*slots));
        self.tables.tiles = self.costs.into_iter().map(|(_, tile)| tile).collect();
        let first = self.tables.tiles.len() as u32;
        for [_, whole] in &mut self.tables.sums {
            *whole += first;
        }
        Ok(self.tables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaError;

    const HEADS: AttnHeads = AttnHeads {
        q: 8,
        kv: 2,
        dim: 128,
    };
    const EXTENT: Extent = Extent {
        arena_rows: 4096,
        layers: 2,
        token_stride: 1,
    };
    const CUT: Cut = Cut {
        tokens: 32,
        partial: false,
        parts: None,
    };

    fn run(first: u32, tokens: usize) -> KvRun {
        let at = KvSlot {
            first,
            per_head: 128,
            per_layer: 512,
            to_value: 256,
        };
        KvRun { at, tokens }
    }

    /// A timestep token and 70 picture tokens behind a prefix of 40.
    fn denoise() -> (Vec<GpuAttnRow>, Vec<Segment>) {
        let row = GpuAttnRow {
            prefix: Some(run(0, 40)),
            fresh: run(1024, 71),
        };
        let causal = Segment {
            row: 0,
            q: 0..1,
            kind: SegmentKind::Causal,
            q_pos: 40,
            keys: 0,
        };
        let full = Segment {
            row: 0,
            q: 1..71,
            kind: SegmentKind::Full,
            q_pos: 0,
            keys: 111,
        };
        (vec![row], vec![causal, full])
    }

    fn reason(result: Result<Tables>) -> String {
        match result {
            Err(error @ CudaError::Argument(_)) => error.to_string(),
            other => panic!("expected a refused argument, got {other:?}"),
        }
    }

    #[test]
    fn every_query_of_every_kv_head_is_in_one_tile_that_shows_its_keys() {
        let (rows, segments) = denoise();
        let tables = tables(HEADS, EXTENT, &rows, &segments, (71, CUT)).unwrap();
        let mut seen = vec![0; 2 * 71];
        for [token, tokens, causal, visible, full, prefix, row, head] in tables.tiles {
            assert_eq!((prefix, row), (40, 0));
            for i in 0..tokens {
                let keys = if i < causal { visible + i } else { full };
                assert_eq!(keys, if token + i == 0 { 41 } else { 111 });
                seen[(head * 71 + token + i) as usize] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
    }

    #[test]
    fn longest_tiles_come_first_and_tiles_of_a_head_stay_together() {
        let row = GpuAttnRow {
            prefix: None,
            fresh: KvRun {
                tokens: 512,
                ..run(0, 0)
            },
        };
        let causal = Segment {
            row: 0,
            q: 0..512,
            kind: SegmentKind::Causal,
            q_pos: 0,
            keys: 0,
        };
        let tables = tables(HEADS, EXTENT, &[row], &[causal], (512, CUT)).unwrap();
        let cost: Vec<u32> = tables
            .tiles
            .iter()
            .map(|t| (t[3] + t[1] - 1).div_ceil(128))
            .collect();
        assert!(cost.is_sorted_by(|a, b| a >= b), "{cost:?}");
        let heads: Vec<u32> = tables.tiles.iter().take(8).map(|t| t[7]).collect();
        assert_eq!(heads, [0, 0, 0, 0, 1, 1, 1, 1]);
    }

    #[test]
    fn few_tokens_with_many_keys_are_cut_into_parts_that_have_every_slot_once() {
        let row = |tokens| GpuAttnRow {
            prefix: Some(KvRun {
                tokens,
                ..run(0, 0)
            }),
            fresh: run(2048, 5),
        };
        let causal = |row, q, q_pos| Segment {
            row,
            q,
            kind: SegmentKind::Causal,
            q_pos,
            keys: 0,
        };
        // 9 slots in parts; 4 slots and 5 tokens as a whole.
        let rows = [row(1000), row(384), row(1000)];
        let segments = [
            causal(0, 0..4, 1000),
            causal(1, 4..5, 384),
            causal(2, 5..10, 1000),
        ];
        let extent = Extent {
            arena_rows: 8192,
            ..EXTENT
        };
        // 2 heads of 9 + 4 slots.
        let cut = Cut {
            parts: Some(7),
            ..CUT
        };
        let tables = tables(HEADS, extent, &rows, &segments, (10, cut)).unwrap();
        assert_eq!(tables.part_slots, 4);
        assert_eq!((tables.whole.len(), tables.sums.len()), (2, 2 * 3));
        let parts: Vec<_> = tables.tiles.iter().filter(|t| t[7] >> 16 > 0).collect();
        assert_eq!(parts.len(), 2 * 3);
        for head in 0..2 {
            let mut of_head: Vec<_> = parts.iter().filter(|t| t[7] & 0xFFFF == head).collect();
            of_head.sort_by_key(|t| t[7]);
            let sum = of_head[0][1] >> 8;
            for (i, part) in of_head.iter().enumerate() {
                assert_eq!((part[1], part[7] >> 16), (4 | sum << 8, i as u32 + 1));
                let [arrived, whole] = tables.sums[(sum as usize) + i];
                let whole = &tables.whole[whole as usize - tables.tiles.len()];
                assert_eq!((arrived, whole[0], whole[1], whole[7]), (0, 0, 4, head));
            }
        }
        assert_eq!(tables.tiles.len(), 2 * (3 + 1 + 1));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let (rows, segments) = denoise();
        let with = |change: &dyn Fn(&mut Vec<GpuAttnRow>, &mut Vec<Segment>)| {
            let (mut rows, mut segments) = (rows.clone(), segments.clone());
            change(&mut rows, &mut segments);
            reason(tables(HEADS, EXTENT, &rows, &segments, (71, CUT)))
        };
        assert!(with(&|_, s| s[1].row = 1).contains("segment.row is 1"));
        assert!(with(&|_, s| s[1].q.end = 72).contains("segment.q is 72"));
        assert!(with(&|_, s| s[1].q.start = 0).contains("cover a token twice"));
        assert!(with(&|_, s| s[1].q.start = 2).contains("leave a token uncovered"));
        assert!(with(&|_, s| s[1].keys = 112).contains("segment keys is 112"));
        assert!(with(&|_, s| s[0].q_pos = 111).contains("segment keys is 112"));
        assert!(with(&|_, s| s[1].keys = 0).contains("sees no key"));
        assert!(with(&|r, _| r[0].fresh.at.first = 3200).contains("end of a run"));
        assert!(with(&|r, _| r[0].fresh.at.per_layer = u32::MAX).contains("end of a run"));
    }

    #[test]
    fn partial_attention_may_leave_tokens_out_and_see_no_key() {
        let (rows, mut segments) = denoise();
        segments[1].q = 40..71;
        segments[1].keys = 0;
        let cut = Cut {
            partial: true,
            ..CUT
        };
        let tables = tables(HEADS, EXTENT, &rows, &segments, (71, cut)).unwrap();
        assert_eq!(tables.tiles.len(), 2 * 2);
    }
}
