//! The one error type of this crate.
//!
//! A caller asks [`ModelError::kind`] and maps it once: bad input is the caller's, a bad checkpoint is the
//! operator's, `Unimplemented` is an honest "not built", the rest is a defect of this program.

/// What happened, with the field, file or tensor named.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A value of a request is outside what the model accepts.
    #[error("{field}: {message}")]
    InvalidArgument {
        /// Name of the request field, as the wire schema spells it.
        field: &'static str,
        /// What is wrong and what would be accepted.
        message: String,
    },
    /// `config.json` or `generation_config.json` is missing a field or holds an impossible value.
    #[error("config field `{field}`: {message}")]
    Config {
        /// Path of the field inside the file, for example `vae.block_out_channels`.
        field: String,
        /// What is wrong.
        message: String,
    },
    /// A checkpoint file cannot be read or contradicts itself.
    #[error("checkpoint file `{file}`: {message}")]
    CheckpointFile {
        /// File name (not the whole path).
        file: String,
        /// What is wrong.
        message: String,
    },
    /// One tensor of the checkpoint is unusable.
    #[error("tensor `{tensor}`: {message}")]
    CheckpointTensor {
        /// Tensor name as the checkpoint spells it.
        tensor: String,
        /// What is wrong.
        message: String,
    },
    /// The set of tensors differs from what the config calls for; every difference is counted and the first
    /// ones are named.
    #[error("checkpoint does not match its config: {0}")]
    CheckpointMismatch(crate::weights::Mismatch),
    /// The tokenizer file is unusable or lacks a special token that the model needs.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The checkpoint or the request asks for something that is not built.
    #[error("unimplemented: {0}")]
    Unimplemented(String),
    /// Memory that a request needs is taken.
    #[error("{what}: {needed} bytes are needed, {free} are free")]
    Exhausted {
        /// Which memory.
        what: &'static str,
        /// Bytes asked for.
        needed: usize,
        /// Bytes free, perhaps not in one piece.
        free: usize,
    },
    /// A model and what is asked of it need more memory than a GPU has.
    #[cfg(feature = "cuda")]
    #[error("gpu {ordinal}: {needed} bytes are needed, {free} are free: {missing} are missing; what would fit: {instead}", missing = needed.saturating_sub(*free))]
    TooLarge {
        /// Number of the GPU.
        ordinal: usize,
        /// Bytes asked for.
        needed: usize,
        /// Bytes free.
        free: usize,
        /// Ways that do fit.
        instead: String,
    },
    /// The GPU refused or failed.
    #[cfg(feature = "cuda")]
    #[error("gpu: {0}")]
    Gpu(#[from] kernels::cuda::CudaError),
    /// The ranks of a group did not finish an operation together.
    #[error("ranks: {0}")]
    Ranks(#[from] parallel::ParallelError),
    /// A kernel refused its operands: a defect of this crate.
    #[error("kernel: {0}")]
    Kernel(#[from] kernels::KernelError),
    /// A broken invariant: a defect of this crate.
    #[error("internal: {0}")]
    Internal(String),
}

impl From<kernels::memory::OutOfMemory> for ModelError {
    fn from(lack: kernels::memory::OutOfMemory) -> Self {
        Self::Exhausted {
            what: "memory",
            needed: lack.needed,
            free: lack.free,
        }
    }
}

/// Whose problem an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller's: the named request field is wrong.
    InvalidArgument {
        /// Name of the request field.
        field: &'static str,
    },
    /// The operator's: the checkpoint directory is wrong.
    Checkpoint,
    /// Nobody's: the feature is not built.
    Unimplemented,
    /// Nobody's: memory is taken, later it may be free.
    Exhausted,
    /// Ours.
    Internal,
}

impl ModelError {
    /// Classifies the error for the one place that maps it to status codes.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidArgument { field, .. } => ErrorKind::InvalidArgument { field },
            Self::Config { .. }
            | Self::CheckpointFile { .. }
            | Self::CheckpointTensor { .. }
            | Self::CheckpointMismatch(_)
            | Self::Tokenizer(_) => ErrorKind::Checkpoint,
            Self::Unimplemented(_) => ErrorKind::Unimplemented,
            Self::Exhausted { .. } => ErrorKind::Exhausted,
            #[cfg(feature = "cuda")]
            Self::TooLarge { .. } | Self::Gpu(kernels::cuda::CudaError::OutOfMemory { .. }) => {
                ErrorKind::Exhausted
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => ErrorKind::Internal,
            Self::Kernel(_) | Self::Internal(_) | Self::Ranks(_) => ErrorKind::Internal,
        }
    }

    /// Bad request value in `field`.
    pub fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::InvalidArgument {
            field,
            message: message.into(),
        }
    }

    /// Bad config value in `field`.
    pub fn config(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Config {
            field: field.into(),
            message: message.into(),
        }
    }

    /// Bad checkpoint file.
    pub fn file(file: impl Into<String>, message: impl Into<String>) -> Self {
        Self::CheckpointFile {
            file: file.into(),
            message: message.into(),
        }
    }

    /// Bad tensor.
    pub fn tensor(tensor: impl Into<String>, message: impl Into<String>) -> Self {
        Self::CheckpointTensor {
            tensor: tensor.into(),
            message: message.into(),
        }
    }
}
