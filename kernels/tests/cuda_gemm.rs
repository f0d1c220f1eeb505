//! Matrix products on the GPU against the CPU operation. Needs a GPU.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
mod cuda_elementwise_common;

use std::sync::Arc;

use common::values;
use cuda_elementwise_common::{decoded, poisoned, relative};
use kernels::cuda::{
    CODE_COLUMNS, CudaError, E4m3Rows, Finish, Gpu, GpuTensor, GpuType, SwiGluCodes, gemm,
    gemm_fp8, grouped_gemm, grouped_gemm_fp8, grouped_swiglu_fp8, quantize_rows,
};
use kernels::{LinearWeight, Tensor, add, bf16, linear, swiglu_up_gate};

/// Rounding of the result to bf16, with room for the order of sums.
const TOLERANCE: f64 = 4e-3;
/// Two operands of 3 mantissa bits, rounded once each; errors of a sum's terms average out.
const FP8_TOLERANCE: f64 = 5e-2;
/// With a result of 3 mantissa bits too.
const CODES_TOLERANCE: f32 = 7e-2;
/// Written before a product to see what it leaves alone.
const POISON: u8 = 0x7F;

/// One product: a group of rows for each entry of `counts`.
struct Case {
    counts: &'static [usize],
    n: usize,
    k: usize,
}

/// Sizes of tiny and of real models, with groups that are empty, of one row, of a tile and beyond. The last case takes
/// the kernels for many rows, the others those for few.
const CASES: [Case; 4] = [
    Case {
        counts: &[3, 0, 5, 1],
        n: 128,
        k: 128,
    },
    Case {
        counts: &[200, 0, 65, 1, 300],
        n: 288,
        k: 336,
    },
    Case {
        counts: &[1, 64, 129],
        n: 6144,
        k: 512,
    },
    Case {
        counts: &[2100, 130],
        n: 2176,
        k: 64,
    },
];

/// Operands on the host: bf16 numbers as f32.
struct Operands {
    a: Tensor,
    w: Vec<Tensor>,
    counts: Vec<usize>,
}

fn rounded(shape: &[usize], seed: u64, scale: f32) -> Tensor {
    let v = values(seed, shape.iter().product());
    let v = v.into_iter().map(|v| bf16::from_f32(scale * v).to_f32());
    Tensor::from_f32(shape, v.collect()).unwrap()
}

impl Operands {
    fn new(case: &Case, seed: u64) -> Self {
        let rows = case.counts.iter().sum();
        let scale = 1.0 / (case.k as f32).sqrt();
        let groups = case.counts.len() as u64;
        Self {
            a: rounded(&[rows, case.k], seed, 2.0),
            w: (0..groups)
                .map(|g| rounded(&[case.n, case.k], seed + 1 + g, 3.0 * scale))
                .collect(),
            counts: case.counts.to_vec(),
        }
    }

    /// The product of each group's rows on the CPU.
    fn on_cpu(&self, finish: impl Fn(&Tensor) -> Tensor) -> Tensor {
        let mut parts = Vec::new();
        let mut start = 0;
        for (count, w) in self.counts.iter().zip(&self.w) {
            let rows = self.a.narrow0(start, *count).unwrap();
            let weight = LinearWeight::new(w, None).unwrap();
            if *count > 0 {
                parts.push(finish(&linear(&rows, &weight).unwrap()));
            }
            start += count;
        }
        Tensor::concat0(&parts.iter().collect::<Vec<_>>()).unwrap()
    }
}

/// The same on the device.
struct There {
    a: GpuTensor,
    w: GpuTensor,
    offsets: GpuTensor,
    out: GpuTensor,
    swiglu: GpuTensor,
}

impl There {
    fn new(gpu: &Arc<Gpu>, here: &Operands) -> Self {
        let all = Tensor::concat0(&here.w.iter().collect::<Vec<_>>()).unwrap();
        let (rows, n, k) = (here.a.dim(0), here.w[0].dim(0), here.a.dim(1));
        let mut offsets = vec![0];
        for count in &here.counts {
            offsets.push(offsets.last().unwrap() + i32::try_from(*count).unwrap());
        }
        let w = GpuTensor::bf16_from_host(gpu, &all, "w").unwrap();
        let there = Self {
            a: GpuTensor::bf16_from_host(gpu, &here.a, "a").unwrap(),
            w: w.reshape(&[here.w.len(), n, k]).unwrap(),
            offsets: GpuTensor::from_i32(gpu, &[offsets.len()], &offsets, "offsets").unwrap(),
            out: GpuTensor::new(gpu, &[rows, n], GpuType::Bf16, "out").unwrap(),
            swiglu: GpuTensor::new(gpu, &[rows, n / 2], GpuType::Bf16, "out").unwrap(),
        };
        poison(&there.out);
        poison(&there.swiglu);
        there
    }

