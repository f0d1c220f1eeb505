//! `ucx_perftest` on the same transport and size.
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use kv_transfer::engine::{EngineConfig, Transport};
use tokio::process::Command;

use crate::bench::{bad, median};
use crate::error::OmniError;

/// Its one-sided bandwidths: name, test, and whether UCX gets the options that our own transfers give it.
const TESTS: [(&str, &str, bool); 4] = [
    ("ucp_put_bw", "ucp_put_bw", false),
    ("ucp_get", "ucp_get", false),
    ("ucp_put_bw, our options", "ucp_put_bw", true),
    ("ucp_get, our options", "ucp_get", true),
];
/// A test that is slower than this part of the best is not run again.
const HOPELESS: f64 = 0.5;
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
    /// GB/s of each test.
    rates: [Vec<f64>; TESTS.len()],
    /// Tests that are not run again: hopeless ones, and those that took longer than [`PATIENCE`].
    over: [bool; TESTS.len()],
}

impl Beside {
    pub(super) fn new(program: &Path, transport: Transport, bytes: usize) -> Self {
        Self {
            program: program.to_owned(),
            transport,
            bytes,
            rates: [const { vec![] }; TESTS.len()],
            over: [false; TESTS.len()],
        }
    }

    /// One round of each test.
    pub(super) async fn round(&mut self) -> Result<(), OmniError> {
        for index in 0..TESTS.len() {
            if self.over[index] {
                continue;
            }
            match one(&self.program, self.transport, self.bytes, index).await? {
                Some(rate) => self.rates[index].push(rate),
                None => self.over[index] = true,
            }
        }
        let best = self.medians().into_iter().filter_map(|(_, rate)| rate);
        let enough = HOPELESS * best.fold(0.0, f64::max);
        for (over, rates) in self.over.iter_mut().zip(&self.rates) {
            *over |= median(rates) < enough;
        }
        Ok(())
    }

    /// The median of each test; none of one that was too slow to end.
    pub(super) fn medians(&self) -> Vec<(String, Option<f64>)> {
        let of = |rates: &Vec<f64>| (!rates.is_empty()).then(|| median(rates));
        TESTS
            .iter()
            .zip(&self.rates)
            .map(|((name, ..), rates)| ((*name).to_owned(), of(rates)))
            .collect()
    }
}

async fn one(
    program: &Path,
    transport: Transport,
    bytes: usize,
    index: usize,
) -> Result<Option<f64>, OmniError> {
    let (_, test, ours) = TESTS[index];
    let options = EngineConfig::only(transport).ucx_options();
    let options = options.map_err(|error| OmniError::of(&error))?;
    let port = (15_000 + std::process::id() % 20_000) as usize + index;
    let rounds = (VOLUME / bytes).clamp(ROUNDS[0], ROUNDS[1]);
    let command = |more: &[String]| {
        let mut command = Command::new(program);
        command
            .args(more)
            .args(["-p", &port.to_string()])
            .envs(
                options
                    .iter()
                    .filter(|_| ours)
                    .map(|(name, value)| (name, value)),
            )
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
