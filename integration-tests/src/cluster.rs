//! Starts and stops `omni up` on the fixture model, and talks to it. For tests alone: what goes wrong
//! here ends the test.
#![allow(clippy::unwrap_used)]

use std::{
    future::Future,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio},
    sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use proto::v1::{
    self, GenerateRequest, GenerateResponse, generate_response::Event,
    image_service_client::ImageServiceClient,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tonic::transport::Channel;

/// How long a system may take to start, and a single request to end.
const START: Duration = Duration::from_secs(120);
const REQUEST: Duration = Duration::from_secs(240);
/// How long a system may take to stop.
const STOP: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// The checkpoint that every test serves.
pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden/model")
}

/// The server binary of the workspace, built on first use; `OMNI_BIN` names another one.
pub fn omni() -> &'static Path {
    static BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(path) = std::env::var_os("OMNI_BIN") {
            return path.into();
        }
        let metadata = cargo_metadata::MetadataCommand::new()
            .no_deps()
            .exec()
            .unwrap();
        let release = !cfg!(debug_assertions);
        let cuda = cfg!(feature = "cuda");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "omni", "--bin", "omni"]);
        build.current_dir(&metadata.workspace_root);
        if release {
            build.arg("--release");
        }
        if cuda {
            build.args(["--features", "cuda"]);
        }
        assert!(build.status().unwrap().success(), "omni does not build");
        let profile = if release { "release" } else { "debug" };
        metadata.target_directory.join(profile).join("omni").into()
    });
    &BINARY
}

/// `omni` with its environment cut off from the caller's settings.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(omni());
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OMNI_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command that ends by itself.
pub fn output(arguments: &[&str]) -> Output {
    let mut child = command(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let drained = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait(&mut child, START).expect("the command does not end");
    Output {
        status,
        stdout: drained.0.join().unwrap(),
        stderr: drained.1.join().unwrap(),
    }
}

/// Collects the lines of a pipe while it is open.
pub fn lines_of<R: std::io::Read + Send + 'static>(from: Option<R>) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let from = BufReader::new(from.unwrap());
    std::thread::spawn(move || {
        for line in from.lines().map_while(Result::ok) {
            sink.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    });
    lines
}

/// The lines so far.
pub fn joined(lines: &Mutex<Vec<String>>) -> String {
    let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
    lines.join("\n")
}

fn drain<R: std::io::Read + Send + 'static>(from: Option<R>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// A running system.
#[derive(Debug)]
pub struct Up {
    process: Child,
    /// The system ends when this closes: it never outlives the test.
    _stdin: ChildStdin,
    log: Arc<Mutex<Vec<String>>>,
    endpoint: String,
    http: String,
    _dir: tempfile::TempDir,
}

impl Up {
    /// Starts all roles and waits until they serve.
    pub fn start(transport: &str) -> Self {
        Self::start_with(transport, &[])
    }

    /// Likewise, with more arguments.
    pub fn start_with(transport: &str, arguments: &[&str]) -> Self {
        Self::start_on(&model_dir(), transport, arguments)
    }

    /// Likewise, on another checkpoint.
    pub fn start_on(model: &Path, transport: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ready = dir.path().join("ready");
        let shape: &[&str] = match arguments.contains(&"--log-format") {
            true => &[],
            false => &["--log-format", "text"],
        };
        let mut process = command(&["up", "--exit-with-parent"])
            .args(shape)
            .args(["--listen", "127.0.0.1:0", "--transport", transport])
            .arg("--model")
            .arg(model)
            .arg("--ready-file")
            .arg(&ready)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = lines_of(process.stderr.take());
        let said = lines_of(process.stdout.take());
        let mut up = Self {
            _stdin: process.stdin.take().unwrap(),
            process,
            log,
            endpoint: String::new(),
            http: String::new(),
            _dir: dir,
        };
        let start = base::clock::now();
        // What it says last is said after the ready file is there.
        while !joined(&said).contains("ready ") {
            assert!(
                up.process.try_wait().unwrap().is_none(),
                "up ended:\n{}",
                up.log()
            );
            assert!(
                start.elapsed() < START,
                "up does not get ready:\n{}",
                up.log()
            );
            std::thread::sleep(POLL);
        }
        up.endpoint = std::fs::read_to_string(&ready).unwrap().trim().to_owned();
        let said = joined(&said);
        let openai = said.lines().find_map(|line| line.strip_prefix("openai "));
        let base = openai.and_then(|url| url.strip_suffix("/v1"));
        up.http = base.expect("up says where its HTTP API is").to_owned();
        up
    }

    /// A system over shared memory that tests share which leave it as they found it.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Up> = OnceLock::new();
        SHARED.get_or_init(|| Self::start("shm"))
    }

    /// What the processes have logged.
    pub fn log(&self) -> String {
        joined(&self.log)
    }

    /// Where the HTTP API answers, "http://HOST:PORT".
    pub fn http(&self) -> &str {
        &self.http
    }

    /// Where a role's probes and metrics answer, "http://HOST:PORT".
    pub fn admin(&self, role: &str) -> String {
        let log = self.log();
        let name = format!("role=\"{role}\"");
        let mut lines = log.lines().filter(|line| line.contains(&name));
        let admin = lines.find_map(|line| line.split("admin=").nth(1));
        admin.expect("up logs what it starts").trim().to_owned()
    }

    /// Address of the router.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A connection to the router.
    pub fn channel(&self) -> Channel {
        proto::channel::lazy(&self.endpoint).unwrap()
    }

    /// A client of the gRPC API.
    pub fn client(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel())
            .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES)
    }

    /// The members that the registry knows.
    pub async fn members(&self) -> Vec<v1::Member> {
        let mut admin = v1::admin_service_client::AdminServiceClient::new(self.channel());
        let ask = admin.list_members(v1::ListMembersRequest {});
        bounded(ask).await.unwrap().into_inner().members
    }

    /// Process ids of this process's children, by role.
    pub fn children(&self) -> Vec<(String, Pid)> {
        let own = self.process.id();
        let path = format!("/proc/{own}/task");
        let tasks = std::fs::read_dir(path).unwrap();
        tasks
            .flat_map(|task| {
                let children = task.unwrap().path().join("children");
                let list = std::fs::read_to_string(children).unwrap_or_default();
                list.split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .filter_map(|pid| {
                // One that has just ended has no command line any more: it is no child.
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                let role = line.split(|byte| *byte == 0).nth(1)?;
                let role = String::from_utf8(role.to_vec()).unwrap();
                Some((role, Pid::from_raw(pid.parse().unwrap()).unwrap()))
            })
            .collect()
    }

    /// Kills one role.
    pub fn kill(&self, role: &str) {
        self.signal(role, Signal::KILL);
    }

    /// Makes one role stand still, until [`Up::go_on`].
    pub fn stand_still(&self, role: &str) {
        self.signal(role, Signal::STOP);
    }

    /// Lets one role go on.
    pub fn go_on(&self, role: &str) {
        self.signal(role, Signal::CONT);
    }

    fn signal(&self, role: &str, signal: Signal) {
        let children = self.children();
        let (_, pid) = children.iter().find(|(name, _)| name == role).unwrap();
        kill_process(*pid, signal).unwrap();
    }

    /// Asks for a clean stop.
    pub fn terminate(&self) {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
    }

    /// Waits for the end.
    pub fn wait(&mut self) -> ExitStatus {
        let ended = wait(&mut self.process, STOP);
        ended.unwrap_or_else(|| panic!("up does not stop:\n{}", self.log()))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // The roles end by themselves when `up` is gone: their standard input closes.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The process exists (and is not merely waiting to be reaped).
pub fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let zombie = |stat: String| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    };
    test_kill_process(pid).is_ok() && !stat.is_ok_and(zombie)
}

/// Waits for the end of a process, `limit` at most.
pub fn wait(process: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = base::clock::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return Some(status);
        }
        if start.elapsed() > limit {
            let _ = process.kill();
            let _ = process.wait();
            return None;
        }
        std::thread::sleep(POLL);
    }
}

