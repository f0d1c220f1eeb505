//! Pictures as clients want them. Workers send PNG, which passes through untouched; JPEG and WebP
//! are made here, on the blocking pool and only so many at once.
use base::{Code, Failure};

/// Pictures that are re-encoded at once; each holds its pixels in memory.
pub(super) const MAX_ENCODING: usize = 4;
/// Best quality of JPEG and WebP; the only one that PNG has.
pub(super) const BEST: u8 = 100;

/// File format of the images in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Png,
    Jpeg,
    Webp,
}

/// Format and quality.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) format: Format,
    /// 0 to 100.
    pub(super) compression: u8,
}

impl Format {
    /// As `output_format` names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpeg",
            Self::Webp => "webp",
        }
    }

    pub(super) fn of_name(name: &str) -> Option<Self> {
        let all = [Self::Png, Self::Jpeg, Self::Webp];
        all.into_iter().find(|format| format.name() == name)
    }
}

/// Re-encodes a worker's PNG. Takes time: not for a thread that serves others.
///
/// # Errors
/// `INTERNAL`: bytes that are no 8-bit RGB PNG, or an encoder that fails.
pub(super) fn encode(png: Vec<u8>, output: Output) -> Result<Vec<u8>, Failure> {
    let failed = |what: &str| Failure::new(Code::Internal, format!("picture: {what}"));
    if output.format == Format::Png {
        return Ok(png);
    }
    let (width, height, rgb) = pixels(&png).map_err(|error| failed(&error))?;
    match output.format {
        Format::Png => Ok(png),
        Format::Jpeg => {
            let mut bytes = Vec::new();
            // The encoder counts from 1.
            let quality = output.compression.max(1);
            image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, quality)
                .encode(&rgb, width, height, image::ExtendedColorType::Rgb8)
                .map_err(|error| failed(&error.to_string()))?;
            Ok(bytes)
        }
        Format::Webp => webp::Encoder::from_rgb(&rgb, width, height)
            .encode_simple(false, f32::from(output.compression))
            .map(|memory| memory.to_vec())
            .map_err(|error| failed(&format!("webp: {error:?}"))),
    }
}

fn pixels(png: &[u8]) -> Result<(u32, u32, Vec<u8>), String> {
    let mut reader = png::Decoder::new(std::io::Cursor::new(png))
        .read_info()
        .map_err(|error| error.to_string())?;
    let info = reader.info();
    if (info.color_type, info.bit_depth) != (png::ColorType::Rgb, png::BitDepth::Eight) {
        return Err("not 8-bit RGB".to_owned());
    }
    let size = reader.output_buffer_size().ok_or("too large")?;
    let mut rgb = vec![0; size];
    let frame = reader
        .next_frame(&mut rgb)
        .map_err(|error| error.to_string())?;
    rgb.truncate(frame.buffer_size());
    Ok((frame.width, frame.height, rgb))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A PNG whose pixel at (x, y) is `colour(x, y)`.
    pub(in super::super) fn png(
        width: u32,
        height: u32,
        colour: impl Fn(u32, u32) -> [u8; 3],
    ) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().unwrap();
        let place = |at: u32| colour(at % width, at / width);
        let data: Vec<u8> = (0..width * height).flat_map(place).collect();
        writer.write_image_data(&data).unwrap();
        writer.finish().unwrap();
        bytes
    }

    fn gradient() -> Vec<u8> {
        png(64, 48, |x, y| [(x * 4) as u8, (y * 5) as u8, 128])
    }

    fn decoded(bytes: &[u8], format: Format) -> Vec<u8> {
        match format {
            Format::Png => pixels(bytes).unwrap().2,
            Format::Jpeg => {
                let known = image::ImageFormat::Jpeg;
                let image = image::load_from_memory_with_format(bytes, known).unwrap();
                image.to_rgb8().into_raw()
            }
            Format::Webp => webp::Decoder::new(bytes).decode().unwrap().to_vec(),
        }
    }

    #[test]
    fn png_passes_through_byte_for_byte() {
        let output = Output {
            format: Format::Png,
            compression: BEST,
        };
        assert_eq!(encode(gradient(), output).unwrap(), gradient());
    }

    #[test]
    fn jpeg_and_webp_show_the_same_picture_and_shrink_with_their_quality() {
        let original = decoded(&gradient(), Format::Png);
        for format in [Format::Jpeg, Format::Webp] {
            let make = |compression| {
                let output = Output {
                    format,
                    compression,
                };
                encode(gradient(), output).unwrap()
            };
            let (best, worst) = (make(BEST), make(0));
            assert!(worst.len() < best.len(), "{format:?}");
            let got = decoded(&best, format);
            assert_eq!(got.len(), original.len());
            let far = got.iter().zip(&original).map(|(a, b)| a.abs_diff(*b)).max();
            assert!(far.unwrap() <= 12, "{format:?} is off by {far:?}");
        }
    }

    #[test]
    fn what_is_no_picture_is_an_internal_error() {
        let output = Output {
            format: Format::Jpeg,
            compression: 50,
        };
        let error = encode(b"PNG, or so it says".to_vec(), output).unwrap_err();
        assert_eq!(error.code, Code::Internal);
    }
}
