//! What this process has asked UCX for, by the transports that a context was opened with: operations, bytes and
//! failures since it started. UCX keeps statistics of its own only in builds made for that.
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::settings::Transport;
use crate::status::UcxError;

/// A kind of call that moves something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A connection is begun.
    Connect,
    /// A one-sided write.
    Put,
    /// A one-sided read.
    Get,
    /// A message goes out.
    Send,
    /// The body of a message that was announced is taken in.
    Receive,
    /// What was begun is waited for.
    Flush,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Connect,
        Self::Put,
        Self::Get,
        Self::Send,
        Self::Receive,
        Self::Flush,
    ];

    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Put => "put",
            Self::Get => "get",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Flush => "flush",
        }
    }

    /// The operation behind a call of UCX; `None`: one that is not counted.
    fn of(call: &str) -> Option<Self> {
        Some(match call {
            "ucp_ep_create" => Self::Connect,
            "ucp_put_nbx" => Self::Put,
            "ucp_get_nbx" => Self::Get,
            "ucp_am_send_nbx" => Self::Send,
            "ucp_am_recv_data_nbx" => Self::Receive,
            "ucp_ep_flush_nbx" => Self::Flush,
            _ => return None,
        })
    }
}

/// The transports of a context, for its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way(usize);

/// Words of [`Way`]: shared memory, TCP, and either of them.
const WAYS: [&str; 3] = ["shm", "tcp", "shm+tcp"];

impl Way {
    /// That of a context that is opened with these settings.
    pub(crate) fn of(settings: &[(&CStr, CString)]) -> Self {
        let tls = settings.iter().find(|(name, _)| *name == c"TLS");
        let text = tls.map_or("", |(_, value)| value.to_str().unwrap_or_default());
        let has = |one: Transport| text.split(',').any(|name| name == one.ucx_name());
        Self(match (has(Transport::Shm), has(Transport::Tcp)) {
            (true, false) => 0,
            (false, true) => 1,
            _ => 2,
        })
    }

    /// An operation of so many bytes was begun.
    pub(crate) fn begun(self, operation: Operation, bytes: usize) {
        let cell = &TABLE[self.0][operation as usize];
        cell.operations.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Passes `result` on, and counts a failure.
    pub(crate) fn noting<T>(self, result: Result<T, UcxError>) -> Result<T, UcxError> {
        if let Err(error) = &result
            && let Some(operation) = Operation::of(error.call)
        {
            let cell = &TABLE[self.0][operation as usize];
            cell.failures.fetch_add(1, Ordering::Relaxed);
        }
        result
    }
}

#[derive(Debug)]
struct Cell {
    operations: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

static TABLE: [[Cell; Operation::ALL.len()]; WAYS.len()] = [const {
    [const {
        Cell {
            operations: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }; Operation::ALL.len()]
}; WAYS.len()];

/// One row of [`counters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// "shm", "tcp" or "shm+tcp".
    pub transport: &'static str,
    /// What was asked for.
    pub operation: Operation,
    /// How often, failures included where UCX took the call.
    pub operations: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// Calls that UCX refused, and operations that ended in an error, cancelled ones included.
    pub failures: u64,
}

/// What has been counted in this process so far; rows without anything are left out.
#[must_use]
pub fn counters() -> Vec<Count> {
    let rows = WAYS.iter().zip(&TABLE).flat_map(|(transport, cells)| {
        let row = |(operation, cell): (Operation, &Cell)| Count {
            transport,
            operation,
            operations: cell.operations.load(Ordering::Relaxed),
            bytes: cell.bytes.load(Ordering::Relaxed),
            failures: cell.failures.load(Ordering::Relaxed),
        };
        Operation::ALL.into_iter().zip(cells).map(row)
    });
    rows.filter(|count| count.operations + count.failures > 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::settings;

    #[test]
    fn every_operation_has_its_cell_and_its_call() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index, "{operation:?}");
        }
        assert_eq!(Operation::of("ucp_worker_create"), None);
        let way = |transports: &[Transport]| Way::of(&settings(transports, None).unwrap()).0;
        assert_eq!(WAYS[way(&[Transport::Shm])], "shm");
        assert_eq!(WAYS[way(&[Transport::Tcp])], "tcp");
        assert_eq!(WAYS[way(&[Transport::Shm, Transport::Tcp])], "shm+tcp");
    }

    #[test]
    fn what_begins_and_what_fails_is_counted_where_it_belongs() {
        let way = Way(2);
        let now = || {
            let rows = counters();
            let found = rows
                .iter()
                .find(|row| (row.transport, row.operation) == ("shm+tcp", Operation::Receive));
            found.map_or((0, 0, 0), |row| (row.operations, row.bytes, row.failures))
        };
        let before = now();
        way.begun(Operation::Receive, 7);
        let error = UcxError {
            call: "ucp_am_recv_data_nbx",
            status: -1,
        };
        assert_eq!(way.noting::<()>(Err(error)), Err(error));
        assert_eq!(way.noting(Ok(3)), Ok(3));
        let after = now();
        let more = (after.0 - before.0, after.1 - before.1, after.2 - before.2);
        assert_eq!(more, (1, 7, 1));
    }
}
