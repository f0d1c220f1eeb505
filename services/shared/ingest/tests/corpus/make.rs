//! Makes files: with the encoders of the `image` and `png` crates, and by hand where they make nothing odd.

use image::{
    DynamicImage, ExtendedColorType, ImageEncoder as _, RgbImage, RgbaImage,
    codecs::{gif::GifEncoder, jpeg::JpegEncoder, png::PngEncoder, webp::WebPEncoder},
};

/// Every made picture is this wide and high unless its name says otherwise.
pub(crate) const SIZE: (u32, u32) = (12, 9);

/// A flat picture.
pub(crate) fn flat(colour: [u8; 3]) -> RgbImage {
    RgbImage::from_pixel(SIZE.0, SIZE.1, image::Rgb(colour))
}

/// Left half one colour, right half another.
pub(crate) fn halves(left: [u8; 3], right: [u8; 3], (width, height): (u32, u32)) -> RgbImage {
    RgbImage::from_fn(width, height, |x, _| {
        image::Rgb(if x < width / 2 { left } else { right })
    })
}

/// A PNG of raw samples.
pub(crate) fn png_of(samples: &[u8], kind: ExtendedColorType) -> Vec<u8> {
    let mut out = Vec::new();
    let encoder = PngEncoder::new(&mut out);
    encoder.write_image(samples, SIZE.0, SIZE.1, kind).unwrap();
    out
}

pub(crate) fn png(image: &RgbImage) -> Vec<u8> {
    let mut out = Vec::new();
    let encoder = PngEncoder::new(&mut out);
    let (width, height) = image.dimensions();
    encoder
        .write_image(image, width, height, ExtendedColorType::Rgb8)
        .unwrap();
    out
}

pub(crate) fn jpeg(image: &RgbImage) -> Vec<u8> {
    let mut out = Vec::new();
    JpegEncoder::new_with_quality(&mut out, 95)
        .encode_image(image)
        .unwrap();
    out
}

pub(crate) fn webp(image: &DynamicImage) -> Vec<u8> {
    let mut out = Vec::new();
    WebPEncoder::new_lossless(&mut out)
        .encode(
            image.as_bytes(),
            image.width(),
            image.height(),
            image.color().into(),
        )
        .unwrap();
    out
}

/// An animation of flat frames.
pub(crate) fn gif(frames: &[RgbaImage]) -> Vec<u8> {
    let mut out = Vec::new();
    {
        let mut encoder = GifEncoder::new(&mut out);
        for frame in frames {
            encoder
                .encode_frame(image::Frame::new(frame.clone()))
                .unwrap();
        }
    }
    out
}

pub(crate) fn rgba(colour: [u8; 4]) -> RgbaImage {
    RgbaImage::from_pixel(SIZE.0, SIZE.1, image::Rgba(colour))
}

/// A PNG with a palette, `depth` bits an index; every pixel has index 1.
pub(crate) fn palette_png(depth: png::BitDepth, palette: &[u8], trns: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(depth);
    encoder.set_palette(palette.to_vec());
    if !trns.is_empty() {
        encoder.set_trns(trns.to_vec());
    }
    let bits = depth as usize;
    let stride = (SIZE.0 as usize * bits).div_ceil(8);
    let byte = (0..8 / bits).fold(0_u8, |byte, n| byte | 1 << (n * bits));
    let mut writer = encoder.write_header().unwrap();
    writer
        .write_image_data(&vec![byte; stride * SIZE.1 as usize])
        .unwrap();
    writer.finish().unwrap();
    out
}

/// A grey PNG of few bits, every sample at its largest.
pub(crate) fn grey_png(depth: png::BitDepth) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(depth);
    let stride = (SIZE.0 as usize * depth as usize).div_ceil(8);
    let mut writer = encoder.write_header().unwrap();
    writer
        .write_image_data(&vec![255; stride * SIZE.1 as usize])
        .unwrap();
    writer.finish().unwrap();
    out
}

