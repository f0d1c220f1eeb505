//! Ground truth: a scene as pixels.

use model::RgbImage;

use super::{Colour, Scene, Texture};

/// Period of stripes and dots, in pixels.
const PERIOD: f64 = 32.0;

/// No shape reaches further from its centre, in radii.
const REACH: f64 = 1.3;

/// Draws a scene, edges antialiased over one pixel.
pub fn draw(scene: &Scene) -> RgbImage {
    let mut order: Vec<_> = scene.objects.iter().collect();
    // What is inside is smaller and comes on top.
    order.sort_by(|a, b| b.r.total_cmp(&a.r));
    let mut data = Vec::with_capacity(scene.height * scene.width * 3);
    for row in 0..scene.height {
        for column in 0..scene.width {
            let (x, y) = (column as f64 + 0.5, row as f64 + 0.5);
            let mut pixel = background(scene, x, y);
            for object in &order {
                let (r, shape) = (object.r, object.shape);
                let (right, down) = ((x - object.x) / r, (y - object.y) / r);
                if right.abs().max(down.abs()) > REACH {
                    continue;
                }
                let distance = shape.distance(right, down) * r;
                let cover = (0.5 - distance).clamp(0.0, 1.0);
                pixel = mix(pixel, levels(object.colour), cover);
            }
            data.extend(pixel.map(|level| level.round_ties_even().clamp(0.0, 255.0) as u8));
        }
    }
    RgbImage {
        width: scene.width,
        height: scene.height,
        data,
    }
}

fn background(scene: &Scene, x: f64, y: f64) -> [f64; 3] {
    let base = levels(scene.background);
    let dark = base.iter().sum::<f64>() < 180.0;
    let tint = base.map(|level| if dark { level + 28.0 } else { level * 0.9 });
    let period = |at: f64| ((at / PERIOD + scene.phase).fract() - 0.5) * PERIOD;
    let amount = match scene.texture {
        Texture::Plain => 0.0,
        Texture::Striped => (period(x + y).abs() - 7.5).clamp(0.0, 1.0),
        Texture::Dotted => (7.5 - period(x).hypot(period(y))).clamp(0.0, 1.0),
        Texture::Gradient => y / (scene.height as f64 - 0.5).max(1.0),
    };
    mix(base, tint, amount)
}

fn levels(colour: Colour) -> [f64; 3] {
    colour.rgb().map(f64::from)
}

fn mix(under: [f64; 3], over: [f64; 3], cover: f64) -> [f64; 3] {
    std::array::from_fn(|channel| under[channel] * (1.0 - cover) + over[channel] * cover)
}
