//! What became of one request, written down while it walks, for `omnictl explain` and `omnictl trace`.
//! Nothing here decides anything. Of a request so many spans are kept; more only set a mark.
use std::time::{Duration, Instant};

use base::{clock, limits::MAX_NOTED_SPANS};
use proto::v1::{
    DenoiseDone, DenoiseStarted, Placement, PrefillDone, RequestRecord, Span, Timings,
};

use crate::{RouterError, jobs::Jobs, validate::ValidRequest};

/// Placements that are kept of one request.
const MAX_PLACEMENTS: usize = MAX_NOTED_SPANS / 4;
/// Outcome of a placement whose phase came to its end.
const DONE: &str = "done";

/// The hand of one request's walk on its record.
#[derive(Debug, Clone)]
pub(crate) struct Notes {
    jobs: Jobs,
    id: String,
    serial: u64,
    since: Instant,
}

/// A stretch of time: since when, and how long.
type Stretch = (Instant, Duration);

impl Notes {
    pub(crate) fn new(jobs: Jobs, (id, serial): (String, u64), since: Instant) -> Self {
        Self {
            jobs,
            id,
            serial,
            since,
        }
    }

    fn note(&self, change: impl FnOnce(&mut RequestRecord)) {
        self.jobs.note(&self.id, self.serial, change);
    }

    /// What the request asks for that [`proto::v1::Accepted`] does not have.
    pub(crate) fn begun(&self, request: &ValidRequest) {
        let chars = u32::try_from(request.prompt.chars().count()).unwrap_or(u32::MAX);
        self.note(|record| {
            record.prompt_chars = chars;
            record.set_priority(request.priority);
        });
    }

    /// It had its turn after so many milliseconds.
    pub(crate) fn queued(&self, ms: f64) {
        let waited = millis(ms);
        let from = clock::now().checked_sub(waited).unwrap_or(self.since);
        self.note(|record| {
            self.span(record, 0, ("queue", "", ""), (from, waited));
        });
    }

    /// Passes on what fetching its pictures answers.
    pub(crate) async fn fetching<T>(&self, fetch: impl Future<Output = T>) -> T {
        let from = clock::now();
        let fetched = fetch.await;
        let took = clock::now().saturating_duration_since(from);
        // Files that came with the request take no time.
        if took >= Duration::from_millis(1) {
            self.note(|record| {
                self.span(record, 0, ("fetch pictures", "", ""), (from, took));
            });
        }
        fetched
    }

    /// A phase was given to a member.
    pub(crate) fn placed(&self, placement: Placement) {
        let at_ms = self.ms(clock::now());
        self.note(|record| {
            if record.placements.len() < MAX_PLACEMENTS {
                record.placements.push(Placement { at_ms, ..placement });
            } else {
                record.cut = true;
            }
        });
    }

    /// The prefixes are published.
    pub(crate) fn prefilled(&self, from: Instant, member: &str, done: &PrefillDone) {
        let now = clock::now();
        let identities = done.rows.iter().filter_map(|row| row.prefix.as_ref());
        let identities = identities.map(|prefix| hex(&prefix.identity)).collect();
        let (compute, publish) = (millis(done.prefill_ms), millis(done.publish_ms));
        let published = now.checked_sub(publish).unwrap_or(from);
        let computed = published.checked_sub(compute).unwrap_or(from);
        let detail = format!(
            "{} tokens of prompt, {} written",
            done.prompt_tokens, done.new_tokens
        );
        self.note(|record| {
            record.prefixes = identities;
            settle(record, ("ar-stage", 0), DONE);
            let phase = self.span(record, 0, ("prefill", member, &detail), between(from, now));
            self.span(record, phase, ("compute", member, ""), (computed, compute));
            self.span(record, phase, ("publish", member, ""), (published, publish));
        });
    }

    /// One image is out.
    pub(crate) fn denoised(
        &self,
        from: Instant,
        (image, member): (u32, &str),
        (started, started_at, done): (&DenoiseStarted, Option<Instant>, &DenoiseDone),
    ) {
        let now = clock::now();
        let fetch = millis(started.transfer_ms);
        let fetched = started_at.unwrap_or(from);
        let fetching = fetched.checked_sub(fetch).unwrap_or(from).max(from);
        let decode = millis(done.decode_ms);
        let decoding = now.checked_sub(decode).unwrap_or(fetched);
        let carried = format!(
            "{} bytes over {}",
            started.transfer_bytes, started.transport
        );
        let name = format!("image {image}");
        self.note(|record| {
            settle(record, ("dit-worker", image), DONE);
            let phase = self.span(record, 0, (&name, member, ""), between(from, now));
            let wait = between(from, fetching);
            self.span(record, phase, ("wait", member, ""), wait);
            self.span(
                record,
                phase,
                ("transfer", member, &carried),
                (fetching, fetch),
            );
            let steps = (fetched, millis(done.denoise_ms));
            self.span(record, phase, ("steps", member, ""), steps);
            self.span(record, phase, ("decode", member, ""), (decoding, decode));
        });
    }

