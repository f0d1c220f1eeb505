//! Measurements of this machine, through the public interface of the model. Everything printed is
//! measured or follows from a formula stated here.
mod attention;
mod balance;
mod costs;
mod decode;
mod denoise;
mod flops;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_collectives;
#[cfg(feature = "cuda")]
mod gpu_ops;
#[cfg(feature = "cuda")]
mod gpu_plan;
#[cfg(feature = "cuda")]
mod gpu_text;
mod memory;
mod mix;
mod offload;
mod on_gpu;
mod saving;
mod transfer;

pub(crate) use attention::{AttentionArgs, run as attention};
pub(crate) use balance::{BalanceArgs, run as balance};
pub(crate) use costs::{CostsArgs, run as costs};
pub(crate) use decode::{DecodeArgs, run as decode};
pub(crate) use denoise::{DenoiseArgs, run as denoise};
pub(crate) use mix::{MixArgs, run as mix};
pub(crate) use offload::{OffloadArgs, run as offload};
pub(crate) use on_gpu::{CollectivesArgs, MoeArgs, VaeArgs, collectives, moe, vae};
pub(crate) use saving::{SavingArgs, run as saving};
pub(crate) use transfer::{TransferArgs, run as transfer};

use crate::error::OmniError;

fn bad(message: impl Into<String>) -> OmniError {
    OmniError::Config(message.into())
}

#[cfg(not(feature = "cuda"))]
fn no_gpu() -> OmniError {
    bad("gpu: this build has no GPU path (feature cuda)")
}

fn model_error(error: model::ModelError) -> OmniError {
    OmniError::of(&stage::StageError::from(error))
}

fn json(value: &serde_json::Value) -> Result<String, OmniError> {
    serde_json::to_string_pretty(value).map_err(|error| bad(format!("json: {error}")))
}

/// The middle value; 0 of none.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
