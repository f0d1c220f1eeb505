//! The vector units of the CPU. This module and its children are the only places of the crate with
//! `unsafe` code.
//!
//! [`run`] compiles a closure for the widest unit the CPU has. All levels give the same bits: the code
//! asks for fused multiply-adds explicitly and every sum has a fixed number of lanes.
#![allow(unsafe_code)]

pub(crate) mod math;
#[cfg(test)]
mod second_opinion;
pub(crate) mod tile;

use std::sync::LazyLock;

/// Vector units, narrowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Whatever the target guarantees. Without fused multiply-add hardware it is slow, and correct.
    Base,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

static LEVEL: LazyLock<Level> = LazyLock::new(detect);

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Base,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Base
}

/// The widest unit this CPU has.
pub(crate) fn level() -> Level {
    *LEVEL
}

/// Its name, for records of what was computed how.
pub(crate) fn name() -> &'static str {
    match level() {
        Level::Base => "cpu",
        Level::Avx2 => "cpu-avx2",
        Level::Avx512 => "cpu-avx512",
    }
}

/// Runs `f` compiled for the widest unit of this CPU. `f` should be `#[inline(always)]`.
#[inline]
pub(crate) fn run<R>(f: impl FnOnce() -> R) -> R {
    run_at(level(), f)
}

/// The same for a given unit, which must not be wider than what the CPU has.
#[inline]
fn run_at<R>(at: Level, f: impl FnOnce() -> R) -> R {
    assert!(at <= level());
    #[cfg(target_arch = "x86_64")]
    match at {
        // SAFETY: `level` answers Avx512 only where the CPU reported every feature that is enabled.
        Level::Avx512 => return unsafe { run_avx512(f) },
        // SAFETY: `level` answers Avx2 or more only where the CPU reported AVX2 and FMA.
        Level::Avx2 => return unsafe { run_avx2(f) },
        Level::Base => {}
    }
    f()
}

/// The units of this CPU, narrowest first.
#[cfg(test)]
fn levels() -> Vec<Level> {
    [Level::Base, Level::Avx2, Level::Avx512]
        .into_iter()
        .filter(|&l| l <= level())
        .collect()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vector_unit_gives_the_same_bits() {
        let x: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 30.0).collect();
        let results: Vec<Vec<u32>> = levels()
            .into_iter()
            .map(|level| {
                let mut y = x.clone();
                let sum = run_at(
                    level,
                    #[inline(always)]
                    || {
                        let max = math::max(&y);
                        let sum = math::exp_sum(&mut y, max);
                        for v in &mut y {
                            *v = math::silu(*v * 20.0) + math::gelu_tanh(*v);
                        }
                        sum + math::sum_by(&y, |acc, v| v.mul_add(v, acc))
                    },
                );
                y.iter().chain([&sum]).map(|v| v.to_bits()).collect()
            })
            .collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}
