//! From latents to a PNG, off the step loop.
use base::{Code, Failure};
use model::{Latents, RgbImage, preprocess::scaled};
use proto::v1::DenoiseImage;
use stage::{Ranks, StageError};

/// A finished picture and the time it took.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) image: DenoiseImage,
    /// Decoding and making the file, without waiting for either.
    pub(crate) decode_ms: f64,
}

/// The file of a decoded picture; `output` is the height and width that it is scaled to, if it is.
pub(crate) fn file(
    mut image: RgbImage,
    output: Option<(usize, usize)>,
) -> Result<DenoiseImage, StageError> {
    if let Some((height, width)) = output {
        image = scaled(&image, height, width);
    }
    encoded(&image)
}

/// The picture of latents, by the worker's decoder.
pub(crate) fn decoded(ranks: &Ranks, latents: &Latents) -> Result<RgbImage, StageError> {
    #[cfg(feature = "cuda")]
    if let Some(gpus) = ranks.gpus() {
        return gpus.decode(latents);
    }
    ranks.decode(latents)
}

/// A picture on the wire.
pub(crate) fn encoded(image: &RgbImage) -> Result<DenoiseImage, StageError> {
    Ok(DenoiseImage {
        width: side(image.width)?,
        height: side(image.height)?,
        png: encode(image)?,
    })
}

fn side(pixels: usize) -> Result<u32, StageError> {
    u32::try_from(pixels).map_err(|_| internal(format!("a side of {pixels} pixels")))
}

/// 8-bit RGB, no metadata: equal pixels give equal files.
fn encode(image: &RgbImage) -> Result<Vec<u8>, StageError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, side(image.width)?, side(image.height)?);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(png_error)?;
    writer.write_image_data(&image.data).map_err(png_error)?;
    writer.finish().map_err(png_error)?;
    Ok(bytes)
}

fn png_error(error: png::EncodingError) -> StageError {
    internal(format!("png encoder: {error}"))
}

fn internal(message: String) -> StageError {
    StageError::Other(Failure::new(Code::Internal, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_png_holds_exactly_the_pixels() {
        let data: Vec<u8> = (0..2 * 3 * 3).map(|value| value * 13).collect();
        let image = RgbImage {
            width: 3,
            height: 2,
            data: data.clone(),
        };
        let bytes = encode(&image).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (3, 2));
        assert_eq!(
            (info.color_type, info.bit_depth),
            (png::ColorType::Rgb, png::BitDepth::Eight)
        );
        assert_eq!(pixels, data);
    }
}
