//! Requests that run or have lately ended, for Get, Cancel and operators. Bounded: running ones by admission,
//! ended ones by [`base::limits::MAX_REMEMBERED_REQUESTS`].
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base::{
    Code, Fault as _,
    clock::{self, Clock as _},
    limits::MAX_REMEMBERED_REQUESTS,
};
use proto::v1::{Accepted, GetResponse, RequestRecord, get_response::State};
use tokio_util::sync::CancellationToken;

use crate::{RouterError, notes::Notes};

#[derive(Debug)]
struct Job {
    answer: GetResponse,
    cancel: CancellationToken,
    running: bool,
    /// Tells this job from an earlier one of the same id.
    serial: u64,
    /// Everything that [`GetResponse`] does not have.
    record: RequestRecord,
    since: Instant,
    /// How long it took, once it has ended.
    took: Option<Duration>,
    /// PNG of the latest preview, while it runs.
    preview: Vec<u8>,
}

impl Job {
    fn record(&self, full: bool) -> RequestRecord {
        let now = || clock::now().saturating_duration_since(self.since);
        let age = self.took.unwrap_or_else(now);
        let GetResponse {
            state,
            accepted,
            step,
            error,
            code,
        } = self.answer.clone();
        let mut record = RequestRecord {
            request_id: accepted
                .as_ref()
                .map_or_else(String::new, |a| a.request_id.clone()),
            state,
            accepted,
            step,
            error,
            code,
            age_ms: age.as_secs_f64() * 1e3,
            has_preview: !self.preview.is_empty(),
            ..self.record.clone()
        };
        if !full {
            record.placements.clear();
            record.spans.clear();
        }
        record
    }
}

#[derive(Debug, Default)]
struct Table {
    jobs: HashMap<String, Job>,
    /// Ended jobs, oldest first.
    ended: VecDeque<(String, u64)>,
    next: u64,
}

/// The table. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Jobs(Arc<Mutex<Table>>);

/// The running request's own hold on its record. Dropped without an end, the request counts as
/// cancelled.
#[derive(Debug)]
pub(crate) struct JobHandle {
    jobs: Jobs,
    id: String,
    serial: u64,
    cancel: CancellationToken,
    ended: bool,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a request that starts now.
    pub(crate) fn begin(&self, accepted: Accepted) -> Result<JobHandle, RouterError> {
        let id = accepted.request_id.clone();
        let mut table = self.lock();
        if table.jobs.get(&id).is_some_and(|job| job.running) {
            return Err(RouterError::Duplicate(id));
        }
        let serial = table.next;
        table.next += 1;
        let cancel = CancellationToken::new();
        let mut answer = GetResponse {
            accepted: Some(accepted),
            ..GetResponse::default()
        };
        answer.set_state(State::Queued);
        let since = clock::now();
        let record = RequestRecord {
            accepted_unix_ms: clock::SystemClock.unix_millis(),
            ..RequestRecord::default()
        };
        let job = Job {
            answer,
            cancel: cancel.clone(),
            running: true,
            serial,
            record,
            since,
            took: None,
            preview: vec![],
        };
        table.jobs.insert(id.clone(), job);
        Ok(JobHandle {
            jobs: self.clone(),
            id,
            serial,
            cancel,
            ended: false,
        })
    }

    /// Where a request stands.
    pub(crate) fn get(&self, id: &str) -> Result<GetResponse, RouterError> {
        let table = self.lock();
        let job = table
            .jobs
            .get(id)
            .ok_or_else(|| RouterError::NoRequest(id.to_owned()))?;
        Ok(job.answer.clone())
    }

    /// What is known of one request.
    pub(crate) fn record(&self, id: &str, full: bool) -> Result<RequestRecord, RouterError> {
        let table = self.lock();
        let job = table.jobs.get(id);
        job.map(|job| job.record(full))
            .ok_or_else(|| RouterError::NoRequest(id.to_owned()))
    }

