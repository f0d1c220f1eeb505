//! Roles as processes of their own, joined through etcd.
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, ChildStdin, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use proto::v1::{
    self, GenerateRequest, Member, Role, admin_service_client::AdminServiceClient,
    generate_response::Event, image_service_client::ImageServiceClient,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::{
    harness::{bounded, command, model_dir, wait},
    server::EtcdServer,
};

/// Bound of every wait for a member to come, go or change.
pub(crate) const SOON: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// One role.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// The role ends when this closes: it never outlives the test.
    _stdin: ChildStdin,
    log: Arc<Mutex<Vec<String>>>,
    pub(crate) endpoint: String,
    admin: String,
}

impl Process {
    /// Starts a role on free ports and waits for its address.
    pub(crate) fn start(role: &str, arguments: &[&str]) -> Self {
        Self::start_at(role, "127.0.0.1:0", arguments)
    }

    /// The same at an address.
    pub(crate) fn start_at(role: &str, listen: &str, arguments: &[&str]) -> Self {
        let mut child = command(&[role, "--exit-with-parent", "--log-format", "text"])
            .args(["--listen", listen])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, sink) = (BufReader::new(child.stderr.take().unwrap()), log.clone());
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let mut log = sink.lock().unwrap_or_else(PoisonError::into_inner);
                log.push(line);
            }
        });
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("{role} says no address: {line:?}\n{log:?}"));
        let text = |key: &str| said[key].as_str().unwrap().to_owned();
        Self {
            _stdin: child.stdin.take().unwrap(),
            child,
            log,
            endpoint: text("endpoint"),
            admin: text("admin"),
        }
    }

    pub(crate) fn log(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.join("\n")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for an end by itself.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let ended = wait(&mut self.child, SOON);
        ended.unwrap_or_else(|| panic!("does not end:\n{}", self.log()))
    }

    /// The value of a metric without labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let address = self.admin.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let ask = "GET /metrics HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n";
        stream.write_all(ask.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let value = answer
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .unwrap_or_else(|| panic!("no {name} in {answer}"))
            .parse()
            .unwrap()
    }

    /// The members as this router sees them, and the epoch of its picture.
    pub(crate) async fn members(&self) -> (Vec<Member>, u64) {
        let mut admin = AdminServiceClient::new(proto::channel::lazy(&self.endpoint).unwrap());
        let list = bounded(admin.list_members(v1::ListMembersRequest {})).await;
        let list = list.unwrap().into_inner();
        (list.members, list.epoch)
    }

    /// Waits until this router's picture is as wanted.
    pub(crate) async fn sees(&self, what: &str, wanted: impl Fn(&[Member]) -> bool) -> Vec<Member> {
        let look = async {
            loop {
                let (members, _) = self.members().await;
                if wanted(&members) {
                    return members;
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(SOON, look).await {
            Ok(members) => members,
            Err(_) => panic!("never: {what}; {:?}\n{}", self.members().await, self.log()),
        }
    }

    /// Asks this router to drain a member.
    pub(crate) async fn drain(&self, member_id: &str) {
        let mut admin = AdminServiceClient::new(proto::channel::lazy(&self.endpoint).unwrap());
        let member_id = member_id.to_owned();
        let asked = bounded(admin.drain(v1::DrainRequest { member_id })).await;
        asked.unwrap();
    }

    /// Draws an image through this router.
    pub(crate) async fn draw(&self, request: GenerateRequest) -> Drawn {
        draw(self.endpoint.clone(), request, oneshot::channel().0).await
    }

    /// The same as a task, and a word when its first step is done.
    pub(crate) fn begin(
        &self,
        request: GenerateRequest,
    ) -> (base::task::Owned<Drawn>, oneshot::Receiver<()>) {
        let (tell, stepped) = oneshot::channel();
        let drawing = draw(self.endpoint.clone(), request, tell);
        (base::task::spawn(drawing), stepped)
    }
}

/// PNG bytes.
type Drawn = Result<Vec<u8>, tonic::Status>;

async fn draw(endpoint: String, request: GenerateRequest, tell: oneshot::Sender<()>) -> Drawn {
    let channel = proto::channel::lazy(&endpoint).unwrap();
    let mut client = ImageServiceClient::new(channel)
        .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES);
    let mut stream = bounded(client.generate(request)).await?.into_inner();
    let (mut image, mut tell) = (None, Some(tell));
    while let Some(response) = bounded(stream.message()).await? {
        match response.event {
            Some(Event::Image(event)) => image = Some(event.png),
            // Nobody may be listening.
            Some(Event::Step(_)) => drop(tell.take().map(|tell| tell.send(()))),
            _ => {}
        }
    }
    Ok(image.expect("an answer without an image"))
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Members of a role that take work.
pub(crate) fn ready(members: &[Member], role: Role) -> Vec<&Member> {
    let takes_work =
        |member: &&Member| member.role() == role && member.state() == v1::MemberState::Ready;
    members.iter().filter(takes_work).collect()
}

/// Two routers and one of each stage around one etcd.
pub(crate) struct Fleet {
    pub(crate) etcd: EtcdServer,
    pub(crate) routers: [Process; 2],
    pub(crate) kv: Process,
    pub(crate) ar: Process,
    pub(crate) dit: Process,
}

impl Fleet {
    /// Starts everything and waits until both routers see a whole cluster.
    pub(crate) async fn start() -> Self {
        let etcd = EtcdServer::start();
        let registry = registry(&etcd);
        let join = ["--registry", registry.as_str()];
        let kv = Process::start("kv-transfer", &join);
        let ar = stage("ar-stage", &registry, &kv);
        let dit = stage("dit-worker", &registry, &kv);
        let routers = [(); 2].map(|()| Process::start("router", &join));
        let whole = |members: &[Member]| {
            [(Role::Router, 2), (Role::ArStage, 1), (Role::DitWorker, 1)]
                .iter()
                .all(|(role, count)| ready(members, *role).len() == *count)
        };
        for router in &routers {
            router.sees("a whole cluster", whole).await;
        }
        Self {
            etcd,
            routers,
            kv,
            ar,
            dit,
        }
    }

    /// Another worker of the same kind.
    pub(crate) fn worker(&self) -> Process {
        stage("dit-worker", &registry(&self.etcd), &self.kv)
    }
}

pub(crate) fn registry(etcd: &EtcdServer) -> String {
    format!("etcd://{}", etcd.endpoint())
}

fn stage(role: &str, registry: &str, kv: &Process) -> Process {
    stage_at(role, registry, &kv.endpoint)
}

/// A stage of the node whose KV-transfer service is at `kv`.
pub(crate) fn stage_at(role: &str, registry: &str, kv: &str) -> Process {
    let model = model_dir().display().to_string();
    let arguments = [
        "--registry",
        registry,
        "--kv-transfer",
        kv,
        "--model",
        &model,
    ];
    Process::start(role, &arguments)
}
