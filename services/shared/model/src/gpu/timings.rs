//! When the parts of a step were reached, by marks on the device.

use kernels::cuda::{Gpu, Mark};

use crate::error::ModelError;

/// Marks of one or more steps.
#[derive(Debug, Default)]
pub struct Timings {
    marks: Vec<(&'static str, Mark)>,
}

impl Timings {
    /// Marks the end of a part.
    pub(super) fn note(&mut self, gpu: &Gpu, what: &'static str) -> Result<(), ModelError> {
        self.marks.push((what, gpu.mark()?));
        Ok(())
    }

    /// Milliseconds of each part, in order, without the time between steps; waits for the device. `begin`
    /// starts a step.
    ///
    /// # Errors
    /// `Gpu` when the device failed.
    pub fn parts(&self) -> Result<Vec<(&'static str, f64)>, ModelError> {
        let mut parts = Vec::with_capacity(self.marks.len());
        if let Some((_, last)) = self.marks.last() {
            last.wait()?;
        }
        for pair in self.marks.windows(2) {
            let (what, end) = &pair[1];
            if *what != "begin" {
                let ms = end.milliseconds_since(&pair[0].1)?;
                parts.push((*what, f64::from(ms)));
            }
        }
        Ok(parts)
    }
}
