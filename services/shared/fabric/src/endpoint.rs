use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::rc::Rc;

use ucx_rs::sys;

use crate::counters::Operation;
use crate::status::{Posted, Request, UcxError, check, posted};
use crate::worker::Worker;

/// Zero bytes appended to what a peer sent before UCX parses it: UCX takes no length, and must not
/// run off the end of a truncated address or key.
const PARSE_SLACK: usize = 4096;
/// Most lanes whose transport is asked for.
const MAX_LANES: usize = 16;

/// Called when a peer dies. Its operations fail by themselves, which is where it is handled; UCX
/// prints an error of its own when there is no such function.
extern "C" fn peer_failed(_: *mut c_void, _: sys::ucp_ep_h, _: sys::ucs_status_t) {}

/// A connection to the worker of a peer.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) worker: Rc<Worker>,
    pub(crate) handle: sys::ucp_ep_h,
    closed: Cell<bool>,
}

impl Endpoint {
    /// Connects to the worker behind `address`. The handshake runs with the first operation.
    ///
    /// The endpoint reports the death of its peer by failing its operations, and can be torn down
    /// at any time; both need error handling mode `PEER`.
    ///
    /// # Errors
    /// What UCX says.
    pub fn connect(worker: &Rc<Worker>, address: &[u8]) -> Result<Rc<Self>, UcxError> {
        let padded = padded(address);
        let params = sys::ucp_ep_params_t {
            field_mask: u64::from(
                sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                    | sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                    | sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLER,
            ),
            address: padded.as_ptr().cast(),
            err_mode: sys::ucp_err_handling_mode_t_UCP_ERR_HANDLING_MODE_PEER,
            err_handler: sys::ucp_err_handler {
                cb: Some(peer_failed),
                arg: ptr::null_mut(),
            },
            ..Default::default()
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the worker is live; `params`, the address and the place for the handle are valid.
        let status =
            unsafe { sys::ucp_ep_create(worker.handle, &raw const params, &raw mut handle) };
        let way = worker.context.way;
        way.begun(Operation::Connect, 0);
        way.noting(check("ucp_ep_create", status))?;
        Ok(Rc::new(Self {
            worker: Rc::clone(worker),
            handle,
            closed: Cell::new(false),
        }))
    }

    /// False once [`Self::abort`] ran: the handle may no longer be used.
    pub(crate) fn ensure_open(&self, call: &'static str) -> Result<(), UcxError> {
        if self.closed.get() {
            Err(UcxError {
                call,
                status: sys::ucs_status_t_UCS_ERR_CANCELED,
            })
        } else {
            Ok(())
        }
    }

    /// Cuts the connection: running operations end as cancelled in the next calls to progress, and
    /// nothing of them reaches the peer's memory after that.
    pub fn abort(&self) {
        if self.closed.replace(true) {
            return;
        }
        let params = sys::ucp_request_param_t {
            op_attr_mask: sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_FLAGS,
            flags: sys::ucp_ep_close_flags_t_UCP_EP_CLOSE_FLAG_FORCE,
            ..Default::default()
        };
        // SAFETY: the endpoint is live, and `closed` keeps it from being used or closed again.
        let pointer = unsafe { sys::ucp_ep_close_nbx(self.handle, &raw const params) };
        match posted("ucp_ep_close_nbx", pointer) {
            // A peer that closed first makes this fail; there is nothing left to close then.
            Ok(Posted::Done) | Err(_) => {}
            Ok(Posted::Pending(request)) => drop(request),
        }
    }

    /// Starts to wait until everything sent so far has left this process.
    ///
    /// # Errors
    /// What UCX says.
    pub fn flush(self: &Rc<Self>) -> Result<Flushing, UcxError> {
        self.ensure_open("ucp_ep_flush_nbx")?;
        let params = sys::ucp_request_param_t::default();
        // SAFETY: the endpoint is live and `params` is valid.
        let pointer = unsafe { sys::ucp_ep_flush_nbx(self.handle, &raw const params) };
        let way = self.worker.context.way;
        way.begun(Operation::Flush, 0);
        let request = match way.noting(posted("ucp_ep_flush_nbx", pointer))? {
            Posted::Done => None,
            Posted::Pending(request) => Some(request),
        };
        Ok(Flushing {
            request,
            _endpoint: Rc::clone(self),
        })
    }

    /// Names of the transports that this endpoint really uses, sorted.
    ///
    /// # Errors
    /// What UCX says.
    pub fn transports(&self) -> Result<Vec<String>, UcxError> {
        self.ensure_open("ucp_ep_query")?;
        let mut entries = [sys::ucp_transport_entry_t::default(); MAX_LANES];
        let mut attr = sys::ucp_ep_attr_t {
            field_mask: u64::from(sys::ucp_ep_attr_field_UCP_EP_ATTR_FIELD_TRANSPORTS),
            transports: sys::ucp_transports_t {
                entries: entries.as_mut_ptr(),
                num_entries: MAX_LANES as u32,
                entry_size: size_of::<sys::ucp_transport_entry_t>(),
            },
            ..Default::default()
        };
        // SAFETY: the endpoint is live, and `attr` points at room for `MAX_LANES` entries.
        let status = unsafe { sys::ucp_ep_query(self.handle, &raw mut attr) };
        check("ucp_ep_query", status)?;
        let used = (attr.transports.num_entries as usize).min(MAX_LANES);
        let names: BTreeSet<String> = entries[..used]
            .iter()
            .filter(|entry| !entry.transport_name.is_null())
            .map(|entry| {
                // SAFETY: UCX keeps this null-terminated name until the endpoint is closed.
                let name = unsafe { CStr::from_ptr(entry.transport_name) };
                name.to_string_lossy().into_owned()
            })
            .collect();
        Ok(names.into_iter().collect())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A flush under way.
#[derive(Debug)]
pub struct Flushing {
    request: Option<Request>,
    // After the request, which belongs to its worker.
    _endpoint: Rc<Endpoint>,
}

impl Flushing {
    /// `None` while it runs.
    #[must_use]
    pub fn poll(&self) -> Option<Result<(), UcxError>> {
        self.request.as_ref().map_or(Some(Ok(())), Request::poll)
    }
}

/// Permission to reach one region of a peer through one endpoint.
#[derive(Debug)]
pub struct RemoteKey {
    pub(crate) endpoint: Rc<Endpoint>,
    pub(crate) handle: sys::ucp_rkey_h,
}

impl RemoteKey {
    /// Reads a key that a peer packed.
    ///
    /// # Errors
    /// What UCX says.
    pub fn unpack(endpoint: &Rc<Endpoint>, packed: &[u8]) -> Result<Rc<Self>, UcxError> {
        endpoint.ensure_open("ucp_ep_rkey_unpack")?;
        let padded = padded(packed);
        let mut handle = ptr::null_mut();
        // SAFETY: the endpoint is live; the key and the place for the handle are valid.
        let status = unsafe {
            sys::ucp_ep_rkey_unpack(endpoint.handle, padded.as_ptr().cast(), &raw mut handle)
        };
        check("ucp_ep_rkey_unpack", status)?;
        Ok(Rc::new(Self {
            endpoint: Rc::clone(endpoint),
            handle,
        }))
    }

    /// The endpoint that the key belongs to.
    pub fn endpoint(&self) -> &Rc<Endpoint> {
        &self.endpoint
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: transfers hold their key by `Rc` until UCX is done, so no operation uses it.
        unsafe { sys::ucp_rkey_destroy(self.handle) };
    }
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = Vec::with_capacity(bytes.len() + PARSE_SLACK);
    padded.extend_from_slice(bytes);
    padded.resize(bytes.len() + PARSE_SLACK, 0);
    padded
}
