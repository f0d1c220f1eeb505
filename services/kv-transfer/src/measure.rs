//! What this process has asked UCX for, as metrics.
use telemetry::{Metrics, names};

/// Shows the counters of UCX calls among `metrics`. They are of the whole process.
pub fn measure(metrics: &Metrics) {
    metrics.read_from(|metrics| {
        for count in fabric::counters() {
            let labels = [count.transport, count.operation.name()];
            metrics.reach(&names::UCX_OPERATIONS, &labels, count.operations);
            metrics.reach(&names::UCX_BYTES, &labels, count.bytes);
            metrics.reach(&names::UCX_FAILURES, &labels, count.failures);
        }
    });
}