    fn quantized(&self, gpu: &Arc<Gpu>) -> (Codes, Codes) {
        let (g, n, k) = (self.w.dim(0), self.w.dim(1), self.w.dim(2));
        let w = Codes::new(gpu, &self.w.reshape(&[g * n, k]).unwrap());
        let w = Codes {
            codes: w.codes.reshape(&[g, n, k]).unwrap(),
            scales: w.scales.reshape(&[g, n]).unwrap(),
        };
        (Codes::new(gpu, &self.a), w)
    }
}

impl There {
    /// SwiGLU of the products in e4m3.
    fn swiglu_codes(&self, gpu: &Arc<Gpu>) -> Codes {
        let (rows, width) = (self.swiglu.dim(0), self.swiglu.dim(1));
        let (a, w) = self.quantized(gpu);
        let out = Codes {
            codes: poisoned(gpu, &[rows, width], GpuType::E4m3),
            scales: poisoned(gpu, &[rows], GpuType::F32),
        };
        let blocks = [rows, width.div_ceil(CODE_COLUMNS)];
        let to = SwiGluCodes {
            rows: out.get(),
            exponents: &poisoned(gpu, &blocks, GpuType::U8),
        };
        grouped_swiglu_fp8(to, a.get(), w.get(), &self.offsets).unwrap();
        out
    }
}

struct Codes {
    codes: GpuTensor,
    scales: GpuTensor,
}

impl Codes {
    fn new(gpu: &Arc<Gpu>, x: &GpuTensor) -> Self {
        let this = Self {
            codes: GpuTensor::new(gpu, x.shape(), GpuType::E4m3, "codes").unwrap(),
            scales: GpuTensor::new(gpu, &[x.dim(0)], GpuType::F32, "scales").unwrap(),
        };
        quantize_rows(x, this.get()).unwrap();
        this
    }

    fn get(&self) -> E4m3Rows<'_> {
        E4m3Rows {
            codes: &self.codes,
            scales: &self.scales,
        }
    }
}

fn poison(tensor: &GpuTensor) {
    tensor.write_bytes(&vec![POISON; tensor.bytes()]).unwrap();
}

/// Relative error over all elements; NaN where anything is.
fn error(got: &GpuTensor, want: &Tensor) -> f64 {
    assert_eq!(got.shape(), want.shape());
    let (mut off, mut all) = (0.0, 0.0);
    for (g, w) in got.to_f32_vec().unwrap().iter().zip(want.to_f32_vec()) {
        off += f64::from(g - w).powi(2);
        all += f64::from(w).powi(2);
    }
    (off / all).sqrt()
}

fn assert_near(what: &str, got: &GpuTensor, want: &Tensor, tolerance: f64) {
    let error = error(got, want);
    assert!(error < tolerance, "{what}: relative error {error}");
}

