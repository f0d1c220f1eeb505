//! Golden 04: the VAE both ways, whole and tiled, and the vision transformer.

use std::collections::BTreeSet;

use kernels::Tensor;
use model::vae::{Posterior, Tiles};
use model::vit::Patches;

use crate::back_support::{channels_first_tensor, limit, models, single};
use crate::common::{Tensors, assert_close, count, in_set, json};

/// Overlap of the recorded tiled passes (golden README, file table).
const OVERLAP: f64 = 0.25;

/// `[1, C, H, W]` as `[H, W, C]`.
fn picture(file: &Tensors, key: &str) -> Tensor {
    let (shape, values) = file.f32(key);
    let [_, c, h, w] = shape[..] else {
        panic!("{key}: {shape:?}")
    };
    let last = (0..h * w).flat_map(|p| (0..c).map(move |i| (i, p)));
    let data = last.map(|(i, p)| values[i * h * w + p]).collect();
    Tensor::from_f32(&[h, w, c], data).unwrap()
}

/// The keys `{stem}N` of a file, for all N it holds.
fn numbered(file: &Tensors, stem: &str, suffix: &str) -> Vec<String> {
    let names = (0..).map(|n| format!("{stem}{n}"));
    names
        .take_while(|name| file.has(&format!("{name}.{suffix}")))
        .collect()
}

fn assert_posterior(what: &str, file: &Tensors, prefix: &str, got: &Posterior) {
    for (key, values) in [("mean", &got.mean), ("logvar", &got.log_variance)] {
        let key = format!("{prefix}{key}");
        assert_close(
            &format!("{what} {key}"),
            values.data(),
            &file.f32(&key).1,
            limit::STATE,
        );
    }
}

/// The recorded inner activations of one case, compared as they come by.
struct Activations<'a> {
    file: &'a Tensors,
    what: &'a str,
    case: &'a str,
    seen: BTreeSet<String>,
}

impl<'a> Activations<'a> {
    fn of(file: &'a Tensors, what: &'a str, case: &'a str) -> Self {
        let seen = BTreeSet::new();
        Self {
            file,
            what,
            case,
            seen,
        }
    }

    fn compare(&mut self, site: &str, value: &Tensor) {
        let key = format!("{}.act.{site}", self.case);
        if self.file.has(&key) {
            assert_close(
                &format!("{} {key}", self.what),
                &channels_first_tensor(value),
                &self.file.f32(&key).1,
                limit::STATE,
            );
            self.seen.insert(key);
        }
    }

    /// Every recorded activation has come by.
    fn assert_all_seen(&self) {
        let prefix = format!("{}.act.", self.case);
        let names = self.file.names();
        let recorded = names.iter().filter(|n| n.starts_with(&prefix)).count();
        assert_eq!(
            self.seen.len(),
            recorded,
            "{}: activations compared",
            self.case
        );
    }
}

#[test]
fn decoding_equals_the_reference() {
    if !in_set(&["04_vae.safetensors"]) {
        return;
    }
    let file = Tensors::load("04_vae.safetensors");
    let cases = numbered(&file, "dec", "z");
    assert!(!cases.is_empty());
    for (name, model) in models() {
        for case in &cases {
            let what = format!("04 {name}");
            let mut activations = Activations::of(&file, &what, case);
            let mut see = |site: &str, value: &Tensor| activations.compare(site, value);
            let z = single(&file, &format!("{case}.z"));
            let frames = model
                .vae()
                .decode_frames(&z, Tiles::Whole, &mut see)
                .unwrap();
            activations.assert_all_seen();
            let all = format!("{case}.sample_all_t");
            let got = channels_first_tensor(&frames);
            assert_close(
                &format!("{what} {all}"),
                &got,
                &file.f32(&all).1,
                limit::STATE,
            );
            let kept = format!("{case}.sample");
            let size = [frames.dim(1), frames.dim(2), frames.dim(3), frames.dim(4)];
            let last = frames
                .reshape(&size)
                .unwrap()
                .narrow0(size[0] - 1, 1)
                .unwrap();
            let got = channels_first_tensor(&last);
            assert_close(
                &format!("{what} {kept}"),
                &got,
                &file.f32(&kept).1,
                limit::STATE,
            );
        }
    }
}

#[test]
fn encoding_equals_the_reference() {
    if !in_set(&["04_vae.safetensors"]) {
        return;
    }
    let file = Tensors::load("04_vae.safetensors");
    let cases = numbered(&file, "enc", "x");
    assert!(!cases.is_empty());
    for (name, model) in models() {
        for case in &cases {
            let what = format!("04 {name}");
            let mut activations = Activations::of(&file, &what, case);
            let mut see = |site: &str, value: &Tensor| activations.compare(site, value);
            let x = picture(&file, &format!("{case}.x"));
            let posterior = model.vae().encode(&x, Tiles::Whole, &mut see).unwrap();
            activations.assert_all_seen();
            assert_posterior(&what, &file, &format!("{case}."), &posterior);
        }
    }
}

