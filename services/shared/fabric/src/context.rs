use std::ffi::{CStr, CString};
use std::ptr;

use ucx_rs::sys;

use crate::counters::Way;
use crate::status::{UcxError, check};

/// What a context is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// One-sided copies: [`crate::Transfer`].
    Copies,
    /// Messages: [`crate::Sending`], [`Worker::next_message`](crate::Worker::next_message).
    Messages,
}

/// A UCX context: the transports of a process and the memory registered with them.
#[derive(Debug)]
pub struct Context {
    pub(crate) handle: sys::ucp_context_h,
    pub(crate) usage: Use,
    pub(crate) way: Way,
}

// SAFETY: the context is created with `mt_workers_shared`, so UCX locks it itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the transports that `settings` name (UCX option names without the `UCX_` prefix).
    ///
    /// # Errors
    /// What UCX says of an option or a transport.
    pub fn open(settings: &[(&CStr, CString)], usage: Use) -> Result<Self, UcxError> {
        let config = Config::read()?;
        for (name, value) in settings {
            config.set(name, value)?;
        }
        let feature = match usage {
            Use::Copies => sys::ucp_feature_UCP_FEATURE_RMA,
            Use::Messages => sys::ucp_feature_UCP_FEATURE_AM,
        };
        let params = sys::ucp_params_t {
            field_mask: u64::from(
                sys::ucp_params_field_UCP_PARAM_FIELD_FEATURES
                    | sys::ucp_params_field_UCP_PARAM_FIELD_MT_WORKERS_SHARED,
            ),
            features: u64::from(feature | sys::ucp_feature_UCP_FEATURE_WAKEUP),
            mt_workers_shared: 1,
            ..Default::default()
        };
        let mut handle = ptr::null_mut();
        // SAFETY: params, config and the place for the handle live across the call.
        let status = unsafe {
            sys::ucp_init_version(
                sys::UCP_API_MAJOR,
                sys::UCP_API_MINOR,
                &raw const params,
                config.0,
                &raw mut handle,
            )
        };
        check("ucp_init", status)?;
        Ok(Self {
            handle,
            usage,
            way: Way::of(settings),
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory hold the context by `Arc`, so none is left here.
        unsafe { sys::ucp_cleanup(self.handle) };
    }
}

struct Config(*mut sys::ucp_config_t);

impl Config {
    fn read() -> Result<Self, UcxError> {
        let mut config = ptr::null_mut();
        // SAFETY: null prefix and file mean the defaults; the place for the result is valid.
        let status = unsafe { sys::ucp_config_read(ptr::null(), ptr::null(), &raw mut config) };
        check("ucp_config_read", status)?;
        Ok(Self(config))
    }

    fn set(&self, name: &CStr, value: &CStr) -> Result<(), UcxError> {
        // SAFETY: the config is live, both strings end in a null byte and are copied.
        let status = unsafe { sys::ucp_config_modify(self.0, name.as_ptr(), value.as_ptr()) };
        check("ucp_config_modify", status)
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: the config came from `ucp_config_read` and is released once.
        unsafe { sys::ucp_config_release(self.0) };
    }
}
