//! The table of metrics. A metric that is not here does not exist; labels are bounded sets, never
//! request ids.

/// What a metric counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows. Its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution of seconds. Its name ends in `_seconds`.
    Seconds,
    /// Distribution of small whole numbers.
    Size,
}

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name as Prometheus shows it.
    pub name: &'static str,
    /// What it counts.
    pub kind: Kind,
    /// One sentence, without a full stop.
    pub help: &'static str,
    /// Label names, in the order in which values are given.
    pub labels: &'static [&'static str],
}

macro_rules! table {
    ($($id:ident = $name:literal, $kind:ident, [$($label:literal),*], $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Metric = Metric {
                name: $name, kind: Kind::$kind, help: $help, labels: &[$($label),*],
            };
        )*
        /// Every metric.
        pub const ALL: &[&Metric] = &[$(&$id),*];
    };
}

table! {
    BUILD_INFO = "omni_build_info", Gauge, ["version", "git_sha", "profile"],
        "What was built; always 1";
    SERIES_DROPPED = "omni_telemetry_series_dropped_total", Counter, [],
        "Observations whose label values would have made too many series";
    ROUTER_REQUESTS = "omni_router_requests_total", Counter, ["model", "code"],
        "Finished requests by status code, OK included";
    ROUTER_DURATION = "omni_router_request_duration_seconds", Seconds, ["model"],
        "Time from acceptance to the last event";
    ROUTER_RUNNING = "omni_router_running", Gauge, [],
        "Requests being dispatched";
    ROUTER_QUEUE = "omni_router_queue_depth", Gauge, [],
        "Requests waiting for admission";
    ROUTER_QUEUE_WAIT = "omni_router_queue_wait_seconds", Seconds, [],
        "Time a request waited for admission";
    ROUTER_PLACEMENT = "omni_router_placement_total", Counter, ["outcome"],
        "Placement decisions";
    ROUTER_RETRIES = "omni_router_retries_total", Counter, ["stage"],
        "Dispatches repeated on another member after the first one went away";
    ROUTER_SHED = "omni_router_shed_total", Counter, ["reason"],
        "Requests refused before any stage saw them";
    STAGE_STEP = "omni_stage_step_duration_seconds", Seconds, ["stage", "phase"],
        "Time of one forward of a stage";
    STAGE_TOKENS = "omni_stage_tokens_total", Counter, ["stage"],
        "Tokens computed";
    STAGE_PADDING = "omni_stage_padding_tokens_total", Counter, ["stage"],
        "Padding tokens in exchanges between sequence-parallel ranks; none is computed";
    STAGE_IMAGES = "omni_stage_images_total", Counter, ["stage"],
        "Images finished";
    STAGE_ROWS = "omni_stage_batch_rows", Size, ["stage"],
        "Rows packed into one forward";
    GPU_STEP = "omni_gpu_step_seconds", Seconds, ["stage", "phase"],
        "Time of one packed forward on the first rank's GPU; the rate of its sum is how busy that is";
    GPU_MEMORY = "omni_gpu_memory_bytes", Gauge, ["stage", "gpu", "kind"],
        "Memory of a GPU: used, by whomever, and total";
    STAGE_RESERVED = "omni_stage_reserved_bytes", Gauge, ["stage"],
        "Memory reserved for requests that are in";
    STAGE_QUEUE = "omni_stage_queue_depth", Gauge, ["stage"],
        "Jobs waiting for a step boundary";
    STAGE_RUNNING = "omni_stage_running", Gauge, ["stage"],
        "Jobs being computed";
    STAGE_PAGES = "omni_stage_kv_pages", Gauge, ["state"],
        "Pages of keys and values of each rank of the AR stage: used by rows, kept for rows that begin alike, free";
    STAGE_PREFIX_TOKENS = "omni_stage_prefix_tokens_total", Counter, ["outcome"],
        "Tokens of rows as they begin: hit, their keys and values were there, or miss";
    STAGE_PREFIX_BYTES = "omni_stage_prefix_hit_bytes_total", Counter, [],
        "Bytes of keys and values that rows took over when they began";
    STAGE_PREEMPTIONS = "omni_stage_preemptions_total", Counter, [],
        "Times that a request gave its pages to an earlier one, to be computed again later";
    STAGE_IMBALANCE = "omni_stage_expert_imbalance", Gauge, ["stage", "when"],
        "Load of the busiest rank over the mean, over the layers of the last rebalancing of experts";
    STAGE_EXPERT_MOVES = "omni_stage_expert_moves_total", Counter, ["stage"],
        "Experts copied to another rank";
    TRANSFER_BYTES = "omni_transfer_bytes_total", Counter, ["transport", "direction"],
        "Payload bytes moved";
    TRANSFER_DURATION = "omni_transfer_duration_seconds", Seconds, ["transport", "direction"],
        "Time to move one prefix";
    TRANSFER_VERIFY = "omni_transfer_verify_failures_total", Counter, ["kind"],
        "Payloads whose digest, identity or geometry did not match";
    TRANSFER_REPAIRED = "omni_transfer_repaired_chunks_total", Counter, ["transport"],
        "Chunks of a payload that were read again because their digest did not match";
    TRANSFER_LEASES = "omni_transfer_leases", Gauge, ["state"],
        "Leases on the pool";
    TRANSFER_POOL = "omni_transfer_pool_bytes", Gauge, ["state"],
        "Bytes of the pool";
    TRANSFER_CACHE = "omni_transfer_cache_total", Counter, ["outcome"],
        "Looks for a cached prefix: hit or miss";
    TRANSFER_CACHE_BYTES = "omni_transfer_cache_hit_bytes_total", Counter, [],
        "Bytes of prefixes that were found in the cache";
    UCX_OPERATIONS = "omni_ucx_operations_total", Counter, ["transport", "operation"],
        "Calls to UCX that move something, by the transports that it was opened with";
    UCX_BYTES = "omni_ucx_bytes_total", Counter, ["transport", "operation"],
        "Bytes of those calls";
    UCX_FAILURES = "omni_ucx_failures_total", Counter, ["transport", "operation"],
        "Of those calls, what UCX refused or ended in an error, cancelled ones included";
    REGISTRY_MEMBERS = "omni_registry_members", Gauge, ["role", "state"],
        "Members alive, as the router sees them";
    REGISTRY_FOLLOWED = "omni_registry_followed", Gauge, [],
        "1 while the registry is followed, 0 while requests are placed by its last picture";
    REGISTRY_STALENESS = "omni_registry_staleness", Gauge, [],
        "Seconds since the registry could last be followed, 0 while it is";
    REGISTRY_RESYNCS = "omni_registry_resyncs_total", Counter, [],
        "Full pictures read again, after a break, a lag or a compaction";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_follow_the_units() {
        let mut seen = HashSet::new();
        for metric in ALL {
            assert!(seen.insert(metric.name), "{} twice", metric.name);
            assert!(metric.name.starts_with("omni_"), "{}", metric.name);
            assert_eq!(
                metric.kind == Kind::Counter,
                metric.name.ends_with("_total")
            );
            assert_eq!(
                metric.kind == Kind::Seconds,
                metric.name.ends_with("_seconds")
            );
            assert!(!metric.help.ends_with('.') && !metric.help.is_empty());
            assert!(
                !metric
                    .labels
                    .iter()
                    .any(|label| label.contains("request_id"))
            );
        }
    }
}