#[test]
#[ignore = "needs a GPU"]
fn grouped_products_are_those_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    for (i, case) in CASES.iter().enumerate() {
        let here = Operands::new(case, 100 * i as u64);
        let there = There::new(&gpu, &here);
        let (a, w, offsets) = (&there.a, &there.w, &there.offsets);
        grouped_gemm(&there.out, a, w, offsets, Finish::Store).unwrap();
        grouped_gemm(&there.swiglu, a, w, offsets, Finish::SwiGlu).unwrap();
        let want = here.on_cpu(Clone::clone);
        assert_near("plain", &there.out, &want, TOLERANCE);
        let gated = here.on_cpu(|y| swiglu_up_gate(y).unwrap());
        assert_near("swiglu", &there.swiglu, &gated, TOLERANCE);
        // In place: out already holds a product that is added to itself.
        grouped_gemm(&there.out, a, w, offsets, Finish::Add(&there.out)).unwrap();
        assert_near("add", &there.out, &add(&want, &want).unwrap(), TOLERANCE);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn grouped_products_of_8_bit_floats_are_near() {
    let gpu = Gpu::open(0).unwrap();
    for (i, case) in CASES.iter().enumerate() {
        let here = Operands::new(case, 50 + 100 * i as u64);
        let there = There::new(&gpu, &here);
        let (a, w) = there.quantized(&gpu);
        let (a, w, offsets) = (a.get(), w.get(), &there.offsets);
        grouped_gemm_fp8(&there.out, a, w, offsets, Finish::Store).unwrap();
        let want = here.on_cpu(Clone::clone);
        assert_near("plain", &there.out, &want, FP8_TOLERANCE);
        let gated = here.on_cpu(|y| swiglu_up_gate(y).unwrap());
        let error = relative(
            &decoded(there.swiglu_codes(&gpu).get()),
            &gated.to_f32_vec(),
        );
        assert!(error < CODES_TOLERANCE, "swiglu: relative error {error}");
        grouped_gemm_fp8(&there.out, a, w, offsets, Finish::Add(&there.out)).unwrap();
        let twice = add(&want, &want).unwrap();
        assert_near("add", &there.out, &twice, FP8_TOLERANCE);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn dense_products_are_those_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    let case = Case {
        counts: &[333],
        n: 192,
        k: 456,
    };
    let here = Operands::new(&case, 7);
    let there = There::new(&gpu, &here);
    let w = there.w.reshape(&[case.n, case.k]).unwrap();
    let want = here.on_cpu(Clone::clone);
    gemm(&there.out, &there.a, &w, Finish::Store).unwrap();
    assert_near("bf16", &there.out, &want, TOLERANCE);
    let float = GpuTensor::new(&gpu, &[333, case.n], GpuType::F32, "out").unwrap();
    poison(&float);
    gemm(&float, &there.a, &w, Finish::Store).unwrap();
    assert_near("f32", &float, &want, 1e-5);
}

#[test]
#[ignore = "needs a GPU"]
fn a_dense_8_bit_product_is_the_grouped_one_of_one_group() {
    let gpu = Gpu::open(0).unwrap();
    let here = Operands::new(
        &Case {
            counts: &[140],
            n: 264,
            k: 208,
        },
        11,
    );
    let there = There::new(&gpu, &here);
    let (a, w) = there.quantized(&gpu);
    grouped_gemm_fp8(&there.out, a.get(), w.get(), &there.offsets, Finish::Store).unwrap();
    let grouped = there.out.to_bytes().unwrap();
    poison(&there.out);
    let codes = w.codes.reshape(&[264, 208]).unwrap();
    let scales = w.scales.reshape(&[264]).unwrap();
    let dense = E4m3Rows {
        codes: &codes,
        scales: &scales,
    };
    gemm_fp8(&there.out, a.get(), dense, Finish::Store).unwrap();
    assert_eq!(there.out.to_bytes().unwrap(), grouped);
}

#[test]
#[ignore = "needs a GPU"]
fn a_row_has_the_same_bits_whatever_else_is_in_the_call() {
    let gpu = Gpu::open(0).unwrap();
    let here = Operands::new(
        &Case {
            counts: &[3000],
            n: 1664,
            k: 1000,
        },
        21,
    );
    let there = There::new(&gpu, &here);
    let w = there.w.reshape(&[1664, 1000]).unwrap();
    gemm(&there.out, &there.a, &w, Finish::Store).unwrap();
    let all = there.out.to_bytes().unwrap();
    for (start, len) in [(0, 1), (65, 3), (130, 129), (2999, 1)] {
        let out = GpuTensor::new(&gpu, &[len, 1664], GpuType::Bf16, "out").unwrap();
        gemm(
            &out,
            &there.a.narrow0(start, len).unwrap(),
            &w,
            Finish::Store,
        )
        .unwrap();
        let part = start * 3328..(start + len) * 3328;
        assert_eq!(out.to_bytes().unwrap(), all[part], "rows {start}+{len}");
    }
}

/// Columns of the first half, in blocks that share an exponent or not, a hundred thousand times larger than others.
fn uneven(here: &mut Operands) {
    let n = here.w[0].dim(0);
    let large = |row: usize| row < n / 2 && row / 48 % 2 == 1;
    for w in &mut here.w {
        let k = w.dim(1);
        let values = w.to_f32_vec().into_iter().enumerate();
        let values = values.map(|(i, v)| if large(i / k) { v * 131_072.0 } else { v });
        *w = Tensor::from_f32(&[n, k], values.collect()).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn codes_have_one_scale_a_row_even_where_columns_differ_widely() {
    let gpu = Gpu::open(0).unwrap();
    for (i, case) in CASES.iter().enumerate() {
        let mut here = Operands::new(case, 70 + 100 * i as u64);
        uneven(&mut here);
        let there = There::new(&gpu, &here);
        let gated = here.on_cpu(|y| swiglu_up_gate(y).unwrap());
        let error = relative(
            &decoded(there.swiglu_codes(&gpu).get()),
            &gated.to_f32_vec(),
        );
        assert!(error < CODES_TOLERANCE, "relative error {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn codes_of_a_row_have_the_same_bits_whatever_else_is_in_the_call() {
    let gpu = Gpu::open(0).unwrap();
    let case = Case {
        counts: &[3000],
        n: 1664,
        k: 208,
    };
    let mut here = Operands::new(&case, 23);
    uneven(&mut here);
    let all = There::new(&gpu, &here).swiglu_codes(&gpu);
    let (codes, scales) = (
        all.codes.to_bytes().unwrap(),
        all.scales.to_bytes().unwrap(),
    );
    for row in [0, 65, 2999] {
        let one = Operands {
            a: here.a.narrow0(row, 1).unwrap(),
            w: here.w.clone(),
            counts: vec![1],
        };
        let alone = There::new(&gpu, &one).swiglu_codes(&gpu);
        assert_eq!(
            alone.codes.to_bytes().unwrap(),
            codes[row * 832..][..832],
            "row {row}"
        );
        assert_eq!(alone.scales.to_bytes().unwrap(), scales[row * 4..][..4]);
    }
}

/// Blocks draw their next tile every two stages of the ring here, faster than anywhere else.
#[test]
#[ignore = "needs a GPU"]
fn thousands_of_products_with_few_steps_a_tile_end_and_agree() {
    let gpu = Gpu::open(0).unwrap();
    let case = Case {
        counts: &[10_280],
        n: 512,
        k: 256,
    };
    let here = Operands::new(&case, 31);
    let there = There::new(&gpu, &here);
    let (a, w) = there.quantized(&gpu);
    let mut first = None;
    for _ in 0..10 {
        poison(&there.out);
        for _ in 0..500 {
            let (a, w) = (a.get(), w.get());
            grouped_gemm_fp8(&there.out, a, w, &there.offsets, Finish::Store).unwrap();
        }
        let got = there.out.to_bytes().unwrap();
        assert!(first.get_or_insert_with(|| got.clone()) == &got);
    }
    let want = here.on_cpu(Clone::clone);
    assert_near("last", &there.out, &want, FP8_TOLERANCE);
}

#[test]
#[ignore = "needs a GPU"]
fn rows_of_no_group_are_not_written() {
    let gpu = Gpu::open(0).unwrap();
    let here = Operands::new(
        &Case {
            counts: &[70, 200],
            n: 136,
            k: 72,
        },
        31,
    );
    let there = There::new(&gpu, &here);
    // The groups end 60 rows before the operands do.
    let offsets = GpuTensor::from_i32(&gpu, &[3], &[0, 70, 210], "offsets").unwrap();
    grouped_gemm(&there.out, &there.a, &there.w, &offsets, Finish::Store).unwrap();
    let bytes = there.out.to_bytes().unwrap();
    assert!(bytes[210 * 272..].iter().all(|b| *b == POISON));
    let want = here.on_cpu(Clone::clone).narrow0(0, 210).unwrap();
    assert_near(
        "written",
        &there.out.narrow0(0, 210).unwrap(),
        &want,
        TOLERANCE,
    );
}

#[test]
#[ignore = "needs a GPU"]
fn operands_that_do_not_fit_are_refused_by_name() {
    let gpu = Gpu::open(0).unwrap();
    let tensor = |dims: &[usize], dtype| GpuTensor::new(&gpu, dims, dtype, "test").unwrap();
    let bf16 = |dims: &[usize]| tensor(dims, GpuType::Bf16);
    let offsets = tensor(&[3], GpuType::I32);
    let (out, a, w) = (bf16(&[9, 32]), bf16(&[9, 64]), bf16(&[2, 32, 64]));
    let refused = |result: Result<(), CudaError>, name: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(name), "{text} names {name}");
    };
    let grouped = |out: &GpuTensor, a: &GpuTensor, w: &GpuTensor, offsets: &GpuTensor| {
        grouped_gemm(out, a, w, offsets, Finish::Store)
    };
    grouped(&out, &a, &w, &offsets.clone()).unwrap();
    refused(grouped(&bf16(&[8, 32]), &a, &w, &offsets), "out");
    refused(grouped(&out, &bf16(&[9, 72]), &w, &offsets), "a");
    refused(
        grouped(&out, &a, &w, &tensor(&[2], GpuType::I32)),
        "offsets",
    );
    refused(
        grouped(&bf16(&[9, 30]), &a, &bf16(&[2, 30, 64]), &offsets),
        "w",
    );
    refused(
        grouped(&out, &bf16(&[9, 60]), &bf16(&[2, 32, 60]), &offsets),
        "w",
    );
    refused(grouped(&out, &a, &bf16(&[129, 32, 64]), &offsets), "w");
    refused(grouped_gemm(&out, &a, &w, &offsets, Finish::SwiGlu), "out");
    let short = bf16(&[8, 32]);
    refused(
        grouped_gemm(&out, &a, &w, &offsets, Finish::Add(&short)),
        "residual",
    );
    let float = tensor(&[9, 32], GpuType::F32);
    let add = Finish::Add(&out);
    refused(grouped_gemm(&float, &a, &w, &offsets, add), "out");
}
