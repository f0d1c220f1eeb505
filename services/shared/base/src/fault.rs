//! What an error tells the outside, whatever crate it comes from.
use std::{fmt, time::Duration};

use crate::Code;

/// An error that knows its category. Crates implement it on their one error enum.
pub trait Fault: std::error::Error {
    /// Category.
    fn code(&self) -> Code;
    /// Request field that is to blame, by its wire name.
    fn field(&self) -> Option<&str> {
        None
    }
    /// What a caller reads: lower case, one sentence, names the culprit.
    fn message(&self) -> String {
        self.to_string()
    }
    /// When to try again, if the error says.
    fn retry_after(&self) -> Option<Duration> {
        None
    }
}

/// A concrete [`Fault`]: what is left of an error once it has crossed a process border.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Category.
    pub code: Code,
    /// Request field to blame.
    pub field: Option<String>,
    /// One sentence.
    pub message: String,
    /// Hint from the other side.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure without field and hint.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            field: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// `INVALID_ARGUMENT` that blames `field`.
    pub fn invalid(field: &str, message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message).with_field(field)
    }

    /// Blames `field`.
    #[must_use]
    pub fn with_field(mut self, field: &str) -> Self {
        self.field = Some(field.to_owned());
        self
    }

    /// Says when to retry.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The owned form of any fault.
    pub fn of(fault: &(impl Fault + ?Sized)) -> Self {
        Self {
            code: fault.code(),
            field: fault.field().map(str::to_owned),
            message: fault.message(),
            retry_after: fault.retry_after(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl Fault for Failure {
    fn code(&self) -> Code {
        self.code
    }
    fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }
    fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}
