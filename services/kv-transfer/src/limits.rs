//! Named bounds of the data plane and of the leases.
use std::time::Duration;

/// Transfers that may wait for the UCX thread of one process.
pub const MAX_QUEUED_TRANSFERS: usize = 256;
/// Transfers that the UCX thread works on at once; the rest wait in the queue.
pub const MAX_ACTIVE_TRANSFERS: usize = 32;
/// Bytes of one one-sided operation: long enough to run at full speed, short enough that a
/// deadline is looked at often.
pub const PIECE_BYTES: usize = 4 << 20;
/// Operations of one transfer in flight at once.
pub const PIECES_IN_FLIGHT: usize = 4;
/// Peers that one process stays connected to; the longest unused one gives way.
pub const MAX_PEERS: usize = 64;
/// Regions of one peer whose keys stay unpacked.
pub const MAX_KEYS_PER_PEER: usize = 16;
/// Longest worker address that is accepted, in bytes.
pub const MAX_WORKER_ADDRESS_BYTES: usize = 4096;
/// Longest remote key that is accepted, in bytes.
pub const MAX_REMOTE_KEY_BYTES: usize = 4096;
/// Idle turns before the UCX thread sleeps on its descriptors: a fraction of a millisecond, longer than the pauses
/// of a transfer that runs, because waking a thread delays the peer that does it.
pub const SPIN_TURNS: usize = 1024;
/// Longest sleep of the UCX thread while operations run.
pub const BUSY_SLEEP: Duration = Duration::from_millis(20);
/// Longest sleep of an idle UCX thread.
pub const IDLE_SLEEP: Duration = Duration::from_secs(1);
/// How long operations may run on after their deadline before their connection is cut.
pub const DRAIN_GRACE: Duration = Duration::from_secs(1);
/// How long operations may run on after their connection was cut before their memory is leaked.
pub const LEAK_GRACE: Duration = Duration::from_secs(10);
/// How long a stopping UCX thread waits for operations to end.
pub const STOP_GRACE: Duration = Duration::from_secs(2);

/// Threads that copy one part out of a mapped pool.
pub const MAX_COPY_THREADS: usize = 4;
/// Bytes that are worth a thread of their own.
pub const COPY_BYTES_PER_THREAD: usize = 4 << 20;
/// Copies of so many bytes go past the caches, which would not hold them.
pub const UNCACHED_COPY_BYTES: usize = 32 << 20;
/// Bytes of buffers for reads over the wire that a client keeps for the next ones.
pub const MAX_SPARE_BYTES: usize = 256 << 20;

/// Smallest pool, in bytes.
pub const MIN_POOL_BYTES: u64 = 1 << 16;
/// Largest pool, in bytes (4 TiB).
pub const MAX_POOL_BYTES: u64 = 1 << 42;
/// Slots start at multiples of a page, which is at least this many bytes.
pub const MIN_PAGE_BYTES: u64 = 4096;
/// Largest page, in bytes.
pub const MAX_PAGE_BYTES: u64 = 1 << 30;
/// Slots that live at once.
pub const MAX_SLOTS: usize = 4096;
/// Leases on one slot.
pub const MAX_LEASES_PER_SLOT: usize = 64;
/// Bytes of a pull token.
pub const TOKEN_BYTES: usize = 16;
/// Pull tokens of one slot that were not used yet.
pub const MAX_TOKENS_PER_SLOT: usize = 256;
/// How long a pull token is good: a receiver may queue for long before it fetches.
pub const TOKEN_TTL: Duration = Duration::from_secs(3600);
/// Shortest lease.
pub const MIN_TTL: Duration = Duration::from_millis(50);
/// Longest lease.
pub const MAX_TTL: Duration = Duration::from_secs(3600);
/// Lease of a caller that names none.
pub const DEFAULT_TTL: Duration = Duration::from_secs(60);
/// How often expired leases are looked for.
pub const REAP_INTERVAL: Duration = Duration::from_millis(100);
/// How long the memory of an expired slot rests before it is given out again.
///
/// A client stops posting at its deadline, which lies before the expiry of its lease, and cuts the
/// connection [`DRAIN_GRACE`] later; the rest is slack for a late thread.
pub const QUARANTINE: Duration = Duration::from_secs(5);
/// How long a clean stop waits for transfers under way and for prefixes that nobody has fetched yet: as long
/// as a stage's lease on one, after which it goes by itself.
pub const FINISH_GRACE: Duration = Duration::from_secs(30);
/// Shortest quarantine that a configuration may ask for.
pub const MIN_QUARANTINE: Duration = Duration::from_millis(1500);
/// Hint to a caller whom a full pool turned away, when no lease says better.
pub const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Bytes that one checksum covers by default.
pub const DEFAULT_CHUNK_BYTES: usize = 4 << 20;
/// Bytes that are written to a mapped pool between two looks at the deadline.
pub const WRITE_BLOCK_BYTES: usize = 1 << 18;