/// Runs a wait that must end.
pub async fn bounded<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(REQUEST, future)
        .await
        .expect("the call neither succeeds nor fails")
}

/// A small request that succeeds.
pub fn request(prompt: &str) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_owned(),
        size: "256x256".to_owned(),
        steps: Some(2),
        seed: Some(1),
        guidance: Some(3.0),
        ..GenerateRequest::default()
    }
}

/// Everything one request answered.
#[derive(Debug)]
pub struct Answer {
    /// What was run.
    pub accepted: v1::Accepted,
    /// The steps that were told, in order.
    pub steps: Vec<u32>,
    /// The image, of several the last.
    pub image: v1::Image,
    /// What it took.
    pub timings: v1::Timings,
}

/// Runs a request to its end.
pub async fn generate(up: &Up, request: GenerateRequest) -> Result<Answer, tonic::Status> {
    let mut stream = bounded(up.client().generate(request)).await?.into_inner();
    let mut events = Vec::new();
    while let Some(response) = bounded(stream.message()).await? {
        events.push(response.event.expect("a response without an event"));
    }
    Ok(collect(events))
}

fn collect(events: Vec<Event>) -> Answer {
    let (mut accepted, mut image, mut timings) = (None, None, None);
    let mut steps = Vec::new();
    assert!(
        matches!(events.first(), Some(Event::Accepted(_))),
        "accepted comes first"
    );
    assert!(
        matches!(events.last(), Some(Event::Done(_))),
        "done comes last"
    );
    for event in events {
        match event {
            Event::Accepted(event) => accepted = Some(event),
            Event::Step(event) => steps.push(event.step),
            Event::Image(event) => image = Some(event),
            Event::Done(event) => timings = event.timings,
            Event::Queued(_) | Event::Text(_) | Event::Written(_) | Event::Preview(_) => {}
        }
    }
    Answer {
        accepted: accepted.unwrap(),
        steps,
        image: image.unwrap(),
        timings: timings.unwrap(),
    }
}

/// The error of a request that must fail.
pub async fn refused(up: &Up, request: GenerateRequest) -> base::Failure {
    match generate(up, request.clone()).await {
        Ok(answer) => panic!("{request:?} was answered: {:?}", answer.accepted),
        Err(status) => proto::status::failure(&status),
    }
}

/// Reads a stream up to its first denoising step.
pub async fn first_step(stream: &mut tonic::Streaming<GenerateResponse>) -> String {
    let mut request_id = String::new();
    loop {
        let response = bounded(stream.message())
            .await
            .unwrap()
            .expect("ended before a step");
        match response.event.unwrap() {
            Event::Accepted(accepted) => request_id = accepted.request_id,
            Event::Step(_) => return request_id,
            _ => {}
        }
    }
}
