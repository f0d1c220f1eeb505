//! Where a service lets itself be reached. In a process of its own: sockets that UCX opens in a test would be
//! inherited by the services that it starts.
#![allow(clippy::unwrap_used)]
use std::collections::HashSet;
use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

/// State of a socket that listens, as the system prints it.
const LISTENS: &str = "0A";

/// Addresses and ports at which a process listens for TCP.
fn listening(pid: u32) -> HashSet<(Ipv4Addr, u16)> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let sockets: HashSet<String> = files
        .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
        .filter_map(|link| {
            let link = link.to_str()?.to_owned();
            Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let any = |table: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
    assert!(
        !any("tcp6").lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[3] == LISTENS && sockets.contains(words[9])
        }),
        "an address of IPv6 that nobody asked for"
    );
    let table = any("tcp");
    let found = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let own = words[3] == LISTENS && sockets.contains(words[9]);
        let (address, port) = words[1].split_once(':').filter(|_| own)?;
        let address = u32::from_str_radix(address, 16).unwrap().to_ne_bytes();
        Some((address.into(), u16::from_str_radix(port, 16).unwrap()))
    });
    found.collect()
}

/// Where a service listens that was started so.
fn ports_of(options: &[&str]) -> HashSet<(Ipv4Addr, u16)> {
    let mut service = Command::new(env!("CARGO_BIN_EXE_kv-probe"))
        .args(["serve", "--pool-bytes=1048576"])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let said = service.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut line).unwrap();
    let ports = listening(service.id());
    service.kill().unwrap();
    service.wait().unwrap();
    assert!(line.starts_with("http://127.0.0.1:"), "{line:?}");
    ports
}

#[test]
fn data_ports_are_bound_to_the_configured_interface_alone() {
    let ports = ports_of(&["--transport=tcp", "--net-devices=lo"]);
    assert!(ports.len() >= 2, "control and data: {ports:?}");
    assert!(
        ports.iter().all(|(address, _)| address.is_loopback()),
        "{ports:?}"
    );
    // A pool that is mapped needs no data port at all.
    assert_eq!(ports_of(&["--transport=shm"]).len(), 1, "control");
}
