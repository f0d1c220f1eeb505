//! Golden 04: resizing, cropping and cutting conditioning pictures.

use model::picture::RgbImage;
use model::preprocess::{vae_picture, vit_picture};
use model::{BucketSet, ModelConfig, ResolutionGroup};

use crate::common::{Tensors, assert_close, count, in_set, json, limit, model_dir, path};

fn bytes_as_levels(bytes: &[u8]) -> Vec<f32> {
    bytes.iter().map(|b| f32::from(*b)).collect()
}

/// Decodes an 8-bit RGB PNG of the golden set.
fn decode_png(name: &str) -> RgbImage {
    let file = std::io::BufReader::new(std::fs::File::open(path(name)).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut data = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut data).unwrap();
    assert_eq!(info.color_type, png::ColorType::Rgb, "{name}");
    assert_eq!(info.bit_depth, png::BitDepth::Eight, "{name}");
    RgbImage {
        width: info.width as usize,
        height: info.height as usize,
        data,
    }
}

#[test]
fn pictures_are_prepared_as_in_the_reference() {
    if !in_set(&["04_vit.json", "04_vit.safetensors"]) {
        return;
    }
    let config = ModelConfig::from_dir(&model_dir()).unwrap();
    let cell = config.pixels_per_token();
    let group = ResolutionGroup::new(config.image_base_size, cell, BucketSet::Base).unwrap();
    let tensors = Tensors::load("04_vit.safetensors");
    for (n, case) in json("04_vit.json").as_array().unwrap().iter().enumerate() {
        let what = |part: &str| format!("img{n}.{part}");
        let image = decode_png(case["file"].as_str().unwrap());
        assert_eq!(image.data, tensors.u8(&what("rgb_u8")).1);

        let vae = vae_picture(&image, &group).unwrap();
        let want = &case["vae"];
        assert_eq!(vae.bucket.height, count(&want["height"]));
        assert_eq!(vae.bucket.width, count(&want["width"]));
        assert_eq!(vae.bucket.ratio_index, count(&want["ratio_index"]));
        let (_, rgb) = tensors.u8(&what("vae_resized_rgb_u8"));
        assert_close(
            &format!("{} in grey levels", what("vae_resized_rgb_u8")),
            &bytes_as_levels(&vae.rgb.data),
            &bytes_as_levels(&rgb),
            limit::GREY_LEVEL,
        );
        // The golden holds the first rows, channels first.
        let (shape, pixels) = tensors.f32(&what("vae_pixels"));
        let got = vae.pixels.to_f32_vec();
        let (rows, columns) = (shape[2], shape[3]);
        let got: Vec<f32> = (0..3 * rows * columns)
            .map(|i| got[i % (rows * columns) * 3 + i / (rows * columns)])
            .collect();
        // One grey level is 2/255 in -1..1.
        let level = 2.0 / 255.0 + 1e-6;
        assert_close(&what("vae_pixels"), &got, &pixels, level);

        let vit = vit_picture(&image, &config.vit_processor).unwrap();
        let grid = (
            count(&case["vit"]["token_h"]),
            count(&case["vit"]["token_w"]),
        );
        assert_eq!(vit.grid, grid);
        assert_eq!(
            tensors.i32(&what("vit_spatial_shapes")).1,
            [grid.0 as i32, grid.1 as i32]
        );
        let (_, mask) = tensors.i32(&what("vit_pixel_attention_mask"));
        let real = grid.0 * grid.1;
        assert!(
            mask.iter()
                .enumerate()
                .all(|(i, m)| (*m == 1) == (i < real))
        );
        assert_eq!(vit.values.dim(0), count(&case["vit"]["image_token_length"]));
        let (_, want) = tensors.f32(&what("vit_pixel_values"));
        let stds = config.vit_processor.image_std;
        let level = stds.map(|std| 1.0 / (255.0 * std as f32)).into_iter();
        let level = level.fold(0.0, f32::max) + 1e-6;
        assert_close(
            &what("vit_pixel_values"),
            &vit.values.to_f32_vec(),
            &want,
            level,
        );
    }
}
