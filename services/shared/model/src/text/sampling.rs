//! The choice of the next token.
//!
//! In this order: repetition penalty, forced transitions, temperature, the `top_k` most likely, of these the
//! smallest set that reaches `top_p`, then one by chance. HunyuanImage-3.0: a ratio token is never sampled.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha12Rng;

use super::{Choice, argmax};

/// Keeps the stream of text apart from those of noise with the same seed; any fixed constant does.
const STREAM: u64 = 0xD1B5_4A32_D192_ED03;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Most likely tokens that may come; 0: all.
    pub top_k: usize,
    /// Probability that the tokens that may come reach together; 1: all.
    pub top_p: f64,
    /// Makes tokens less likely that stand in the row already; 1: off.
    pub repetition_penalty: f64,
    /// Of the chance.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        seed: 0,
    };
}

/// Chooses the tokens of one row.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    chance: ChaCha12Rng,
}

impl Sampler {
    /// A sampler at the start of its chance.
    pub fn new(sampling: Sampling) -> Self {
        Self {
            chance: ChaCha12Rng::seed_from_u64(sampling.seed ^ STREAM),
            sampling,
        }
    }

    /// The next token: `seen` are the row's tokens, `never` tokens that must not be chosen freely.
    pub fn pick(&mut self, logits: &[f32], seen: &[u32], choice: Choice<'_>, never: &[u32]) -> u32 {
        if let Choice::Forced(id) = choice {
            return id;
        }
        let mut scores = logits.to_vec();
        self.penalise(&mut scores, seen);
        if let Choice::MostLikelyOf(ids) = choice {
            let of: Vec<f32> = ids.iter().map(|id| scores[*id as usize]).collect();
            return ids[argmax(&of) as usize];
        }
        for id in never {
            scores[*id as usize] = f32::NEG_INFINITY;
        }
        if self.sampling.temperature == 0.0 {
            return argmax(&scores);
        }
        self.draw(&scores)
    }

    /// Every token once, however often it stands there.
    fn penalise(&self, scores: &mut [f32], seen: &[u32]) {
        let penalty = self.sampling.repetition_penalty as f32;
        if penalty == 1.0 {
            return;
        }
        let mut seen = seen.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = if *score < 0.0 {
                    *score * penalty
                } else {
                    *score / penalty
                };
            }
        }
    }

    fn draw(&mut self, scores: &[f32]) -> u32 {
        // Likelier ones first, the lower id first among equals.
        let likelier = |a: &u32, b: &u32| {
            let (x, y) = (scores[*a as usize], scores[*b as usize]);
            y.total_cmp(&x).then(a.cmp(b))
        };
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        let most = match self.sampling.top_k {
            0 => ids.len(),
            k => k.min(ids.len()),
        };
        if most < ids.len() {
            ids.select_nth_unstable_by(most, likelier);
            ids.truncate(most);
        }
        ids.sort_unstable_by(likelier);
        let best = f64::from(scores[ids[0] as usize]);
        let weight = |id: &u32| {
            let above = f64::from(scores[*id as usize]) - best;
            libm::exp(above / self.sampling.temperature)
        };
        let mut weights: Vec<f64> = ids.iter().map(weight).collect();
        let whole: f64 = weights.iter().sum();
        let mut reached = 0.0;
        let needed = weights.iter().position(|weight| {
            reached += weight / whole;
            reached >= self.sampling.top_p
        });
        weights.truncate(needed.map_or(weights.len(), |last| last + 1));
        // 53 bits: every value is exact, and none is 1.
        let chance = (self.chance.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut left = chance * weights.iter().sum::<f64>();
        let hit = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        ids[hit.unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -1.0];

    fn sampling(temperature: f64) -> Sampling {
        Sampling {
            temperature,
            seed: 5,
            ..Sampling::GREEDY
        }
    }

    /// How often each token comes in many draws.
    fn counts(sampling: Sampling) -> [usize; 5] {
        let mut sampler = Sampler::new(sampling);
        let mut counts = [0; 5];
        for _ in 0..4_000 {
            counts[sampler.pick(&LOGITS, &[], Choice::Free, &[]) as usize] += 1;
        }
        counts
    }

    #[test]
    fn without_temperature_the_first_of_the_likeliest_comes() {
        let mut greedy = Sampler::new(Sampling::GREEDY);
        assert_eq!(greedy.pick(&LOGITS, &[], Choice::Free, &[]), 1);
        assert_eq!(greedy.pick(&LOGITS, &[], Choice::Free, &[1]), 3);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let counts = counts(sampling(1.0));
        let exp: Vec<f64> = LOGITS.iter().map(|l| f64::from(*l).exp()).collect();
        let whole: f64 = exp.iter().sum();
        for (count, exp) in counts.iter().zip(exp) {
            let (got, want) = (*count as f64 / 4_000.0, exp / whole);
            // Five standard deviations.
            assert!((got - want).abs() < 0.04, "{got} {want}");
        }
    }

    #[test]
    fn top_k_and_top_p_bound_what_may_come() {
        let two = counts(Sampling {
            top_k: 2,
            ..sampling(1.0)
        });
        assert_eq!((two[0], two[2], two[4]), (0, 0, 0));
        assert!(two[1] > 1_500 && two[3] > 1_500, "{two:?}");
        // The first token has a probability of 0.41, so that it does not reach the bound alone.
        let reached = counts(Sampling {
            top_p: 0.5,
            ..sampling(1.0)
        });
        assert_eq!((reached[0], reached[2], reached[4]), (0, 0, 0));
        let one = counts(Sampling {
            top_p: 0.1,
            ..sampling(1.0)
        });
        assert_eq!(one[1], 4_000);
    }

    #[test]
    fn a_penalty_makes_seen_tokens_rarer_whatever_their_sign() {
        let mut sampler = Sampler::new(Sampling {
            repetition_penalty: 2.0,
            ..Sampling::GREEDY
        });
        assert_eq!(sampler.pick(&LOGITS, &[1, 1, 3], Choice::Free, &[]), 2);
        let below = [-1.0, -1.5];
        assert_eq!(sampler.pick(&below, &[0], Choice::Free, &[]), 1);
    }

    #[test]
    fn forced_and_ratio_tokens_are_never_drawn() {
        let mut sampler = Sampler::new(sampling(9.0));
        for _ in 0..100 {
            assert_eq!(sampler.pick(&LOGITS, &[], Choice::Forced(4), &[]), 4);
            let ratio = sampler.pick(&LOGITS, &[], Choice::MostLikelyOf(&[0, 2, 4]), &[]);
            assert_eq!(ratio, 2);
        }
    }

    #[test]
    fn a_seed_gives_the_same_text_again_and_another_seed_another() {
        let text = |seed| {
            let mut sampler = Sampler::new(Sampling {
                seed,
                ..sampling(2.0)
            });
            let pick = |_| sampler.pick(&LOGITS, &[], Choice::Free, &[]);
            (0..64).map(pick).collect::<Vec<_>>()
        };
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }
}
