use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use ucx_rs::sys;

use crate::context::{Context, Use};
use crate::message::{Arrived, Inbox};
use crate::status::{UcxError, check};

/// Whether a worker may sleep on its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// The descriptor becomes readable on the next event.
    Yes,
    /// Events are waiting: progress first.
    Busy,
}

/// A progress engine. It stays on the thread that made it.
#[derive(Debug)]
pub struct Worker {
    pub(crate) context: Arc<Context>,
    pub(crate) handle: sys::ucp_worker_h,
    /// UCX holds its address, so it is dropped after the worker is destroyed.
    inbox: Box<Inbox>,
}

impl Worker {
    /// A worker of `context`.
    ///
    /// # Errors
    /// What UCX says.
    pub fn new(context: &Arc<Context>) -> Result<Rc<Self>, UcxError> {
        let params = sys::ucp_worker_params_t {
            field_mask: u64::from(sys::ucp_worker_params_field_UCP_WORKER_PARAM_FIELD_THREAD_MODE),
            thread_mode: sys::ucs_thread_mode_t_UCS_THREAD_MODE_SINGLE,
            ..Default::default()
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the context is live, `params` and the place for the handle are valid.
        let status =
            unsafe { sys::ucp_worker_create(context.handle, &raw const params, &raw mut handle) };
        check("ucp_worker_create", status)?;
        let worker = Self {
            context: Arc::clone(context),
            handle,
            inbox: Box::default(),
        };
        if context.usage == Use::Messages {
            worker.inbox.attach(handle)?;
        }
        Ok(Rc::new(worker))
    }

    /// The next message that came in during [`Self::progress`].
    pub fn next_message(self: &Rc<Self>) -> Option<Arrived> {
        self.inbox.next(self)
    }

    /// What a peer needs to connect.
    ///
    /// # Errors
    /// What UCX says.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let mut address = ptr::null_mut();
        let mut len = 0;
        // SAFETY: the worker is live and both places for the result are valid.
        let status =
            unsafe { sys::ucp_worker_get_address(self.handle, &raw mut address, &raw mut len) };
        check("ucp_worker_get_address", status)?;
        let mut bytes = vec![0; len];
        // SAFETY: UCX wrote `len` bytes at `address`, and `bytes` has room for them.
        unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), bytes.as_mut_ptr(), len) };
        // SAFETY: the address came from this worker and is released once.
        unsafe { sys::ucp_worker_release_address(self.handle, address) };
        Ok(bytes)
    }

    /// Descriptor that becomes readable on events once [`Self::arm`] said [`Armed::Yes`].
    ///
    /// # Errors
    /// What UCX says.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>, UcxError> {
        let mut fd = -1;
        // SAFETY: the worker is live, was created with the wakeup feature, and `fd` is valid.
        let status = unsafe { sys::ucp_worker_get_efd(self.handle, &raw mut fd) };
        check("ucp_worker_get_efd", status)?;
        // SAFETY: UCX keeps this descriptor open for as long as the worker, which is borrowed.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Works on running operations; true when something moved.
    pub fn progress(&self) -> bool {
        // SAFETY: the worker is live and this is the thread that made it.
        unsafe { sys::ucp_worker_progress(self.handle) != 0 }
    }

    /// Asks for a signal on [`Self::event_fd`] at the next event.
    ///
    /// # Errors
    /// What UCX says.
    pub fn arm(&self) -> Result<Armed, UcxError> {
        // SAFETY: the worker is live and this is the thread that made it.
        let status = unsafe { sys::ucp_worker_arm(self.handle) };
        if status == sys::ucs_status_t_UCS_ERR_BUSY {
            return Ok(Armed::Busy);
        }
        check("ucp_worker_arm", status)?;
        Ok(Armed::Yes)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inbox.refuse_all(self.handle);
        // SAFETY: endpoints hold the worker by `Rc`, so none is left here.
        unsafe { sys::ucp_worker_destroy(self.handle) };
    }
}
