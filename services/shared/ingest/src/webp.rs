//! WebP: chunks in a RIFF file whose head says how long it is.

use std::borrow::Cow;

use crate::{Format, Header, Reason, Walked, little};

/// The RIFF head: name, length, kind.
const HEAD: usize = 12;

/// Walks the chunks that the head promises.
pub(crate) fn walk(bytes: &[u8]) -> Result<Walked<'_>, Reason> {
    let cut = |missing| Reason::cut(Format::WebP, missing);
    let promised = little(bytes, 4, 4).unwrap_or(0) as usize + 8;
    let whole = bytes.get(..promised).ok_or_else(|| cut("its last part"))?;
    let (mut at, mut header, mut exif, mut data) = (HEAD, None, None, false);
    while at < whole.len() {
        let kind = whole.get(at..at + 4).ok_or_else(|| cut("a chunk"))?;
        let length = little(whole, at + 4, 4).ok_or_else(|| cut("a chunk"))? as usize;
        let body = length
            .checked_add(at + 8)
            .and_then(|end| whole.get(at + 8..end))
            .ok_or_else(|| cut("the end of a chunk"))?;
        if header.is_none() {
            header = Some(size(kind, body)?);
        }
        match kind {
            b"VP8 " | b"VP8L" | b"ANMF" => data = true,
            b"EXIF" => exif = Some(body.strip_prefix(b"Exif\0\0").unwrap_or(body)),
            _ => {}
        }
        at += 8 + length + length % 2;
    }
    if !data {
        return Err(cut("the picture data"));
    }
    let (width, height) = header.ok_or_else(|| cut("every chunk"))?;
    Ok(Walked {
        header: Header {
            format: Format::WebP,
            width,
            height,
        },
        bytes: Cow::Borrowed(whole),
        exif,
    })
}

/// Width and height, as the first chunk says.
fn size(kind: &[u8], body: &[u8]) -> Result<(u32, u32), Reason> {
    let sides = match kind {
        b"VP8 " => little(body, 6, 2)
            .zip(little(body, 8, 2))
            .map(|(width, height)| (width & 0x3fff, height & 0x3fff)),
        b"VP8L" => {
            let bits = little(body, 1, 4);
            bits.map(|bits| ((bits & 0x3fff) + 1, ((bits >> 14) & 0x3fff) + 1))
        }
        b"VP8X" => little(body, 4, 3)
            .zip(little(body, 7, 3))
            .map(|(width, height)| (width + 1, height + 1)),
        _ => {
            return Err(Reason::malformed(
                Format::WebP,
                "it does not start with a picture",
            ));
        }
    };
    sides.ok_or_else(|| Reason::malformed(Format::WebP, "its first chunk is too short"))
}
