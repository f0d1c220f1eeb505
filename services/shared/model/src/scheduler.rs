//! The flow-matching schedule, Euler's step and guidance.
//!
//! Everything is f32, in the order of operations of the reference, so that timesteps agree to the last bit.

use crate::error::ModelError;

/// Timesteps of the model per unit of sigma.
pub const TIMESTEP_SCALE: f32 = 1000.0;
/// Most steps of one job.
pub const MAX_STEPS: usize = 1000;

/// Sigmas and timesteps of one job.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// `steps + 1` values from 1 to 0.
    pub sigmas: Vec<f32>,
    /// `steps` values: 1000 times the sigma at which each step starts.
    pub timesteps: Vec<f32>,
}

impl Schedule {
    /// Linear sigmas from 1 to 0, each shifted by `s·t / (1 + (s − 1)·t)`.
    ///
    /// # Errors
    /// No steps, too many steps, or a shift that is not above zero.
    pub fn new(steps: usize, shift: f64) -> Result<Self, ModelError> {
        if steps == 0 || steps > MAX_STEPS {
            return Err(ModelError::invalid(
                "steps",
                format!("{steps} is not in 1..={MAX_STEPS}"),
            ));
        }
        if !(shift.is_finite() && shift > 0.0) {
            return Err(ModelError::config(
                "flow_shift",
                format!("{shift} is not above 0"),
            ));
        }
        let sigmas: Vec<f32> = linspace_down(steps + 1)
            .into_iter()
            .map(|t| shifted(t, shift))
            .collect();
        Ok(Self {
            timesteps: sigmas[..steps].iter().map(|s| s * TIMESTEP_SCALE).collect(),
            sigmas,
        })
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.timesteps.len()
    }

    /// The timestep a meanflow model is told to reach at step `i`: the next one, 0 at the last step.
    pub fn next_timestep(&self, i: usize) -> f32 {
        self.timesteps.get(i + 1).copied().unwrap_or(0.0)
    }

    /// One Euler step in place: `x += (sigma[i+1] − sigma[i]) · v`.
    ///
    /// # Errors
    /// `i` is no step, or the slices differ in length.
    pub fn step(&self, i: usize, latents: &mut [f32], velocity: &[f32]) -> Result<(), ModelError> {
        if i >= self.steps() || latents.len() != velocity.len() {
            return Err(ModelError::Internal(format!(
                "euler step {i} of {} over {} latents and {} velocities",
                self.steps(),
                latents.len(),
                velocity.len()
            )));
        }
        let dt = self.sigmas[i + 1] - self.sigmas[i];
        for (x, v) in latents.iter_mut().zip(velocity) {
            *x += v * dt;
        }
        Ok(())
    }
}

fn shifted(t: f32, shift: f64) -> f32 {
    let s = shift as f32;
    (s * t) / (1.0 + (s - 1.0) * t)
}

/// `count >= 2` values from 1 to 0: counted up from the start in the first half, down to the end in the
/// second, each with one rounding (the reference does the same; its recorded schedules agree bit for bit).
fn linspace_down(count: usize) -> Vec<f32> {
    let step = (0.0f32 - 1.0) / (count - 1) as f32;
    (0..count)
        .map(|i| {
            if i < count / 2 {
                step.mul_add(i as f32, 1.0)
            } else {
                -step * (count - 1 - i) as f32
            }
        })
        .collect()
}

/// Classifier-free guidance into `cond`: `uncond + scale · (cond − uncond)`.
///
/// # Errors
/// The slices differ in length.
pub fn guide(cond: &mut [f32], uncond: &[f32], scale: f64) -> Result<(), ModelError> {
    if cond.len() != uncond.len() {
        return Err(ModelError::Internal(format!(
            "guidance over {} and {} values",
            cond.len(),
            uncond.len()
        )));
    }
    let scale = scale as f32;
    for (c, u) in cond.iter_mut().zip(uncond) {
        *c = u + scale * (*c - u);
    }
    Ok(())
}

