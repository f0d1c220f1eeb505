//! The rows of a pass as one rank sees them: its tokens, and which of its queries see which keys.
//!
//! Built once for a pass and used by every layer. Keys come from one source for each rank of the ring,
//! each with its own segments, so that generalised causal attention goes round a ring without a mask.

use std::ops::Range;

use kernels::{AttnRow, RopeTable, Segment, SegmentKind, Tensor};
use parallel::{Axis, ExchangeRow, HeadExchange, SequenceShards};

use super::row::{Row, RowKv, RowSegment};
use crate::error::ModelError;
use crate::rank::{Place, RankShard};

/// Built once for a pass.
#[derive(Debug)]
pub(crate) struct Packing {
    ring: Place,
    ulysses: Place,
    shards: Vec<SequenceShards>,
    /// One for each rank of the ring.
    sources: Vec<Source>,
}

/// The keys of one ring rank, and the queries of this rank's ring chunk that see them.
#[derive(Debug, Default)]
pub(crate) struct Source {
    /// Packed fresh tokens of each row in that rank's keys.
    pub(crate) fresh: Vec<Range<usize>>,
    /// Past tokens of each row in that rank's keys.
    pub(crate) past: Vec<usize>,
    /// Keys count the past tokens first.
    pub(crate) segments: Vec<Segment>,
}

