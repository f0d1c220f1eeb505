//! JPEG: segments, and between them entropy-coded data, up to the end-of-image marker.

use std::borrow::Cow;

use crate::{Format, Header, Reason, Walked, big};

const END: u8 = 0xd9;
const SCAN: u8 = 0xda;
const APP1: u8 = 0xe1;
const EXIF: &[u8] = b"Exif\0\0";

/// Walks the segments up to the end of the image. Decoders fill in what is missing of a cut file, so the
/// end marker is looked for here.
pub(crate) fn walk(bytes: &[u8]) -> Result<Walked<'_>, Reason> {
    let cut = |missing| Reason::cut(Format::Jpeg, missing);
    let mut at = 2;
    let (mut header, mut exif) = (None, None);
    let mut scanned = false;
    loop {
        let kind = marker(bytes, &mut at)?;
        match kind {
            END => break,
            // Markers without a segment.
            0x01 | 0xd0..=0xd8 => continue,
            _ => {}
        }
        let length = big(bytes, at, 2).ok_or_else(|| cut("a segment"))? as usize;
        if length < 2 {
            return Err(Reason::malformed(Format::Jpeg, "a segment has no length"));
        }
        let body = bytes
            .get(at + 2..at + length)
            .ok_or_else(|| cut("the end of a segment"))?;
        at += length;
        match kind {
            // Frame headers; the three left out are tables.
            0xc0..=0xcf if !matches!(kind, 0xc4 | 0xc8 | 0xcc) => {
                if header.is_some() {
                    return Err(Reason::malformed(Format::Jpeg, "it has two frame headers"));
                }
                header = Some(frame(body)?);
            }
            APP1 if exif.is_none() => exif = body.strip_prefix(EXIF),
            SCAN => {
                scanned = true;
                at = entropy_end(bytes, at).ok_or_else(|| cut("the end of the picture data"))?;
            }
            _ => {}
        }
    }
    let header = header.ok_or_else(|| cut("the frame header"))?;
    if !scanned {
        return Err(cut("the picture data"));
    }
    Ok(Walked {
        header,
        bytes: Cow::Borrowed(&bytes[..at]),
        exif,
    })
}

/// The next marker; fill bytes may stand before it.
fn marker(bytes: &[u8], at: &mut usize) -> Result<u8, Reason> {
    let next = |at: usize| {
        let byte = bytes.get(at).copied();
        byte.ok_or_else(|| Reason::cut(Format::Jpeg, "the end marker"))
    };
    if next(*at)? != 0xff {
        return Err(Reason::malformed(
            Format::Jpeg,
            format!("no marker at byte {at}"),
        ));
    }
    while next(*at)? == 0xff {
        *at += 1;
    }
    *at += 1;
    Ok(bytes[*at - 1])
}

/// Where the marker behind entropy-coded data stands: stuffed zeros and restarts belong to the data.
fn entropy_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        match bytes.get(at + 1)? {
            0x00 | 0xd0..=0xd7 => at += 2,
            0xff => at += 1,
            _ => return Some(at),
        }
    }
}

fn frame(body: &[u8]) -> Result<Header, Reason> {
    match (big(body, 1, 2), big(body, 3, 2)) {
        (Some(height), Some(width)) => Ok(Header {
            format: Format::Jpeg,
            width,
            height,
        }),
        _ => Err(Reason::malformed(
            Format::Jpeg,
            "the frame header is too short",
        )),
    }
}
