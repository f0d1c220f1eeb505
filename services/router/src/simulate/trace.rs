//! Traces: one request a line, as JSON.
use std::{fmt::Write as _, time::Duration};

use base::limits::{MAX_GUIDANCE, MAX_IMAGES, MAX_REQUEST_DEADLINE, MAX_STEPS};
use proto::size::Size;
use serde::{Deserialize, Serialize};

use crate::{RouterError, batching::Class};

/// Most requests of a trace.
const MAX_REQUESTS: usize = 1_000_000;
/// Longest trace, in seconds.
const MAX_SECONDS: f64 = 1e7;
/// Largest side of a picture, in pixels.
const MAX_SIDE: u32 = 4096;
/// Most prompt tokens of a row.
const MAX_PROMPT_TOKENS: u32 = 1 << 16;

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// When it comes, in seconds since the start of the trace; never before the line above.
    pub at_s: f64,
    /// WIDTHxHEIGHT in pixels.
    pub size: String,
    /// Denoising steps.
    pub steps: u32,
    /// Guidance scale; above 1 an image has two rows.
    pub guidance: f64,
    /// It edits a picture of the same size, whose tokens are part of its prefix.
    pub edit: bool,
    /// Its class.
    pub class: Class,
    /// Seconds after which it is of no use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<f64>,
    /// Images.
    pub n: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
}

/// Requests in the order in which they come.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    /// The lines.
    pub requests: Vec<Request>,
}

impl Trace {
    /// Reads JSON lines; empty lines are skipped.
    ///
    /// # Errors
    /// [`RouterError::Invalid`] names the line and the field.
    pub fn parse(text: &str) -> Result<Self, RouterError> {
        let mut requests: Vec<Request> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let at_line = |reason: String| format!("{reason} (line {})", index + 1);
            let request: Request = serde_json::from_str(line)
                .map_err(|error| RouterError::invalid("trace", at_line(error.to_string())))?;
            let before = requests.last().map_or(0.0, |last| last.at_s);
            request.check(before).map_err(|error| match error {
                RouterError::Invalid { field, reason } => {
                    RouterError::invalid(field, at_line(reason))
                }
                other => other,
            })?;
            if requests.len() == MAX_REQUESTS {
                let reason = format!("must have at most {MAX_REQUESTS} requests");
                return Err(RouterError::invalid("trace", reason));
            }
            requests.push(request);
        }
        if requests.is_empty() {
            return Err(RouterError::invalid("trace", "must have requests"));
        }
        Ok(Self { requests })
    }

    /// The trace as JSON lines.
    ///
    /// # Errors
    /// [`RouterError::Invalid`]: a number that JSON cannot express.
    pub fn to_lines(&self) -> Result<String, RouterError> {
        let mut text = String::new();
        for request in &self.requests {
            let line = serde_json::to_string(request)
                .map_err(|error| RouterError::invalid("trace", error.to_string()))?;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{line}");
        }
        Ok(text)
    }

    /// The same requests, `factor` times as far apart.
    #[must_use]
    pub fn stretched(mut self, factor: f64) -> Self {
        for request in &mut self.requests {
            request.at_s *= factor;
        }
        self
    }

    /// When the last request comes.
    pub fn seconds(&self) -> f64 {
        self.requests.last().map_or(0.0, |last| last.at_s)
    }
}

impl Request {
    /// Everything is within bounds, and not before `before` seconds.
    fn check(&self, before: f64) -> Result<(), RouterError> {
        let invalid = |field, reason: String| Err(RouterError::invalid(field, reason));
        if !(before..=MAX_SECONDS).contains(&self.at_s) {
            let reason = format!(
                "must be {before} to {MAX_SECONDS}, in order, got {}",
                self.at_s
            );
            return invalid("at_s", reason);
        }
        if !(1..=MAX_STEPS).contains(&self.steps) {
            return invalid(
                "steps",
                format!("must be 1 to {MAX_STEPS}, got {}", self.steps),
            );
        }
        if !(0.0..=MAX_GUIDANCE).contains(&self.guidance) {
            let reason = format!("must be 0 to {MAX_GUIDANCE}, got {}", self.guidance);
            return invalid("guidance", reason);
        }
        if !(1..=MAX_IMAGES).contains(&self.n) {
            return invalid("n", format!("must be 1 to {MAX_IMAGES}, got {}", self.n));
        }
        if self.prompt_tokens > MAX_PROMPT_TOKENS {
            let reason = format!(
                "must be at most {MAX_PROMPT_TOKENS}, got {}",
                self.prompt_tokens
            );
            return invalid("prompt_tokens", reason);
        }
        let most = MAX_REQUEST_DEADLINE.as_secs_f64();
        let in_time = |seconds: f64| seconds > 0.0 && seconds <= most;
        if self.deadline_s.is_some_and(|seconds| !in_time(seconds)) {
            return invalid("deadline_s", format!("must be above 0 and at most {most}"));
        }
        self.pixels().map(drop)
    }

    fn pixels(&self) -> Result<(u32, u32), RouterError> {
        let size: Size = self
            .size
            .parse()
            .map_err(|error| RouterError::invalid("size", format!("{error}")))?;
        let legal = |side: u32| (1..=MAX_SIDE).contains(&side);
        if !legal(size.width) || !legal(size.height) {
            let reason = format!("must have sides of 1 to {MAX_SIDE} pixels, got {size}");
            return Err(RouterError::invalid("size", reason));
        }
        Ok((size.width, size.height))
    }

    /// Image tokens, of `pixels_per_token` pixels along each side.
    ///
    /// # Errors
    /// [`RouterError::Invalid`]: a size that this does not divide.
    pub(super) fn image_tokens(&self, pixels_per_token: u32) -> Result<u32, RouterError> {
        let (width, height) = self.pixels()?;
        if width % pixels_per_token != 0 || height % pixels_per_token != 0 {
            let reason = format!("{} is no multiple of {pixels_per_token} pixels", self.size);
            return Err(RouterError::invalid("size", reason));
        }
        Ok(width / pixels_per_token * (height / pixels_per_token))
    }

    /// Rows of an image.
    pub(super) fn rows(&self) -> u32 {
        if self.guidance > 1.0 { 2 } else { 1 }
    }

    /// When it comes.
    pub(super) fn at(&self) -> Duration {
        seconds(self.at_s)
    }
}

/// Seconds within the bounds of this module as a duration.
pub(super) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}
