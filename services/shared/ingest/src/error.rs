//! Why a file is refused.

use crate::Format;

/// A refused file, by the name that the caller gave it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct IngestError {
    /// Which file: the request field that it came in.
    pub field: String,
    /// Why.
    pub reason: Reason,
}

impl IngestError {
    pub(crate) fn new(field: &str, reason: Reason) -> Self {
        Self {
            field: field.to_owned(),
            reason,
        }
    }
}

/// Why a file is refused; each is the sender's to mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// There are no bytes.
    #[error("is empty")]
    Empty,
    /// More bytes than are taken.
    #[error("has {bytes} bytes, at most {most} are taken")]
    TooManyBytes {
        /// Of the file.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// None of the formats that are read.
    #[error("must be a PNG, JPEG, WebP or GIF picture")]
    UnknownFormat,
    /// The file ends too early.
    #[error("is a {} that was cut off: {missing} is missing", format.name())]
    Truncated {
        /// Kind of file.
        format: Format,
        /// What should have come.
        missing: &'static str,
    },
    /// The file contradicts its format.
    #[error("is a malformed {}: {message}", format.name())]
    Malformed {
        /// Kind of file.
        format: Format,
        /// What is wrong.
        message: String,
    },
    /// A side of zero.
    #[error("has no pixels ({width}x{height})")]
    NoPixels {
        /// As the header says.
        width: u32,
        /// As the header says.
        height: u32,
    },
    /// Larger than is taken, by its header.
    #[error("is {width}x{height}, at most {side} pixels a side and {pixels} in all are taken")]
    TooLarge {
        /// As the header says.
        width: u32,
        /// As the header says.
        height: u32,
        /// Bound of a side.
        side: u32,
        /// Bound of the area.
        pixels: u64,
    },
}

impl Reason {
    pub(crate) fn cut(format: Format, missing: &'static str) -> Self {
        Self::Truncated { format, missing }
    }

    pub(crate) fn malformed(format: Format, message: impl Into<String>) -> Self {
        Self::Malformed {
            format,
            message: message.into(),
        }
    }
}
