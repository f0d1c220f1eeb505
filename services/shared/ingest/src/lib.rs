//! Turns image bytes that nobody vouches for into RGB pixels.
//!
//! One way in: [`decode`]. Before a decoder sees a byte, the container is walked from end to end: what it
//! is, how large the picture says it is, and whether the file is whole. A picture that is too large is
//! refused by its header, before anything of its size is allocated; a file that was cut is refused even
//! where a decoder would fill in the rest. What comes out is upright (EXIF), 8-bit RGB, transparent parts
//! flattened on [`BACKGROUND`], of an animation the first frame. Colour profiles are not applied. Bytes
//! behind the end of a picture are ignored.
//!
//! PNG (an APNG gives its still image), JPEG (grey, colour, CMYK), WebP and GIF.

#![forbid(unsafe_code)]

mod error;
mod gif;
mod jpeg;
mod pixels;
mod png;
mod webp;

pub use error::{IngestError, Reason};

/// What transparent parts lie on: white.
pub const BACKGROUND: [u8; 3] = [255; 3];

/// What is refused before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest file, in bytes.
    pub bytes: usize,
    /// Largest side, in pixels.
    pub side: u32,
    /// Largest area, in pixels.
    pub pixels: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 32 << 20,
            side: 16_384,
            pixels: 32 << 20,
        }
    }
}

/// The kinds of file that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Portable network graphics, with or without animation.
    Png,
    /// JPEG, baseline or progressive.
    Jpeg,
    /// WebP, lossy, lossless or extended.
    WebP,
    /// Graphics interchange format.
    Gif,
}

impl Format {
    /// As error messages spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
        }
    }
}

/// What a whole file says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of file.
    pub format: Format,
    /// Pixels across, as stored (before it is turned upright).
    pub width: u32,
    /// Pixels down, as stored.
    pub height: u32,
}

/// An upright picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels across.
    pub width: usize,
    /// Pixels down.
    pub height: usize,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

/// A walked file: its header, what a decoder needs of it, and its EXIF block.
#[derive(Debug)]
pub(crate) struct Walked<'a> {
    pub(crate) header: Header,
    pub(crate) bytes: std::borrow::Cow<'a, [u8]>,
    /// TIFF bytes.
    pub(crate) exif: Option<&'a [u8]>,
}

/// Reads what a file says about itself and checks that it is whole; nothing is decoded. `field` names the
/// file in errors.
///
/// # Errors
/// No bytes, no known format, a cut or malformed container, a size of zero or above `limits`.
pub fn header(field: &str, bytes: &[u8], limits: &Limits) -> Result<Header, IngestError> {
    walk(bytes, limits)
        .map(|walked| walked.header)
        .map_err(|reason| IngestError::new(field, reason))
}

/// The picture in a file. `field` names the file in errors.
///
/// # Errors
/// Those of [`header`], and pixels that do not decode.
pub fn decode(field: &str, bytes: &[u8], limits: &Limits) -> Result<Picture, IngestError> {
    walk(bytes, limits)
        .and_then(|walked| pixels::decode(&walked, limits))
        .map_err(|reason| IngestError::new(field, reason))
}

fn walk<'a>(bytes: &'a [u8], limits: &Limits) -> Result<Walked<'a>, Reason> {
    if bytes.is_empty() {
        return Err(Reason::Empty);
    }
    if bytes.len() > limits.bytes {
        return Err(Reason::TooManyBytes {
            bytes: bytes.len(),
            most: limits.bytes,
        });
    }
    // A file that is cut within its first bytes is known by what is left of them.
    let walked = if bytes.starts_with(&png::SIGNATURE[..bytes.len().min(8)]) {
        png::walk(bytes)?
    } else if bytes.starts_with(&[0xff, 0xd8][..bytes.len().min(2)]) {
        jpeg::walk(bytes)?
    } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
        webp::walk(bytes)?
    } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
        gif::walk(bytes)?
    } else {
        return Err(Reason::UnknownFormat);
    };
    let Header { width, height, .. } = walked.header;
    if width == 0 || height == 0 {
        return Err(Reason::NoPixels { width, height });
    }
    let area = u64::from(width) * u64::from(height);
    if width > limits.side || height > limits.side || area > limits.pixels {
        return Err(Reason::TooLarge {
            width,
            height,
            side: limits.side,
            pixels: limits.pixels,
        });
    }
    Ok(walked)
}

/// Big-endian number at `at`.
pub(crate) fn big(bytes: &[u8], at: usize, count: usize) -> Option<u32> {
    let part = bytes.get(at..at.checked_add(count)?)?;
    Some(part.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
}

/// Little-endian number at `at`.
pub(crate) fn little(bytes: &[u8], at: usize, count: usize) -> Option<u32> {
    let part = bytes.get(at..at.checked_add(count)?)?;
    Some(
        part.iter()
            .rev()
            .fold(0, |sum, byte| sum << 8 | u32::from(*byte)),
    )
}
