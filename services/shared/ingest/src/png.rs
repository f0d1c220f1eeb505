//! PNG: a signature, then chunks up to `IEND`.

use std::borrow::Cow;

use crate::{Format, Header, Reason, Walked, big};

pub(crate) const SIGNATURE: &[u8; 8] = b"\x89PNG\r\n\x1a\n";

/// Length, type and checksum around a chunk's data.
const AROUND: usize = 12;

/// Bytes of the largest palette.
const MAX_PALETTE: usize = 3 * 256;

/// Walks the chunks. Only those that make pixels are passed on: text and profiles may be bombs, and the
/// frames of an animation are not shown.
pub(crate) fn walk(bytes: &[u8]) -> Result<Walked<'_>, Reason> {
    let cut = |missing| Reason::cut(Format::Png, missing);
    let mut at = SIGNATURE.len();
    let (mut header, mut exif, mut data) = (None, None, false);
    let mut kept = SIGNATURE.to_vec();
    loop {
        let length = big(bytes, at, 4).ok_or_else(|| cut("the IEND chunk"))? as usize;
        let kind = bytes.get(at + 4..at + 8).ok_or_else(|| cut("a chunk"))?;
        let end = length
            .checked_add(AROUND)
            .and_then(|n| n.checked_add(at))
            .filter(|end| *end <= bytes.len())
            .ok_or_else(|| cut("the end of a chunk"))?;
        let chunk = &bytes[at..end];
        let body = &bytes[at + 8..end - 4];
        match kind {
            b"IHDR" if header.is_none() => header = Some(ihdr(body)?),
            _ if header.is_none() => {
                return Err(Reason::malformed(Format::Png, "IHDR does not come first"));
            }
            // Decoders rely on whole entries.
            b"PLTE" if length == 0 || !length.is_multiple_of(3) || length > MAX_PALETTE => {
                return Err(Reason::malformed(
                    Format::Png,
                    "its palette has a wrong length",
                ));
            }
            b"IDAT" => data = true,
            b"eXIf" => exif = Some(body),
            b"IEND" => break,
            _ => {}
        }
        if matches!(kind, b"IHDR" | b"PLTE" | b"tRNS" | b"IDAT") {
            kept.extend_from_slice(chunk);
        }
        at = end;
    }
    if !data {
        return Err(cut("the picture data"));
    }
    kept.extend_from_slice(&bytes[at..at + AROUND]);
    let header = header.ok_or_else(|| cut("the IHDR chunk"))?;
    Ok(Walked {
        header,
        bytes: Cow::Owned(kept),
        exif,
    })
}

fn ihdr(body: &[u8]) -> Result<Header, Reason> {
    match (big(body, 0, 4), big(body, 4, 4)) {
        (Some(width), Some(height)) if body.len() == 13 => Ok(Header {
            format: Format::Png,
            width,
            height,
        }),
        _ => Err(Reason::malformed(Format::Png, "IHDR has a wrong length")),
    }
}
