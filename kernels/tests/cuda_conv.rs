//! Convolutions and group normalisation on the GPU against the CPU definitions.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::random;
use half::f16;
use kernels::cuda::{
    ConvOptions, Gpu, GpuConvWeight, GpuGroupNorm, GpuTensor, GpuType, Moves, Pictures, Shortcut,
    channel_means, conv, conv_sum_elements, group_norm_apply, group_norm_coefficients,
    group_norm_sum_elements, group_norm_sums, to_channels_last, wide_softmax,
};
use kernels::{Conv3dWeight, GroupNorm, Tensor, conv3d, group_norm};

/// One rounding of the result and one of the shortcut, in bf16.
const TOLERANCE: f64 = 6e-3;

fn gpu() -> Arc<Gpu> {
    Gpu::open(0).unwrap()
}

/// Rounded to the type on the device, and the same values on the host.
fn upload(gpu: &Arc<Gpu>, tensor: &Tensor, dtype: GpuType) -> (GpuTensor, Tensor) {
    let device = match dtype {
        GpuType::Bf16 => GpuTensor::bf16_from_host(gpu, tensor, "test").unwrap(),
        GpuType::F16 => {
            let values = tensor.to_f32_vec();
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect();
            let device = GpuTensor::new(gpu, tensor.shape(), dtype, "test").unwrap();
            device.write_bytes(&bytes).unwrap();
            device
        }
        _ => GpuTensor::from_host(gpu, tensor, "test").unwrap(),
    };
    let host = Tensor::from_f32(tensor.shape(), device.to_f32_vec().unwrap()).unwrap();
    (device, host)
}

/// Filled with what no kernel writes.
fn poisoned(gpu: &Arc<Gpu>, dims: &[usize], dtype: GpuType) -> GpuTensor {
    let out = GpuTensor::new(gpu, dims, dtype, "test").unwrap();
    out.write_bytes(&vec![0xFF; out.bytes()]).unwrap();
    out
}

fn assert_near(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let square = |v: f64| v * v;
    let difference: f64 = got
        .iter()
        .zip(want)
        .map(|(g, w)| square(f64::from(*g) - f64::from(*w)))
        .sum();
    let norm: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    let relative = (difference / norm).sqrt();
    // NaN is not below anything.
    assert!(relative < TOLERANCE, "{what}: relative error {relative}");
}

struct Case {
    x: [usize; 5],
    c_out: usize,
    side: usize,
    dtype: GpuType,
}

/// Everything of one convolution, on both sides.
struct Sides {
    x: (GpuTensor, Tensor),
    weight: GpuConvWeight,
    definition: Conv3dWeight,
}

impl Case {
    fn sides(&self, gpu: &Arc<Gpu>, seed: u64) -> Sides {
        let c_in = self.x[4];
        let side = self.side;
        let time = if self.x[1] > 1 { side } else { 1 };
        let w = random(seed ^ 1, &[self.c_out, c_in, time, side, side]);
        let bias = random(seed ^ 2, &[self.c_out]);
        let (_, rounded) = upload(gpu, &w, self.dtype);
        let w = GpuTensor::from_host(gpu, &w, "test").unwrap();
        let b = GpuTensor::from_host(gpu, &bias, "test").unwrap();
        Sides {
            x: upload(gpu, &random(seed, &self.x), self.dtype),
            weight: GpuConvWeight::pack(&w, Some(&b), self.dtype).unwrap(),
            definition: Conv3dWeight::new(&rounded, Some(&bias)).unwrap(),
        }
    }
}

