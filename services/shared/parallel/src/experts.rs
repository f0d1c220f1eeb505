//! Tokens travel to the ranks that hold their experts, and the experts' outputs travel back.
//!
//! Nothing is computed and no token is dropped. A token goes once to each rank that holds some of its
//! experts, and comes back once for each of them, so that the weighted sum is formed where the token
//! lives, in the order of its choices: the same bits as on one rank.

use crate::eplb::Placement;
use crate::{Collective, ParallelError, Pending};

/// Largest count or index that travels as an element: every integer up to here is exact in F32.
const MAX_EXACT: usize = 1 << 24;

/// What one rank sends to the others, and how it reads their answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertDispatch {
    hidden: usize,
    /// One for each rank.
    parts: Vec<Part>,
    /// For each choice `(token, k)`: its row among all answers in the order of ranks.
    position: Vec<u32>,
}

/// What goes to one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Part {
    /// The tokens it gets.
    tokens: Vec<usize>,
    /// `(place of the token in that list, slot of the rank)` for each of the choices it computes.
    choices: Vec<(usize, usize)>,
}

/// What a rank got to compute: `rows [choices, hidden]`, one for each choice.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertWork {
    /// Vectors in the order of the ranks that sent them.
    pub rows: Vec<f32>,
    /// Slot of this rank that computes each row.
    pub slots: Vec<u32>,
    /// Choices of each rank.
    pub counts: Vec<usize>,
}

fn mismatch(field: &'static str, expected: usize, got: usize) -> ParallelError {
    ParallelError::Mismatch {
        field,
        expected,
        got,
    }
}

impl ExpertDispatch {
    /// Deals the choices of `experts` (`top_k` for each token, one token after the other) to the ranks
    /// that `placement` names. `first` numbers the first token, so that replicas share the work.
    ///
    /// # Errors
    /// [`ParallelError::OutOfRange`] for an expert that is nowhere or more than 2^24 choices.
    pub fn new(
        placement: &Placement,
        experts: &[u32],
        top_k: usize,
        hidden: usize,
        first: usize,
    ) -> Result<Self, ParallelError> {
        crate::error::in_range("top_k", top_k, 1, MAX_EXACT)?;
        crate::error::in_range("choices", experts.len(), 0, MAX_EXACT)?;
        let ranks = placement.slots().len();
        let mut parts = vec![Part::default(); ranks];
        let mut holders = Vec::with_capacity(experts.len());
        for (choice, &expert) in experts.iter().enumerate() {
            let token = choice / top_k;
            let held = placement.holder_for(expert as usize, first + token);
            let (rank, slot) = held.ok_or(ParallelError::OutOfRange {
                field: "expert",
                min: 0,
                max: MAX_EXACT,
                got: expert as usize,
            })?;
            let Part { tokens, choices } = &mut parts[rank];
            if tokens.last() != Some(&token) {
                tokens.push(token);
            }
            holders.push((rank, choices.len()));
            choices.push((tokens.len() - 1, slot));
        }
        let mut starts = vec![0; ranks];
        for rank in 1..ranks {
            starts[rank] = starts[rank - 1] + parts[rank - 1].choices.len();
        }
        let place = |(rank, at): (usize, usize)| (starts[rank] + at) as u32;
        Ok(Self {
            hidden,
            position: holders.into_iter().map(place).collect(),
            parts,
        })
    }

    /// For each choice, its row in what [`Self::collect`] returns.
    #[must_use]
    pub fn position(&self) -> &[u32] {
        &self.position
    }

    /// Elements sent to each rank by [`Self::send`]: what it costs on the wire.
    #[must_use]
    pub fn sent_elements(&self) -> Vec<usize> {
        let cost = |part: &Part| 2 + 2 * part.choices.len() + part.tokens.len() * self.hidden;
        self.parts.iter().map(cost).collect()
    }

    /// Elements that each rank sends back in [`ExpertWork::answer`].
    #[must_use]
    pub fn answered_elements(&self) -> Vec<usize> {
        let parts = self.parts.iter();
        parts.map(|p| p.choices.len() * self.hidden).collect()
    }