    /// Running requests, the oldest first, then those that have ended, the latest first; `limit` in all.
    pub(crate) fn records(&self, limit: usize, full: bool) -> Vec<RequestRecord> {
        let table = self.lock();
        let mut running: Vec<_> = table.jobs.values().filter(|job| job.running).collect();
        running.sort_by_key(|job| job.serial);
        let ended = table.ended.iter().rev().filter_map(|(id, serial)| {
            let job = table.jobs.get(id)?;
            (job.serial == *serial && !job.running).then_some(job)
        });
        let all = running.into_iter().chain(ended).take(limit);
        all.map(|job| job.record(full)).collect()
    }

    /// PNG of the latest preview of a request that runs; empty: there is none.
    pub(crate) fn preview(&self, id: &str) -> Vec<u8> {
        let table = self.lock();
        let job = table.jobs.get(id);
        job.map_or_else(Vec::new, |job| job.preview.clone())
    }

    /// Changes the record of a request, unless another one has its id by now.
    pub(crate) fn note(&self, id: &str, serial: u64, change: impl FnOnce(&mut RequestRecord)) {
        let mut table = self.lock();
        let job = table.jobs.get_mut(id);
        if let Some(job) = job.filter(|job| job.serial == serial) {
            change(&mut job.record);
        }
    }

    /// Keeps the latest preview of a request.
    pub(crate) fn previewed(&self, id: &str, serial: u64, png: Vec<u8>) {
        let mut table = self.lock();
        let job = table.jobs.get_mut(id);
        if let Some(job) = job.filter(|job| job.serial == serial && job.running) {
            job.preview = png;
        }
    }

    /// Whose request it is.
    pub(crate) fn tenant(&self, id: &str) -> Result<String, RouterError> {
        let table = self.lock();
        let job = table.jobs.get(id);
        job.map(|job| job.record.tenant.clone())
            .ok_or_else(|| RouterError::NoRequest(id.to_owned()))
    }

    /// Asks a request to stop. False: it had ended.
    pub(crate) fn cancel(&self, id: &str) -> Result<bool, RouterError> {
        let table = self.lock();
        let job = table
            .jobs
            .get(id)
            .ok_or_else(|| RouterError::NoRequest(id.to_owned()))?;
        job.cancel.cancel();
        Ok(job.running)
    }
}

