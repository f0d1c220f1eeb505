//! From a walked file to upright RGB pixels.

use std::{
    io::Cursor,
    panic::{AssertUnwindSafe, catch_unwind},
};

use image::{
    DynamicImage, ImageDecoder as _, ImageResult,
    codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder},
    metadata::Orientation,
};

use crate::{BACKGROUND, Format, Limits, Picture, Reason, Walked};

/// Most bytes of a decoded pixel: four channels of 16 bits.
const WIDEST: u64 = 8;
/// What a decoder may hold besides the pixels themselves, in bytes.
const SCRATCH: u64 = 64 << 20;

/// Decodes what was walked.
pub(crate) fn decode(walked: &Walked<'_>, limits: &Limits) -> Result<Picture, Reason> {
    let header = walked.header;
    let malformed = |message: String| Reason::malformed(header.format, message);
    // A decoder that panics on a file nobody has thought of takes this file down, and nothing else.
    let decoded = catch_unwind(AssertUnwindSafe(|| pixels(walked, limits)))
        .map_err(|_| malformed("its data breaks the decoder".to_owned()))?
        .map_err(|error| malformed(brief(&error)))?;
    if (decoded.width(), decoded.height()) != (header.width, header.height) {
        return Err(malformed(format!(
            "its header says {}x{}, its data {}x{}",
            header.width,
            header.height,
            decoded.width(),
            decoded.height()
        )));
    }
    let mut upright = decoded;
    if let Some(orientation) = walked.exif.and_then(Orientation::from_exif_chunk) {
        upright.apply_orientation(orientation);
    }
    let (width, height) = (upright.width() as usize, upright.height() as usize);
    Ok(Picture {
        width,
        height,
        rgb: flattened(upright),
    })
}

fn pixels(walked: &Walked<'_>, limits: &Limits) -> ImageResult<DynamicImage> {
    let bytes = Cursor::new(walked.bytes.as_ref());
    let mut bounds = image::Limits::default();
    bounds.max_image_width = Some(limits.side);
    bounds.max_image_height = Some(limits.side);
    bounds.max_alloc = Some(limits.pixels * WIDEST + SCRATCH);
    match walked.header.format {
        Format::Png => DynamicImage::from_decoder(PngDecoder::with_limits(bytes, bounds)?),
        Format::Jpeg => {
            let mut decoder = JpegDecoder::new(bytes)?;
            decoder.set_limits(bounds)?;
            DynamicImage::from_decoder(decoder)
        }
        Format::WebP => {
            let mut decoder = WebPDecoder::new(bytes)?;
            decoder.set_limits(bounds)?;
            if decoder.has_animation() {
                // What no frame covers is transparent.
                decoder.set_background_color(image::Rgba([255, 255, 255, 0]))?;
            }
            DynamicImage::from_decoder(decoder)
        }
        Format::Gif => {
            let mut decoder = GifDecoder::new(bytes)?;
            decoder.set_limits(bounds)?;
            DynamicImage::from_decoder(decoder)
        }
    }
}

/// The decoder's words, on one line and not too many.
fn brief(error: &image::ImageError) -> String {
    const MAX_CHARS: usize = 160;
    let text = error.to_string();
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(MAX_CHARS).collect()
}

/// 8-bit RGB on the background; 16 bits are rounded, grey is spread.
fn flattened(image: DynamicImage) -> Vec<u8> {
    if !image.color().has_alpha() {
        return image.into_rgb8().into_raw();
    }
    let rgba = image.into_rgba8();
    let mut rgb = Vec::with_capacity(rgba.len() / 4 * 3);
    for pixel in rgba.as_raw().chunks_exact(4) {
        let alpha = u16::from(pixel[3]);
        for (value, behind) in pixel[..3].iter().zip(BACKGROUND) {
            let mixed = u16::from(*value) * alpha + u16::from(behind) * (255 - alpha);
            rgb.push(((mixed + 127) / 255) as u8);
        }
    }
    rgb
}
