//! Kernels that may start before the one ahead of them has ended (programmatic dependent launch): they do
//! what needs nothing of it, and wait on the device for the rest.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{PoisonError, RwLock};

use cudarc::driver::sys::{self, CUfunction_attribute_enum};
use cudarc::driver::{DeviceRepr, result};

use super::device::{Gpu, PLAIN_SHARED_BYTES, image};
use super::error::{Result, argument};
use super::launch::Grid;

/// When a kernel starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// After everything enqueued before.
    #[default]
    InOrder,
    /// As soon as the kernel enqueued right before lets it, which must be one that does; weights that it reads then
    /// were there before that one started.
    Early,
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Function {}
// SAFETY: likewise.
unsafe impl Sync for Function {}

#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Module {}
// SAFETY: likewise.
unsafe impl Sync for Module {}

/// Loaded kernels, by file and name.
#[derive(Default)]
pub(super) struct EarlyKernels {
    modules: RwLock<HashMap<&'static str, Module>>,
    functions: RwLock<HashMap<(&'static str, &'static str), Function>>,
}

impl EarlyKernels {
    fn get(
        &self,
        gpu: &Gpu,
        file: &'static str,
        name: &'static str,
        shared: u32,
    ) -> Result<Function> {
        let known = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known.get(&(file, name)) {
            return Ok(*function);
        }
        drop(known);
        let module = self.module(gpu, file)?;
        let symbol =
            CString::new(name).map_err(|_| argument("kernel", "name", "has a zero byte"))?;
        // SAFETY: the module was loaded and stays so until the GPU is dropped.
        let function = unsafe { result::module::get_function(module.0, symbol) }?;
        if shared > PLAIN_SHARED_BYTES {
            let most = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(shared).unwrap_or(i32::MAX);
            // SAFETY: the function exists.
            unsafe { result::function::set_function_attribute(function, most, bytes) }?;
        }
        let mut known = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert((file, name), Function(function));
        Ok(Function(function))
    }

    fn module(&self, gpu: &Gpu, file: &'static str) -> Result<Module> {
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(file) {
            return Ok(*module);
        }
        gpu.context()?;
        // SAFETY: a cubin that nvcc wrote, whole in memory; the context is current.
        let module = Module(unsafe { result::module::load_data(image(file)?.as_ptr().cast()) }?);
        modules.insert(file, module);
        Ok(module)
    }

    /// Unloads everything; the context is current.
    pub(super) fn clear(&mut self) {
        let modules = self
            .modules
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for (_, module) in modules.drain() {
            // A failure can only repeat one that was reported by the call that caused it.
            // SAFETY: loaded once; nobody has its functions any more.
            let _ = unsafe { result::module::unload(module.0) };
        }
    }
}

/// Enqueues kernel `name` of `cuda/<file>.cu`, whose arguments are `arguments` and, unless it is absent, `more`.
///
/// # Safety
/// They have the layouts of the kernel's arguments, and the kernel, started on `grid`, stays within the memory
/// they name, and waits for the one before it before it touches what that one may write.
pub(super) unsafe fn launch_at<A: DeviceRepr>(
    gpu: &Gpu,
    (file, name): (&'static str, &'static str),
    grid: Grid,
    start: Start,
    arguments: &A,
    more: Option<&i32>,
) -> Result<()> {
    let function = gpu.early().get(gpu, file, name, grid.shared)?;
    gpu.context()?;
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: grid.blocks.0,
        gridDimY: grid.blocks.1,
        gridDimZ: grid.blocks.2,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared,
        hStream: gpu.stream().cu_stream(),
        attrs: &raw mut attribute,
        numAttrs: u32::from(start == Start::Early),
    };
    let mut pointers: [*mut c_void; 2] = [
        std::ptr::from_ref(arguments).cast_mut().cast(),
        more.map_or(std::ptr::null_mut(), |m| {
            std::ptr::from_ref(m).cast_mut().cast()
        }),
    ];
    // SAFETY: the caller vouches for layouts and ranges; the driver copies the arguments before it returns.
    unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            function.0,
            pointers.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
    .result()?;
    Ok(())
}