impl Packing {
    pub(crate) fn new(rows: &[Row<'_>], rank: &RankShard) -> Result<Self, ModelError> {
        let (ring, ulysses) = (rank.place(Axis::Ring), rank.place(Axis::Ulysses));
        let mut shards = Vec::with_capacity(rows.len());
        for (index, row) in rows.iter().enumerate() {
            check(index, row)?;
            let dealt = SequenceShards::new(row.tokens, ring.size, ulysses.size, row.order)?;
            if let RowKv::Append(cache) = &row.kv {
                if ring.size > 1 && !cache.is_empty() && !cache.is_spread() {
                    return Err(ModelError::Internal(format!(
                        "row {index} continues a whole cache on a ring"
                    )));
                }
                cache.room_for(dealt.ring_tokens(ring.index))?;
            }
            shards.push(dealt);
        }
        let mut packing = Self {
            ring,
            ulysses,
            shards,
            sources: Vec::with_capacity(ring.size),
        };
        for source in 0..ring.size {
            let made = packing.source(rows, source);
            packing.sources.push(made);
        }
        Ok(packing)
    }

    fn source(&self, rows: &[Row<'_>], source: usize) -> Source {
        let (mut made, mut keys, mut queries) = (Source::default(), 0, 0);
        for (index, (row, shards)) in rows.iter().zip(&self.shards).enumerate() {
            let past = row.kv.held_from(source, self.ring.index);
            let seen = Keys {
                past,
                fresh: shards.ring_ranges(source),
            };
            for own in shards.ring_ranges(self.ring.index) {
                for segment in row.segments {
                    let tokens =
                        segment.tokens.start.max(own.start)..segment.tokens.end.min(own.end);
                    if tokens.is_empty() {
                        continue;
                    }
                    let first = queries + tokens.start - own.start;
                    let to = (index, first);
                    seen.segments(segment, tokens, to, &mut made.segments);
                }
                queries += own.len();
            }
            let next = keys + shards.ring_tokens(source);
            made.fresh.push(keys..next);
            made.past.push(past);
            keys = next;
        }
        made
    }

    /// Keys of every ring rank; this rank's are at its place in the ring.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// This rank's place in the ring.
    pub(crate) fn ring(&self) -> Place {
        self.ring
    }

    /// This rank's place in its Ulysses group.
    pub(crate) fn ulysses(&self) -> Place {
        self.ulysses
    }

    /// How each row is dealt out.
    pub(crate) fn shards(&self) -> &[SequenceShards] {
        &self.shards
    }

    /// This rank's tokens of each row.
    pub(crate) fn own_tokens(&self) -> impl Iterator<Item = usize> {
        let (ring, ulysses) = (self.ring.index, self.ulysses.index);
        self.shards.iter().map(move |s| s.own_tokens(ring, ulysses))
    }

    /// Whether each rank has all tokens.
    pub(crate) fn is_whole(&self) -> bool {
        self.ring.size * self.ulysses.size == 1
    }

    /// This rank's tokens of `whole [tokens of all rows, width]`.
    pub(crate) fn cut(&self, whole: &Tensor) -> Result<Tensor, ModelError> {
        if self.is_whole() {
            return Ok(whole.clone());
        }
        let (width, data) = (whole.dim(1), whole.as_f32()?);
        let (mut own, mut at) = (Vec::new(), 0);
        for shards in &self.shards {
            let next = at + shards.tokens() * width;
            let row = data.get(at..next).unwrap_or_default();
            own.extend(shards.sp_shard(row, width, self.ring.index, self.ulysses.index)?);
            at = next;
        }
        Ok(Tensor::from_f32(&[own.len() / width.max(1), width], own)?)
    }

    /// This rank's entries of the rotary tables of all rows.
    pub(crate) fn cut_rope(&self, whole: &RopeTable) -> Result<RopeTable, ModelError> {
        Ok(RopeTable {
            cos: self.cut(&whole.cos)?,
            sin: self.cut(&whole.sin)?,
        })
    }

    /// The trade of tokens for heads within the Ulysses group.
    pub(crate) fn exchange(&self) -> Result<HeadExchange, ModelError> {
        let rows = self.shards.iter().map(|s| ExchangeRow {
            piece: s.piece(),
            tokens: (0..self.ulysses.size)
                .map(|u| s.own_tokens(self.ring.index, u))
                .collect(),
        });
        let Place { size, index } = self.ulysses;
        Ok(HeadExchange::new(rows.collect(), size, index)?)
    }

    /// Counts the fresh tokens of every row that appends.
    pub(crate) fn advance(&self, rows: &mut [Row<'_>]) {
        for (row, shards) in rows.iter_mut().zip(&self.shards) {
            if let RowKv::Append(cache) = &mut row.kv {
                cache.advance(shards, self.ring.index);
            }
        }
    }

    /// This rank's own keys as attention wants them.
    pub(crate) fn own_rows<'a>(&self, rows: &'a [Row<'_>], layer: usize) -> Vec<AttnRow<'a>> {
        let fresh = &self.sources[self.ring.index].fresh;
        let rows = rows.iter().zip(fresh);
        rows.map(|(row, fresh)| AttnRow {
            past: row.kv.parts(layer),
            fresh: fresh.clone(),
        })
        .collect()
    }
}

/// The keys of one row that a source has.
struct Keys<'a> {
    past: usize,
    fresh: &'a [Range<usize>],
}

impl Keys<'_> {
    /// Keys with a fresh index below `limit`.
    fn below(&self, limit: usize) -> usize {
        let fresh = self.fresh.iter();
        self.past
            + fresh
                .map(|r| limit.clamp(r.start, r.end) - r.start)
                .sum::<usize>()
    }

    /// What queries `tokens` of `segment` see here; `to` is the row and the first of their packed tokens.
    fn segments(
        &self,
        segment: &RowSegment,
        tokens: Range<usize>,
        to: (usize, usize),
        out: &mut Vec<Segment>,
    ) {
        let (row, first) = to;
        let mut push = |piece: Range<usize>, kind, q_pos, keys: usize| {
            if keys > 0 {
                out.push(Segment {
                    row,
                    q: first + piece.start - tokens.start..first + piece.end - tokens.start,
                    kind,
                    q_pos,
                    keys,
                });
            }
        };
        if segment.kind == SegmentKind::Full {
            push(
                tokens.clone(),
                SegmentKind::Full,
                0,
                self.below(segment.tokens.end),
            );
            return;
        }
        // Query `t` sees `below(t + 1)` keys: one more with each token of this source, else as many.
        let mut at = tokens.start;
        while at < tokens.end {
            let inside = self.fresh.iter().find(|r| r.contains(&at));
            if let Some(range) = inside {
                let end = range.end.min(tokens.end);
                push(
                    at..end,
                    SegmentKind::Causal,
                    self.below(at),
                    self.below(end),
                );
                at = end;
            } else {
                let next = self.fresh.iter().map(|r| r.start).find(|start| *start > at);
                let end = next.unwrap_or(tokens.end).min(tokens.end);
                push(at..end, SegmentKind::Full, 0, self.below(at));
                at = end;
            }
        }
    }
}

fn check(index: usize, row: &Row<'_>) -> Result<(), ModelError> {
    let mut next = 0;
    let mut covered = true;
    for segment in row.segments {
        covered &= segment.tokens.start == next && segment.tokens.end >= next;
        next = segment.tokens.end;
    }
    if covered && next == row.tokens {
        return Ok(());
    }
    Err(ModelError::Internal(format!(
        "segments of row {index} do not cover its {} tokens in order",
        row.tokens
    )))
}

#[cfg(test)]
mod tests {
    use parallel::TokenOrder;

    use super::*;

    #[test]
    fn segments_that_leave_a_gap_are_refused() {
        let segments = [RowSegment {
            tokens: 1..3,
            kind: SegmentKind::Causal,
        }];
        let row = Row {
            tokens: 3,
            segments: &segments,
            kv: RowKv::Fresh,
            order: TokenOrder::Contiguous,
        };
        assert!(check(0, &row).is_err());
    }

    /// Fresh keys that the queries of all pieces see, by fresh index.
    fn seen(pieces: &[Segment], keys: &Keys<'_>, first: usize) -> Vec<(usize, Vec<usize>)> {
        let order: Vec<usize> = keys.fresh.iter().cloned().flatten().collect();
        let mut all = Vec::new();
        for piece in pieces {
            for (i, q) in piece.q.clone().enumerate() {
                let count = match piece.kind {
                    SegmentKind::Causal => piece.q_pos + i + 1,
                    SegmentKind::Full => piece.keys,
                };
                all.push((q - first, order[..count - keys.past].to_vec()));
            }
        }
        all
    }

    #[test]
    fn every_query_sees_of_a_source_exactly_the_keys_its_rule_allows() {
        let one = std::slice::from_ref::<Range<usize>>;
        let lists = [
            &[],
            one(&(0..3)),
            &[2..5, 9..12],
            one(&(0..12)),
            one(&(5..6)),
        ];
        for (fresh, past) in lists.into_iter().flat_map(|f| [(f, 0), (f, 4)]) {
            let keys = Keys { past, fresh };
            for (start, end) in (0..12).flat_map(|s| (s + 1..=12).map(move |e| (s, e))) {
                for kind in [SegmentKind::Causal, SegmentKind::Full] {
                    let segment = RowSegment {
                        tokens: 0..12,
                        kind,
                    };
                    let mut out = Vec::new();
                    keys.segments(&segment, start..end, (0, 100), &mut out);
                    let mut got = seen(&out, &keys, 100).into_iter().peekable();
                    for (q, t) in (start..end).enumerate() {
                        let limit = if kind == SegmentKind::Causal {
                            t + 1
                        } else {
                            12
                        };
                        let want: Vec<usize> = fresh
                            .iter()
                            .cloned()
                            .flatten()
                            .filter(|k| *k < limit)
                            .collect();
                        if want.len() + past > 0 {
                            assert_eq!(got.next(), Some((q, want)), "{fresh:?}");
                        }
                    }
                    assert_eq!(got.next(), None);
                }
            }
        }
    }
}
