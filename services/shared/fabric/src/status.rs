use ucx_rs::sys;

/// A UCX call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", ucx_rs::status_string(*.status))]
pub struct UcxError {
    /// Name of the call.
    pub call: &'static str,
    /// Status that it gave.
    pub status: i8,
}

impl UcxError {
    /// UCX or the system is out of memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.status == sys::ucs_status_t_UCS_ERR_NO_MEMORY
    }
}

/// Turns a status into a result.
pub(crate) fn check(call: &'static str, status: sys::ucs_status_t) -> Result<(), UcxError> {
    if status == 0 {
        Ok(())
    } else {
        Err(UcxError { call, status })
    }
}

/// What a non-blocking call returned, read once at the border.
pub(crate) enum Posted {
    /// Finished already; there is no request.
    Done,
    /// Running; the request must be freed after it completes.
    Pending(Request),
}

/// Reads the tri-state pointer of a `*_nbx` call.
pub(crate) fn posted(
    call: &'static str,
    pointer: sys::ucs_status_ptr_t,
) -> Result<Posted, UcxError> {
    match ucx_rs::decode_status_ptr(pointer) {
        Ok(None) => Ok(Posted::Done),
        Ok(Some(request)) => Ok(Posted::Pending(Request {
            call,
            pointer: request,
        })),
        Err(status) => Err(UcxError { call, status }),
    }
}

/// A running operation. Dropping it tells UCX to release it once it completes.
#[derive(Debug)]
pub(crate) struct Request {
    call: &'static str,
    pointer: sys::ucs_status_ptr_t,
}

impl Request {
    /// `None` while it runs.
    pub(crate) fn poll(&self) -> Option<Result<(), UcxError>> {
        // SAFETY: `pointer` is a request that UCX returned and that is freed only in `drop`.
        let status = unsafe { sys::ucp_request_check_status(self.pointer) };
        (status != sys::ucs_status_t_UCS_INPROGRESS).then(|| check(self.call, status))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: `pointer` is a live request; UCX defers the release of one that still runs.
        unsafe { sys::ucp_request_free(self.pointer) };
    }
}