    /// Sends `data [tokens, hidden]` to the holders and receives what this rank has to compute.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when the sizes disagree, here or (when waited for) on the sender's
    /// side; those of [`Collective::all_to_all_v`].
    pub fn send(
        &self,
        group: &dyn Collective,
        data: &[f32],
    ) -> Result<Pending<ExpertWork>, ParallelError> {
        if group.size() != self.parts.len() {
            return Err(mismatch("group size", self.parts.len(), group.size()));
        }
        let mut buffers = Vec::with_capacity(self.parts.len());
        for (Part { tokens, choices }, elements) in self.parts.iter().zip(self.sent_elements()) {
            let mut part = Vec::with_capacity(elements);
            part.extend([tokens.len() as f32, choices.len() as f32]);
            for &(at, slot) in choices {
                part.extend([at as f32, slot as f32]);
            }
            for token in tokens {
                let (start, end) = (token * self.hidden, (token + 1) * self.hidden);
                let row = data.get(start..end);
                part.extend(row.ok_or_else(|| mismatch("elements of tokens", end, data.len()))?);
            }
            buffers.push(part);
        }
        let hidden = self.hidden;
        let pending = group.all_to_all_v(buffers)?;
        Ok(pending.and_then(move |parts| ExpertWork::read(&parts, hidden)))
    }

    /// Puts the answers of all ranks one after the other: `[choices, hidden]`.
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when a rank answered another number of choices.
    pub fn collect(&self, answers: &[Vec<f32>]) -> Result<Vec<f32>, ParallelError> {
        let expected = self.answered_elements();
        if expected.len() != answers.len() {
            return Err(mismatch("answers", expected.len(), answers.len()));
        }
        for (expected, answer) in expected.into_iter().zip(answers) {
            if expected != answer.len() {
                return Err(mismatch("elements of an answer", expected, answer.len()));
            }
        }
        Ok(answers.concat())
    }
}

impl ExpertWork {
    fn read(parts: &[Vec<f32>], hidden: usize) -> Result<Self, ParallelError> {
        let mut work = Self {
            rows: Vec::new(),
            slots: Vec::new(),
            counts: Vec::with_capacity(parts.len()),
        };
        for part in parts {
            let short = |expected| mismatch("elements of dispatched tokens", expected, part.len());
            let [tokens, choices, rest @ ..] = part.as_slice() else {
                return Err(short(2));
            };
            let (tokens, choices) = (*tokens as usize, *choices as usize);
            let pairs = choices.saturating_mul(2);
            let expected = pairs.saturating_add(tokens.saturating_mul(hidden));
            if rest.len() != expected {
                return Err(short(expected.saturating_add(2)));
            }
            let (pairs, vectors) = rest.split_at(pairs);
            for pair in pairs.chunks_exact(2) {
                let row = (pair[0] as usize)
                    .checked_mul(hidden)
                    .and_then(|at| vectors.get(at..at + hidden));
                work.rows.extend(row.ok_or_else(|| short(vectors.len()))?);
                work.slots.push(pair[1] as u32);
            }
            work.counts.push(choices);
        }
        Ok(work)
    }

