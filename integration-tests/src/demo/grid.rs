//! Pictures beside each other, as PNG.

use std::io;

use model::RgbImage;

/// Side of a cell; a picture is scaled down to fit.
const CELL: usize = 132;
/// White space around a picture.
const GAP: usize = 4;

/// A sheet of pictures, row by row, `columns` in a row.
pub fn contact_sheet(pictures: &[RgbImage], columns: usize) -> RgbImage {
    let columns = columns.max(1);
    let (width, height) = (
        columns * (CELL + GAP) + GAP,
        pictures.len().div_ceil(columns) * (CELL + GAP) + GAP,
    );
    let mut sheet = RgbImage {
        width,
        height,
        data: vec![255; width * height * 3],
    };
    for (n, picture) in pictures.iter().enumerate() {
        let small = shrunk(picture);
        let left = n % columns * (CELL + GAP) + GAP + (CELL - small.width) / 2;
        let top = n / columns * (CELL + GAP) + GAP + (CELL - small.height) / 2;
        for (row, line) in small.data.chunks_exact(small.width * 3).enumerate() {
            let start = ((top + row) * width + left) * 3;
            sheet.data[start..start + line.len()].copy_from_slice(line);
        }
    }
    sheet
}

/// The picture scaled to fit a cell: every pixel is the mean of what it covers.
fn shrunk(picture: &RgbImage) -> RgbImage {
    let long = picture.width.max(picture.height);
    let side = |length: usize| (length * CELL / long).max(1);
    let (width, height) = (side(picture.width), side(picture.height));
    let span = |n: usize, out: usize, all: usize| n * all / out..((n + 1) * all).div_ceil(out);
    let mut data = Vec::with_capacity(width * height * 3);
    for row in 0..height {
        for column in 0..width {
            let (rows, columns) = (
                span(row, height, picture.height),
                span(column, width, picture.width),
            );
            let count = (rows.len() * columns.len()).max(1);
            for channel in 0..3 {
                let sum: usize = rows
                    .clone()
                    .flat_map(|r| columns.clone().map(move |c| r * picture.width + c))
                    .map(|at| usize::from(picture.data[at * 3 + channel]))
                    .sum();
                data.push((sum / count) as u8);
            }
        }
    }
    RgbImage {
        width,
        height,
        data,
    }
}

/// A picture as a PNG file.
///
/// # Errors
/// When the encoder refuses, as for a picture without pixels.
pub fn encode_png(picture: &RgbImage) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, picture.width as u32, picture.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&picture.data)?;
    writer.finish()?;
    Ok(out)
}

/// The picture of a PNG file of 8-bit RGB, which is what Omni writes.
///
/// # Errors
/// When it is no PNG, or one of other pixels.
pub fn decode_png(bytes: &[u8]) -> io::Result<RgbImage> {
    let mut reader = png::Decoder::new(io::Cursor::new(bytes)).read_info()?;
    let size = reader.output_buffer_size();
    let mut data = vec![0; size.ok_or_else(|| io::Error::other("a png of no size"))?];
    let info = reader.next_frame(&mut data)?;
    if (info.color_type, info.bit_depth) != (png::ColorType::Rgb, png::BitDepth::Eight) {
        let found = format!("{:?} of {:?}", info.color_type, info.bit_depth);
        return Err(io::Error::other(found));
    }
    data.truncate(info.buffer_size());
    Ok(RgbImage {
        width: info.width as usize,
        height: info.height as usize,
        data,
    })
}
