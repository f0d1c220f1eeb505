//! Refuses what does not fit the memory of a GPU before anything is allocated, and says what would fit.

use kernels::cuda::Gpu;
use parallel::Plan;

use super::{GpuNeeds, GpuOptions, GpuShare, GpuVaeParts, WeightType};
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Plans that are proposed, each for its number of GPUs.
const PLANS: [(usize, &[&str]); 3] = [
    (2, &["cfg=2,ep=cfg", "tp=2", "pp=2"]),
    (4, &["tp=4", "pp=4"]),
    (8, &["tp=8", "pp=8"]),
];

/// Refuses what needs more memory than the GPU has free.
pub(super) fn check(
    gpu: &Gpu,
    config: &ModelConfig,
    share: &GpuShare,
    options: GpuOptions,
) -> Result<(), ModelError> {
    let free = gpu.memory()?.free;
    let needed = needed(config, share, options)?;
    if needed <= free {
        return Ok(());
    }
    Err(ModelError::TooLarge {
        ordinal: gpu.ordinal(),
        needed,
        free,
        instead: instead(config, share, options, free),
    })
}

/// Bytes on the GPU of a rank, keys and values included.
fn needed(
    config: &ModelConfig,
    share: &GpuShare,
    options: GpuOptions,
) -> Result<usize, ModelError> {
    Ok(needs(config, share, options)?.total() + options.kv_bytes)
}

/// What a rank needs without keys and values; the VAE is opened by itself.
fn needs(
    config: &ModelConfig,
    share: &GpuShare,
    options: GpuOptions,
) -> Result<GpuNeeds, ModelError> {
    let none = GpuVaeParts {
        decoder: false,
        encoder: false,
    };
    GpuNeeds::of_share(config, share, &options, (none, 0))
}

/// What would fit, in words.
fn instead(config: &ModelConfig, share: &GpuShare, options: GpuOptions, free: usize) -> String {
    let fits = |share: &GpuShare, options| needed(config, share, options).is_ok_and(|n| n <= free);
    let mut ways = Vec::new();
    let mut eight = options;
    eight.weights = WeightType::Fp8;
    if options.weights == WeightType::Bf16 && fits(share, eight) {
        ways.push("fp8 weights".to_owned());
    }
    let layers = share.shard().layers().len();
    let needs = needs(config, share, options).ok();
    if let Some(resident) = needs.and_then(|needs| needs.layers_that_fit(free, options.kv_bytes)) {
        ways.push(format!("{resident} of {layers} layers resident"));
    }
    for (gpus, plans) in PLANS {
        let fitting = plans.iter().find(|text| {
            let plan = text.parse::<Plan>().ok();
            let other = plan.and_then(|plan| GpuShare::new(config, &plan, 0).ok());
            let other = other.filter(|other| !options.text || other.writes_text().is_ok());
            gpus > share.ranks() && other.is_some_and(|s| fits(&s, options))
        });
        if let Some(plan) = fitting {
            ways.push(format!("plan {plan} on {gpus} such gpus"));
            break;
        }
    }
    if ways.is_empty() {
        ways.push("nothing with so many tokens and prefixes".to_owned());
    }
    ways.join(", or ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const RELEASED: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../integration-tests/fixtures/published"
    );
    /// Of an H200.
    const FREE: usize = 150_000_000_000;

    fn options(weights: WeightType) -> GpuOptions {
        GpuOptions {
            ordinal: 0,
            weights,
            max_tokens: 8210,
            kv_bytes: 300 << 20,
            resident_layers: None,
            text: false,
        }
    }

    fn released() -> (ModelConfig, GpuShare) {
        let config = ModelConfig::from_dir(Path::new(RELEASED)).unwrap();
        let share = GpuShare::new(&config, &Plan::default(), 0).unwrap();
        (config, share)
    }

    #[test]
    fn the_released_model_needs_what_its_weights_say() {
        let (config, share) = released();
        let bytes = |weights| needed(&config, &share, options(weights)).unwrap();
        let (bf16, fp8) = (bytes(WeightType::Bf16), bytes(WeightType::Fp8));
        assert!((160e9..168e9).contains(&(bf16 as f64)), "{bf16}");
        assert!((81e9..88e9).contains(&(fp8 as f64)), "{fp8}");
    }

    #[test]
    fn what_is_proposed_fits() {
        let (config, share) = released();
        let said = instead(&config, &share, options(WeightType::Bf16), FREE);
        assert!(said.contains("fp8 weights"), "{said}");
        assert!(said.contains("plan cfg=2,ep=cfg on 2 such gpus"), "{said}");
        let resident = said.split(" of 32 layers").next().unwrap();
        let resident = resident.rsplit(' ').next().unwrap().parse().unwrap();
        let mut fewer = options(WeightType::Bf16);
        fewer.resident_layers = Some(resident);
        assert!(needed(&config, &share, fewer).unwrap() <= FREE);
        fewer.resident_layers = Some(resident + 1);
        assert!(needed(&config, &share, fewer).unwrap() > FREE);
        let text = GpuOptions {
            text: true,
            ..options(WeightType::Bf16)
        };
        let said = instead(&config, &share, text, FREE);
        assert!(said.contains("plan tp=2 on 2 such gpus"), "{said}");
        let none = instead(&config, &share, options(WeightType::Fp8), 1 << 30);
        assert!(none.starts_with("nothing"), "{none}");
    }
}
