use std::mem::ManuallyDrop;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ucx_rs::sys;

use crate::counters::{Operation, Way};
use crate::endpoint::RemoteKey;
use crate::memory::Registration;
use crate::status::{Posted, Request, UcxError, posted};

/// Local memory of a transfer, owned by it until every operation on it has ended.
#[derive(Debug)]
pub enum Payload {
    /// Bytes to write to the peer. Shared, because nobody may change them.
    Source(Arc<Vec<u8>>),
    /// Room for bytes read from the peer.
    Target(Vec<u8>),
}

impl Payload {
    /// True when there is nothing to move.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes in the payload.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Source(bytes) => bytes.len(),
            Self::Target(bytes) => bytes.len(),
        }
    }
}

/// One-sided operations between a payload and a region of a peer.
#[derive(Debug)]
pub struct Transfer {
    /// Dropped by hand: memory that UCX may still touch must not be freed.
    held: ManuallyDrop<Held>,
    base: *mut u8,
    bytes: usize,
    writes: bool,
    requests: Vec<Request>,
}

#[derive(Debug)]
struct Held {
    // Fields drop in this order: the registration names the payload's memory.
    registration: Registration,
    payload: Payload,
    key: Rc<RemoteKey>,
}

impl Transfer {
    /// Takes the payload over and registers its memory.
    ///
    /// # Errors
    /// What UCX says.
    pub fn new(key: &Rc<RemoteKey>, mut payload: Payload) -> Result<Self, UcxError> {
        let bytes = payload.len();
        let (base, writes) = match &mut payload {
            // UCX only reads the source of a put, whatever the pointer says.
            Payload::Source(source) => (source.as_ptr().cast_mut(), true),
            Payload::Target(target) => (target.as_mut_ptr(), false),
        };
        let registration = Registration::of_range(&key.endpoint.worker.context, base, bytes)?;
        let held = Held {
            registration,
            payload,
            key: Rc::clone(key),
        };
        Ok(Self {
            held: ManuallyDrop::new(held),
            base,
            bytes,
            writes,
            requests: vec![],
        })
    }

    /// Starts to copy `range` of the payload to or from `remote` at the peer.
    ///
    /// # Errors
    /// A range outside the payload, a closed endpoint, and what UCX says.
    pub fn post(&mut self, range: Range<usize>, remote: u64) -> Result<(), UcxError> {
        let key = &self.held.key;
        let call = if self.writes {
            "ucp_put_nbx"
        } else {
            "ucp_get_nbx"
        };
        key.endpoint.ensure_open(call)?;
        if range.start > range.end || range.end > self.bytes {
            return Err(UcxError {
                call,
                status: sys::ucs_status_t_UCS_ERR_INVALID_PARAM,
            });
        }
        let params = sys::ucp_request_param_t {
            op_attr_mask: sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMH,
            memh: self.held.registration.handle,
            ..Default::default()
        };
        let (ep, rkey, len) = (key.endpoint.handle, key.handle, range.len());
        // SAFETY: `range` lies in the payload, as checked above.
        let local = unsafe { self.base.add(range.start) }.cast();
        let pointer = if self.writes {
            // SAFETY: endpoint and key are live; the payload stays put until the request ends,
            // because `held` owns it and is given back or freed only without requests.
            unsafe { sys::ucp_put_nbx(ep, local, len, remote, rkey, &raw const params) }
        } else {
            // SAFETY: as for the put; the target is owned here, so nobody else looks at it.
            unsafe { sys::ucp_get_nbx(ep, local, len, remote, rkey, &raw const params) }
        };
        let operation = if self.writes {
            Operation::Put
        } else {
            Operation::Get
        };
        self.way().begun(operation, len);
        let posted = self.way().noting(posted(call, pointer))?;
        self.track(posted);
        Ok(())
    }

    /// Starts to wait until the peer's memory holds everything posted so far.
    ///
    /// # Errors
    /// A closed endpoint, and what UCX says.
    pub fn post_flush(&mut self) -> Result<(), UcxError> {
        let endpoint = &self.held.key.endpoint;
        endpoint.ensure_open("ucp_ep_flush_nbx")?;
        let params = sys::ucp_request_param_t::default();
        // SAFETY: the endpoint is live and `params` is valid.
        let pointer = unsafe { sys::ucp_ep_flush_nbx(endpoint.handle, &raw const params) };
        self.way().begun(Operation::Flush, 0);
        let posted = self.way().noting(posted("ucp_ep_flush_nbx", pointer))?;
        self.track(posted);
        Ok(())
    }

    fn way(&self) -> Way {
        self.held.key.endpoint.worker.context.way
    }

    fn track(&mut self, posted: Posted) {
        match posted {
            Posted::Done => {}
            Posted::Pending(request) => self.requests.push(request),
        }
    }

    /// Reaps operations that ended; gives how many did, or the first error among them.
    ///
    /// # Errors
    /// The first failed operation.
    pub fn reap(&mut self) -> Result<usize, UcxError> {
        let (before, way) = (self.requests.len(), self.way());
        let mut first = Ok(());
        self.requests.retain(|request| match request.poll() {
            None => true,
            Some(result) => {
                first = first.and(way.noting(result));
                false
            }
        });
        first.map(|()| before - self.requests.len())
    }

    /// Operations still running.
    pub fn outstanding(&self) -> usize {
        self.requests.len()
    }

    /// The key in use.
    pub fn key(&self) -> &Rc<RemoteKey> {
        &self.held.key
    }

    /// Gives the payload back; `None`, with the payload left to UCX, while operations run.
    /// Nothing can be posted afterwards.
    pub fn take_payload(&mut self) -> Option<Payload> {
        if !self.requests.is_empty() {
            return None;
        }
        self.bytes = 0;
        let empty = Payload::Target(Vec::new());
        Some(std::mem::replace(&mut self.held.payload, empty))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.requests.is_empty() {
            // SAFETY: no operation runs, and `held` is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.held) };
        }
        // Otherwise the payload, its registration and its key are leaked on purpose.
    }
}
