//! The GPU twins of the operations, for NVIDIA Hopper (H100, H200).
//!
//! Activations are bf16 `[tokens, features]` with fp32 accumulation; the CPU operations of this crate define
//! what each one computes, and the tests compare (relative error at most 1e-2). One operation, one file:
//! `cuda/<op>.cu` is the kernel and `src/cuda/<op>.rs` checks its arguments and launches it.
//!
//! Every operation is enqueued on the stream of its [`Gpu`] and returns at once; reading a tensor waits.
//! Arguments are checked before anything is launched. Libraries are looked up when a GPU is opened, so that
//! a build with this path also starts where there is none.
#![allow(unsafe_code)]

mod attention;
mod attention_fused;
mod attention_tiles;
mod bias;
mod codes;
mod comm;
mod comm_library;
mod comm_ops;
mod conv;
mod conv_layout;
mod decode;
mod decode_attention;
mod decode_parts;
mod decode_rows;
mod device;
mod early;
mod embed;
mod error;
mod gemm;
mod gemm_launch;
mod group_norm;
mod heads;
mod launch;
mod link;
mod map;
mod memory;
mod merge;
mod norm;
mod norm_layer;
mod permute;
mod random;
mod rope;
mod router;
mod scheduler;
mod tensor;
mod transfer;
mod vae_ops;

pub use attention::{AttentionOut, AttentionPlan, attention};
pub use attention_fused::{attention_fused, plan_fused};
pub use attention_tiles::{GpuAttnRow, KvRun};
pub use bias::{Activation, bias_activation};
pub use codes::{CODE_COLUMNS, SwiGluCodes};
pub use comm::{Comm, CommAborter, CommId, CommOptions, Lane};
pub use comm_ops::Transfer;
pub use conv::{ConvOptions, Moves, Shortcut, conv, conv_sum_elements};
pub use conv_layout::{ChannelSums, GpuConvWeight, Pictures};
pub use decode::{
    DECODE_TOKENS, DecodeProduct, DecodeWeights, decode_activation, decode_dense, decode_down,
    decode_gate_up,
};
pub use decode_attention::{DecodeAttention, DecodeRow, DecodeRows, decode_attention};
pub use decode_parts::{DecodeParts, Gather, PartSum};
pub use decode_rows::{
    DecodeAdded, DecodeEnter, DecodeRoute, DecodeRouting, DecodeSource, decode_enter, decode_route,
    likeliest,
};
pub use device::{Gpu, GpuMemory};
pub use early::Start;
pub use embed::{RowIndex, gather_rows, move_rows, narrow_to_bf16, scalar_code, scatter_rows};
pub use error::{CudaError, Result};
pub use gemm::{Finish, gemm, gemm_fp8, grouped_gemm, grouped_gemm_fp8, grouped_swiglu_fp8};
pub use group_norm::{
    GpuGroupNorm, group_norm_apply, group_norm_coefficients, group_norm_sum_elements,
    group_norm_sums,
};
pub use heads::WholeAttention;
pub use link::{UploadRing, Uploader};
pub use memory::DeviceBuffer;
pub use merge::{KeptOutputs, Partial, merge_attention, sum_kept};
pub use norm::{
    E4m3Rows, ExpertOutputs, NormOutput, RmsNorm, add_rms_norm, combine, quantize_rows, rms_norm,
};
pub use norm_layer::{GpuLayerNorm, add_layer_norm, layer_norm};
pub use permute::{Permutation, gather, gather_e4m3, permute};
pub use random::fill_random;
pub use rope::{KvSlot, KvSlots, Qkv, qkv_rope_norm_write};
pub use router::{GpuRouting, RouterWeight, route};
pub use scheduler::{StepJob, StepJobs, guide_step};
pub use tensor::{GpuTensor, GpuType};
pub use transfer::{CopyStream, Mark, PinnedBuffer};
pub use vae_ops::{channel_means, to_channels_last, wide_softmax};
