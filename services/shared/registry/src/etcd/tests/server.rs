//! A real etcd of one node or more, started by a test and ended with it.
use std::{
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// How long etcd may take to listen.
const START: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// Ports are picked free, but another process may be faster.
const TRIES: usize = 5;

/// The process, its data and its address. Stopping it leaves data and address for another start.
#[derive(Debug)]
pub(crate) struct EtcdServer {
    process: Option<Child>,
    dir: tempfile::TempDir,
    port: u16,
    peer_port: u16,
    flags: Vec<String>,
    scheme: &'static str,
    name: String,
    /// Every node of its cluster, `name=peer URL`.
    nodes: String,
}

impl EtcdServer {
    /// Starts an empty etcd without TLS.
    pub(crate) fn start() -> Self {
        Self::start_with("http", Vec::new())
    }

    /// Starts an empty etcd with further flags.
    pub(crate) fn start_with(scheme: &'static str, flags: Vec<String>) -> Self {
        for _ in 0..TRIES {
            let mut server = Self::node("n0".to_owned(), scheme, flags.clone());
            server.nodes = server.as_node();
            if server.run() {
                return server;
            }
        }
        panic!("etcd does not start");
    }

    /// Starts one cluster of several nodes.
    pub(crate) fn start_cluster(size: usize) -> Vec<Self> {
        for _ in 0..TRIES {
            let node = |index| Self::node(format!("n{index}"), "http", Vec::new());
            let mut servers: Vec<_> = (0..size).map(node).collect();
            let nodes: Vec<_> = servers.iter().map(Self::as_node).collect();
            for server in &mut servers {
                server.nodes = nodes.join(",");
                server.spawn();
            }
            if servers.iter_mut().all(Self::listens) {
                return servers;
            }
        }
        panic!("no cluster of etcd starts");
    }

    fn node(name: String, scheme: &'static str, flags: Vec<String>) -> Self {
        Self {
            process: None,
            dir: tempfile::tempdir().unwrap(),
            port: free_port(),
            peer_port: free_port(),
            flags,
            scheme,
            name,
            nodes: String::new(),
        }
    }

    fn as_node(&self) -> String {
        format!("{}=http://127.0.0.1:{}", self.name, self.peer_port)
    }

    /// `HOST:PORT`; the host is in every certificate that the tests make.
    pub(crate) fn endpoint(&self) -> String {
        format!("localhost:{}", self.port)
    }

    /// Process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Ends it as a power cut would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Loses its data; it must not run.
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
    }

    /// Starts it again on the same data and address.
    pub(crate) fn restart(&mut self) {
        self.kill();
        assert!(self.run(), "etcd does not start again");
    }

    fn run(&mut self) -> bool {
        self.spawn();
        self.listens()
    }

    fn spawn(&mut self) {
        let client = format!("{}://127.0.0.1:{}", self.scheme, self.port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let data: PathBuf = self.dir.path().join("data");
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(data)
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--name", &self.name, "--initial-cluster", &self.nodes])
            .args(["--log-level", "error", "--unsafe-no-fsync"])
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect(
                "etcd must be installed (Debian package etcd-server): these tests are not skipped",
            );
        self.process = Some(process);
    }

    fn listens(&mut self) -> bool {
        let Some(process) = &mut self.process else {
            return false;
        };
        let start = base::clock::now();
        while start.elapsed() < START {
            if process.try_wait().unwrap().is_some() {
                self.process = None;
                return false;
            }
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return true;
            }
            std::thread::sleep(POLL);
        }
        self.kill();
        false
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
