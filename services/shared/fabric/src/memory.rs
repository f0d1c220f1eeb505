use std::ptr::{self, NonNull};
use std::sync::Arc;

use ucx_rs::sys;

use crate::context::Context;
use crate::shared::SharedMemory;
use crate::status::{UcxError, check};

/// One region that peers read and write one-sided.
///
/// Because peers write while this process runs, it is never lent out as a slice: bytes are copied in
/// and out.
#[derive(Debug)]
pub struct PoolMemory {
    // First, so that UCX forgets the memory before it goes.
    registration: Registration,
    base: NonNull<u8>,
    bytes: usize,
    /// Owner of the memory; UCX itself when absent.
    _shared: Option<Arc<SharedMemory>>,
}

// SAFETY: the region is plain memory that is only reached through copies of bytes.
unsafe impl Send for PoolMemory {}
// SAFETY: as above; a racing peer can garble bytes, which the checksums are there to find.
unsafe impl Sync for PoolMemory {}

impl PoolMemory {
    /// Registers memory that processes of this node map, for peers that cannot.
    ///
    /// # Errors
    /// What UCX says.
    pub fn of_shared(context: &Arc<Context>, shared: &Arc<SharedMemory>) -> Result<Self, UcxError> {
        let (base, bytes) = (shared.base(), shared.bytes());
        Ok(Self {
            registration: Registration::of_range(context, base.as_ptr(), bytes)?,
            base,
            bytes,
            _shared: Some(Arc::clone(shared)),
        })
    }

    /// Allocates, so that peers on the node can map it through UCX, and registers `bytes` bytes.
    ///
    /// # Errors
    /// What UCX says.
    pub fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Self, UcxError> {
        let params = sys::ucp_mem_map_params_t {
            field_mask: u64::from(
                sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH
                    | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_FLAGS,
            ),
            length: bytes,
            flags: sys::UCP_MEM_MAP_ALLOCATE,
            ..Default::default()
        };
        let registration = Registration::map(context, &params)?;
        let mut attr = sys::ucp_mem_attr_t {
            field_mask: u64::from(
                sys::ucp_mem_attr_field_UCP_MEM_ATTR_FIELD_ADDRESS
                    | sys::ucp_mem_attr_field_UCP_MEM_ATTR_FIELD_LENGTH,
            ),
            ..Default::default()
        };
        // SAFETY: the registration is live and `attr` is a valid place for the answer.
        let status = unsafe { sys::ucp_mem_query(registration.handle, &raw mut attr) };
        check("ucp_mem_query", status)?;
        let base = NonNull::new(attr.address.cast::<u8>())
            .filter(|_| attr.length >= bytes)
            .ok_or(UcxError {
                call: "ucp_mem_query",
                status: sys::ucs_status_t_UCS_ERR_NO_MEMORY,
            })?;
        Ok(Self {
            registration,
            base,
            bytes,
            _shared: None,
        })
    }

    /// Bytes in the region.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address that peers name in their operations.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// What a peer needs to reach the region. It grants the whole region and is never logged.
    ///
    /// # Errors
    /// What UCX says.
    pub fn remote_key(&self) -> Result<Vec<u8>, UcxError> {
        let context = self.registration.context.handle;
        let mut buffer = ptr::null_mut();
        let mut len = 0;
        // SAFETY: context and registration are live, both places for the result are valid.
        let status = unsafe {
            sys::ucp_rkey_pack(
                context,
                self.registration.handle,
                &raw mut buffer,
                &raw mut len,
            )
        };
        check("ucp_rkey_pack", status)?;
        let mut key = vec![0; len];
        // SAFETY: UCX wrote `len` bytes at `buffer`, and `key` has room for them.
        unsafe { ptr::copy_nonoverlapping(buffer.cast::<u8>(), key.as_mut_ptr(), len) };
        // SAFETY: the buffer came from `ucp_rkey_pack` and is released once.
        unsafe { sys::ucp_rkey_buffer_release(buffer) };
        Ok(key)
    }

    /// Copies `[offset, offset + out.len())` of the region out. False, with `out` untouched, when
    /// that reaches past the end.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset
            .checked_add(out.len())
            .is_none_or(|end| end > self.bytes)
        {
            return false;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let from = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range lies in the region, and `out` is memory of this process alone.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        true
    }
}

/// Memory known to the transports; unknown again when dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    context: Arc<Context>,
    pub(crate) handle: sys::ucp_mem_h,
}

impl Registration {
    fn map(context: &Arc<Context>, params: &sys::ucp_mem_map_params_t) -> Result<Self, UcxError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the context is live, `params` and the place for the handle are valid.
        let status = unsafe { sys::ucp_mem_map(context.handle, params, &raw mut handle) };
        check("ucp_mem_map", status)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// Registers memory that the caller keeps alive, at one address, for as long as this lives.
    pub(crate) fn of_range(
        context: &Arc<Context>,
        base: *mut u8,
        bytes: usize,
    ) -> Result<Self, UcxError> {
        let params = sys::ucp_mem_map_params_t {
            field_mask: u64::from(
                sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                    | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH,
            ),
            address: base.cast(),
            length: bytes,
            ..Default::default()
        };
        Self::map(context, &params)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: the handle came from `ucp_mem_map` on this context and is unmapped once.
        unsafe { sys::ucp_mem_unmap(self.context.handle, self.handle) };
    }
}