/// Deadline of a publication or a fetch that names none.
pub const DEFAULT_TRANSFER_DEADLINE: Duration = Duration::from_secs(30);
/// Longest deadline of a publication or a fetch.
pub const MAX_TRANSFER_DEADLINE: Duration = Duration::from_secs(600);
/// Longest wait for the end of a prefix that is still being written by a producer that lives.
pub const MAX_FOLLOW: Duration = Duration::from_secs(3600);
/// Reads of a damaged chunk, the first one included.
pub const MAX_CHUNK_READS: usize = 3;
/// Largest payload that a client makes room for by default, in bytes.
pub const DEFAULT_MAX_PAYLOAD_BYTES: u64 = 16 << 30;
/// Connections to transfer services that a client keeps.
pub const MAX_CHANNELS: usize = 64;
/// Releases that may wait to be sent; past it a lease ends by its time to live.
pub const MAX_PENDING_RELEASES: usize = 1024;

/// Processes that may ask for the pool at once.
pub const MAX_DOOR_PEERS: usize = 64;
/// How long either side of the pool's socket waits for the other.
pub const DOOR_PATIENCE: Duration = Duration::from_secs(2);
/// Pools that one process keeps mapped.
pub const MAX_MAPPED_POOLS: usize = 16;
/// How long before a caller gives up waiting the service says that it waited in vain.
pub const ANSWER_MARGIN: Duration = Duration::from_millis(500);
/// Pause after the pool's socket could not take a peer in.
pub const DOOR_PAUSE: Duration = Duration::from_millis(100);
/// Reservations that may wait in line for room.
pub const MAX_WAITING: usize = 1024;
/// Longest wait in line.
pub const MAX_WAIT: Duration = Duration::from_secs(600);
/// Bytes that a receiver reads, checks while they are in the last cache and, after a failure, reads again as one.
pub const STORE_BYTES: usize = 4 << 20;
/// Stores that one fetch reads at once: some travel while others are checked.
pub const STORES_IN_FLIGHT: usize = 4;
/// Times that one store is begun again after its connection broke.
pub const MAX_RESUMES: usize = 8;
/// Pause before a store is begun again for the first time; each next one is twice as long.
pub const RESUME_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause before a store is begun again.
pub const MAX_RESUME_PAUSE: Duration = Duration::from_millis(1600);
/// Prefixes of other nodes that a service brings to its own at once.
pub const MAX_RELAYED: usize = 1024;
/// How long a prefix of another node stays on this one when nobody here reads it.
pub const RELAY_TTL: Duration = Duration::from_secs(15);
/// Longest name of a cache scope, in bytes.
pub const MAX_SCOPE_BYTES: usize = 64;

const _: () = assert!(
    MIN_QUARANTINE.as_millis() > DRAIN_GRACE.as_millis(),
    "memory must rest until late operations are cut"
);
