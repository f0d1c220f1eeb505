//! Online correction of predicted times.

/// Smallest and largest correction. What is further off is no longer a matter of constants.
pub const RATIO_BOUNDS: (f64, f64) = (0.25, 4.0);
/// Weight of the newest step.
const SMOOTHING: f64 = 0.1;

/// Exponentially weighted ratio of measured to predicted seconds, within [`RATIO_BOUNDS`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Correction {
    ratio: f64,
}

impl Default for Correction {
    fn default() -> Self {
        Self { ratio: 1.0 }
    }
}

impl Correction {
    /// As it travels: measured over predicted in thousandths; 0 says nothing.
    pub fn thousandths(ratio: u32) -> Self {
        let (least, most) = RATIO_BOUNDS;
        match ratio {
            0 => Self::default(),
            ratio => Self {
                ratio: (f64::from(ratio) / 1e3).clamp(least, most),
            },
        }
    }

    /// A step that was predicted to take `predicted` seconds took `measured`. What is not a positive number of
    /// seconds says nothing and is left out.
    pub fn observe(&mut self, predicted: f64, measured: f64) {
        let usable = |seconds: f64| seconds.is_finite() && seconds > 0.0;
        if usable(predicted) && usable(measured) {
            let (least, most) = RATIO_BOUNDS;
            // A quotient of finite numbers may still overflow, which the clamp also catches.
            let sample = (measured / predicted).clamp(least, most);
            self.ratio += SMOOTHING * (sample - self.ratio);
        }
    }

    /// `seconds` as they are expected to turn out.
    pub fn apply(&self, seconds: f64) -> f64 {
        seconds * self.ratio
    }

    /// Measured over predicted.
    pub fn ratio(&self) -> f64 {
        self.ratio
    }
}
