//! Odd files, made here, and what becomes of each; the seeds of the fuzz target, replayed.
#![allow(clippy::unwrap_used)]

mod files;
mod jpeg;
mod make;
mod replay;

use ingest::{Format, Limits, Picture, Reason, decode, header};

/// What must become of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// A picture of this size, of this colour everywhere but for rounding.
    Flat((usize, usize), [u8; 3]),
    /// A picture of this size whose first and last pixels have these colours.
    Ends((usize, usize), [u8; 3], [u8; 3]),
    /// Refused: no bytes.
    Empty,
    /// Refused: too many bytes.
    TooManyBytes,
    /// Refused: not a picture that is read.
    Unknown,
    /// Refused: the file is not whole.
    Cut(Format),
    /// Refused: the file contradicts itself.
    Malformed(Format),
    /// Refused: a side of zero.
    NoPixels,
    /// Refused by its header.
    TooLarge,
}

/// Small bounds, so that files that break them are small.
pub(crate) const LIMITS: Limits = Limits {
    bytes: 1 << 16,
    side: 512,
    pixels: 1 << 16,
};
/// JPEG rounds.
const NEAR: u8 = 4;

fn near(pixel: &[u8], colour: [u8; 3]) -> bool {
    (pixel.iter().zip(colour)).all(|(a, b)| a.abs_diff(b) <= NEAR)
}

fn right(outcome: Outcome, decoded: &Result<Picture, Reason>) -> bool {
    match (outcome, decoded) {
        (Outcome::Flat(size, colour), Ok(picture)) => {
            (picture.width, picture.height) == size
                && picture.rgb.chunks_exact(3).all(|pixel| near(pixel, colour))
        }
        (Outcome::Ends(size, first, last), Ok(picture)) => {
            let mut pixels = picture.rgb.chunks_exact(3);
            (picture.width, picture.height) == size
                && near(pixels.next().unwrap(), first)
                && near(pixels.next_back().unwrap(), last)
        }
        (Outcome::Empty, Err(Reason::Empty))
        | (Outcome::TooManyBytes, Err(Reason::TooManyBytes { .. }))
        | (Outcome::Unknown, Err(Reason::UnknownFormat))
        | (Outcome::NoPixels, Err(Reason::NoPixels { .. }))
        | (Outcome::TooLarge, Err(Reason::TooLarge { .. })) => true,
        (Outcome::Cut(want), Err(Reason::Truncated { format, .. }))
        | (Outcome::Malformed(want), Err(Reason::Malformed { format, .. })) => want == *format,
        _ => false,
    }
}

#[test]
fn every_odd_file_has_the_right_outcome() {
    let files = files::all();
    assert!(files.len() >= 60, "only {} files", files.len());
    let mut wrong = Vec::new();
    for (name, bytes, outcome) in files {
        let decoded = decode("image", &bytes, &LIMITS);
        if let Ok(picture) = &decoded {
            assert_eq!(
                picture.rgb.len(),
                picture.width * picture.height * 3,
                "{name}"
            );
        }
        let reason = decoded.map_err(|error| {
            assert_eq!(error.field, "image");
            let text = error.to_string();
            assert!(
                text.starts_with("image ") && text.lines().count() == 1,
                "{name}: {text}"
            );
            error.reason
        });
        if !right(outcome, &reason) {
            let got = reason.map(|picture| {
                let some: Vec<_> = picture.rgb.iter().take(12).copied().collect();
                format!("{}x{} {some:?}", picture.width, picture.height)
            });
            wrong.push(format!("{name}: wanted {outcome:?}, got {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_cut_anywhere_is_refused() {
    for (name, bytes) in make::one_of_each() {
        for end in 0..bytes.len() {
            let cut = decode("image", &bytes[..end], &LIMITS);
            assert!(cut.is_err(), "{name} cut at {end} of {}", bytes.len());
        }
        assert!(decode("image", &bytes, &LIMITS).is_ok(), "{name}");
    }
}

#[test]
fn headers_are_read_without_decoding() {
    for (name, bytes) in make::one_of_each() {
        let head = header("image", &bytes, &LIMITS).unwrap();
        let picture = decode("image", &bytes, &LIMITS).unwrap();
        assert_eq!(
            (head.width as usize, head.height as usize),
            (picture.width, picture.height),
            "{name}"
        );
    }
}

#[test]
fn the_default_limits_let_a_large_photograph_in_and_keep_bombs_out() {
    let limits = Limits::default();
    let inside = make::png_header_only(6_000, 4_000);
    let outside = make::png_header_only(16_000, 16_000);
    let refused = |bytes: &[u8]| header("image", bytes, &limits).map_err(|error| error.reason);
    assert!(refused(&inside).is_ok());
    assert!(matches!(refused(&outside), Err(Reason::TooLarge { .. })));
}
