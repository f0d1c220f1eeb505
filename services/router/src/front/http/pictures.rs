//! Uploaded pictures, as far as their headers tell: kind and size. Nothing is decoded here.
use axum::body::Bytes;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::Value;

use super::schema::Raw;

/// Most pictures of one edit; HunyuanImage-3.0 is conditioned on at most three.
pub(super) const MAX_PICTURES: usize = 3;
/// Largest side and largest area of an uploaded picture, in pixels.
const MAX_SIDE: u32 = 16_384;
const MAX_PIXELS: u64 = 64 << 20;

/// Media types that a picture may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Media {
    Png,
    Jpeg,
    Webp,
}

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) media: Media,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// The bytes of the pictures in one value: a part of a form, or data URLs in JSON, as a string, an
/// object with `image_url`, or a list of either.
///
/// # Errors
/// Why it is no picture. An address is refused: this server fetches nothing.
pub(super) fn sent(raw: Raw) -> Result<Vec<Bytes>, String> {
    let json = match raw {
        Raw::Part(bytes) => return Ok(vec![bytes]),
        Raw::Json(Value::Array(list)) => list,
        Raw::Json(one) => vec![one],
    };
    json.iter().map(of_json).collect()
}

fn of_json(value: &Value) -> Result<Bytes, String> {
    let url = match value {
        Value::String(url) => Some(url.as_str()),
        Value::Object(object) if object.len() == 1 => {
            object.get("image_url").and_then(Value::as_str)
        }
        _ => None,
    };
    let url = url.ok_or("must be a data URL, or an object whose only key is image_url")?;
    let data = url
        .strip_prefix("data:image/")
        .and_then(|rest| rest.split_once(";base64,"))
        .ok_or("must be a URL that starts with data:image/TYPE;base64, for nothing is fetched")?;
    let bytes = STANDARD.decode(data.1);
    bytes
        .map(Bytes::from)
        .map_err(|error| format!("is no base64: {error}"))
}

/// Reads the header of a picture.
///
/// # Errors
/// Not one of the three kinds, a header cut short, or a size out of bounds.
pub(super) fn header(bytes: &[u8]) -> Result<Header, String> {
    let found = png(bytes).or_else(|| webp(bytes)).or_else(|| jpeg(bytes));
    let header = found.ok_or("must be a PNG, JPEG or WebP picture with a whole header")?;
    let (width, height) = (header.width, header.height);
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 || width > MAX_SIDE || height > MAX_SIDE || pixels > MAX_PIXELS {
        return Err(format!(
            "must be at most {MAX_SIDE} pixels a side and {MAX_PIXELS} in all, got {width}x{height}"
        ));
    }
    Ok(header)
}

fn big(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?;
    Some(u32::from_be_bytes(four.try_into().ok()?))
}

fn png(bytes: &[u8]) -> Option<Header> {
    let ihdr = bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.get(12..16)? == b"IHDR";
    ihdr.then_some(())?;
    Some(Header {
        media: Media::Png,
        width: big(bytes, 16)?,
        height: big(bytes, 20)?,
    })
}

fn little(bytes: &[u8], at: usize, count: usize) -> Option<u32> {
    let part = bytes.get(at..at + count)?;
    let sum = |sum, (byte, place): (&u8, u32)| sum | (u32::from(*byte) << (8 * place));
    Some(part.iter().zip(0..).fold(0, sum))
}

fn webp(bytes: &[u8]) -> Option<Header> {
    let riff = bytes.starts_with(b"RIFF") && bytes.get(8..12)? == b"WEBP";
    riff.then_some(())?;
    let (width, height) = match bytes.get(12..16)? {
        b"VP8 " => {
            let sides = (little(bytes, 26, 2)?, little(bytes, 28, 2)?);
            (sides.0 & 0x3fff, sides.1 & 0x3fff)
        }
        b"VP8L" => {
            let bits = little(bytes, 21, 4)?;
            ((bits & 0x3fff) + 1, ((bits >> 14) & 0x3fff) + 1)
        }
        b"VP8X" => (little(bytes, 24, 3)? + 1, little(bytes, 27, 3)? + 1),
        _ => return None,
    };
    Some(Header {
        media: Media::Webp,
        width,
        height,
    })
}

/// Walks the segments up to the first frame header.
fn jpeg(bytes: &[u8]) -> Option<Header> {
    bytes.starts_with(&[0xff, 0xd8]).then_some(())?;
    let mut at = 2;
    loop {
        let (&marker, &kind) = (bytes.get(at)?, bytes.get(at + 1)?);
        (marker == 0xff).then_some(())?;
        if kind == 0xff {
            // Fill bytes may stand before a marker.
            at += 1;
            continue;
        }
        let length = usize::try_from(big(bytes, at + 2)? >> 16).ok()?;
        // Every start of frame, but not the tables that share its numbers.
        if (0xc0..=0xcf).contains(&kind) && ![0xc4, 0xc8, 0xcc].contains(&kind) {
            let sides = big(bytes, at + 5)?;
            return Some(Header {
                media: Media::Jpeg,
                width: sides & 0xffff,
                height: sides >> 16,
            });
        }
        let ends = kind == 0xd9 || kind == 0xda || length < 2;
        (!ends).then_some(())?;
        at += 2 + length;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::{super::encode, *};

    fn picture(width: u32, height: u32) -> Vec<u8> {
        encode::tests::png(width, height, |x, y| [x as u8, y as u8, 7])
    }

    #[test]
    fn sizes_are_read_off_the_headers_of_real_files() {
        let png = picture(21, 13);
        let mut cases = vec![(Media::Png, png.clone())];
        for (media, format) in [
            (Media::Jpeg, encode::Format::Jpeg),
            (Media::Webp, encode::Format::Webp),
        ] {
            for compression in [40, 100] {
                let output = encode::Output {
                    format,
                    compression,
                };
                cases.push((media, encode::encode(png.clone(), output).unwrap()));
            }
        }
        for (media, bytes) in cases {
            let (width, height) = (21, 13);
            assert_eq!(
                header(&bytes),
                Ok(Header {
                    media,
                    width,
                    height
                })
            );
        }
    }

    #[test]
    fn a_picture_in_json_is_a_data_url_and_nothing_is_fetched() {
        let url = format!("data:image/png;base64,{}", STANDARD.encode(picture(2, 2)));
        for json in [json!(url), json!({"image_url": url}), json!([url])] {
            assert_eq!(sent(Raw::Json(json)).unwrap()[0], picture(2, 2));
        }
        for json in [
            json!("http://localhost/a.png"),
            json!("data:text/html;base64,AA=="),
            json!("data:image/png;base64,@@"),
            json!({"image_url": url, "file_id": "x"}),
            json!(7),
        ] {
            assert!(sent(Raw::Json(json.clone())).is_err(), "{json}");
        }
    }

    #[test]
    fn absurd_sizes_and_other_files_are_refused() {
        let mut wide = picture(2, 2);
        wide[16..20].copy_from_slice(&20_000_u32.to_be_bytes());
        assert!(header(&wide).unwrap_err().contains("20000x2"));
        wide[16..20].copy_from_slice(&0_u32.to_be_bytes());
        assert!(header(&wide).is_err());
        for bad in [
            &b""[..],
            b"GIF89a",
            b"\x89PNG\r\n\x1a\n",
            b"RIFF0000WEBPVP8 ",
            &[0xff, 0xd8],
        ] {
            assert!(header(bad).is_err());
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            start in 0..4_usize, bytes in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let starts = [&b""[..], b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8X", &[0xff, 0xd8]];
            let _ = header(&[starts[start], &bytes].concat());
        }
    }
}
