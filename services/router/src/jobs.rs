//! Requests that run or have lately ended, for Get and Cancel. Bounded: running ones by admission,
//! ended ones by [`base::limits::MAX_REMEMBERED_REQUESTS`].
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use base::{Code, Fault as _, limits::MAX_REMEMBERED_REQUESTS};
use proto::v1::{Accepted, GetResponse, get_response::State};
use tokio_util::sync::CancellationToken;

use crate::RouterError;

#[derive(Debug)]
struct Job {
    answer: GetResponse,
    cancel: CancellationToken,
    running: bool,
    /// Tells this job from an earlier one of the same id.
    serial: u64,
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
        let job = Job {
            answer,
            cancel: cancel.clone(),
            running: true,
            serial,
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
