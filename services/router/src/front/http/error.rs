//! Failures as HTTP answers, in the shape that clients of the OpenAI API read:
//! `{"error": {"message", "type", "param", "code"}}`. Categories and their statuses come from
//! [`base::Code`]; only what HTTP alone can get wrong (method, media type, body) has a status here.
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use base::{Code, Failure, Fault};
use serde_json::{Value, json};
use tonic::Status;

use crate::RouterError;

/// The header that names a request; the `request_id` of the gRPC API.
pub(super) const REQUEST_ID: &str = "x-request-id";
/// Tells clients of the OpenAI API whether to send the same again.
const SHOULD_RETRY: &str = "x-should-retry";

/// Why there is no image.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HttpError {
    failure: Failure,
    /// Where HTTP is more precise than the category.
    status: Option<StatusCode>,
}

impl HttpError {
    /// A fault that only HTTP can have.
    pub(super) fn of_http(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            failure: Failure::new(Code::InvalidArgument, message),
            status: Some(status),
        }
    }

    pub(super) fn code(&self) -> Code {
        self.failure.code
    }

    fn status(&self) -> StatusCode {
        let own = StatusCode::from_u16(self.failure.code.http_status());
        self.status
            .or(own.ok())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The error object.
    pub(super) fn object(&self) -> Value {
        let Failure {
            code,
            field,
            message,
            ..
        } = &self.failure;
        let param = field.as_deref().map(|field| match field {
            "request_id" => REQUEST_ID,
            // The images API has one name for them.
            "images" => "image",
            other => other,
        });
        json!({
            "message": message,
            "type": kind(self.status()),
            "param": param,
            "code": code.name().to_ascii_lowercase(),
        })
    }
}

/// What went wrong, by who has to act.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

/// Every type of [`kind`], for the document.
pub(super) const KINDS: [&str; 5] = [
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
];

impl From<Failure> for HttpError {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            status: None,
        }
    }
}

impl From<RouterError> for HttpError {
    fn from(error: RouterError) -> Self {
        Failure::of(&error).into()
    }
}

impl From<Status> for HttpError {
    fn from(status: Status) -> Self {
        proto::status::failure(&status).into()
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let body = Json(json!({ "error": self.object() }));
        let mut response = (self.status(), body).into_response();
        let headers = response.headers_mut();
        let retry = if self.failure.code.is_retryable() {
            "true"
        } else {
            "false"
        };
        headers.insert(SHOULD_RETRY, HeaderValue::from_static(retry));
        if let Some(after) = Fault::retry_after(&self.failure) {
            // Whole seconds, rounded up: earlier than asked is too early.
            let seconds = after.as_millis().div_ceil(1_000).max(1);
            if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
                headers.insert(RETRY_AFTER, value);
            }
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_category_has_one_status_and_never_crosses_between_4xx_and_5xx() {
        for code in Code::all() {
            let error = HttpError::from(Failure::new(code, "x"));
            let response = error.clone().into_response();
            assert_eq!(response.status().as_u16(), code.http_status());
            let server = error.object()["type"] == "server_error";
            assert_eq!(server, response.status().is_server_error(), "{code}");
            assert!(KINDS.iter().any(|kind| error.object()["type"] == *kind));
        }
    }

    #[test]
    fn a_hint_is_whole_seconds_rounded_up() {
        for (millis, seconds) in [(1, "1"), (1_000, "1"), (1_001, "2"), (60_000, "60")] {
            let full = Failure::new(Code::ResourceExhausted, "full")
                .with_retry_after(Duration::from_millis(millis));
            let response = HttpError::from(full).into_response();
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[RETRY_AFTER], seconds);
            assert_eq!(response.headers()[SHOULD_RETRY], "true");
        }
    }

    #[test]
    fn the_field_is_the_param_and_the_request_id_is_a_header_here() {
        let error = HttpError::from(Failure::invalid("size", "size 1x1 is none"));
        assert_eq!(
            error.object(),
            json!({
                "message": "size 1x1 is none", "type": "invalid_request_error",
                "param": "size", "code": "invalid_argument",
            })
        );
        let twice = HttpError::from(RouterError::Duplicate("a".into()));
        assert_eq!(twice.object()["param"], REQUEST_ID);
        let method = HttpError::of_http(StatusCode::METHOD_NOT_ALLOWED, "use POST");
        assert_eq!(method.object()["param"], Value::Null);
        assert_eq!(method.object()["type"], "invalid_request_error");
    }
}