fn pictures(tensor: &GpuTensor) -> Pictures {
    Pictures::new(tensor).unwrap()
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn convolutions_equal_the_cpu_definition_at_any_size() {
    let gpu = gpu();
    let (bf16, f16) = (GpuType::Bf16, GpuType::F16);
    let cases = [
        Case {
            x: [1, 1, 16, 16, 64],
            c_out: 128,
            side: 3,
            dtype: bf16,
        },
        Case {
            x: [2, 1, 20, 37, 96],
            c_out: 136,
            side: 3,
            dtype: bf16,
        },
        Case {
            x: [2, 3, 17, 18, 32],
            c_out: 64,
            side: 3,
            dtype: f16,
        },
        Case {
            x: [1, 1, 3, 5, 16],
            c_out: 32,
            side: 3,
            dtype: bf16,
        },
        Case {
            x: [1, 4, 6, 4, 8],
            c_out: 16,
            side: 3,
            dtype: f16,
        },
        Case {
            x: [2, 1, 9, 31, 72],
            c_out: 40,
            side: 1,
            dtype: bf16,
        },
    ];
    for (seed, case) in cases.iter().enumerate() {
        let sides = case.sides(&gpu, seed as u64 * 100);
        let mut size = case.x;
        size[4] = case.c_out;
        for dtype in [case.dtype, GpuType::F32] {
            let out = poisoned(&gpu, &size, dtype);
            let x = pictures(&sides.x.0);
            conv(&pictures(&out), &x, &sides.weight, ConvOptions::default()).unwrap();
            let want = conv3d(&sides.x.1, &sides.definition).unwrap();
            let name = format!("case {seed} {dtype:?}");
            assert_near(&name, &out.to_f32_vec().unwrap(), want.as_f32().unwrap());
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn channels_move_to_space_and_back_with_their_shortcuts() {
    let gpu = gpu();
    let case = Case {
        x: [1, 2, 6, 10, 32],
        c_out: 128,
        side: 3,
        dtype: GpuType::F16,
    };
    let sides = case.sides(&gpu, 7);
    let x = pictures(&sides.x.0);
    let shortcut = Some(Shortcut {
        pictures: &x,
        repeat: 4,
    });
    let moves = Moves::ToSpace { frames: 2 };
    let up = poisoned(&gpu, &[1, 4, 12, 20, 16], GpuType::F16);
    let options = ConvOptions {
        moves,
        shortcut,
        ..ConvOptions::default()
    };
    conv(&pictures(&up), &x, &sides.weight, options).unwrap();
    // The definition, cell by cell: sub-position major, channel minor.
    let main = conv3d(&sides.x.1, &sides.definition).unwrap();
    let (main, source) = (main.as_f32().unwrap(), sides.x.1.as_f32().unwrap());
    let mut want = vec![0.0; up.numel()];
    for (at, value) in want.iter_mut().enumerate() {
        let (c, column, row) = (at % 16, at / 16 % 20, at / 320 % 12);
        let frame = at / 3840;
        let sub = (frame % 2 * 2 + row % 2) * 2 + column % 2;
        let pixel = (frame / 2 * 6 + row / 2) * 10 + column / 2;
        *value = main[pixel * 128 + sub * 16 + c] + source[pixel * 32 + (sub * 16 + c) / 4];
    }
    let got = up.to_f32_vec().unwrap();
    assert_near("to space", &got, &want);

    // Back: a window that copies its centre, and means of channel groups as the shortcut.
    let mut identity = vec![0.0_f32; 16 * 16 * 27];
    (0..16).for_each(|c| identity[(c * 16 + c) * 27 + 13] = 1.0);
    let identity = GpuTensor::from_f32(&gpu, &[16, 16, 3, 3, 3], &identity, "test").unwrap();
    let identity = GpuConvWeight::pack(&identity, None, GpuType::F16).unwrap();
    let low = poisoned(&gpu, &[1, 2, 6, 10, 128], GpuType::F16);
    let back = ConvOptions {
        moves: Moves::ToChannels { frames: 2 },
        ..ConvOptions::default()
    };
    conv(&pictures(&low), &pictures(&up), &identity, back).unwrap();
    let low_values = low.to_f32_vec().unwrap();
    let wide: Vec<f32> = (0..low_values.len())
        .map(|i| main[i] + source[i / 128 * 32 + i % 128 / 4])
        .collect();
    assert_near("to channels", &low_values, &wide);
    let means = poisoned(&gpu, &[1, 2, 6, 10, 32], GpuType::F16);
    channel_means(&pictures(&means), &pictures(&low)).unwrap();
    let want: Vec<f32> = low_values
        .chunks(4)
        .map(|g| g.iter().sum::<f32>() / 4.0)
        .collect();
    assert_near("means", &means.to_f32_vec().unwrap(), &want);
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn the_last_frame_alone_equals_the_last_of_all_frames_as_colours() {
    let gpu = gpu();
    let case = Case {
        x: [1, 4, 18, 20, 64],
        c_out: 3,
        side: 3,
        dtype: GpuType::F16,
    };
    let sides = case.sides(&gpu, 11);
    let out = poisoned(&gpu, &[1, 1, 18, 20, 3], GpuType::U8);
    let last = ConvOptions {
        first_frame: 3,
        ..ConvOptions::default()
    };
    conv(&pictures(&out), &pictures(&sides.x.0), &sides.weight, last).unwrap();
    let tail = pictures(&sides.x.0).frames_from(2).unwrap();
    let again = poisoned(&gpu, &[1, 1, 18, 20, 3], GpuType::U8);
    let last = ConvOptions {
        first_frame: 1,
        ..ConvOptions::default()
    };
    conv(&pictures(&again), &tail, &sides.weight, last).unwrap();
    assert_eq!(out.to_bytes().unwrap(), again.to_bytes().unwrap());
    let all = conv3d(&sides.x.1, &sides.definition).unwrap();
    let frame = 18 * 20 * 3;
    let want = all.as_f32().unwrap()[3 * frame..].iter();
    let worst = want.zip(out.to_bytes().unwrap()).map(|(v, level)| {
        let exact = (v / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
        (exact - f32::from(level)).abs()
    });
    let worst = worst.fold(0.0, f32::max);
    assert!(worst < 0.51, "{worst} levels off");
}

/// Group norm of pictures on the device by the given sums.
fn normalised(
    x: &Pictures,
    sums: &kernels::cuda::ChannelSums,
    norm: &GpuGroupNorm<'_>,
) -> Vec<f32> {
    let gpu = x.tensor().gpu();
    let [images, .., channels] = x.size();
    let factors = poisoned(gpu, &[images, channels, 2], GpuType::F32);
    group_norm_coefficients(&factors, sums, x.pixels(), norm).unwrap();
    let out = poisoned(gpu, &x.size(), x.dtype());
    group_norm_apply(&pictures(&out), x, &factors, true).unwrap();
    out.to_f32_vec().unwrap()
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn group_norm_equals_the_cpu_definition_by_either_sums() {
    let gpu = gpu();
    for (size, groups) in [
        ([2, 1, 9, 7, 32], 32),
        ([1, 2, 5, 6, 128], 32),
        ([2, 1, 24, 20, 256], 32),
    ] {
        let c = size[4];
        let identity: Vec<f32> = (0..c * c).map(|i| f32::from(i / c == i % c)).collect();
        let identity = Tensor::from_f32(&[c, c], identity).unwrap();
        let (identity, _) = upload(&gpu, &identity, GpuType::Bf16);
        let identity = GpuConvWeight::matrix(&identity, None).unwrap();
        let (x, host) = upload(&gpu, &random(3, &size), GpuType::Bf16);
        let x = pictures(&x);
        let (weight, bias) = (random(4, &[c]), random(5, &[c]));
        let (_, modulation) = upload(&gpu, &random(6, &[size[0], 2 * c]), GpuType::Bf16);
        let device = |t: &Tensor| GpuTensor::from_host(&gpu, t, "test").unwrap();
        let both = upload(&gpu, &modulation, GpuType::Bf16).0;
        let norm = GpuGroupNorm {
            groups,
            weight: &device(&weight),
            bias: &device(&bias),
            eps: 1e-5,
            modulation: Some(&both),
        };
        let rows: Vec<f32> = modulation.to_f32_vec();
        let half = |first: usize| {
            let data = rows
                .chunks(2 * c)
                .flat_map(|r| r[first..first + c].to_vec())
                .collect();
            Tensor::from_f32(&[size[0], c], data).unwrap()
        };
        let (scale, shift) = (half(0), half(c));
        let params = GroupNorm {
            groups,
            weight: &weight,
            bias: &bias,
            eps: 1e-5,
        };
        let want = group_norm(&host, &params, Some((&scale, &shift)), true).unwrap();
        let needed = group_norm_sum_elements(size[0], c);
        let scratch = poisoned(&gpu, &[needed], GpuType::F32);
        let sums = group_norm_sums(&scratch, &x).unwrap();
        assert_near(
            "own sums",
            &normalised(&x, &sums, &norm),
            want.as_f32().unwrap(),
        );
        if c % 128 == 0 {
            let needed = conv_sum_elements(x.size(), &identity);
            let scratch = poisoned(&gpu, &[needed], GpuType::F32);
            let copy = poisoned(&gpu, &size, GpuType::Bf16);
            let options = ConvOptions {
                sums: Some(&scratch),
                ..ConvOptions::default()
            };
            let sums = conv(&pictures(&copy), &x, &identity, options)
                .unwrap()
                .unwrap();
            let got = normalised(&pictures(&copy), &sums, &norm);
            assert_near("sums of a convolution", &got, want.as_f32().unwrap());
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn an_image_is_bitwise_the_same_alone_and_among_the_rows_of_a_batch() {
    let gpu = gpu();
    let case = Case {
        x: [2, 1, 20, 12, 64],
        c_out: 128,
        side: 3,
        dtype: GpuType::Bf16,
    };
    let sides = case.sides(&gpu, 23);
    let rows = sides.x.0.reshape(&[480, 64]).unwrap();
    let batch = poisoned(&gpu, &[500, 128], GpuType::Bf16);
    let both = Pictures::among_rows(&batch, (3, 247), 2, (20, 12)).unwrap();
    conv(
        &both,
        &pictures(&sides.x.0),
        &sides.weight,
        ConvOptions::default(),
    )
    .unwrap();
    let batch = batch.to_bytes().unwrap();
    for image in 0..2 {
        let alone = poisoned(&gpu, &[1, 1, 20, 12, 128], GpuType::Bf16);
        let x = Pictures::among_rows(&rows, (image * 240, 0), 1, (20, 12)).unwrap();
        conv(&pictures(&alone), &x, &sides.weight, ConvOptions::default()).unwrap();
        let start = (3 + image * 247) * 256;
        assert_eq!(
            alone.to_bytes().unwrap(),
            batch[start..start + 240 * 256],
            "image {image}"
        );
    }
    let outside = [0..3 * 256, 243 * 256..250 * 256, 490 * 256..500 * 256];
    assert!(
        outside
            .into_iter()
            .all(|range| batch[range].iter().all(|b| *b == 0xFF))
    );
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn wide_rows_and_layouts_equal_their_definitions() {
    let gpu = gpu();
    let (x, host) = upload(&gpu, &random(31, &[5, 4104]), GpuType::F32);
    let out = poisoned(&gpu, &[5, 4104], GpuType::Bf16);
    wide_softmax(&out, &x, 7.0, 4101).unwrap();
    let want: Vec<f32> = host
        .to_f32_vec()
        .chunks(4104)
        .flat_map(|row| {
            let row = &row[..4101];
            let top = row.iter().copied().fold(f32::MIN, f32::max);
            let weights: Vec<f64> = row
                .iter()
                .map(|v| f64::from(7.0 * (v - top)).exp())
                .collect();
            let sum: f64 = weights.iter().sum();
            weights
                .into_iter()
                .map(move |w| (w / sum) as f32)
                .chain([0.0; 3])
                .collect::<Vec<_>>()
        })
        .collect();
    assert_near("softmax", &out.to_f32_vec().unwrap(), &want);
    let (x, host) = upload(&gpu, &random(32, &[3, 4, 5]), GpuType::F32);
    let out = poisoned(&gpu, &[1, 2, 4, 5, 8], GpuType::Bf16);
    to_channels_last(&pictures(&out), &x, 2.0, 0.5).unwrap();
    let planes = host.to_f32_vec();
    let want: Vec<f32> = (0..320)
        .map(|i| {
            if i % 8 < 3 {
                planes[i % 8 * 20 + i / 8 % 20] * 2.0 + 0.5
            } else {
                0.0
            }
        })
        .collect();
    assert_near("channels last", &out.to_f32_vec().unwrap(), &want);
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn what_does_not_fit_is_refused_by_name() {
    let gpu = gpu();
    let case = Case {
        x: [1, 1, 6, 6, 16],
        c_out: 32,
        side: 3,
        dtype: GpuType::Bf16,
    };
    let sides = case.sides(&gpu, 41);
    let x = pictures(&sides.x.0);
    let refused = |out: &GpuTensor, options: ConvOptions<'_>, name: &str| {
        let error = conv(&pictures(out), &x, &sides.weight, options)
            .unwrap_err()
            .to_string();
        assert!(error.contains(name), "{error}");
    };
    let none = ConvOptions::default();
    let fitting = poisoned(&gpu, &[1, 1, 6, 6, 32], GpuType::Bf16);
    refused(
        &poisoned(&gpu, &[1, 1, 6, 5, 32], GpuType::Bf16),
        none,
        "out",
    );
    refused(
        &poisoned(&gpu, &[1, 1, 6, 6, 32], GpuType::F16),
        none,
        "out",
    );
    let shortcut = Some(Shortcut {
        pictures: &x,
        repeat: 3,
    });
    refused(&fitting, ConvOptions { shortcut, ..none }, "shortcut");
    let scratch = poisoned(&gpu, &[1 << 16], GpuType::F32);
    refused(
        &fitting,
        ConvOptions {
            sums: Some(&scratch),
            ..none
        },
        "sums",
    );
    refused(
        &fitting,
        ConvOptions {
            first_frame: 1,
            ..none
        },
        "first_frame",
    );
    let moves = Moves::ToChannels { frames: 2 };
    refused(&fitting, ConvOptions { moves, ..none }, "x");
    let odd = poisoned(&gpu, &[32, 16, 5, 5], GpuType::F32);
    let error = GpuConvWeight::pack(&odd, None, GpuType::Bf16)
        .unwrap_err()
        .to_string();
    assert!(error.contains('w'), "{error}");
}
