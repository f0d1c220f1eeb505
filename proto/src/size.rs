//! Sizes as people write them: "WIDTHxHEIGHT" in pixels, nothing else.
use std::{fmt, str::FromStr};

use base::{
    Code, Fault,
    limits::{MAX_SIDE_PIXELS, MAX_SIZE_CHARS},
};

/// A size in pixels, both sides at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    /// Horizontal.
    pub width: u32,
    /// Vertical.
    pub height: u32,
}

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not two decimal numbers around one lower-case `x`.
    #[error("size must be WIDTHxHEIGHT in pixels, for example 1024x1024")]
    Form,
    /// A side is zero.
    #[error("size must have both sides at least 1 pixel")]
    Zero,
    /// A side is beyond anything a model could make.
    #[error("size must have both sides at most {MAX_SIDE_PIXELS} pixels")]
    TooLarge,
}

impl Fault for SizeError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
    fn field(&self) -> Option<&str> {
        Some("size")
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        if text.len() > MAX_SIZE_CHARS {
            return Err(SizeError::Form);
        }
        let (width, height) = text.split_once('x').ok_or(SizeError::Form)?;
        let size = Self {
            width: side(width)?,
            height: side(height)?,
        };
        if size.width == 0 || size.height == 0 {
            return Err(SizeError::Zero);
        }
        if size.width > MAX_SIDE_PIXELS || size.height > MAX_SIDE_PIXELS {
            return Err(SizeError::TooLarge);
        }
        Ok(size)
    }
}

/// Only ASCII digits: `u32::from_str` would take a leading plus.
fn side(text: &str) -> Result<u32, SizeError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(SizeError::Form);
    }
    text.parse().map_err(|_| SizeError::TooLarge)
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_two_plain_numbers_around_an_x_are_a_size() {
        for bad in [
            "",
            "x",
            "1024",
            "1024x",
            "x1024",
            "1024X1024",
            " 1024x1024",
            "1024x1024 ",
            "1024 x 1024",
            "-1x5",
            "+1x5",
            "5x-1",
            "1x2x3",
            "1.5x2",
            "0x10x2",
            "１０２４x１０２４",
            "1024×1024",
            "axb",
            "00000000000000001x0000000000000001",
        ] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::Form), "{bad:?}");
        }
        for bad in ["0x0", "0x1024", "1024x0", "00x00"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::Zero), "{bad:?}");
        }
        for bad in ["100000x10000", "1x65537", "4294967296x1", "99999999999x1"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::TooLarge), "{bad:?}");
        }
        // Odd and off-grid sizes parse: whether a model makes them is another question.
        assert_eq!(
            "1023x1024".parse(),
            Ok(Size {
                width: 1023,
                height: 1024
            })
        );
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_back(width in 1..=MAX_SIDE_PIXELS, height in 1..=MAX_SIDE_PIXELS) {
            let size = Size { width, height };
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn any_text_parses_or_names_the_field(text in "\\PC{0,40}") {
            if let Err(error) = text.parse::<Size>() {
                prop_assert_eq!(error.field(), Some("size"));
            }
        }
    }
}
