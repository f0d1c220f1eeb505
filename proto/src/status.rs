//! The one place that turns an error into a gRPC status and back. The category is the code, the
//! blamed field a `google.rpc.BadRequest`, the hint a `google.rpc.RetryInfo`.
use std::error::Error as _;

use base::{Code, Failure, Fault};
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

/// Domain of `google.rpc.ErrorInfo` in our statuses.
pub const DOMAIN: &str = "omni";

/// Longest message that travels, in bytes; gRPC carries it in a header.
const MAX_MESSAGE_BYTES: usize = 2_048;

/// What tonic writes when a deadline that the client set elapses.
const TIMEOUT_TEXT: &str = "Timeout expired";

/// The status of a fault.
pub fn status(fault: &(impl Fault + ?Sized)) -> Status {
    let code = fault.code();
    let message = clip(fault.message());
    let mut details = ErrorDetails::new();
    details.set_error_info(code.name(), DOMAIN, std::collections::HashMap::new());
    if let Some(field) = fault.field() {
        details.add_bad_request_violation(field, message.as_str());
    }
    if let Some(after) = fault.retry_after() {
        details.set_retry_info(Some(after));
    }
    Status::with_error_details(tonic::Code::from_i32(code.number()), message, details)
}

/// What a status says, in our own terms.
///
/// A status that this process made from a broken connection (it has a source, one from the wire
/// never has) is `UNAVAILABLE`, and an elapsed deadline is `DEADLINE_EXCEEDED`, whatever code the
/// HTTP/2 layer chose for them.
pub fn failure(status: &Status) -> Failure {
    let details = status.get_error_details();
    let field = details
        .bad_request()
        .and_then(|bad| bad.field_violations.first())
        .map(|violation| violation.field.clone());
    let message = match status.message() {
        "" => format!("the other side answered {:?}", status.code()),
        text => text.to_owned(),
    };
    Failure {
        code: code(status),
        field,
        message,
        retry_after: details.retry_info().and_then(|info| info.retry_delay),
    }
}

/// The category of a status; see [`failure`].
pub fn code(status: &Status) -> Code {
    let code = Code::from_number(status.code() as i32).unwrap_or(Code::Unknown);
    if code == Code::Cancelled && status.message() == TIMEOUT_TEXT {
        return Code::DeadlineExceeded;
    }
    let ours = matches!(code, Code::Unknown | Code::Internal | Code::Cancelled);
    if ours && (status.source().is_some() || is_broken_stream(status)) {
        return Code::Unavailable;
    }
    code
}

/// A response body that broke off is reported without a source; the text is tonic's own.
fn is_broken_stream(status: &Status) -> bool {
    let text = status.message();
    text.starts_with("h2 protocol error") || text.contains("transport error")
}

fn clip(mut message: String) -> String {
    if message.len() > MAX_MESSAGE_BYTES {
        let end = (0..=MAX_MESSAGE_BYTES)
            .rev()
            .find(|&at| message.is_char_boundary(at));
        message.truncate(end.unwrap_or(0));
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn code_field_message_and_hint_survive_the_wire() {
        for code in Code::all() {
            let sent = Failure::new(code, "steps must be at most 200")
                .with_field("steps")
                .with_retry_after(Duration::from_millis(250));
            let headers = status(&sent).into_http::<tonic::body::Body>();
            let got = Status::from_header_map(headers.headers()).unwrap();
            assert_eq!(failure(&got), sent);
        }
    }

    #[test]
    fn a_foreign_status_without_details_keeps_code_and_text() {
        let got = failure(&Status::not_found("no such thing"));
        assert_eq!(got, Failure::new(Code::NotFound, "no such thing"));
        assert!(!failure(&Status::internal("")).message.is_empty());
    }

    #[test]
    fn elapsed_and_broken_are_told_from_cancelled() {
        assert_eq!(
            code(&Status::cancelled(TIMEOUT_TEXT)),
            Code::DeadlineExceeded
        );
        assert_eq!(
            code(&Status::cancelled("client went away")),
            Code::Cancelled
        );
        let broken = Status::from_error("connection reset".into());
        assert_eq!(code(&broken), Code::Unavailable);
        assert_eq!(code(&Status::unknown("a bug")), Code::Unknown);
    }

    #[test]
    fn long_messages_are_clipped_at_a_character() {
        let text = clip("ä".repeat(MAX_MESSAGE_BYTES));
        assert!(text.len() <= MAX_MESSAGE_BYTES + '…'.len_utf8());
        assert!(text.ends_with('…'));
    }
}
