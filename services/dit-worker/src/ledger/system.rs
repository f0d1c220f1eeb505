//! What the system says of memory.
use std::{fs, path::Path};

use stage::StageError;

const STATUS: &str = "/proc/self/status";
const MACHINE: &str = "/proc/meminfo";
/// Writing 5 to it makes the peak what is resident now.
const RESET: &str = "/proc/self/clear_refs";
/// Bytes resident now.
///
/// # Errors
/// `Io` or `Config` where the system does not say.
pub fn resident_bytes() -> Result<u64, StageError> {
    field(Path::new(STATUS), "VmRSS:")
}

/// Most bytes that were resident since the peak was last reset.
///
/// # Errors
/// `Io` or `Config` where the system does not say.
pub fn peak_bytes() -> Result<u64, StageError> {
    field(Path::new(STATUS), "VmHWM:")
}

/// Makes the peak what is resident now.
///
/// # Errors
/// `Io` where the system does not let us.
pub fn reset_peak() -> Result<(), StageError> {
    fs::write(RESET, "5").map_err(|source| StageError::Io {
        what: format!("write {RESET}"),
        source,
    })
}

/// Bytes that the machine has free.
pub(super) fn available_bytes() -> Result<u64, StageError> {
    field(Path::new(MACHINE), "MemAvailable:")
}

/// Where the peak cannot be reset, what the model took while it was loaded hides what it takes now.
pub(super) fn forget_peak() {
    if let Err(error) = reset_peak() {
        tracing::warn!(%error, "memory is measured from the highest so far");
    }
}

fn field(file: &Path, name: &str) -> Result<u64, StageError> {
    let text = fs::read_to_string(file).map_err(|source| StageError::Io {
        what: format!("read {}", file.display()),
        source,
    })?;
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| StageError::config("memory", format!("{} has no {name}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_seen_and_can_be_forgotten() {
        reset_peak().unwrap();
        let before = peak_bytes().unwrap();
        let large = vec![1_u8; 64 << 20];
        assert!(
            std::hint::black_box(&large)
                .iter()
                .step_by(4096)
                .all(|b| *b == 1)
        );
        let held = peak_bytes().unwrap();
        assert!(held >= before + (48 << 20));
        drop(large);
        // Other tests of this process take and free memory meanwhile.
        let forgotten = (0..200).any(|_| {
            reset_peak().unwrap();
            let fell = peak_bytes().unwrap() + (32 << 20) < held;
            if !fell {
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            fell
        });
        assert!(forgotten, "the peak stays at {held}");
    }
}
