//! The innermost loop of every matrix product: a tile of a few rows times one panel of columns.
//!
//! `c[r][j] = fma(a[r][k], b[k][j], c[r][j])` for ascending `k`. Each element of `c` is its own chain of
//! fused multiply-adds, so its value depends neither on the tile it falls in nor on the vector unit.

use half::bf16;

use super::Level;

/// Columns of a panel.
pub(crate) const PANEL: usize = 32;
/// Largest number of `k` in one call.
pub(crate) const KC: usize = 256;
/// Distance between rows of `a`, in elements: a constant, so that every row is one pointer plus a
/// constant, and no multiple of a page, so that rows do not share cache sets.
pub(crate) const STRIDE: usize = KC + 16;
/// Largest number of rows in one call.
pub(crate) const MAX_ROWS: usize = 12;

/// One row of a panel, as stored.
pub(crate) trait PanelRow: Copy + Send + Sync {
    /// Columns of the panel, 16 or 32.
    const WIDTH: usize;
    /// Column `j`, widened.
    fn get(&self, j: usize) -> f32;
    /// Columns `half * 16 .. half * 16 + 16`.
    #[cfg(target_arch = "x86_64")]
    fn load512(&self, half: usize) -> std::arch::x86_64::__m512
    where
        Self: Sized;
    /// Columns `quarter * 8 .. quarter * 8 + 8`.
    #[cfg(target_arch = "x86_64")]
    fn load256(&self, quarter: usize) -> std::arch::x86_64::__m256
    where
        Self: Sized;
}

/// Output tile: `rows` rows as wide as the panel, `stride` apart, the first at the start of `data`.
pub(crate) struct Tile<'a> {
    /// The elements from the first of the tile on.
    pub(crate) data: &'a mut [f32],
    /// Distance between rows.
    pub(crate) stride: usize,
    /// Number of rows, at most [`rows_per_call`].
    pub(crate) rows: usize,
    /// Whether the sums start from what the tile holds, or from zero.
    pub(crate) add: bool,
}

/// Rows that one call handles on this CPU.
pub(crate) fn rows_per_call() -> usize {
    rows_at(super::level())
}

fn rows_at(level: Level) -> usize {
    match level {
        Level::Avx512 => MAX_ROWS,
        Level::Avx2 => 6,
        Level::Base => 4,
    }
}

/// `c += a . b` (or `c = a . b`) for a tile; `a` holds rows [`STRIDE`] apart.
#[inline]
pub(crate) fn multiply_add<P: PanelRow>(a: &[f32], b: &[P], c: Tile<'_>) {
    multiply_add_at(super::level(), a, b, c);
}

/// The same for a given unit, which must not be wider than what the CPU has.
#[inline]
fn multiply_add_at<P: PanelRow>(at: Level, a: &[f32], b: &[P], c: Tile<'_>) {
    let rows = c.rows;
    assert!(at <= super::level() && (1..=rows_at(at)).contains(&rows) && b.len() <= KC);
    assert!(a.len() >= (rows - 1) * STRIDE + b.len());
    assert!(c.stride >= P::WIDTH && c.data.len() >= (rows - 1) * c.stride + P::WIDTH);
    #[cfg(target_arch = "x86_64")]
    match at {
        // SAFETY: the CPU has AVX-512 at this level.
        Level::Avx512 => return unsafe { x86::avx512_rows(a, b, c) },
        // SAFETY: the CPU has AVX2 and FMA at this level.
        Level::Avx2 => return unsafe { x86::avx2_rows(a, b, c) },
        Level::Base => {}
    }
    portable(a, b, c);
}

/// The same for any CPU.
fn portable<P: PanelRow>(a: &[f32], b: &[P], c: Tile<'_>) {
    for r in 0..c.rows {
        let out = &mut c.data[r * c.stride..][..P::WIDTH];
        if !c.add {
            out.fill(0.0);
        }
        for (&x, row) in a[r * STRIDE..].iter().zip(b) {
            for (j, o) in out.iter_mut().enumerate() {
                *o = x.mul_add(row.get(j), *o);
            }
        }
    }
}

impl<const N: usize> PanelRow for [f32; N] {
    const WIDTH: usize = N;

