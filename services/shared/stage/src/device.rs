//! What a stage computes on.
use std::{fmt, str::FromStr};

use parallel::Plan;

use crate::StageError;

/// Name of the setting, in errors.
const FIELD: &str = "device";
/// Largest number of a GPU.
const MAX_ORDINAL: usize = 1023;

/// What a stage computes on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// GPUs, one for each rank of the plan.
    Cuda(GpuSettings),
}

/// Which GPUs a stage has, and how it uses them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuSettings {
    /// Number of each rank's GPU among those the driver shows; none: 0, 1, and so on.
    pub gpus: Vec<usize>,
    /// Large matrices are held in 8 bits.
    pub fp8: bool,
    /// Bytes that the stage may take of each GPU; `None`: what is free.
    pub memory: Option<u64>,
    /// Layers that stay on each GPU, while the others travel from the host in every pass; `None`: all.
    pub resident_layers: Option<usize>,
}

impl FromStr for Device {
    type Err = String;

    /// `cpu`, `cuda`, or `cuda:` and the numbers of GPUs.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("must be cpu, cuda or cuda:0,1,.., got {text:?}");
        let gpus = match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => Vec::new(),
            Some(("cuda", list)) => {
                let number = |one: &str| one.parse().ok().filter(|n| *n <= MAX_ORDINAL);
                let all: Option<Vec<usize>> = list.split(',').map(number).collect();
                all.ok_or_else(wrong)?
            }
            _ => return Err(wrong()),
        };
        if let Some(twice) = gpus
            .iter()
            .enumerate()
            .find(|(i, g)| gpus[..*i].contains(g))
        {
            return Err(format!("names gpu {} twice", twice.1));
        }
        Ok(Self::Cuda(GpuSettings {
            gpus,
            ..GpuSettings::default()
        }))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(settings) if settings.gpus.is_empty() => f.write_str("cuda"),
            Self::Cuda(settings) => {
                let gpus: Vec<String> = settings.gpus.iter().map(ToString::to_string).collect();
                write!(f, "cuda:{}", gpus.join(","))
            }
        }
    }
}

/// What the GPUs of a stage load.
#[cfg(feature = "cuda")]
pub type OnGpus = crate::GpuLoad;
/// Never there in this build.
#[cfg(not(feature = "cuda"))]
pub type OnGpus = std::convert::Infallible;

impl Device {
    /// [`Device::check`], and whether what `load` says fits, as far as that can be said without loading.
    ///
    /// # Errors
    /// `Config` naming the setting at fault.
    pub fn check_load(
        &self,
        plan: &Plan,
        load: impl FnOnce() -> Result<Option<OnGpus>, StageError>,
    ) -> Result<(), StageError> {
        self.check(plan)?;
        match load()? {
            #[cfg(feature = "cuda")]
            Some(load) => load.check(),
            _ => Ok(()),
        }
    }

    /// Whether this build can compute on it, and how many ranks it is for.
    ///
    /// # Errors
    /// `Config` naming `device`.
    pub fn check(&self, plan: &Plan) -> Result<(), StageError> {
        let Self::Cuda(settings) = self else {
            return Ok(());
        };
        if cfg!(not(feature = "cuda")) {
            let message = "cuda: this build has no GPU path (feature cuda)";
            return Err(StageError::config(FIELD, message));
        }
        settings.of_ranks(plan).map(drop)
    }
}

impl GpuSettings {
    /// The GPU of each rank of `plan`.
    ///
    /// # Errors
    /// `Config` naming `device` for another number of GPUs than ranks, `plan` for a mesh that cannot be.
    pub fn of_ranks(&self, plan: &Plan) -> Result<Vec<usize>, StageError> {
        let mesh = plan
            .mesh()
            .map_err(|e| StageError::config("plan", e.to_string()))?;
        let ranks = mesh.ranks();
        if self.gpus.is_empty() {
            return Ok((0..ranks).collect());
        }
        if self.gpus.len() != ranks {
            let given = self.gpus.len();
            let message = format!("names {given} GPUs, and the plan {plan} has {ranks} ranks");
            return Err(StageError::config(FIELD, message));
        }
        Ok(self.gpus.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:3,1"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for wrong in [
            "",
            "gpu",
            "cuda:",
            "cuda:a",
            "cuda:0,",
            "cuda:-1",
            "cuda:1024",
            "cpu:0",
        ] {
            let error = wrong.parse::<Device>().unwrap_err();
            assert!(error.contains("must be cpu, cuda"), "{wrong}: {error}");
        }
        let twice = "cuda:1,1".parse::<Device>().unwrap_err();
        assert!(twice.contains("gpu 1 twice"), "{twice}");
    }

    #[test]
    fn gpus_are_as_many_as_ranks() {
        let plan: Plan = "cfg=2".parse().unwrap();
        let of = |text: &str| match text.parse().unwrap() {
            Device::Cuda(settings) => settings.of_ranks(&plan),
            Device::Cpu => panic!("{text}"),
        };
        assert_eq!(of("cuda").unwrap(), [0, 1]);
        assert_eq!(of("cuda:5,2").unwrap(), [5, 2]);
        let error = of("cuda:0").unwrap_err().to_string();
        assert!(
            error.contains("device") && error.contains("2 ranks"),
            "{error}"
        );
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_gpus_says_so_and_names_the_setting() {
        let device: Device = "cuda".parse().unwrap();
        let error = device.check(&Plan::default()).unwrap_err();
        assert!(matches!(
            error,
            StageError::Config {
                field: "device",
                ..
            }
        ));
        assert!(error.to_string().contains("feature cuda"), "{error}");
    }
}
