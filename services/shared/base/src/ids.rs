//! Names of requests and members. Both travel in logs, metadata and keys, so their alphabet is
//! small and their length bounded.
use std::{fmt, str::FromStr};

use uuid::Uuid;

use crate::{Code, Fault, limits::MAX_ID_CHARS};

/// An id outside `[A-Za-z0-9_-]{1,64}`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be 1 to {MAX_ID_CHARS} characters of [A-Za-z0-9_-]")]
pub struct IdError {
    field: &'static str,
}

impl Fault for IdError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
    fn field(&self) -> Option<&str> {
        Some(self.field)
    }
}

fn check(text: &str, field: &'static str) -> Result<String, IdError> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if text.is_empty() || text.len() > MAX_ID_CHARS || !text.bytes().all(legal) {
        return Err(IdError { field });
    }
    Ok(text.to_owned())
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $field:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// A fresh id: UUID version 7, so that ids sort by age.
            pub fn generate() -> Self {
                Self(Uuid::now_v7().to_string())
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                check(text, $field).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// Id of a request; the client may choose it to make retries safe.
    RequestId,
    "request_id"
);
id!(
    /// Id of one process start.
    MemberId,
    "member_id"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_ids_are_legal_and_distinct() {
        let (a, b) = (RequestId::generate(), RequestId::generate());
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<RequestId>().unwrap(), a);
    }

    #[test]
    fn illegal_ids_are_refused_and_name_the_field() {
        let long = "a".repeat(MAX_ID_CHARS + 1);
        for bad in ["", "a b", "a/b", "ä", "a\n", long.as_str()] {
            let error = bad.parse::<RequestId>().unwrap_err();
            assert_eq!(error.field(), Some("request_id"), "{bad:?}");
        }
        assert!("a".repeat(MAX_ID_CHARS).parse::<MemberId>().is_ok());
        assert_eq!(
            "".parse::<MemberId>().unwrap_err().field(),
            Some("member_id")
        );
    }
}