/// Guidance rescale: mixes `guided` with itself brought to the standard deviation of `cond`, by `phi` in 0..=1.
/// 0 leaves `guided` as it is.
///
/// # Errors
/// The slices differ in length or hold fewer than two values, or `phi` is outside 0..=1.
pub fn rescale(guided: &mut [f32], cond: &[f32], phi: f64) -> Result<(), ModelError> {
    if !(0.0..=1.0).contains(&phi) {
        return Err(ModelError::invalid(
            "guidance_rescale",
            format!("{phi} is not in 0..=1"),
        ));
    }
    if guided.len() != cond.len() || guided.len() < 2 {
        return Err(ModelError::Internal(format!(
            "guidance rescale over {} and {} values",
            guided.len(),
            cond.len()
        )));
    }
    if phi == 0.0 {
        return Ok(());
    }
    let (wanted, got) = (deviation(cond), deviation(guided));
    if got == 0.0 {
        return Ok(());
    }
    let factor = (phi * (wanted / got) + (1.0 - phi)) as f32;
    for v in guided {
        *v *= factor;
    }
    Ok(())
}

/// Brings each vector of `channels` values of `guided` to the length of the one of `cond`: guidance may turn a
/// position's velocity, not stretch it.
///
/// # Errors
/// The slices differ in length or are not made of such vectors.
pub fn preserve_norm(guided: &mut [f32], cond: &[f32], channels: usize) -> Result<(), ModelError> {
    if guided.len() != cond.len() || channels == 0 || !guided.len().is_multiple_of(channels) {
        return Err(ModelError::Internal(format!(
            "norm-preserving guidance over {} and {} values of {channels} channels",
            guided.len(),
            cond.len()
        )));
    }
    let length = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let positions = guided.chunks_exact_mut(channels);
    for (guided, cond) in positions.zip(cond.chunks_exact(channels)) {
        let (wanted, got) = (length(cond), length(guided));
        if got > 0.0 {
            let factor = (wanted / got) as f32;
            guided.iter_mut().for_each(|v| *v *= factor);
        }
    }
    Ok(())
}

/// Unbiased standard deviation, summed in f64.
fn deviation(values: &[f32]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
    let squares: f64 = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum();
    (squares / (count - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn norm_preserving_guidance_turns_a_velocity_and_keeps_its_length() {
        let cond = [3.0, 4.0, 0.0, 2.0, 0.0, 0.0];
        let mut guided = [0.0, 10.0, 1.0, 0.0, 0.0, 0.0];
        preserve_norm(&mut guided, &cond, 2).unwrap();
        assert_eq!(guided, [0.0, 5.0, 2.0, 0.0, 0.0, 0.0]);
        assert!(preserve_norm(&mut guided, &cond, 4).is_err());
        assert!(preserve_norm(&mut guided, &cond[1..], 2).is_err());
    }

    #[test]
    fn eight_steps_of_shift_three_are_the_published_ones() {
        let schedule = Schedule::new(8, 3.0).unwrap();
        let want = [1.0, 0.954545, 0.9, 0.833333, 0.75, 0.642857, 0.5, 0.3, 0.0];
        for (got, want) in schedule.sigmas.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
        assert_eq!(schedule.next_timestep(7), 0.0);
        assert!((schedule.next_timestep(6) - 300.0).abs() < 1e-3);
    }

    #[test]
    fn impossible_schedules_are_refused() {
        for (steps, shift) in [(0, 3.0), (MAX_STEPS + 1, 3.0), (8, 0.0), (8, f64::NAN)] {
            assert!(Schedule::new(steps, shift).is_err(), "{steps} {shift}");
        }
    }

    #[test]
    fn guidance_of_one_is_the_conditional_row() {
        let mut cond = vec![1.5, -2.0];
        guide(&mut cond, &[0.5, 1.0], 1.0).unwrap();
        assert_eq!(cond, [1.5, -2.0]);
    }

    #[test]
    fn full_rescale_restores_the_deviation() {
        let cond = vec![1.0, 2.0, 4.0, -1.0];
        let mut guided: Vec<f32> = cond.iter().map(|v| v * 3.0 + 1.0).collect();
        rescale(&mut guided, &cond, 1.0).unwrap();
        assert!((deviation(&guided) - deviation(&cond)).abs() < 1e-6);
        let before = guided.clone();
        rescale(&mut guided, &cond, 0.0).unwrap();
        assert_eq!(guided, before);
    }

    proptest! {
        #[test]
        fn sigmas_fall_from_one_to_zero(steps in 1usize..=MAX_STEPS, shift in 0.2f64..20.0) {
            let schedule = Schedule::new(steps, shift).unwrap();
            prop_assert!((schedule.sigmas[0] - 1.0).abs() < 1e-6);
            prop_assert_eq!(schedule.sigmas[steps], 0.0);
            prop_assert!(schedule.sigmas.windows(2).all(|w| w[1] < w[0]));
        }
    }
}
