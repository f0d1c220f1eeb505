//! One worker, its connections to all other ranks, and the messages under way on them.

use std::{ffi::CString, ops::Range, os::fd::BorrowedFd, rc::Rc, sync::Arc};

use fabric::{
    Armed, Arrived, Context, Endpoint, Flushing, Sending, Transport, UcxError, Use, Worker,
};

use parallel::ParallelError;

/// A failure of UCX as an error of this crate.
pub(super) fn ucx(what: &'static str) -> impl Fn(UcxError) -> ParallelError {
    move |error| ParallelError::Transport {
        what,
        message: error.to_string().into(),
    }
}

/// A worker and its connections.
#[derive(Debug)]
pub(super) struct Link {
    worker: Rc<Worker>,
    /// By rank; none to this rank, to ranks that are gone, and before the ranks are known.
    endpoints: Vec<Option<Rc<Endpoint>>>,
    sends: Vec<(usize, Sending)>,
    flushes: Vec<Flushing>,
}

impl Link {
    pub(super) fn open(
        transports: &[Transport],
        interface: Option<&str>,
        ranks: usize,
    ) -> Result<Self, ParallelError> {
        let mut settings =
            fabric::settings(transports, interface).map_err(|error| ParallelError::Transport {
                what: error.field,
                message: error.message.into(),
            })?;
        // A whole message on one connection, so that what was sent last comes last.
        settings.push((c"MAX_EAGER_LANES", CString::from(c"1")));
        let context = Context::open(&settings, Use::Messages).map_err(ucx("open transports"))?;
        let worker = Worker::new(&Arc::new(context)).map_err(ucx("make a worker"))?;
        Ok(Self {
            worker,
            endpoints: vec![None; ranks],
            sends: Vec::new(),
            flushes: Vec::new(),
        })
    }

    pub(super) fn address(&self) -> Result<Vec<u8>, ParallelError> {
        self.worker
            .address()
            .map_err(ucx("read the worker address"))
    }

    pub(super) fn connect(&mut self, rank: usize, address: &[u8]) -> Result<(), ParallelError> {
        let endpoint = Endpoint::connect(&self.worker, address).map_err(ucx("connect"))?;
        self.endpoints[rank] = Some(endpoint);
        Ok(())
    }

    /// Starts to send; false when the connection is gone.
    pub(super) fn send(
        &mut self,
        rank: usize,
        header: &[u8],
        body: Option<(Arc<Vec<f32>>, Range<usize>)>,
    ) -> bool {
        let Some(endpoint) = &self.endpoints[rank] else {
            return false;
        };
        let Ok(mut sending) = Sending::post(endpoint, header, body) else {
            return false;
        };
        match sending.poll() {
            None => self.sends.push((rank, sending)),
            Some(Ok(())) => {}
            Some(Err(_)) => return false,
        }
        true
    }

    pub(super) fn progress(&self) -> bool {
        self.worker.progress()
    }

    pub(super) fn next_message(&self) -> Option<Arrived> {
        self.worker.next_message()
    }

    /// Lets go of messages that are sent; names ranks whose connection broke.
    pub(super) fn reap(&mut self, broken: &mut Vec<usize>) -> bool {
        let before = self.sends.len();
        self.sends
            .retain_mut(|(rank, sending)| match sending.poll() {
                None => true,
                Some(Ok(())) => false,
                Some(Err(_)) => {
                    broken.push(*rank);
                    false
                }
            });
        self.flushes.retain(|flushing| flushing.poll().is_none());
        self.sends.len() < before
    }

    /// Messages and flushes under way.
    pub(super) fn outstanding(&self) -> usize {
        self.sends.len() + self.flushes.len()
    }

    /// Messages are under way to a rank that `counts`.
    pub(super) fn is_sending(&self, counts: impl Fn(usize) -> bool) -> bool {
        self.sends.iter().any(|(rank, _)| counts(*rank))
    }

    /// Starts to wait until everything sent has left this process.
    pub(super) fn flush(&mut self) {
        let open = self.endpoints.iter().flatten();
        // A connection that is broken has nothing to flush.
        self.flushes
            .extend(open.filter_map(|endpoint| endpoint.flush().ok()));
    }

    /// Cuts the connection to a rank.
    pub(super) fn cut(&mut self, rank: usize) {
        if let Some(endpoint) = self.endpoints[rank].take() {
            endpoint.abort();
        }
    }

    pub(super) fn cut_all(&mut self) {
        (0..self.endpoints.len()).for_each(|rank| self.cut(rank));
    }

    pub(super) fn arm(&self) -> Result<Armed, ParallelError> {
        self.worker.arm().map_err(ucx("arm the worker"))
    }

    pub(super) fn event_fd(&self) -> Result<BorrowedFd<'_>, ParallelError> {
        self.worker.event_fd().map_err(ucx("read the descriptor"))
    }

    /// Names of the transports in use towards a rank.
    pub(super) fn transports(&self, rank: usize) -> Vec<String> {
        let endpoint = self.endpoints[rank].as_ref();
        endpoint.map_or_else(Vec::new, |e| e.transports().unwrap_or_default())
    }
}
