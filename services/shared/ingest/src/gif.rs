//! GIF: a screen, then blocks up to the trailer.

use std::borrow::Cow;

use crate::{Format, Header, Reason, Walked, little};

const EXTENSION: u8 = 0x21;
const IMAGE: u8 = 0x2c;
const TRAILER: u8 = 0x3b;

/// Walks the blocks. Only what lies up to the end of the first frame is passed on.
pub(crate) fn walk(bytes: &[u8]) -> Result<Walked<'_>, Reason> {
    let cut = |missing| Reason::cut(Format::Gif, missing);
    let (width, height) = little(bytes, 6, 2)
        .zip(little(bytes, 8, 2))
        .ok_or_else(|| cut("the screen"))?;
    let packed = *bytes.get(10).ok_or_else(|| cut("the screen"))?;
    let mut at = 13 + table(packed);
    let mut first = None;
    loop {
        match bytes.get(at).ok_or_else(|| cut("the trailer"))? {
            &TRAILER => break,
            &EXTENSION => at = blocks(bytes, at + 2)?,
            &IMAGE => {
                let packed = *bytes.get(at + 9).ok_or_else(|| cut("a frame"))?;
                at = blocks(bytes, at + 11 + table(packed))?;
                first = first.or(Some(at));
            }
            other => {
                let message = format!("block {other:#04x} at byte {at} is unknown");
                return Err(Reason::malformed(Format::Gif, message));
            }
        }
    }
    let end = first.ok_or_else(|| cut("every frame"))?;
    let mut kept = bytes[..end].to_vec();
    kept.push(TRAILER);
    Ok(Walked {
        header: Header {
            format: Format::Gif,
            width,
            height,
        },
        bytes: Cow::Owned(kept),
        exif: None,
    })
}

/// Bytes of the colour table that a packed field announces.
fn table(packed: u8) -> usize {
    if packed & 0x80 == 0 {
        0
    } else {
        3 << ((packed & 7) + 1)
    }
}

/// Skips sub-blocks up to the empty one.
fn blocks(bytes: &[u8], mut at: usize) -> Result<usize, Reason> {
    loop {
        match bytes.get(at) {
            None => return Err(Reason::cut(Format::Gif, "the end of a block")),
            Some(0) => return Ok(at + 1),
            Some(length) => at += 1 + usize::from(*length),
        }
    }
}
