//! Named bounds of the `ucx` backend.

use std::time::Duration;

/// How often a rank says that it lives, by default.
pub const HEARTBEAT: Duration = Duration::from_millis(250);
/// How long a rank may be silent before it counts as dead, by default.
pub const DEAD_AFTER: Duration = Duration::from_millis(1500);
/// Shortest heartbeat accepted.
pub const MIN_HEARTBEAT: Duration = Duration::from_millis(10);
/// Heartbeats that may be lost, at least, before a rank counts as dead.
pub const MIN_LOST_BEATS: u32 = 3;
/// How long all ranks may take to join, by default.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long after its connection broke a rank's last words are waited for.
pub const LAST_WORDS: Duration = Duration::from_millis(50);
/// How long a rank that leaves finishes what it has begun with the others.
pub const LINGER: Duration = Duration::from_secs(5);
/// How long a rank that leaves waits for the others to have read its goodbye.
pub const FAREWELL: Duration = Duration::from_secs(2);
/// How long a rank's last words may take to leave its process.
pub const FLUSH: Duration = Duration::from_millis(500);
/// How long UCX may take to let go of memory once every connection is cut.
pub const CLOSE: Duration = Duration::from_secs(1);
/// Idle turns before the thread sleeps on its descriptors.
pub const SPIN_TURNS: usize = 64;
/// Pause between turns while UCX must not sleep, because a peer's queue is full.
pub const BUSY_PAUSE: Duration = Duration::from_micros(50);
/// Longest sleep while operations run.
pub const BUSY_SLEEP: Duration = Duration::from_millis(20);
/// How much longer than its bound an operation waits for the thread that watches it.
pub const THREAD_GRACE: Duration = Duration::from_secs(10);
/// Longest reason that reaches other ranks, in bytes; the rest is cut off.
pub const MAX_REASON_BYTES: usize = 512;
/// Longest blob that a rank publishes, in bytes.
pub const MAX_ADDRESS_BYTES: usize = 16_384;
/// Messages kept for groups that this rank has not made yet.
pub const MAX_EARLY_MESSAGES: usize = 65_536;
/// How far ahead of this rank, in operations of one group, a message may be.
pub const MAX_AHEAD: u64 = 2 * parallel::MAX_IN_FLIGHT as u64;
/// Elements of one message (64 GiB).
pub const MAX_BODY_ELEMENTS: usize = 1 << 34;
