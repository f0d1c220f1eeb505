//! A job's state on the wire: steps done and latents, with a checksum.
use base::limits::MAX_CHECKPOINT_BYTES;
use model::{JobState, Latents};
use proto::v1::DenoiseCheckpoint;

/// `None` for a state that is too large to travel.
pub(crate) fn write(state: &JobState) -> Option<DenoiseCheckpoint> {
    let values = state.latents.data();
    if size_of_val(values) > MAX_CHECKPOINT_BYTES {
        return None;
    }
    let latents: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Some(DenoiseCheckpoint {
        step: u32::try_from(state.step).unwrap_or(u32::MAX),
        crc32c: checksum(&latents),
        latents,
    })
}

/// The state of a picture of `channels` on a grid of height x width.
///
/// # Errors
/// Why it is none of such a picture.
pub(crate) fn read(
    from: &DenoiseCheckpoint,
    channels: usize,
    grid: (usize, usize),
) -> Result<JobState, String> {
    let wanted = channels * grid.0 * grid.1 * size_of::<f32>();
    if from.latents.len() != wanted {
        let got = from.latents.len();
        return Err(format!("{got} bytes of latents, this size has {wanted}"));
    }
    if checksum(&from.latents) != from.crc32c {
        return Err("its latents do not have their checksum".to_owned());
    }
    let (values, _) = from.latents.as_chunks::<4>();
    let values = values.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let latents = Latents::new(channels, grid.0, grid.1, values.collect());
    let latents = latents.map_err(|error| error.to_string())?;
    if !latents.is_finite() {
        return Err("its latents are not finite".to_owned());
    }
    Ok(JobState {
        step: from.step as usize,
        latents,
    })
}

fn checksum(bytes: &[u8]) -> u32 {
    let whole = kv::chunk_crc32c(bytes, bytes.len());
    whole.first().copied().unwrap_or(0)
}