impl JobHandle {
    /// Cancelled when Cancel was called.
    pub(crate) fn cancelled(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Where the walk of the request writes down what becomes of it.
    pub(crate) fn notes(&self, since: Instant) -> Notes {
        if let Some(job) = self.jobs.lock().jobs.get_mut(&self.id) {
            job.since = since;
        }
        Notes::new(self.jobs.clone(), (self.id.clone(), self.serial), since)
    }

    /// Says whose request it is.
    pub(crate) fn set_tenant(&self, tenant: &str) {
        if let Some(job) = self.jobs.lock().jobs.get_mut(&self.id) {
            tenant.clone_into(&mut job.record.tenant);
        }
    }

    pub(crate) fn set_state(&self, state: State) {
        self.update(|answer| answer.set_state(state));
    }

    pub(crate) fn set_step(&self, step: u32) {
        self.update(|answer| answer.step = step);
    }

    /// Records the end.
    pub(crate) fn end(mut self, error: Option<&RouterError>) {
        self.finish(error);
    }

    fn finish(&mut self, error: Option<&RouterError>) {
        self.ended = true;
        self.update(|answer| match error {
            None => answer.set_state(State::Done),
            Some(error) if error.code() == Code::Cancelled => answer.set_state(State::Cancelled),
            Some(error) => {
                answer.set_state(State::Failed);
                answer.error = error.to_string();
                answer.code = error.code().number();
            }
        });
        let mut table = self.jobs.lock();
        if let Some(job) = table.jobs.get_mut(&self.id) {
            job.running = false;
            job.took = Some(clock::now().saturating_duration_since(job.since));
            job.preview = vec![];
            let word = error.map_or("the request ended", |error| error.code().name());
            for placement in &mut job.record.placements {
                if placement.outcome.is_empty() {
                    word.clone_into(&mut placement.outcome);
                }
            }
        }
        table.ended.push_back((self.id.clone(), self.serial));
        while table.ended.len() > MAX_REMEMBERED_REQUESTS {
            let Some((id, serial)) = table.ended.pop_front() else {
                break;
            };
            if table.jobs.get(&id).is_some_and(|job| job.serial == serial) {
                table.jobs.remove(&id);
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut GetResponse)) {
        if let Some(job) = self.jobs.lock().jobs.get_mut(&self.id) {
            change(&mut job.answer);
        }
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(Some(&RouterError::Cancelled));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(id: &str) -> Accepted {
        Accepted {
            request_id: id.into(),
            ..Accepted::default()
        }
    }

    #[test]
    fn an_id_is_taken_while_its_request_runs_and_free_afterwards() {
        let jobs = Jobs::default();
        let job = jobs.begin(accepted("a")).unwrap();
        let error = jobs.begin(accepted("a")).unwrap_err();
        assert_eq!(
            (error.code(), error.field()),
            (Code::AlreadyExists, Some("request_id"))
        );
        job.set_state(State::Denoise);
        job.set_step(3);
        assert_eq!(
            (jobs.get("a").unwrap().state(), jobs.get("a").unwrap().step),
            (State::Denoise, 3)
        );
        job.end(None);
        assert_eq!(jobs.get("a").unwrap().state(), State::Done);
        assert!(!jobs.cancel("a").unwrap());
        assert!(jobs.begin(accepted("a")).is_ok());
    }

    #[test]
    fn an_end_keeps_its_reason() {
        let jobs = Jobs::default();
        jobs.begin(accepted("a"))
            .unwrap()
            .end(Some(&RouterError::ShuttingDown));
        let answer = jobs.get("a").unwrap();
        assert_eq!(answer.state(), State::Failed);
        assert_eq!(answer.code, Code::Unavailable.number());
        assert!(answer.error.contains("shutting down"));
        drop(jobs.begin(accepted("b")).unwrap());
        assert_eq!(jobs.get("b").unwrap().state(), State::Cancelled);
        assert_eq!(jobs.get("c").unwrap_err().code(), Code::NotFound);
    }

    #[test]
    fn records_come_running_first_then_the_latest_that_ended() {
        let jobs = Jobs::default();
        let first = jobs.begin(accepted("first")).unwrap();
        for id in ["a", "b"] {
            jobs.begin(accepted(id)).unwrap().end(None);
        }
        let second = jobs.begin(accepted("second")).unwrap();
        let ids = |limit| -> Vec<String> {
            let records = jobs.records(limit, false);
            records
                .into_iter()
                .map(|record| record.request_id)
                .collect()
        };
        assert_eq!(ids(9), ["first", "second", "b", "a"]);
        assert_eq!(ids(3), ["first", "second", "b"]);
        assert_eq!(jobs.record("z", true).unwrap_err().code(), Code::NotFound);
        drop((first, second));
    }

    #[test]
    fn cancel_reaches_the_running_request() {
        let jobs = Jobs::default();
        let job = jobs.begin(accepted("a")).unwrap();
        assert!(jobs.cancel("a").unwrap());
        assert!(job.cancelled().is_cancelled());
    }

    #[test]
    fn only_so_many_ended_requests_are_remembered() {
        let jobs = Jobs::default();
        let running = jobs.begin(accepted("running")).unwrap();
        for index in 0..MAX_REMEMBERED_REQUESTS + 10 {
            jobs.begin(accepted(&format!("r{index}")))
                .unwrap()
                .end(None);
        }
        assert!(jobs.get("r9").is_err());
        assert!(jobs.get("r10").is_ok());
        assert!(jobs.get("running").is_ok());
        assert_eq!(jobs.lock().jobs.len(), MAX_REMEMBERED_REQUESTS + 1);
        drop(running);
    }
}
