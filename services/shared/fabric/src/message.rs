use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use ucx_rs::sys;

use crate::counters::Operation;
use crate::endpoint::Endpoint;
use crate::status::{Posted, Request, UcxError, check, posted};
use crate::worker::Worker;

/// Longest header of a message, in bytes.
pub const MAX_HEADER_BYTES: usize = 1024;
/// The one kind of message: what it means stands in its header.
const MESSAGE_ID: u32 = 1;

/// A message that came in.
#[derive(Debug)]
pub struct Arrived {
    /// The sender's header.
    pub header: Vec<u8>,
    /// What came with it.
    pub body: Body,
}

/// The elements of a message.
#[derive(Debug)]
pub enum Body {
    /// They came with the header, or there are none.
    Here(Vec<f32>),
    /// The sender holds them until they are asked for.
    Announced(Announced),
    /// The body is not a whole number of elements, or UCX broke its promise.
    Malformed,
}

impl Body {
    /// Elements of the body, here or still to come.
    #[must_use]
    pub fn elements(&self) -> usize {
        match self {
            Self::Here(data) => data.len(),
            Self::Announced(announced) => announced.elements,
            Self::Malformed => 0,
        }
    }
}

/// As [`Arrived`], before it has an owner on the Rust side.
#[derive(Debug)]
struct Raw {
    header: Vec<u8>,
    body: RawBody,
}

#[derive(Debug)]
enum RawBody {
    Here(Vec<f32>),
    Held {
        descriptor: *mut c_void,
        bytes: usize,
    },
    Malformed,
}

/// Messages that came in and that nobody has taken yet, in order. A worker owns it at one address.
#[derive(Default)]
pub(crate) struct Inbox {
    queue: Cell<VecDeque<Raw>>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inbox")
    }
}

impl Inbox {
    /// Makes UCX deliver the messages of `worker` here.
    ///
    /// The caller keeps the inbox at its address for as long as the worker lives.
    pub(crate) fn attach(&self, worker: sys::ucp_worker_h) -> Result<(), UcxError> {
        let params = sys::ucp_am_handler_param_t {
            field_mask: u64::from(
                sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ID
                    | sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_CB
                    | sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ARG,
            ),
            id: MESSAGE_ID,
            cb: Some(on_message),
            arg: ptr::from_ref(self).cast_mut().cast(),
            ..Default::default()
        };
        // SAFETY: the worker is live and `params` is valid; the inbox outlives the worker.
        let status = unsafe { sys::ucp_worker_set_am_recv_handler(worker, &raw const params) };
        check("ucp_worker_set_am_recv_handler", status)
    }

    fn with<T>(&self, act: impl FnOnce(&mut VecDeque<Raw>) -> T) -> T {
        let mut queue = self.queue.take();
        let result = act(&mut queue);
        self.queue.set(queue);
        result
    }

    pub(crate) fn next(&self, worker: &Rc<Worker>) -> Option<Arrived> {
        let raw = self.with(VecDeque::pop_front)?;
        let body = match raw.body {
            RawBody::Here(data) => Body::Here(data),
            RawBody::Malformed => Body::Malformed,
            RawBody::Held { descriptor, bytes } => Body::Announced(Announced {
                worker: Rc::clone(worker),
                descriptor,
                elements: bytes / size_of::<f32>(),
            }),
        };
        Some(Arrived {
            header: raw.header,
            body,
        })
    }

    /// Tells the senders of announced bodies that nobody will ask for them.
    pub(crate) fn refuse_all(&self, worker: sys::ucp_worker_h) {
        for raw in self.with(std::mem::take) {
            if let RawBody::Held { descriptor, .. } = raw.body {
                // SAFETY: the worker is live, and UCX left the descriptor to us in `on_message`.
                unsafe { sys::ucp_am_data_release(worker, descriptor) };
            }
        }
    }
}

