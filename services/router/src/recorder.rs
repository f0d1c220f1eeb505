//! A JSON line for each request that ends: all that it takes to make the same picture again but its words,
//! which are the client's. A thread writes; requests never wait for it.
use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use base::{
    Failure, Fault as _,
    clock::{self, Clock as _},
};
use proto::v1::{Placement, RequestRecord};
use serde_json::{Value, json};

use crate::{RouterError, dispatch::Walk};

/// Lines that wait to be written; more are dropped, and counted in the log.
const QUEUE: usize = 1_024;

/// Writes requests down. Clones share the file.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    lines: SyncSender<String>,
    dropped: Arc<AtomicU64>,
}

impl Recorder {
    /// Opens a file to add to.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let bad = |error: std::io::Error| {
            let reason = format!("record_file {}: {error}", path.display());
            Failure::invalid("record_file", reason)
        };
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(bad)?;
        let (lines, waiting) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new().name("recorder".to_owned());
        thread.spawn(move || write(file, &waiting)).map_err(bad)?;
        Ok(Self {
            lines,
            dropped: Arc::default(),
        })
    }

    /// Writes down how a request ended.
    pub(crate) fn record(&self, walk: &Walk, error: Option<&RouterError>) {
        let line = line(walk, error);
        if self.lines.try_send(format!("{line}\n")).is_err() {
            let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(dropped, "the record of a request could not be written");
        }
    }
}

/// Until the last hand on the recorder is gone.
fn write(mut file: File, waiting: &Receiver<String>) {
    while let Ok(line) = waiting.recv() {
        if let Err(error) = file.write_all(line.as_bytes()) {
            tracing::warn!(%error, "the record of a request could not be written");
        }
    }
}

fn line(walk: &Walk, error: Option<&RouterError>) -> Value {
    let request = &walk.request;
    let id = request.request_id.to_string();
    let record = walk.context.jobs.record(&id, true).unwrap_or_default();
    let code = error.map_or("OK", |error| error.code().name());
    let took = clock::millis_since(walk.accepted_at);
    let sampling = &request.sampling;
    json!({
        "ended_unix_ms": clock::SystemClock.unix_millis(),
        "ms": took,
        "code": code,
        "error_field": error.and_then(|error| error.field()),
        "request_id": id,
        "trace_id": telemetry::trace::current_id(),
        "tenant": walk.tenant,
        "model": request.model,
        "weights_id": request.weights_id,
        "mode": request.mode.as_str_name(),
        "priority": request.priority.as_str_name(),
        "size": request.size.to_string(),
        "steps": request.steps,
        "seed": request.seed,
        "prefix_seed": request.prefix_seed(),
        "guidance": request.guidance,
        "n": request.n,
        "template": request.template,
        "system_prompt_name": request.system_prompt_name,
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": sampling.max_new_tokens,
        },
        "drop_think": request.drop_think,
        "align_image_size": request.align_image_size,
        "pictures": request.images.len(),
        "prompt_chars": record.prompt_chars,
        "prefixes": record.prefixes,
        "prefix_tokens": record.prefix_tokens,
        "image_tokens": record.image_tokens,
        "members": members(walk, &record),
    })
}

/// Who took part, with what decides the last bits of what it computes.
fn members(walk: &Walk, record: &RequestRecord) -> Vec<Value> {
    let snapshot = walk.context.members.snapshots.current();
    let member = |placement: &Placement| {
        let known = snapshot.members.get(&placement.member);
        let model = known.and_then(|member| member.model.as_ref());
        json!({
            "role": placement.stage,
            "image": placement.image,
            "member": placement.member,
            "outcome": placement.outcome,
            "plan": model.map(|model| &model.plan),
            "kernels": model.map(|model| &model.kernels),
        })
    };
    record.placements.iter().map(member).collect()
}