    /// A member did not bring its phase to the end.
    pub(crate) fn lost(
        &self,
        from: Instant,
        (stage, image): (&str, u32),
        (member, error): (&str, &RouterError),
    ) {
        let outcome = format!("lost: {error}");
        let name = match stage {
            "ar-stage" => "prefill".to_owned(),
            _ => format!("image {image}"),
        };
        self.note(|record| {
            settle(record, (stage, image), &outcome);
            let took = between(from, clock::now());
            self.span(record, 0, (&name, member, &outcome), took);
        });
    }

    /// A preview has passed.
    pub(crate) fn previewed(&self, png: &[u8]) {
        self.jobs.previewed(&self.id, self.serial, png.to_vec());
    }

    /// The request has run to its end.
    pub(crate) fn done(&self, timings: &Timings, (prefix, image): (u32, u64)) {
        self.note(|record| {
            record.timings = Some(timings.clone());
            (record.prefix_tokens, record.image_tokens) = (prefix, image);
        });
    }

    fn ms(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.since).as_secs_f64() * 1e3
    }

    /// Adds a span; answers its number, 0 when there is no room.
    fn span(
        &self,
        record: &mut RequestRecord,
        parent: u32,
        (name, member, detail): (&str, &str, &str),
        (start, length): Stretch,
    ) -> u32 {
        if record.spans.len() >= MAX_NOTED_SPANS {
            record.cut = true;
            return 0;
        }
        let id = u32::try_from(record.spans.len() + 1).unwrap_or(0);
        record.spans.push(Span {
            id,
            parent,
            name: name.to_owned(),
            start_ms: self.ms(start),
            duration_ms: length.as_secs_f64() * 1e3,
            member: member.to_owned(),
            detail: detail.to_owned(),
        });
        id
    }
}

/// Says how the latest placement of a phase came out.
fn settle(record: &mut RequestRecord, (stage, image): (&str, u32), outcome: &str) {
    let of_phase = |placement: &&mut Placement| {
        placement.stage == stage && placement.image == image && placement.outcome.is_empty()
    };
    if let Some(placement) = record.placements.iter_mut().rev().find(of_phase) {
        outcome.clone_into(&mut placement.outcome);
    }
}

fn between(from: Instant, to: Instant) -> Stretch {
    (from, to.saturating_duration_since(from))
}

/// A stage's word for a length of time, which may be anything.
fn millis(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use proto::v1::Accepted;

    use super::*;

    fn begun(jobs: &Jobs) -> (crate::jobs::JobHandle, Notes) {
        let accepted = Accepted {
            request_id: "a".to_owned(),
            ..Accepted::default()
        };
        let job = jobs.begin(accepted).unwrap();
        let notes = job.notes(clock::now());
        (job, notes)
    }

    #[test]
    fn spans_of_a_phase_hang_below_it_and_a_lost_member_stays_visible() {
        let jobs = Jobs::default();
        let (job, notes) = begun(&jobs);
        let place = |stage: &str, member: &str| {
            notes.placed(Placement {
                stage: stage.to_owned(),
                member: member.to_owned(),
                ..Placement::default()
            });
        };
        notes.queued(5.0);
        place("ar-stage", "r1");
        let done = PrefillDone {
            prefill_ms: 3.0,
            publish_ms: 1.0,
            ..PrefillDone::default()
        };
        notes.prefilled(clock::now(), "r1", &done);
        place("dit-worker", "d1");
        notes.lost(
            clock::now(),
            ("dit-worker", 0),
            ("d1", &RouterError::ShuttingDown),
        );
        place("dit-worker", "d2");
        let told = (&DenoiseStarted::default(), None, &DenoiseDone::default());
        notes.denoised(clock::now(), (0, "d2"), told);
        job.end(None);
        let record = jobs.record("a", true).unwrap();
        let outcomes: Vec<_> = record
            .placements
            .iter()
            .map(|p| p.outcome.as_str())
            .collect();
        assert_eq!((outcomes[0], outcomes[2]), ("done", "done"));
        assert!(outcomes[1].starts_with("lost: "), "{outcomes:?}");
        let tree: Vec<_> = record
            .spans
            .iter()
            .map(|s| (s.name.as_str(), s.parent))
            .collect();
        assert_eq!(
            tree[..4],
            [("queue", 0), ("prefill", 0), ("compute", 2), ("publish", 2)]
        );
        assert_eq!(tree[4..6], [("image 0", 0), ("image 0", 0)]);
        assert_eq!(
            tree[6..],
            [("wait", 6), ("transfer", 6), ("steps", 6), ("decode", 6)]
        );
        assert_eq!(jobs.record("a", false).unwrap().spans.len(), 0);
    }

    #[test]
    fn what_is_kept_of_one_request_is_bounded_and_the_cut_is_told() {
        let jobs = Jobs::default();
        let (job, notes) = begun(&jobs);
        for _ in 0..2 * MAX_NOTED_SPANS {
            notes.queued(1.0);
            notes.placed(Placement::default());
        }
        let record = jobs.record("a", true).unwrap();
        assert_eq!(record.spans.len(), MAX_NOTED_SPANS);
        assert_eq!(record.placements.len(), MAX_PLACEMENTS);
        assert!(record.cut);
        drop(job);
        // What was still under way when it ended is told as such.
        let record = jobs.record("a", true).unwrap();
        assert!(record.placements.iter().all(|p| p.outcome == "CANCELLED"));
    }
}
