//! What a GPU and the links between GPUs can do.
//!
//! Each figure names where it is from. Measured means on H200 cards with random weights of the published
//! sizes, not with this program's own GPU path.

use serde::{Deserialize, Serialize};

use crate::Op;

/// Element type of the decoder's large weights; everything else stays in two bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightType {
    /// Two bytes.
    #[default]
    Bf16,
    /// One byte; attention itself is still computed in two.
    Fp8,
}

impl WeightType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// How GPUs reach each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interconnect {
    /// All on NVLink.
    #[default]
    NvLink,
    /// Through PCIe gen 5 x16.
    Pcie,
    /// One network port of 400 Gbit/s for each GPU.
    Rdma,
}

/// Rates of the links, in bytes per second and rank, and the seconds an operation takes at least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Seconds of an operation that carries nothing.
    pub latency: f64,
    /// All-reduce and reduce-scatter.
    pub reduce: f64,
    /// All-gather and broadcast.
    pub gather: f64,
    /// All-to-all.
    pub all_to_all: f64,
    /// From one GPU to another.
    pub point_to_point: f64,
}

/// One GPU of a pool, and its links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Bytes of GPU memory.
    pub memory: u64,
    /// Bytes that are not ours: driver context, library workspaces, communication buffers.
    pub reserve: u64,
    /// Element type of the large weights.
    pub weights: WeightType,
    /// Operations per second of a large matrix product.
    pub dense: f64,
    /// The same of the experts, gathering and scattering of their tokens included.
    pub experts: f64,
    /// The same of attention.
    pub attention: f64,
    /// The same of convolutions.
    pub convolution: f64,
    /// Bytes per second from GPU memory.
    pub memory_rate: f64,
    /// Bytes per second from pinned host memory to one GPU.
    pub host_rate: f64,
    /// The links.
    pub link: Link,
}

impl Interconnect {
    /// The rates.
    #[must_use]
    pub fn link(self) -> Link {
        match self {
            // Measured between two GPUs with NCCL: 8 KiB all-reduce, 67 MB all-reduce in 0.31 ms, bus rates of
            // the others at 64 MiB, peer copy.
            Self::NvLink => Link {
                latency: 11e-6,
                reduce: 216e9,
                gather: 201e9,
                all_to_all: 230e9,
                point_to_point: 387e9,
            },
            // Assumed: the measured host link, of which collectives reach as much as on NVLink (two thirds).
            Self::Pcie => Link {
                latency: 20e-6,
                reduce: 37e9,
                gather: 28e9,
                all_to_all: 32e9,
                point_to_point: 55e9,
            },
            // Assumed: 50 GB/s nominal, nine tenths of it point to point, two thirds in collectives.
            Self::Rdma => Link {
                latency: 30e-6,
                reduce: 33e9,
                gather: 25e9,
                all_to_all: 29e9,
                point_to_point: 45e9,
            },
        }
    }
}

impl Link {
    /// Bytes per second of operations of `kind`, see [`Op::kind`].
    pub(super) fn rate(&self, kind: usize) -> f64 {
        let of = |op: Op| op.kind();
        if kind == of(Op::AllReduce) || kind == of(Op::ReduceScatter) {
            self.reduce
        } else if kind == of(Op::AllGather) || kind == of(Op::Broadcast { root: 0 }) {
            self.gather
        } else if kind == of(Op::AllToAll) || kind == of(Op::AllToAllV) {
            self.all_to_all
        } else {
            self.point_to_point
        }
    }
}

impl Machine {
    /// An H200 whose memory is taken to be `memory` bytes.
    #[must_use]
    pub fn h200(memory: u64, weights: WeightType, interconnect: Interconnect) -> Self {
        // Measured: bf16 products 747 to 768, fp8 per row 1396; the experts of one layer with their
        // gathering 423 in bf16, which is scaled by the ceilings of grouped products (750 and 1314) for fp8.
        let (dense, experts) = match weights {
            WeightType::Bf16 => (750e12, 423e12),
            WeightType::Fp8 => (1396e12, 423e12 * 1314.0 / 750.0),
        };
        Self {
            memory,
            // Assumed.
            reserve: 3 << 30,
            weights,
            dense,
            experts,
            // Measured: variable-length attention, two rows of 4097 queries.
            attention: 406e12,
            // Assumed: half the rate of a product.
            convolution: 375e12,
            // Measured ceiling of streaming kernels.
            memory_rate: 4.3e12,
            // Measured, pinned, 1 GiB; a copy of 10 GiB was hidden wholly behind products.
            host_rate: 55e9,
            link: interconnect.link(),
        }
    }
}
