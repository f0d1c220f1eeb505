//! What the stages are told: model, plan, device, memory, transport.
use std::path::PathBuf;

use kv_transfer::{
    ClientConfig,
    engine::{EngineConfig, Transport},
};
use model::{BalanceOptions, Residency, StepCache, vae::Tiles};
use parallel::eplb::EplbConfig;
use stage::{Device, GpuSettings};

use crate::{error::OmniError, settings::Settings};

/// Most compute threads a process may be told to use.
const MAX_THREADS: usize = 1024;
/// Least and largest share by which tiles of a picture overlap.
const MIN_OVERLAP: f64 = 0.05;
const MAX_OVERLAP: f64 = 0.5;

pub(super) fn engine(settings: &Settings) -> Result<EngineConfig, OmniError> {
    let words = [("shm", Transport::Shm), ("tcp", Transport::Tcp)];
    Ok(EngineConfig {
        net_devices: settings.get("transfer_devices").map(str::to_owned),
        ..EngineConfig::only(settings.one_of("transport", &words)?)
    })
}

/// How a worker gets its prefixes.
pub(super) fn receiver(settings: &Settings) -> Result<ClientConfig, OmniError> {
    let relay = settings.one_of("prefix_relay", &[("off", false), ("on", true)])?;
    Ok(ClientConfig {
        node: relay.then(|| settings.url("kv_transfer")).transpose()?,
        ..ClientConfig::new(engine(settings)?)
    })
}

pub(super) fn threads(settings: &Settings) -> Result<usize, OmniError> {
    let threads = settings.count("threads", 0)?;
    if threads > MAX_THREADS {
        return Err(OmniError::Config(format!(
            "threads must be at most {MAX_THREADS}, got {threads}"
        )));
    }
    Ok(threads)
}

/// The plan of an AR stage, which computes both guidance rows of a request in one pass.
pub(crate) fn ar_plan(settings: &Settings, key: &'static str) -> Result<parallel::Plan, OmniError> {
    let plan = parallel_plan(settings, key)?;
    if plan.cfg == 1 {
        return Ok(plan);
    }
    Err(OmniError::Config(format!(
        "{key} \"{plan}\": an AR stage has both guidance rows in one pass, so cfg must be 1"
    )))
}

/// What a setting names as a device.
pub(crate) fn parsed_device(settings: &Settings, key: &'static str) -> Result<Device, OmniError> {
    let text = settings.text(key)?;
    text.parse()
        .map_err(|reason: String| OmniError::Config(format!("{key} {reason}")))
}

/// What a stage computes on. What only GPUs understand is not dropped quietly.
pub(super) fn device(settings: &Settings) -> Result<Device, OmniError> {
    let fp8 = settings.one_of("weights", &[("bf16", false), ("fp8", true)])?;
    let memory = match settings.text("gpu_memory")? {
        "auto" => None,
        _ => Some(settings.bytes("gpu_memory")? as u64),
    };
    match parsed_device(settings, "device")? {
        Device::Cpu => {
            let only_gpus = [("weights", fp8), ("gpu_memory", memory.is_some())];
            match only_gpus.into_iter().find(|(_, set)| *set) {
                Some((key, _)) => Err(OmniError::Config(format!(
                    "{key} belongs to GPUs, and device is cpu"
                ))),
                None => Ok(Device::Cpu),
            }
        }
        Device::Cuda(gpus) => Ok(Device::Cuda(GpuSettings {
            fp8,
            memory,
            resident_layers: match residency(settings)? {
                Residency::All => None,
                Residency::Layers(layers) => Some(layers),
                Residency::Bytes(_) => {
                    let text = "resident_layers must be all or a number of layers on GPUs";
                    return Err(OmniError::Config(text.to_owned()));
                }
            },
            ..gpus
        })),
    }
}

/// That of a stage whose layers can only leave a GPU.
pub(super) fn ar_device(settings: &Settings) -> Result<Device, OmniError> {
    let device = device(settings)?;
    if device == Device::Cpu && settings.text("resident_layers")? != "all" {
        let text = "resident_layers belongs to GPUs, and device is cpu".to_owned();
        return Err(OmniError::Config(text));
    }
    Ok(device)
}

/// How experts move between the ranks of a worker.
pub(super) fn balance(settings: &Settings) -> Result<BalanceOptions, OmniError> {
    let interval_steps = settings.count("eplb_interval", 0)?;
    Ok(BalanceOptions {
        eplb: EplbConfig {
            enabled: interval_steps > 0,
            interval_steps: interval_steps.max(1),
        },
        extra_slots: settings.count("eplb_extra_slots", 0)?,
        hosts: 1,
    })
}

/// Memory of a worker; `None`: what is free.
pub(super) fn memory(settings: &Settings) -> Result<Option<u64>, OmniError> {
    if settings.text("memory")? == "auto" {
        return Ok(None);
    }
    settings.bytes("memory").map(|bytes| Some(bytes as u64))
}

/// How much of the decoder stays in memory: all, a number of layers of each rank, or bytes of all ranks.
pub(super) fn residency(settings: &Settings) -> Result<Residency, OmniError> {
    let text = settings.text("resident_layers")?;
    if text == "all" {
        return Ok(Residency::All);
    }
    if let Ok(layers) = text.parse() {
        return Ok(Residency::Layers(layers));
    }
    let bytes = settings.bytes("resident_layers").map_err(|_| {
        let message = "must be all, a number of layers or bytes such as 40GiB";
        OmniError::Config(format!("resident_layers {message}, got {text:?}"))
    })?;
    Ok(Residency::Bytes(bytes as u64))
}

/// How pictures are decoded.
pub(super) fn tiles(settings: &Settings) -> Result<Tiles, OmniError> {
    let text = settings.text("vae_tiles")?;
    if text == "off" {
        return Ok(Tiles::Whole);
    }
    match text.parse() {
        Ok(overlap) if (MIN_OVERLAP..=MAX_OVERLAP).contains(&overlap) => {
            Ok(Tiles::Overlapping(overlap))
        }
        _ => Err(OmniError::Config(format!(
            "vae_tiles must be off or an overlap of {MIN_OVERLAP} to {MAX_OVERLAP}, got {text:?}"
        ))),
    }
}

/// How jobs save steps; what belongs to a model is read when that is loaded.
pub(super) fn step_cache(settings: &Settings) -> Result<StepCache, OmniError> {
    let cache = settings.text("step_cache")?.parse::<StepCache>();
    cache.map_err(|error| OmniError::Config(error.to_string()))
}

/// A setting that is a plan; whether it fits the model is seen when that is loaded.
pub(crate) fn parallel_plan(
    settings: &Settings,
    key: &'static str,
) -> Result<parallel::Plan, OmniError> {
    let text = settings.text(key)?;
    text.parse().map_err(|error: parallel::ParallelError| {
        OmniError::Config(format!("{key} {text:?}: {error}"))
    })
}

/// The checkpoint directory, which must at least be one.
pub(crate) fn model_dir(settings: &Settings) -> Result<PathBuf, OmniError> {
    let path = PathBuf::from(settings.text("model")?);
    if !path.is_dir() {
        return Err(OmniError::Config(format!(
            "model must be a checkpoint directory, {} is none",
            path.display()
        )));
    }
    Ok(path)
}

/// Sizes the pool that all arithmetic of this process runs on; 0: one thread a core.
pub(crate) fn set_threads(threads: usize) -> Result<(), OmniError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("compute-{index}"))
        .build_global()
        .map_err(|error| OmniError::Config(format!("threads: {error}")))
}
