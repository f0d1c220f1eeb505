//! Why the GPU path refused or failed.

use cudarc::driver::DriverError;

use crate::error::KernelError;

/// Result of the GPU path.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Everything that can go wrong on or before the GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver on this machine.
    #[error("no CUDA driver: libcuda.so.1 cannot be loaded")]
    NoDriver,
    /// The driver is older than the kernels.
    #[error("the CUDA driver supports version {found}, this build needs {needed}")]
    OldDriver {
        /// `1000 * major + 10 * minor`.
        found: i32,
        /// Likewise.
        needed: i32,
    },
    /// There is no such device.
    #[error("gpu {ordinal} does not exist, the machine has {count}")]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// Devices there are.
        count: usize,
    },
    /// The kernels are compiled for another kind of GPU.
    #[error("{name} has compute capability {major}.{minor}, the kernels need 9.0")]
    WrongDevice {
        /// Name of the device.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// A library that a kernel needs cannot be loaded.
    #[error("{library} cannot be loaded")]
    NoLibrary {
        /// Its file name.
        library: &'static str,
    },
    /// Device memory is exhausted.
    #[error("{what} needs {needed} bytes of device memory, {free} are free: {missing} are missing", missing = needed.saturating_sub(*free))]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        needed: usize,
        /// Bytes free at that time.
        free: usize,
    },
    /// An argument was refused before anything ran.
    #[error(transparent)]
    Argument(#[from] KernelError),
    /// A library call failed.
    #[error("{library}: {call} failed: {message}")]
    Library {
        /// Library.
        library: &'static str,
        /// What was called.
        call: &'static str,
        /// What it said.
        message: String,
    },
    /// A group of GPUs does not work together any more; results that were not waited for are worthless.
    #[error("the group of gpus ended: {reason}")]
    GroupEnded {
        /// The first thing that went wrong.
        reason: String,
    },
    /// The driver refused a call or a kernel failed.
    #[error("cuda: {0}")]
    Driver(String),
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        let text = error
            .error_string()
            .map(|s| s.to_string_lossy().into_owned());
        Self::Driver(text.unwrap_or_else(|_| format!("{:?}", error.0)))
    }
}

/// An argument that is neither a shape nor an index is not acceptable.
pub(crate) fn argument(op: &'static str, what: &'static str, reason: &'static str) -> CudaError {
    KernelError::Argument { op, what, reason }.into()
}

/// A tensor has the wrong shape.
pub(crate) fn shape(
    op: &'static str,
    what: &'static str,
    expected: impl Into<String>,
    got: &[usize],
) -> CudaError {
    KernelError::shape(op, what, expected, got).into()
}
