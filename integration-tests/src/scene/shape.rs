//! Shapes as signed distances: negative inside, in units of the radius, x to the right and y down.

use std::f64::consts::PI;
use std::sync::LazyLock;

use serde::Deserialize;

/// The shapes of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names say it all
pub enum Shape {
    Circle,
    Square,
    Triangle,
    Star,
    Ring,
    Cross,
    Diamond,
    Heart,
}

/// Corners of a triangle.
const TRIANGLE: [(f64, f64); 3] = [(0.0, -1.05), (1.05, 0.85), (-1.05, 0.85)];

impl Shape {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Circle,
        Self::Square,
        Self::Triangle,
        Self::Star,
        Self::Ring,
        Self::Cross,
        Self::Diamond,
        Self::Heart,
    ];

    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Circle => "circle",
            Self::Square => "square",
            Self::Triangle => "triangle",
            Self::Star => "star",
            Self::Ring => "ring",
            Self::Cross => "cross",
            Self::Diamond => "diamond",
            Self::Heart => "heart",
        }
    }

    /// Distance of a point to the edge; negative inside.
    pub fn distance(self, x: f64, y: f64) -> f64 {
        let (ax, ay) = (x.abs(), y.abs());
        match self {
            Self::Circle => x.hypot(y) - 1.0,
            Self::Square => ax.max(ay) - 0.9,
            Self::Triangle => to_polygon(x, y, &TRIANGLE),
            Self::Star => to_polygon(x, y, &*STAR),
            Self::Ring => (x.hypot(y) - 0.77).abs() - 0.25,
            Self::Cross => {
                let across = (ax - 1.0).max(ay - 0.34);
                let down = (ax - 0.34).max(ay - 1.0);
                across.min(down)
            }
            Self::Diamond => (ax * 1.25 + ay - 1.08) * 0.62,
            Self::Heart => heart(ax, y + 0.05),
        }
    }
}

/// Two discs over a point; `x` is already mirrored.
fn heart(x: f64, y: f64) -> f64 {
    let disc = (x - 0.46).hypot(y + 0.33) - 0.56;
    // The side of the point is tangent to the disc.
    let point = (x * 0.735 + y * 0.678 - 0.674).max(0.05 - y);
    let between = (x - 0.46).max((y + 0.25).abs() - 0.37);
    disc.min(point).min(between)
}

/// Five outer and five inner corners, one of them straight up.
static STAR: LazyLock<[(f64, f64); 10]> = LazyLock::new(|| {
    std::array::from_fn(|corner| {
        let radius = if corner % 2 == 0 { 1.12 } else { 1.12 * 0.45 };
        let (sin, cos) = (PI * corner as f64 / 5.0).sin_cos();
        (radius * sin, -radius * cos)
    })
});

/// Distance to a closed polygon: the nearest edge, with the sign of the even-odd rule.
fn to_polygon(x: f64, y: f64, corners: &[(f64, f64)]) -> f64 {
    let (mut nearest, mut inside) = (f64::INFINITY, false);
    for (n, a) in corners.iter().enumerate() {
        let b = corners[(n + 1) % corners.len()];
        let (ex, ey) = (b.0 - a.0, b.1 - a.1);
        let along = ((x - a.0) * ex + (y - a.1) * ey) / (ex * ex + ey * ey);
        let along = along.clamp(0.0, 1.0);
        nearest = nearest.min((x - a.0 - along * ex).hypot(y - a.1 - along * ey));
        if (a.1 > y) != (b.1 > y) && x < a.0 + (y - a.1) * ex / ey {
            inside = !inside;
        }
    }
    if inside { -nearest } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_its_inside_and_fits_its_radius() {
        for shape in Shape::ALL {
            let centre = shape.distance(0.0, 0.0);
            assert_eq!(centre > 0.0, shape == Shape::Ring, "{}", shape.name());
            for n in 0..64 {
                let (sin, cos) = (PI * f64::from(n) / 32.0).sin_cos();
                assert!(
                    shape.distance(1.5 * cos, 1.5 * sin) > 0.0,
                    "{}",
                    shape.name()
                );
            }
        }
    }

    #[test]
    fn polygon_distances_are_exact() {
        let square = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)];
        assert!((to_polygon(0.0, 0.0, &square) + 1.0).abs() < 1e-12);
        assert!((to_polygon(4.0, 5.0, &square) - 5.0).abs() < 1e-12);
        assert!((to_polygon(0.5, -3.0, &square) - 2.0).abs() < 1e-12);
    }
}
