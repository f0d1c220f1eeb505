//! `ucx_perftest` on the same transport and size.
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use kv_transfer::engine::Transport;
use tokio::process::Command;

use crate::bench::{bad, median};
use crate::error::OmniError;

/// Its one-sided bandwidths.
const TESTS: [&str; 2] = ["ucp_put_bw", "ucp_get"];
/// Bytes that one run is meant to move.
const VOLUME: usize = 64 << 20;
/// Fewest and most transfers of one run.
const ROUNDS: [usize; 2] = [3, 500];
/// How long a server of it may take to listen.
const SETTLE: Duration = Duration::from_millis(400);
/// Longest run; some versions write very slowly over TCP.
const PATIENCE: Duration = Duration::from_secs(10);

/// What it measured so far; its rounds take turns with ours, so that both meet the same machine.
#[derive(Debug)]
pub(super) struct Beside {
    program: PathBuf,
    transport: Transport,
    bytes: usize,
    /// GB/s of each test. One that took longer than [`PATIENCE`] is not run again.
    rates: [Option<Vec<f64>>; TESTS.len()],
}

impl Beside {
    pub(super) fn new(program: &Path, transport: Transport, bytes: usize) -> Self {
        Self {
            program: program.to_owned(),
            transport,
            bytes,
            rates: [const { Some(vec![]) }; TESTS.len()],
        }
    }

    /// One round of each test.
    pub(super) async fn round(&mut self) -> Result<(), OmniError> {
        for (index, test) in TESTS.into_iter().enumerate() {
            let Some(rates) = &mut self.rates[index] else {
                continue;
            };
            match one(&self.program, self.transport, self.bytes, (index, test)).await? {
                Some(rate) => rates.push(rate),
                None => self.rates[index] = None,
            }
        }
        Ok(())
    }

    /// The median of each test; none of one that was too slow.
    pub(super) fn medians(&self) -> Vec<(String, Option<f64>)> {
        let of = |rates: &Option<Vec<f64>>| rates.as_deref().map(median);
        TESTS
            .iter()
            .zip(&self.rates)
            .map(|(test, rates)| ((*test).to_owned(), of(rates)))
            .collect()
    }
}

async fn one(
    program: &Path,
    transport: Transport,
    bytes: usize,
    (index, test): (usize, &str),
) -> Result<Option<f64>, OmniError> {
    let port = (15_000 + std::process::id() % 20_000) as usize + index;
    let rounds = (VOLUME / bytes).clamp(ROUNDS[0], ROUNDS[1]);
    let command = |more: &[String]| {
        let mut command = Command::new(program);
        command
            .args(more)
            .args(["-p", &port.to_string()])
            .env("UCX_TLS", transport.ucx_name())
            .env("UCX_LOG_LEVEL", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    };
    let failed = |error| OmniError::io("run ucx_perftest", error);
    let _server = command(&[]).spawn().map_err(failed)?;
    tokio::time::sleep(SETTLE).await;
    let words = [
        "127.0.0.1",
        "-t",
        test,
        "-s",
        &bytes.to_string(),
        "-n",
        &rounds.to_string(),
        "-w",
        "3",
        "-f",
        "-v",
    ];
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    let client = tokio::time::timeout(PATIENCE, command(&words).output());
    let Ok(output) = client.await else {
        return Ok(None);
    };
    let output = output.map_err(failed)?;
    parse(&output).map(Some).ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stdout);
        let complained = String::from_utf8_lossy(&output.stderr);
        bad(format!("ucx_perftest {test} says {said:?} {complained:?}"))
    })
}

/// The overall bandwidth of its last line of numbers, which is in MB (2^20 bytes) a second.
fn parse(output: &Output) -> Option<f64> {
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers = |line: &str| -> Option<Vec<f64>> {
        let words = line.split(',').map(|word| word.trim().parse().ok());
        words.collect()
    };
    let last = text.lines().rev().find_map(numbers)?;
    // iterations, three latencies, average and overall bandwidth, two message rates.
    last.get(5).map(|mb| mb * f64::from(1 << 20) / 1e9)
}
