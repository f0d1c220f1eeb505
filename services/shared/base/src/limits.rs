//! Every bound that more than one crate relies on, by name.
use std::time::Duration;

/// Longest id, in bytes.
pub const MAX_ID_CHARS: usize = 64;
/// Longest prompt, and longest system prompt, in Unicode characters.
pub const MAX_PROMPT_CHARS: usize = 32_000;
/// Longest `size` text, in bytes; a longer one is not worth parsing.
pub const MAX_SIZE_CHARS: usize = 32;
/// Largest image side, in pixels, that is looked at at all.
pub const MAX_SIDE_PIXELS: u32 = 65_536;
/// Most denoising steps of one request.
pub const MAX_STEPS: u32 = 200;
/// Largest guidance scale.
pub const MAX_GUIDANCE: f64 = 100.0;
/// Largest seed.
pub const MAX_SEED: u64 = i64::MAX as u64;
/// Images one request may ask for.
pub const MAX_IMAGES: u32 = 10;
/// Previews one image may have.
pub const MAX_PREVIEWS: u32 = 3;

/// Largest request message a server decodes, in bytes. Far above two prompts of 4-byte characters,
/// so that a prompt that is too long is still read and blamed by name.
pub const MAX_REQUEST_BYTES: usize = 4 * 1024 * 1024;
/// Likewise for a request that may carry pictures, and largest body of such a one: three files, base64 and all.
pub const MAX_EDIT_BYTES: usize = 48 * 1024 * 1024;
/// Pictures of one request; HunyuanImage-3.0 is shown at most three.
pub const MAX_PICTURES: usize = 3;
/// Most tokens of one text that a request may ask for.
pub const MAX_NEW_TOKENS: u32 = 16_384;
/// Largest response message a client decodes, in bytes: one PNG of the largest bucket, and slack.
pub const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;

/// Largest checkpoint of a denoise job, in bytes of latents; a job with larger ones goes without.
pub const MAX_CHECKPOINT_BYTES: usize = 1 << 20;

/// Events of one request that may wait for a slow reader.
pub const EVENT_QUEUE: usize = 64;
/// Recent requests a router remembers for Get.
pub const MAX_REMEMBERED_REQUESTS: usize = 4_096;
/// Spans that a router keeps of one request; likewise placements, a quarter of it.
pub const MAX_NOTED_SPANS: usize = 128;
/// Candidates that a router keeps of one placement.
pub const MAX_NOTED_CANDIDATES: usize = 8;
/// Events of a cluster that a router keeps.
pub const MAX_EVENTS: usize = 1_024;
/// Members a registry holds.
pub const MAX_MEMBERS: usize = 4_096;
/// Membership events a slow watcher may fall behind before it gets a fresh snapshot.
pub const WATCH_QUEUE: usize = 256;
/// Concurrent HTTP/2 streams per connection.
pub const MAX_STREAMS_PER_CONNECTION: u32 = 1_024;

/// How long a connection may take to come up.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of HTTP/2 pings.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a ping may stay unanswered before the connection counts as dead.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Deadline of a control call (registry, admin, leases).
pub const CONTROL_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline of a request that names none.
pub const DEFAULT_REQUEST_DEADLINE: Duration = Duration::from_secs(600);
/// Longest deadline a request may ask for.
pub const MAX_REQUEST_DEADLINE: Duration = Duration::from_secs(3_600);
/// Longest bound of one transfer of a prefix that a request may name.
pub const MAX_TRANSFER_TIMEOUT: Duration = Duration::from_secs(600);
/// Default lease of a member.
pub const LEASE_TTL: Duration = Duration::from_secs(5);
/// Shortest lease a registry grants.
pub const MIN_LEASE_TTL: Duration = Duration::from_millis(100);
/// Longest lease a registry grants.
pub const MAX_LEASE_TTL: Duration = Duration::from_secs(60);
/// How long a clean stop may take before the rest is dropped.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);