    #[inline(always)]
    fn get(&self, j: usize) -> f32 {
        self[j]
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn load512(&self, half: usize) -> std::arch::x86_64::__m512 {
        let part: &[f32; 16] = &self.as_chunks::<16>().0[half];
        reinterpret(part)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn load256(&self, quarter: usize) -> std::arch::x86_64::__m256 {
        let part: &[f32; 8] = &self.as_chunks::<8>().0[quarter];
        reinterpret(part)
    }
}

/// Reads a value of another type with the same size from unaligned memory.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn reinterpret<A, V: Copy>(part: &A) -> V {
    const { assert!(size_of::<A>() == size_of::<V>()) };
    // SAFETY: both types are plain arrays of floats of equal size (checked at compile time above), every
    // bit pattern is valid, and the read is unaligned.
    unsafe { std::ptr::from_ref(part).cast::<V>().read_unaligned() }
}

impl PanelRow for [bf16; PANEL] {
    const WIDTH: usize = PANEL;

    #[inline(always)]
    fn get(&self, j: usize) -> f32 {
        f32::from_bits(u32::from(self[j].to_bits()) << 16)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn load512(&self, half: usize) -> std::arch::x86_64::__m512 {
        let wide: [f32; 16] = std::array::from_fn(
            #[inline(always)]
            |j| self.get(half * 16 + j),
        );
        reinterpret(&wide)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn load256(&self, quarter: usize) -> std::arch::x86_64::__m256 {
        let wide: [f32; 8] = std::array::from_fn(
            #[inline(always)]
            |j| self.get(quarter * 8 + j),
        );
        reinterpret(&wide)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_storeu_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_set1_ps, _mm512_storeu_ps,
    };

    use super::{PANEL, PanelRow, STRIDE, Tile};

    macro_rules! by_rows {
        ($f:ident, $v:literal, $a:ident, $b:ident, $c:ident, $($m:literal)*) => {
            match $c.rows {
                $($m => $f::<P, $m, $v>($a, $b, $c),)*
                rows => unreachable!("tile of {rows} rows"),
            }
        };
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn avx512_rows<P: PanelRow>(a: &[f32], b: &[P], c: Tile<'_>) {
        if P::WIDTH == PANEL {
            by_rows!(avx512, 2, a, b, c, 1 2 3 4 5 6 7 8 9 10 11 12);
        } else {
            by_rows!(avx512, 1, a, b, c, 1 2 3 4 5 6 7 8 9 10 11 12);
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2_rows<P: PanelRow>(a: &[f32], b: &[P], c: Tile<'_>) {
        if P::WIDTH == PANEL {
            by_rows!(avx2, 2, a, b, c, 1 2 3 4 5 6);
        } else {
            by_rows!(avx2, 1, a, b, c, 1 2 3 4 5 6);
        }
    }

    /// The first `len` elements of each row.
    #[inline(always)]
    fn rows_of<const M: usize>(a: &[f32], len: usize) -> [&[f32]; M] {
        let mut rows: [&[f32]; M] = [&[]; M];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = &a[r * STRIDE..][..len];
        }
        rows
    }

    /// `M` rows of `V` vectors of 16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512<P: PanelRow, const M: usize, const V: usize>(a: &[f32], b: &[P], c: Tile<'_>) {
        const { assert!(M > 0 && P::WIDTH >= 16) };
        // Equal lengths, known to the compiler: `x[r][k]` needs no check in the loop.
        let x = rows_of::<M>(a, b.len());
        let mut acc = [[_mm512_set1_ps(0.0); V]; M];
        for (r, acc) in acc.iter_mut().enumerate().filter(|_| c.add) {
            let row = &c.data[r * c.stride..][..V * 16];
            for (h, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `row` has V * 16 elements; 16 are read from h * 16 on, h < V.
                *acc = unsafe { _mm512_loadu_ps(row[h * 16..].as_ptr()) };
            }
        }
        for (k, row) in b.iter().enumerate() {
            let mut b = [_mm512_set1_ps(0.0); V];
            for (h, b) in b.iter_mut().enumerate() {
                *b = row.load512(h);
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(x[r][k]);
                for (acc, b) in acc.iter_mut().zip(b) {
                    *acc = _mm512_fmadd_ps(x, b, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            let row = &mut c.data[r * c.stride..][..V * 16];
            for (h, acc) in acc.iter().enumerate() {
                // SAFETY: `row` has V * 16 elements; 16 are written from h * 16 on, h < V.
                unsafe { _mm512_storeu_ps(row[h * 16..].as_mut_ptr(), *acc) };
            }
        }
    }

    /// `M` rows of `V` pairs of vectors of 8.
    #[target_feature(enable = "avx2,fma")]
    fn avx2<P: PanelRow, const M: usize, const V: usize>(a: &[f32], b: &[P], c: Tile<'_>) {
        const { assert!(M > 0 && P::WIDTH >= 16) };
        // Equal lengths, known to the compiler: `x[r][k]` needs no check in the loop.
        let x = rows_of::<M>(a, b.len());
        for pair in 0..V {
            let mut acc = [[_mm256_set1_ps(0.0); 2]; M];
            for (r, acc) in acc.iter_mut().enumerate().filter(|_| c.add) {
                let row = &c.data[r * c.stride + pair * 16..][..16];
                for (h, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: `row` has 16 elements; 8 are read from 0 or 8 on.
                    *acc = unsafe { _mm256_loadu_ps(row[h * 8..].as_ptr()) };
                }
            }
            for (k, row) in b.iter().enumerate() {
                let (b0, b1) = (row.load256(pair * 2), row.load256(pair * 2 + 1));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(x[r][k]);
                    acc[0] = _mm256_fmadd_ps(x, b0, acc[0]);
                    acc[1] = _mm256_fmadd_ps(x, b1, acc[1]);
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                let row = &mut c.data[r * c.stride + pair * 16..][..16];
                for (h, acc) in acc.iter().enumerate() {
                    // SAFETY: `row` has 16 elements; 8 are written from 0 or 8 on.
                    unsafe { _mm256_storeu_ps(row[h * 8..].as_mut_ptr(), *acc) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.7).sin()).collect()
    }

    fn tile_at<P: PanelRow>(level: Level, a: &[f32], b: &[P], rows: usize, add: bool) -> Vec<u32> {
        let stride = P::WIDTH + 3;
        let mut data = values(rows * stride);
        multiply_add_at(
            level,
            a,
            b,
            Tile {
                data: &mut data,
                stride,
                rows,
                add,
            },
        );
        data.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn every_vector_unit_gives_the_same_bits() {
        let a = values(MAX_ROWS * STRIDE);
        for (k, add) in [(1, true), (7, false), (KC, true)] {
            let wide: Vec<[f32; PANEL]> = (0..k)
                .map(|i| std::array::from_fn(|j| ((i * 37 + j) as f32).cos()))
                .collect();
            let narrow: Vec<[f32; 16]> = wide
                .iter()
                .map(|row| std::array::from_fn(|j| row[j]))
                .collect();
            let short: Vec<[bf16; PANEL]> = wide.iter().map(|r| r.map(bf16::from_f32)).collect();
            for level in super::super::levels() {
                for rows in 1..=rows_at(level) {
                    let want = |width: usize, b: &dyn Fn(usize, usize) -> f32| -> Vec<u32> {
                        let mut c = values(rows * (width + 3));
                        for (at, c) in c.iter_mut().enumerate() {
                            let (r, j) = (at / (width + 3), at % (width + 3));
                            if j < width {
                                let start = if add { *c } else { 0.0 };
                                let chain =
                                    |sum: f32, i: usize| a[r * STRIDE + i].mul_add(b(i, j), sum);
                                *c = (0..k).fold(start, chain);
                            }
                        }
                        c.iter().map(|v| v.to_bits()).collect()
                    };
                    assert_eq!(
                        tile_at(level, &a, &wide, rows, add),
                        want(PANEL, &|i, j| wide[i][j])
                    );
                    assert_eq!(
                        tile_at(level, &a, &narrow, rows, add),
                        want(16, &|i, j| wide[i][j])
                    );
                    assert_eq!(
                        tile_at(level, &a, &short, rows, add),
                        want(PANEL, &|i, j| short[i][j].to_f32())
                    );
                }
            }
        }
    }
}
