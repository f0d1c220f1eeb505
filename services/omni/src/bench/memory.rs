//! Resident memory of this process.
use crate::error::OmniError;

const STATUS: &str = "/proc/self/status";

/// Bytes resident now.
pub(super) fn resident_bytes() -> Result<u64, OmniError> {
    field("VmRSS:")
}

/// Most bytes ever resident.
pub(super) fn peak_resident_bytes() -> Result<u64, OmniError> {
    field("VmHWM:")
}

fn field(name: &str) -> Result<u64, OmniError> {
    let text = std::fs::read_to_string(STATUS)
        .map_err(|error| OmniError::io(format!("read {STATUS}"), error))?;
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| super::bad(format!("{STATUS} has no field {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_at_least_what_is_resident() {
        let now = resident_bytes().unwrap();
        assert!(now > 0);
        assert!(peak_resident_bytes().unwrap() >= now / 2);
    }
}
