//! A worker that dies, or stops before its request is done, costs time and nothing else: another one goes on
//! from the last checkpoint, and the image is the same to the last byte.
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::v1::{GenerateRequest, Role, generate_response::Event};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{
    Up, bounded, command, first_step, generate, joined, lines_of, model_dir, request, wait,
};

/// Long enough for a process to end in the middle.
const STEPS: i32 = 24;
/// How long a process may take to start or to end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A second worker beside that of `up`.
pub(crate) struct Extra {
    pub(crate) process: Child,
    pub(crate) id: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Extra {
    /// `grace`: seconds that its requests may take once it is to stop.
    pub(crate) async fn start(up: &Up, grace: &str) -> Self {
        let members = up.members().await;
        let pool = members
            .iter()
            .find(|m| m.role() == Role::KvTransfer)
            .unwrap();
        let known: Vec<&str> = members.iter().map(|member| member.id.as_str()).collect();
        let model = model_dir();
        let mut process = command(&[
            "dit-worker",
            "--model",
            model.to_str().unwrap(),
            "--listen",
            "127.0.0.1:0",
            "--registry",
            up.endpoint(),
            "--kv-transfer",
            &pool.endpoint,
            "--transport",
            "shm",
            "--drain-grace-s",
            grace,
            "--threads",
            "1",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        let log = lines_of(process.stderr.take());
        let ready = async {
            loop {
                let now = up.members().await;
                let new = now.iter().find(|m| !known.contains(&m.id.as_str()));
                let is_ready = |m: &&proto::v1::Member| m.state() == proto::v1::MemberState::Ready;
                if let Some(new) = new.filter(is_ready) {
                    return new.id.clone();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let id = tokio::time::timeout(PATIENCE, ready).await.unwrap();
        Self { process, id, log }
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        joined(&self.log)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Extra {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends requests until one runs on the extra worker, ends that with `signal`, and answers the image.
async fn interrupted(up: &Up, wish: &GenerateRequest, signal: Signal) -> Vec<u8> {
    let mut extra = Extra::start(up, "1").await;
    let mut client = up.client();
    // The worker of `up` is the busier one from here on.
    let busy = GenerateRequest {
        steps: Some(200),
        ..request("keeps the other one busy")
    };
    let mut others = Vec::new();
    let mut stream = loop {
        let mut other = bounded(client.generate(busy.clone()))
            .await
            .unwrap()
            .into_inner();
        first_step(&mut other).await;
        others.push(other);
        let mut stream = bounded(client.generate(wish.clone()))
            .await
            .unwrap()
            .into_inner();
        first_step(&mut stream).await;
        let members = up.members().await;
        let load = |id: &str| {
            let member = members.iter().find(|m| m.id == id);
            member
                .and_then(|m| m.load)
                .map_or(0, |l| l.running + l.queued)
        };
        if load(&extra.id) > 0 {
            break stream;
        }
        assert!(others.len() < 6, "the extra worker never gets a request");
        others.push(stream);
    };
    drop(others);
    let mut steps = 0;
    while steps < 6 {
        let message = bounded(stream.message()).await.unwrap().unwrap();
        if let Some(Event::Step(step)) = message.event {
            steps = step.step;
        }
    }
    extra.signal(signal);
    let mut worker = String::new();
    let mut png = Vec::new();
    while let Some(message) = bounded(stream.message()).await.unwrap() {
        match message.event {
            Some(Event::Step(step)) => {
                assert!(step.step > steps, "step {} is told twice", step.step);
                steps = step.step;
            }
            Some(Event::Image(image)) => (png, worker) = (image.png, image.worker),
            _ => {}
        }
    }
    assert!(
        wait(&mut extra.process, PATIENCE).is_some(),
        "it does not end"
    );
    assert_ne!(
        worker, extra.id,
        "the image came before the end of its worker"
    );
    png
}

#[tokio::test]
async fn a_worker_that_dies_or_stops_is_followed_by_another_and_the_image_is_the_same() {
    let up = Up::start("shm");
    let wish = GenerateRequest {
        steps: Some(STEPS),
        seed: Some(11),
        ..request("a boat that changes hands")
    };
    let undisturbed = generate(&up, wish.clone()).await.unwrap().image.png;
    for signal in [Signal::KILL, Signal::TERM] {
        let png = Box::pin(interrupted(&up, &wish, signal)).await;
        assert!(png == undisturbed, "{signal:?}: the image is another one");
    }
}