    /// Sends `outputs`, one row for each of [`ExpertWork::rows`], back to the ranks they came from; the
    /// result is for [`ExpertDispatch::collect`].
    ///
    /// # Errors
    /// [`ParallelError::Mismatch`] when there is not one row a choice; those of
    /// [`Collective::all_to_all_v`].
    pub fn answer(
        &self,
        group: &dyn Collective,
        outputs: &[f32],
    ) -> Result<Pending<Vec<Vec<f32>>>, ParallelError> {
        if outputs.len() != self.rows.len() {
            return Err(mismatch(
                "elements of outputs",
                self.rows.len(),
                outputs.len(),
            ));
        }
        let hidden = self.rows.len() / self.slots.len().max(1);
        let mut next = 0;
        let parts = self.counts.iter().map(|choices| {
            let start = next;
            next += choices * hidden;
            outputs[start..next].to_vec()
        });
        group.all_to_all_v(parts.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::collective::threads;
    use crate::{Op, wire};

    /// Every expert adds its number to a vector, so an answer tells who computed what.
    fn compute(work: &ExpertWork, placement: &Placement, rank: usize, hidden: usize) -> Vec<f32> {
        let mut out = work.rows.clone();
        for (row, &slot) in out.chunks_exact_mut(hidden).zip(&work.slots) {
            let expert = placement.slots()[rank][slot as usize].unwrap();
            row.iter_mut().for_each(|v| *v += expert as f32);
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Each choice of each token comes back from its expert, and the bytes are those predicted.
        #[test]
        fn every_choice_is_computed_by_its_expert(
            ranks in 1_usize..5, each in 1_usize..4, top_k in 1_usize..4, hidden in 1_usize..4,
            tokens in prop::collection::vec(0_usize..6, 4), seed in any::<u32>(),
        ) {
            let experts = ranks * each;
            let placement = Placement::contiguous(experts, ranks).unwrap();
            let chosen = |rank: usize| -> Vec<u32> {
                let pick = |i: usize| {
                    (seed.wrapping_mul(2_654_435_761).wrapping_add((rank * 977 + i * 131) as u32)
                        >> 7) % experts as u32
                };
                (0..tokens[rank] * top_k).map(pick).collect()
            };
            let dispatch = |rank: usize| {
                ExpertDispatch::new(&placement, &chosen(rank), top_k, hidden, 0).unwrap()
            };
            let counts: Vec<_> = (0..ranks).map(|r| dispatch(r).sent_elements()).collect();
            let back: Vec<Vec<usize>> = (0..ranks)
                .map(|r| (0..ranks).map(|to| dispatch(to).answered_elements()[r]).collect())
                .collect();
            let ends = threads::group(ranks, Duration::from_secs(60)).unwrap();
            thread::scope(|scope| {
                for (rank, end) in ends.into_iter().enumerate() {
                    let (own, placement, counts, back) = (dispatch(rank), &placement, &counts, &back);
                    let chosen = chosen(rank);
                    let data: Vec<f32> = (0..tokens[rank] * hidden)
                        .map(|i| (rank * 10_000 + i * 100) as f32)
                        .collect();
                    scope.spawn(move || {
                        let work = own.send(&end, &data).unwrap().wait().unwrap();
                        let out = compute(&work, placement, rank, hidden);
                        let answers = work.answer(&end, &out).unwrap().wait().unwrap();
                        let all = own.collect(&answers).unwrap();
                        for (choice, &at) in own.position().iter().enumerate() {
                            for d in 0..hidden {
                                let sent = data[choice / top_k * hidden + d];
                                let got = all[at as usize * hidden + d];
                                assert_eq!(got, sent + chosen[choice] as f32);
                            }
                        }
                        end.barrier().unwrap().wait().unwrap();
                        let moved = end.traffic().by_kind[Op::AllToAllV.kind()];
                        let [there, home] =
                            [counts, back].map(|c| wire::all_to_all_v(c, rank));
                        assert_eq!(moved.sent, there.sent + home.sent);
                        assert_eq!(moved.received, there.received + home.received);
                    });
                }
            });
        }
    }

    #[test]
    fn a_token_goes_once_to_a_rank_that_holds_two_of_its_experts() {
        let placement = Placement::contiguous(4, 2).unwrap();
        let dispatch = ExpertDispatch::new(&placement, &[0, 1, 1, 3], 2, 10, 0).unwrap();
        // Rank 0: both tokens and three choices; rank 1: one of each.
        assert_eq!(dispatch.sent_elements(), [2 + 6 + 20, 2 + 2 + 10]);
        assert_eq!(dispatch.answered_elements(), [30, 10]);
        assert_eq!(dispatch.position(), [0, 1, 2, 3]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let placement = Placement::contiguous(4, 2).unwrap();
        assert!(ExpertDispatch::new(&placement, &[4], 1, 10, 0).is_err());
        let dispatch = ExpertDispatch::new(&placement, &[1], 1, 10, 0).unwrap();
        let ends = threads::group(2, Duration::from_secs(1)).unwrap();
        assert!(dispatch.send(&ends[0], &[0.0; 9]).is_err());
        assert!(dispatch.collect(&[vec![0.0; 10]]).is_err());
        assert!(dispatch.collect(&[vec![0.0; 9], vec![]]).is_err());
        assert!(ExpertWork::read(&[vec![1.0, 1.0, 0.0, 0.0]], 2).is_err());
        assert!(ExpertWork::read(&[vec![1.0]], 2).is_err());
        assert!(ExpertWork::read(&[vec![1.0, 1.0, 5.0, 0.0, 1.0, 1.0]], 2).is_err());
    }
}