#[test]
fn tiled_passes_equal_the_reference() {
    if !in_set(&["04_vae.safetensors"]) {
        return;
    }
    let file = Tensors::load("04_vae.safetensors");
    for (name, model) in models() {
        let what = format!("04 {name}");
        let z = single(&file, "tiled_dec.z");
        for (key, tiles) in [
            ("tiled_dec.sample_untiled", Tiles::Whole),
            ("tiled_dec.sample", Tiles::Overlapping(OVERLAP)),
        ] {
            let frames = model
                .vae()
                .decode_frames(&z, tiles, &mut |_, _| {})
                .unwrap();
            let size = [frames.dim(1), frames.dim(2), frames.dim(3), frames.dim(4)];
            let last = frames
                .reshape(&size)
                .unwrap()
                .narrow0(size[0] - 1, 1)
                .unwrap();
            let got = channels_first_tensor(&last);
            assert_close(
                &format!("{what} {key}"),
                &got,
                &file.f32(key).1,
                limit::STATE,
            );
        }
        let x = picture(&file, "tiled_enc.x");
        let tiles = Tiles::Overlapping(OVERLAP);
        let posterior = model.vae().encode(&x, tiles, &mut |_, _| {}).unwrap();
        assert_posterior(&what, &file, "tiled_enc.", &posterior);
    }
}

#[test]
fn vision_features_equal_the_reference() {
    if !in_set(&["04_vit.json", "04_vit.safetensors"]) {
        return;
    }
    let file = Tensors::load("04_vit.safetensors");
    let cases = json("04_vit.json");
    for (index, case) in cases.as_array().unwrap().iter().enumerate() {
        let key = |name: &str| format!("img{index}.{name}");
        let (shape, values) = file.f32(&key("vit_pixel_values"));
        let values = Tensor::from_f32(&shape[1..], values).unwrap();
        let grid = (
            count(&case["vit"]["token_h"]),
            count(&case["vit"]["token_w"]),
        );
        assert_eq!(
            file.i32(&key("vit_spatial_shapes")).1,
            [grid.0 as i32, grid.1 as i32]
        );
        for (name, model) in models() {
            let what = format!("04 {name}");
            let mut compared = 0;
            let mut see = |site: &str, value: &Tensor| {
                let key = key(&format!("vit_{site}"));
                if file.has(&key) {
                    let got = value.as_f32().unwrap();
                    assert_close(
                        &format!("{what} {key}"),
                        got,
                        &file.f32(&key).1,
                        limit::STATE,
                    );
                    compared += 1;
                }
            };
            let patches = Patches {
                values: &values,
                grid,
            };
            let aligned = model.vit().unwrap().forward(patches, &mut see).unwrap();
            assert!(
                compared >= 3,
                "img{index}: {compared} inner states compared"
            );
            let key = key("vit_aligned");
            let got = aligned.as_f32().unwrap();
            assert_close(
                &format!("{what} {key}"),
                got,
                &file.f32(&key).1,
                limit::STATE,
            );
        }
    }
}

#[test]
fn sampled_latents_of_a_picture_equal_the_reference() {
    if !in_set(&["04_vit.json", "04_vit.safetensors"]) {
        return;
    }
    let file = Tensors::load("04_vit.safetensors");
    let cases = json("04_vit.json");
    for index in 0..cases.as_array().unwrap().len() {
        let key = |name: &str| format!("img{index}.{name}");
        let pixels = cond_pixels(&file, index);
        for (name, model) in models() {
            let what = format!("04 {name}");
            let posterior = model
                .vae()
                .encode(&pixels, Tiles::Whole, &mut |_, _| {})
                .unwrap();
            assert_posterior(&what, &file, &key("cond_vae_"), &posterior);
            let noise = single(&file, &key("cond_vae_noise"));
            let got = model.vae().sample(&posterior, &noise).unwrap();
            let key = key("cond_vae_latents_scaled");
            assert_close(
                &format!("{what} {key}"),
                got.data(),
                &file.f32(&key).1,
                limit::STATE,
            );
        }
    }
}

/// Pixels of recorded picture `index` for the VAE, `[h, w, 3]` in -1..1.
pub(crate) fn cond_pixels(file: &Tensors, index: usize) -> Tensor {
    let (shape, bytes) = file.u8(&format!("img{index}.vae_resized_rgb_u8"));
    let values = bytes
        .iter()
        .map(|b| (f32::from(*b) / 255.0 - 0.5) / 0.5)
        .collect();
    Tensor::from_f32(&shape, values).unwrap()
}
