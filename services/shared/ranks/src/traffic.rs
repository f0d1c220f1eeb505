//! Bytes that cross the border to UCX.

use std::sync::atomic::{AtomicU64, Ordering};

use parallel::{Moved, Op, Traffic, wire::ELEMENT_BYTES};

/// `[sent, received]` bytes by kind of operation.
#[derive(Debug, Default)]
pub(super) struct Payloads([[AtomicU64; 2]; Op::KINDS]);

impl Payloads {
    pub(super) fn sent(&self, op: Op, elements: usize) {
        self.count(op, 0, elements);
    }

    pub(super) fn received(&self, op: Op, elements: usize) {
        self.count(op, 1, elements);
    }

    fn count(&self, op: Op, side: usize, elements: usize) {
        let bytes = elements as u64 * ELEMENT_BYTES;
        self.0[op.kind()][side].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for (moved, [sent, received]) in traffic.by_kind.iter_mut().zip(&self.0) {
            *moved = Moved {
                sent: sent.load(Ordering::Relaxed),
                received: received.load(Ordering::Relaxed),
            };
        }
        traffic
    }
}

/// What the messages of one rank took besides their payload, signs of life included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Headers {
    /// Messages sent.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Bytes of their headers.
    pub bytes: Moved,
}

/// Counts [`Headers`].
#[derive(Debug, Default)]
pub(super) struct HeaderCount([[AtomicU64; 2]; 2]);

impl HeaderCount {
    pub(super) fn sent(&self, bytes: usize) {
        Self::add(&self.0[0], bytes);
    }

    pub(super) fn received(&self, bytes: usize) {
        Self::add(&self.0[1], bytes);
    }

    fn add([messages, total]: &[AtomicU64; 2], bytes: usize) {
        messages.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Headers {
        let load = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let [[sent, sent_bytes], [received, received_bytes]] = &self.0;
        Headers {
            sent: load(sent),
            received: load(received),
            bytes: Moved {
                sent: load(sent_bytes),
                received: load(received_bytes),
            },
        }
    }
}