/// Takes a message from UCX: its header and a short body are copied, a long body stays where it is.
unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> sys::ucs_status_t {
    // SAFETY: `arg` is the inbox given in `attach`, which outlives the worker.
    let inbox = unsafe { &*arg.cast::<Inbox>() };
    let mut bytes = vec![0_u8; header_length];
    if header_length > 0 {
        // SAFETY: UCX gives `header_length` bytes at `header`, and `bytes` has room for them.
        unsafe { ptr::copy_nonoverlapping(header.cast(), bytes.as_mut_ptr(), header_length) };
    }
    // SAFETY: UCX gives a valid `param` for the duration of the call.
    let attributes = unsafe { (*param).recv_attr };
    let rendezvous =
        attributes & u64::from(sys::ucp_am_recv_attr_t_UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    let whole = length.is_multiple_of(size_of::<f32>());
    let (body, status) = if !whole {
        // A body that is announced and not kept is dropped by UCX.
        (RawBody::Malformed, 0)
    } else if rendezvous {
        let held = RawBody::Held {
            descriptor: data,
            bytes: length,
        };
        (held, sys::ucs_status_t_UCS_INPROGRESS)
    } else {
        let mut elements = vec![0_f32; length / size_of::<f32>()];
        if length > 0 {
            // SAFETY: UCX gives `length` bytes at `data`; the vector has room for exactly those.
            unsafe {
                ptr::copy_nonoverlapping(data.cast::<u8>(), elements.as_mut_ptr().cast(), length);
            };
        }
        (RawBody::Here(elements), 0)
    };
    let raw = Raw {
        header: bytes,
        body,
    };
    inbox.with(|queue| queue.push_back(raw));
    status
}

/// A body that its sender holds. Dropping it tells the sender that it is not wanted.
#[derive(Debug)]
pub struct Announced {
    worker: Rc<Worker>,
    descriptor: *mut c_void,
    elements: usize,
}

impl Announced {
    /// Elements of the body.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Starts to copy the body here.
    ///
    /// # Errors
    /// What UCX says; the body is lost then.
    pub fn receive(self) -> Result<Receiving, UcxError> {
        // The descriptor goes to UCX, so this must not release it.
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped nor used again, so its worker is moved out once.
        let worker = unsafe { ptr::read(&raw const this.worker) };
        let mut data = ManuallyDrop::new(vec![0_f32; this.elements]);
        let params = sys::ucp_request_param_t::default();
        let bytes = this.elements * size_of::<f32>();
        let buffer = data.as_mut_ptr().cast();
        // SAFETY: the worker is live and the descriptor came from it; the buffer has room for the
        // announced length, and stays put until the request ends, because `Receiving` owns it and
        // gives it back or frees it only without a request.
        let pointer = unsafe {
            sys::ucp_am_recv_data_nbx(
                worker.handle,
                this.descriptor,
                buffer,
                bytes,
                &raw const params,
            )
        };
        let way = worker.context.way;
        way.begun(Operation::Receive, bytes);
        let request = match way.noting(posted("ucp_am_recv_data_nbx", pointer)) {
            Ok(Posted::Done) => None,
            Ok(Posted::Pending(request)) => Some(request),
            Err(error) => {
                drop(ManuallyDrop::into_inner(data));
                return Err(error);
            }
        };
        Ok(Receiving {
            data,
            request,
            worker,
        })
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        // SAFETY: the worker is live, and UCX left the descriptor to us in `on_message`.
        unsafe { sys::ucp_am_data_release(self.worker.handle, self.descriptor) };
    }
}

/// A body on its way here.
#[derive(Debug)]
pub struct Receiving {
    /// Freed only without a request: UCX may still write to it.
    data: ManuallyDrop<Vec<f32>>,
    request: Option<Request>,
    // After the request, which belongs to the worker.
    worker: Rc<Worker>,
}

impl Receiving {
    /// The body, once all of it is here; `None` while it comes.
    pub fn poll(&mut self) -> Option<Result<Vec<f32>, UcxError>> {
        let result = match &self.request {
            Some(request) => self.worker.context.way.noting(request.poll()?),
            None => Ok(()),
        };
        self.request = None;
        let data = std::mem::take(&mut *self.data);
        Some(result.map(|()| data))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if self.request.is_none() {
            // SAFETY: no operation runs, and the buffer is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.data) };
        }
        // Otherwise the buffer is leaked on purpose.
    }
}

/// A message on its way to a peer. It owns its header and shares its body until UCX is done.
#[derive(Debug)]
pub struct Sending {
    /// Freed only without a request: UCX may still read it.
    held: ManuallyDrop<Held>,
    request: Option<Request>,
    // After the request, which belongs to its worker.
    endpoint: Rc<Endpoint>,
}

#[derive(Debug)]
struct Held {
    header: Box<[u8]>,
    _body: Option<Arc<Vec<f32>>>,
}

impl Sending {
    /// Starts to send `header` and the given elements of a buffer, which nobody may change.
    ///
    /// No order is promised between messages to one peer, unless the first has ended before the
    /// second is posted.
    ///
    /// # Errors
    /// A header that is empty or longer than [`MAX_HEADER_BYTES`], a range outside the buffer, and
    /// what UCX says.
    pub fn post(
        endpoint: &Rc<Endpoint>,
        header: &[u8],
        body: Option<(Arc<Vec<f32>>, Range<usize>)>,
    ) -> Result<Self, UcxError> {
        const CALL: &str = "ucp_am_send_nbx";
        endpoint.ensure_open(CALL)?;
        let invalid = UcxError {
            call: CALL,
            status: sys::ucs_status_t_UCS_ERR_INVALID_PARAM,
        };
        let (body, range) = body.map_or((None, 0..0), |(body, range)| (Some(body), range));
        let elements = body.as_deref().map_or(&[][..], Vec::as_slice);
        let part = elements.get(range).ok_or(invalid)?;
        if header.is_empty() || header.len() > MAX_HEADER_BYTES {
            return Err(invalid);
        }
        let (buffer, bytes) = (part.as_ptr().cast(), size_of_val(part));
        let held = ManuallyDrop::new(Held {
            header: header.into(),
            _body: body,
        });
        let (head, head_bytes) = (held.header.as_ptr().cast(), held.header.len());
        let params = sys::ucp_request_param_t::default();
        // SAFETY: the endpoint is live; header and body stay put until the request ends, because
        // `held` owns the one and keeps the other, and is freed only without a request.
        let pointer = unsafe {
            sys::ucp_am_send_nbx(
                endpoint.handle,
                MESSAGE_ID,
                head,
                head_bytes,
                buffer,
                bytes,
                &raw const params,
            )
        };
        let way = endpoint.worker.context.way;
        way.begun(Operation::Send, bytes);
        let request = match way.noting(posted(CALL, pointer)) {
            Ok(Posted::Done) => None,
            Ok(Posted::Pending(request)) => Some(request),
            Err(error) => {
                drop(ManuallyDrop::into_inner(held));
                return Err(error);
            }
        };
        Ok(Self {
            held,
            request,
            endpoint: Rc::clone(endpoint),
        })
    }

    /// `None` while UCX needs the memory.
    pub fn poll(&mut self) -> Option<Result<(), UcxError>> {
        let result = match &self.request {
            Some(request) => {
                let way = self.endpoint.worker.context.way;
                way.noting(request.poll()?)
            }
            None => Ok(()),
        };
        self.request = None;
        Some(result)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.request.is_none() {
            // SAFETY: no operation runs, and `held` is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.held) };
        }
        // Otherwise header and body are leaked on purpose.
    }
}

#[cfg(test)]
mod tests;
