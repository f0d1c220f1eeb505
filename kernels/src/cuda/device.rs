//! One GPU: its context, the stream that everything runs on in order, and the compiled kernels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, result};
use cudarc::nvrtc::Ptx;

use super::early::EarlyKernels;
use super::error::{CudaError, Result};
use super::memory::Spare;

/// Version of CUDA the kernels are compiled for, as the driver counts.
const CUDA_VERSION: i32 = 13_000;
/// Shared memory a block may have without asking, in bytes.
pub(super) const PLAIN_SHARED_BYTES: u32 = 48 << 10;

static CUBINS: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// An opened GPU. Work runs in the order it was enqueued.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    multiprocessors: u32,
    name: String,
    modules: RwLock<HashMap<&'static str, Arc<CudaModule>>>,
    functions: RwLock<HashMap<(&'static str, &'static str), CudaFunction>>,
    early: EarlyKernels,
    spare: Mutex<Spare>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name)
            .field("ordinal", &self.context.ordinal())
            .finish_non_exhaustive()
    }
}

/// Free and total device memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Not allocated by anyone.
    pub free: usize,
    /// Of the device.
    pub total: usize,
}

impl Gpu {
    /// Number of GPUs the driver shows; an error where there is no driver, never a panic.
    ///
    /// # Errors
    /// `NoDriver`, or what the driver says.
    pub fn count() -> Result<usize> {
        // SAFETY: only tries to open a shared library.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        cudarc::driver::result::init()?;
        Ok(usize::try_from(CudaContext::device_count()?).unwrap_or(0))
    }

    /// Opens GPU `ordinal` after checking that the kernels can run on it.
    ///
    /// # Errors
    /// `NoDriver`, `NoDevice`, `OldDriver`, `WrongDevice`, or what the driver says.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let mut found = 0;
        // SAFETY: the driver is present and writes one integer.
        unsafe { sys::cuDriverGetVersion(&raw mut found) }.result()?;
        if found < CUDA_VERSION {
            let needed = CUDA_VERSION;
            return Err(CudaError::OldDriver { found, needed });
        }
        let context = CudaContext::new(ordinal)?;
        // SAFETY: buffers of this crate are not cudarc's slices; order comes from the one stream.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability()?;
        let name = context.name()?;
        if (major, minor) != (9, 0) {
            return Err(CudaError::WrongDevice { name, major, minor });
        }
        let processors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Arc::new(Self {
            stream: context.new_stream()?,
            context,
            multiprocessors: u32::try_from(processors).unwrap_or(1),
            name,
            modules: RwLock::default(),
            functions: RwLock::default(),
            early: EarlyKernels::default(),
            spare: Mutex::default(),
        }))
    }

    /// Number of the device among those the driver shows.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Name of the device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Streaming multiprocessors: how many blocks a persistent kernel starts.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Memory at this time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<GpuMemory> {
        let (free, total) = self.context.mem_get_info()?;
        Ok(GpuMemory { free, total })
    }

    /// Waits until everything enqueued has run; reports a kernel that failed.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// The context; makes it current on this thread.
    pub(crate) fn context(&self) -> Result<&Arc<CudaContext>> {
        self.context.bind_to_thread()?;
        Ok(&self.context)
    }

    /// Small device buffers that nobody uses.
    pub(crate) fn spare(&self) -> &Mutex<Spare> {
        &self.spare
    }

    /// Kernels that may start early.
    pub(super) fn early(&self) -> &EarlyKernels {
        &self.early
    }

    /// The stream that work runs on.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Kernel `name` of `cuda/<file>.cu`, allowed to use `shared` bytes of dynamic shared memory.
    pub(crate) fn kernel(
        &self,
        file: &'static str,
        name: &'static str,
        shared: u32,
    ) -> Result<CudaFunction> {
        let known = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known.get(&(file, name)) {
            return Ok(function.clone());
        }
        drop(known);
        let function = self.module(file)?.load_function(name)?;
        if shared > PLAIN_SHARED_BYTES {
            let most = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(most, i32::try_from(shared).unwrap_or(i32::MAX))?;
        }
        let mut known = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert((file, name), function.clone());
        Ok(function)
    }

    fn module(&self, file: &'static str) -> Result<Arc<CudaModule>> {
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(file) {
            return Ok(module.clone());
        }
        let image = image(file)?;
        let module = self.context.load_module(Ptx::from_binary(image.to_vec()))?;
        modules.insert(file, module.clone());
        Ok(module)
    }
}

/// What nvcc made of `cuda/<file>.cu`.
pub(super) fn image(file: &'static str) -> Result<&'static [u8]> {
    let image = CUBINS.iter().find(|(name, _)| *name == file);
    let (_, image) = image.ok_or_else(|| CudaError::Library {
        library: "kernels",
        call: "module",
        message: format!("{file}.cu was not compiled into this build"),
    })?;
    Ok(image)
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        self.early.clear();
        let spare = self.spare.get_mut().unwrap_or_else(PoisonError::into_inner);
        for address in spare.drain() {
            // A failure can only repeat one that was reported by the call that caused it.
            // SAFETY: allocated by `DeviceBuffer::new`; its last user gave it back.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}
