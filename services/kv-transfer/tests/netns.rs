//! Transfers between two network namespaces: a slow link, a link that loses packets, one that breaks for a
//! while. Needs root and the tools ip, tc and nft; says so where it cannot run.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// One token has 64 KiB.
const TOKENS: usize = 256;
const NEAR: &str = "10.213.7.1";
const FAR: &str = "10.213.7.2";

fn run(words: &[&str]) -> bool {
    let status = Command::new(words[0])
        .args(&words[1..])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

fn must(words: &[&str]) {
    assert!(run(words), "{words:?}");
}

/// Two namespaces and the link between them; gone with this.
struct Net {
    near: String,
    far: String,
}

impl Net {
    /// None when this machine cannot do it.
    fn new(tag: &str) -> Option<Self> {
        let name = |side| format!("okv{}{tag}{side}", std::process::id());
        let net = Self {
            near: name("n"),
            far: name("f"),
        };
        let able = run(&["tc", "-V"]) && run(&["nft", "-v"]);
        if !able || !run(&["ip", "netns", "add", &net.near]) {
            println!("skipped: needs root, ip, tc and nft");
            return None;
        }
        must(&["ip", "netns", "add", &net.far]);
        must(&[
            "ip", "-n", &net.near, "link", "add", "near0", "type", "veth", "peer", "name", "far0",
            "netns", &net.far,
        ]);
        for (space, device, address) in [(&net.near, "near0", NEAR), (&net.far, "far0", FAR)] {
            let address = format!("{address}/24");
            must(&["ip", "-n", space, "address", "add", &address, "dev", device]);
            must(&["ip", "-n", space, "link", "set", device, "up"]);
            must(&["ip", "-n", space, "link", "set", "lo", "up"]);
        }
        Some(net)
    }

    fn slow(&self) {
        let shape = ["rate", "100mbit", "burst", "256kb", "latency", "400ms"];
        let mut words = vec![
            "ip", "netns", "exec", &self.near, "tc", "qdisc", "add", "dev", "near0", "root", "tbf",
        ];
        words.extend(shape);
        must(&words);
    }

    fn lose(&self) {
        let rules = "add table inet loss\n\
            add chain inet loss input { type filter hook input priority 0; }\n\
            add rule inet loss input numgen random mod 100 < 1 drop\n";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        let path = file.path().to_str().unwrap();
        must(&["ip", "netns", "exec", &self.far, "nft", "-f", path]);
    }

    fn link(&self, state: &str) {
        must(&["ip", "-n", &self.near, "link", "set", "near0", state]);
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        run(&["ip", "netns", "del", &self.near]);
        run(&["ip", "netns", "del", &self.far]);
    }
}

/// A `kv-probe` in a namespace; dies with its handle.
struct Probe(Child);

impl Probe {
    fn start(space: &str, words: &[String]) -> Self {
        let child = Command::new("ip")
            .args(["netns", "exec", space, env!("CARGO_BIN_EXE_kv-probe")])
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// The first line, or what it complains about.
    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let mut out = BufReader::new(self.0.stdout.as_mut().unwrap());
        out.read_line(&mut line).unwrap();
        if !line.is_empty() {
            return Ok(line.trim().to_owned());
        }
        let mut complaint = String::new();
        let errors = self.0.stderr.as_mut().unwrap();
        errors.read_to_string(&mut complaint).unwrap();
        Err(complaint)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn words(command: &str, device: &str, more: &[&str]) -> Vec<String> {
    let wires = [
        "--transport=tcp".to_owned(),
        format!("--net-devices={device}"),
    ];
    let mut words = vec![command.to_owned()];
    words.extend(wires);
    words.extend(more.iter().map(|&word| word.to_owned()));
    words
}

/// A service and a producer at one end of a link, and a consumer at the other. `harm` is done to the link while
/// the consumer reads. Gives what the consumer said, and after how long.
fn fetch_over(
    net: &Net,
    deadline_ms: u64,
    harm: impl FnOnce(&Net),
) -> (Result<String, String>, Duration) {
    let listen = format!("--listen={NEAR}:0");
    let serve = words("serve", "near0", &[&listen, "--pool-bytes=33554432"]);
    let mut service = Probe::start(&net.near, &serve);
    let endpoint = format!("--endpoint={}", service.line().unwrap());
    let tokens = format!("--tokens={TOKENS}");
    let path = [endpoint.as_str(), &tokens, "--phase=sealed"];
    let mut producer = Probe::start(&net.near, &words("produce", "near0", &path));
    let said = producer.line().unwrap();
    let (phase, lease) = said.split_once(' ').unwrap();
    assert_eq!(phase, "sealed");
    // Whoever fetches needs a pull token, which the producer's lease grants.
    let lease = format!("--lease={lease}");
    let deadline = format!("--deadline-ms={deadline_ms}");
    let path = [
        endpoint.as_str(),
        &tokens,
        "--phase=copied",
        &deadline,
        &lease,
    ];
    let begun = base::clock::now();
    let mut consumer = Probe::start(&net.far, &words("consume", "far0", &path));
    harm(net);
    // Its own lease follows the phase.
    let said = consumer.line();
    let said = said.map(|line| line.split(' ').next().unwrap_or_default().to_owned());
    (said, base::clock::now() - begun)
}

#[tokio::test]
async fn a_prefix_crosses_a_slow_link_and_one_that_loses_packets() {
    let Some(net) = Net::new("s") else { return };
    net.slow();
    let (said, took) = fetch_over(&net, 60_000, |_| {});
    assert_eq!(said.unwrap(), "copied");
    // 16 MiB at 100 Mbit a second: had it been faster, the link would not have been what it says.
    assert!(took > Duration::from_secs(1), "{took:?}");
    net.lose();
    let (said, _) = fetch_over(&net, 60_000, |_| {});
    assert_eq!(said.unwrap(), "copied");
}

#[tokio::test]
async fn a_link_that_is_down_for_five_seconds_costs_time_or_a_typed_error_by_the_deadline() {
    let Some(net) = Net::new("p") else { return };
    net.slow();
    let cut = |seconds| {
        move |net: &Net| {
            std::thread::sleep(Duration::from_millis(600));
            net.link("down");
            std::thread::sleep(Duration::from_secs(seconds));
            net.link("up");
        }
    };
    let (said, took) = fetch_over(&net, 50_000, cut(5));
    assert_eq!(said.unwrap(), "copied");
    assert!(
        took > Duration::from_secs(5),
        "the link was down meanwhile: {took:?}"
    );
    // A deadline within the partition ends it with an error that says so.
    let (said, took) = fetch_over(&net, 3_000, cut(5));
    let complaint = said.unwrap_err();
    let typed = ["deadline", "lost"]
        .iter()
        .any(|word| complaint.contains(word));
    assert!(typed, "{complaint}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}
