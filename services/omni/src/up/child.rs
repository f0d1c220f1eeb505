//! One role as a process: started with its pipes, watched, stopped.
use std::{
    ffi::OsString,
    io::Write as _,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base::{clock, task};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    process::{Child as Process, ChildStdin, Command},
    sync::oneshot,
};

use crate::{announce::Announcement, error::OmniError, settings::Role};

/// How often a wait for an exit looks.
const POLL: Duration = Duration::from_millis(20);
/// How long the kernel may take to end a killed process.
const KILL_WAIT: Duration = Duration::from_secs(5);
/// How long the last words of a dead child may take to arrive.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(1);

/// A running role.
#[derive(Debug)]
pub(crate) struct Child {
    role: Role,
    process: Process,
    /// Held open: the child ends when it closes, so it never outlives this process.
    _stdin: Option<ChildStdin>,
    announced: Option<oneshot::Receiver<Announcement>>,
    last: Arc<Mutex<String>>,
    log: task::Owned<()>,
    _out: task::Owned<()>,
}

impl Child {
    /// Starts this same binary as `role`. Must run inside the runtime.
    pub(crate) fn start(role: Role, arguments: Vec<OsString>) -> Result<Self, OmniError> {
        let failed = |source| OmniError::io(format!("start {}", role.name()), source);
        let binary = std::env::current_exe().map_err(failed)?;
        let mut process = Command::new(binary)
            .arg(role.name())
            .args(arguments)
            .arg("--exit-with-parent")
            // These may be an operator's, for omnictl; the roles get theirs as arguments.
            .env_remove("OMNI_TLS_CERT")
            .env_remove("OMNI_TLS_KEY")
            .env_remove("OMNI_TLS_CA")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C in the terminal is for `up` alone, which then stops the roles in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let last = Arc::new(Mutex::new(String::new()));
        let (announce, announced) = oneshot::channel();
        let log = task::spawn(forward(role, process.stderr.take(), Arc::clone(&last)));
        let out = task::spawn(read_announcement(process.stdout.take(), announce));
        Ok(Self {
            role,
            _stdin: process.stdin.take(),
            process,
            announced: Some(announced),
            last,
            log,
            _out: out,
        })
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// The child's announcement; an error when it ends before that or says something else.
    pub(crate) async fn announcement(&mut self) -> Result<Announcement, OmniError> {
        let said = match self.announced.take() {
            Some(announced) => announced.await.ok(),
            None => None,
        };
        match said {
            Some(announcement) => Ok(announcement),
            // Standard output closes a moment before the process can be reaped.
            None => Err(self.exited_within(KILL_WAIT).await),
        }
    }

    async fn exited_within(&mut self, wait: Duration) -> OmniError {
        let status = tokio::time::timeout(wait, self.process.wait()).await;
        self.died(status.ok().and_then(Result::ok)).await
    }

    /// The exit status, once there is one.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }

    /// The error that a death of this child is.
    pub(crate) async fn died(&mut self, status: Option<ExitStatus>) -> OmniError {
        let _ = tokio::time::timeout(LAST_WORDS_WAIT, &mut self.log).await;
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        OmniError::ChildDied {
            role: self.role.name(),
            status: status.map_or_else(|| "no exit status".to_owned(), |s| s.to_string()),
            last: if last.is_empty() {
                "nothing".to_owned()
            } else {
                last.clone()
            },
            exit: status
                .and_then(|status| status.code())
                .and_then(|code| u8::try_from(code).ok())
                .filter(|&code| code != 0)
                .unwrap_or(base::code::EXIT_FAILURE),
        }
    }

    /// Asks the child to stop. A child that has ended is left alone.
    pub(crate) fn terminate(&mut self) {
        if self.exit_status().is_some() {
            return;
        }
        let pid = self.process.id().and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            // It is not reaped yet, so the number is still its own.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Waits until the child has ended, `grace` at most; then kills it. True when it went by itself.
    pub(crate) async fn finish(
        &mut self,
        grace: Duration,
        forced: impl Future<Output = ()>,
    ) -> bool {
        let start = clock::now();
        tokio::pin!(forced);
        let mut hurry = false;
        loop {
            if self.exit_status().is_some() {
                return true;
            }
            if hurry || start.elapsed() >= grace {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(POLL) => {}
                () = &mut forced => hurry = true,
            }
        }
        let _ = self.process.start_kill();
        let _ = tokio::time::timeout(KILL_WAIT, self.process.wait()).await;
        false
    }
}

async fn forward<R: AsyncRead + Unpin>(role: Role, stderr: Option<R>, last: Arc<Mutex<String>>) {
    let Some(stderr) = stderr else { return };
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // Nobody may be reading; the roles run on regardless.
        let _ = writeln!(std::io::stderr(), "[{}] {line}", role.name());
        *last.lock().unwrap_or_else(PoisonError::into_inner) = line;
    }
}

async fn read_announcement<R: AsyncRead + Unpin>(
    stdout: Option<R>,
    announce: oneshot::Sender<Announcement>,
) {
    let Some(stdout) = stdout else { return };
    let mut lines = BufReader::new(stdout).lines();
    if let Ok(Some(line)) = lines.next_line().await
        && let Some(announcement) = Announcement::parse(&line)
    {
        let _ = announce.send(announcement);
    }
    // Keep reading, so that the child never blocks on a full pipe.
    while let Ok(Some(_)) = lines.next_line().await {}
}
