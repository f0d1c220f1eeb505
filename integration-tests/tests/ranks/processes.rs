//! Starting ranks, hearing what they say, making sure they end.

use std::{
    env,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use base::clock;
use ranks::Transport;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A hang guard: far above what anything here takes.
pub(crate) const GUARD: Duration = Duration::from_secs(10);
/// Begins every line that a rank has for its test.
pub(crate) const MARK: &str = "rank says ";

/// One world at a time: the machine has few cores, and the printed figures are to mean something.
static TURN: Mutex<()> = Mutex::new(());

struct Process {
    child: Child,
    lines: Receiver<(Instant, String)>,
}

/// The ranks of one world. They die with it.
pub(crate) struct Ranks {
    processes: Vec<Process>,
    _directory: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Ranks {
    /// Starts `size` ranks that do `what`.
    pub(crate) fn start(what: &str, size: usize, transport: Transport) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let start = |rank: usize| {
            let mut child = Command::new(env::current_exe().unwrap())
                .args([
                    "child::a_rank_of_a_world",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ])
                .env("OMNI_TEST_WORLD", directory.path())
                .env("OMNI_TEST_RANK", rank.to_string())
                .env("OMNI_TEST_RANKS", size.to_string())
                .env("OMNI_TEST_WHAT", what)
                .env("OMNI_TEST_TRANSPORT", transport.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let (sender, lines) = channel();
            let output = BufReader::new(child.stdout.take().unwrap());
            thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    if let Some(said) = line.split(MARK).nth(1) {
                        // The test may have heard enough.
                        let _ = sender.send((clock::now(), said.to_owned()));
                    } else {
                        println!("rank {rank}: {line}");
                    }
                }
            });
            Process { child, lines }
        };
        Self {
            processes: (0..size).map(start).collect(),
            _directory: directory,
            _turn: turn,
        }
    }

    /// The next thing a rank says, and when.
    pub(crate) fn hear(&self, rank: usize) -> (Instant, String) {
        match self.processes[rank].lines.recv_timeout(GUARD) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("rank {rank} says nothing"),
            Err(RecvTimeoutError::Disconnected) => panic!("rank {rank} ended without a word"),
        }
    }

    /// Waits until every rank has said `word`.
    pub(crate) fn all_say(&self, word: &str) {
        for rank in 0..self.processes.len() {
            assert_eq!(self.hear(rank).1, word, "rank {rank}");
        }
    }

    /// Sends a signal; returns when.
    pub(crate) fn signal(&self, rank: usize, signal: Signal) -> Instant {
        let pid = Pid::from_child(&self.processes[rank].child);
        let now = clock::now();
        kill_process(pid, signal).unwrap();
        now
    }

    /// Waits until a rank's process has ended by itself; true when it ended well.
    pub(crate) fn ended(&mut self, rank: usize) -> bool {
        let end = clock::now() + GUARD;
        loop {
            if let Some(status) = self.processes[rank].child.try_wait().unwrap() {
                if !status.success() {
                    println!("rank {rank}: {status}");
                }
                return status.success();
            }
            assert!(clock::now() < end, "rank {rank} does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // They have ended, unless the test has failed.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}