/// An animated PNG of two flat frames.
pub(crate) fn apng(first: [u8; 3], second: [u8; 3]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_animated(2, 0).unwrap();
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&flat(first)).unwrap();
    writer.write_image_data(&flat(second)).unwrap();
    writer.finish().unwrap();
    out
}

/// A PNG chunk with its checksum.
pub(crate) fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut crc = u32::MAX;
    for byte in kind.iter().chain(body) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    let length = (body.len() as u32).to_be_bytes();
    [&length[..], kind, body, &(!crc).to_be_bytes()].concat()
}

/// A well-formed PNG container that says any size and has hardly any data.
pub(crate) fn png_header_only(width: u32, height: u32) -> Vec<u8> {
    let ihdr = [
        &width.to_be_bytes()[..],
        &height.to_be_bytes(),
        &[8, 2, 0, 0, 0],
    ]
    .concat();
    [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk(b"IHDR", &ihdr),
        chunk(b"IDAT", &[0x78, 0x9c, 0x03, 0, 0, 0, 0, 1]),
        chunk(b"IEND", &[]),
    ]
    .concat()
}

/// `png` with a chunk more, behind its header.
pub(crate) fn with_chunk(png: &[u8], kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    const BEHIND_IHDR: usize = 8 + 12 + 13;
    let (head, tail) = png.split_at(BEHIND_IHDR);
    [head, &chunk(kind, body), tail].concat()
}

/// The TIFF bytes of an EXIF block that says only how the picture lies.
pub(crate) fn exif(orientation: u8, big_endian: bool) -> Vec<u8> {
    let short = |value: u16| match big_endian {
        true => value.to_be_bytes(),
        false => value.to_le_bytes(),
    };
    let long = |value: u32| match big_endian {
        true => value.to_be_bytes(),
        false => value.to_le_bytes(),
    };
    [
        if big_endian { &b"MM"[..] } else { b"II" },
        &short(42),
        &long(8),
        // One entry: orientation, a short, once.
        &short(1),
        &short(0x0112),
        &short(3),
        &long(1),
        &short(orientation.into()),
        &[0, 0],
        &long(0),
    ]
    .concat()
}

/// A JPEG segment.
pub(crate) fn segment(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u16 + 2).to_be_bytes();
    [&[0xff, kind][..], &length, body].concat()
}

/// `jpeg` with a segment more, at its start.
pub(crate) fn with_segment(jpeg: &[u8], kind: u8, body: &[u8]) -> Vec<u8> {
    [&jpeg[..2], &segment(kind, body), &jpeg[2..]].concat()
}

/// A RIFF chunk, padded.
pub(crate) fn riff_chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut out = [&kind[..], &(body.len() as u32).to_le_bytes(), body].concat();
    if body.len() % 2 == 1 {
        out.push(0);
    }
    out
}

/// A WebP file of chunks.
pub(crate) fn riff(chunks: &[Vec<u8>]) -> Vec<u8> {
    let body = [&b"WEBP"[..], &chunks.concat()].concat();
    [&b"RIFF"[..], &(body.len() as u32).to_le_bytes(), &body].concat()
}

/// The extended header of a WebP file.
pub(crate) fn vp8x(flags: u8, (width, height): (u32, u32)) -> Vec<u8> {
    let side = |side: u32| (side - 1).to_le_bytes()[..3].to_vec();
    riff_chunk(
        b"VP8X",
        &[vec![flags, 0, 0, 0], side(width), side(height)].concat(),
    )
}

/// A whole file of every format.
pub(crate) fn one_of_each() -> Vec<(&'static str, Vec<u8>)> {
    let picture = flat([200, 40, 90]);
    vec![
        ("png", png(&picture)),
        ("jpeg", jpeg(&picture)),
        ("webp", webp(&picture.clone().into())),
        ("gif", gif(&[rgba([200, 40, 90, 255])])),
    ]
}
