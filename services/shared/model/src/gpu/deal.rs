//! How the tokens of a batch are dealt to the ranks of a plan.

use std::ops::Range;

use parallel::near_even_range;

use super::share::{Attention, GpuShare};
use crate::error::ModelError;

/// One row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchRow {
    /// Index of its job.
    pub(crate) job: usize,
    /// 0: with the prompt, 1: without.
    pub(crate) side: usize,
    /// Fresh tokens.
    pub(crate) tokens: usize,
    /// Those before it in the batch.
    pub(crate) start: usize,
}

/// Consecutive fresh tokens of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the row.
    pub(crate) row: usize,
    /// Counted from the row's first fresh token.
    pub(crate) tokens: Range<usize>,
}

/// Who has which tokens. All of them in order of the ranks is the order in which they are gathered.
#[derive(Clone, Debug)]
pub(crate) struct Deal {
    /// By rank.
    pub(crate) pieces: Vec<Vec<Piece>>,
    /// First token of each rank, and the end.
    pub(crate) starts: Vec<usize>,
    pub(crate) me: usize,
}

impl Deal {
    /// Rows to ranks, or a part of each row to each rank, or everything to each stage.
    pub(crate) fn new(share: &GpuShare, rows: &[BatchRow]) -> Result<Self, ModelError> {
        let cut = share.flow().attention != Attention::Own;
        let alone = share.is_staged() || share.ranks() == 1;
        let ranks = if alone { 1 } else { share.ranks() };
        let mut pieces = vec![Vec::new(); ranks];
        for (row, of) in rows.iter().enumerate() {
            for (rank, list) in pieces.iter_mut().enumerate() {
                let tokens = if cut {
                    near_even_range(of.tokens, ranks, rank)?
                } else if alone || of.side == rank {
                    0..of.tokens
                } else {
                    continue;
                };
                list.push(Piece { row, tokens });
            }
        }
        let mut starts = vec![0];
        for list in &pieces {
            let tokens: usize = list.iter().map(|p| p.tokens.len()).sum();
            starts.push(starts[starts.len() - 1] + tokens);
        }
        let me = if alone { 0 } else { share.rank() };
        Ok(Self { pieces, starts, me })
    }

    /// Pieces of this rank.
    pub(crate) fn own(&self) -> &[Piece] {
        &self.pieces[self.me]
    }

    /// Tokens of all ranks.
    pub(crate) fn all_tokens(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// The whole of some rows, for a pass on one rank.
    #[cfg(test)]
    pub(crate) fn whole(tokens: &[usize]) -> Vec<Piece> {
        let piece = |(row, tokens): (usize, &usize)| Piece {
            row,
            tokens: 0..*tokens,
        };
        tokens.iter().enumerate().map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::ModelConfig;

    const CHECKPOINT: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../integration-tests/fixtures/golden/model"
    );

    fn deal(plan: &str, rank: usize, rows: &[BatchRow]) -> Deal {
        let config = ModelConfig::from_dir(Path::new(CHECKPOINT)).unwrap();
        let share = GpuShare::new(&config, &plan.parse().unwrap(), rank).unwrap();
        Deal::new(&share, rows).unwrap()
    }

    #[test]
    fn every_token_of_a_batch_is_dealt_once() {
        let row = |job, side, tokens, start| BatchRow {
            job,
            side,
            tokens,
            start,
        };
        let rows = [
            row(0, 0, 17, 0),
            row(0, 1, 17, 17),
            row(1, 0, 5, 34),
            row(1, 1, 5, 39),
        ];
        for plan in [
            "single",
            "cfg=2",
            "cfg=2,ep=cfg",
            "tp=2",
            "ulysses=2",
            "ring=2",
            "pp=2",
        ] {
            for rank in 0..if plan == "single" { 1 } else { 2 } {
                let deal = deal(plan, rank, &rows);
                let mut owners = vec![0; 44];
                for piece in deal.pieces.iter().flatten() {
                    for token in piece.tokens.clone() {
                        owners[rows[piece.row].start + token] += 1;
                    }
                }
                assert!(owners.iter().all(|n| *n == 1), "{plan}: {owners:?}");
                assert_eq!(deal.all_tokens(), 44);
                let own: usize = deal.own().iter().map(|p| p.tokens.len()).sum();
                assert_eq!(own, deal.starts[deal.me + 1] - deal.starts[deal.me]);
            }
        }
    }
}
