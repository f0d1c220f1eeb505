//! The seam for randomness: everything random is drawn from a generator made here, so that a seed
//! reproduces a run.
use std::sync::{Mutex, PoisonError};

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// A generator that depends on `seed` alone, on every machine.
pub fn seeded(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// A generator seeded by the operating system.
pub fn from_os() -> ChaCha8Rng {
    ChaCha8Rng::from_os_rng()
}

/// A shareable source of random numbers.
#[derive(Debug)]
pub struct Source(Mutex<ChaCha8Rng>);

impl Source {
    /// Seeded by the operating system.
    pub fn from_os() -> Self {
        Self(Mutex::new(from_os()))
    }

    /// Depends on `seed` alone.
    pub fn seeded(seed: u64) -> Self {
        Self(Mutex::new(seeded(seed)))
    }

    /// Uniform over all 64-bit numbers.
    pub fn next_u64(&self) -> u64 {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .random()
    }

    /// Uniform over `[0, bound)`; 0 when `bound` is 0.
    pub fn below(&self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .random_range(0..bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers() {
        let (a, b, c) = (Source::seeded(7), Source::seeded(7), Source::seeded(8));
        let (first, second) = (a.next_u64(), a.next_u64());
        assert_eq!((first, second), (b.next_u64(), b.next_u64()));
        assert_ne!(first, c.next_u64());
    }

    #[test]
    fn below_stays_below() {
        let source = Source::seeded(1);
        assert!((0..1000).all(|_| source.below(3) < 3));
        assert_eq!(source.below(0), 0);
    }
}
