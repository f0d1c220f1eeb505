//! Pixels back to shapes, colours and places.
//!
//! Every pixel takes the name of the nearest palette colour; connected patches of one name are objects when
//! they are more than the thin rim that antialiasing leaves; an object's shape is the template that it
//! overlaps best once both are stretched to the same square.

use std::sync::OnceLock;

use model::RgbImage;

use super::{Colour, Named, Shape};

/// Side of the square that patches and templates are stretched to.
const CELLS: usize = 32;
/// Side of a template before that.
const TEMPLATE_SIDE: usize = 256;
/// A template shows -REACH..REACH radii.
const REACH: f64 = 1.3;
/// Fewest pixels of an object.
const MIN_PIXELS: usize = 60;
/// Fewest pixels of an object that have only pixels of that object within `RIM` of them.
const MIN_CORE: usize = 8;
/// How wide an antialiased edge is at most, in pixels.
const RIM: usize = 2;
/// How wide the frame is whose commonest colour is the background, in pixels.
const FRAME: usize = 2;

/// A box of pixels, ends excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// First column.
    pub left: usize,
    /// First row.
    pub top: usize,
    /// Column after the last.
    pub right: usize,
    /// Row after the last.
    pub bottom: usize,
}

impl Bounds {
    /// Whether this box lies in `outer`, or at most a rim beyond it.
    pub fn within(&self, outer: &Self) -> bool {
        self.left + RIM >= outer.left
            && self.top + RIM >= outer.top
            && self.right <= outer.right + RIM
            && self.bottom <= outer.bottom + RIM
    }

    fn area(&self) -> usize {
        (self.right - self.left) * (self.bottom - self.top)
    }

    /// Grown by a rim on every side, as far as the picture goes.
    fn grown(&self, picture: &RgbImage) -> Self {
        Self {
            left: self.left.saturating_sub(RIM),
            top: self.top.saturating_sub(RIM),
            right: (self.right + RIM).min(picture.width),
            bottom: (self.bottom + RIM).min(picture.height),
        }
    }
}

/// An object that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its colour and shape.
    pub named: Named,
    /// How well the shape fits, 0..=1 (overlap over union).
    pub fit: f64,
    /// Where it is.
    pub bounds: Bounds,
    /// Centre, pixels from the left.
    pub x: f64,
    /// Centre, pixels from the top.
    pub y: f64,
}

/// What a picture shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Pixels down.
    pub height: usize,
    /// Pixels across.
    pub width: usize,
    /// The colour around everything.
    pub background: Colour,
    /// The objects, largest box first.
    pub objects: Vec<Seen>,
}

/// Reads a picture.
pub fn read(picture: &RgbImage) -> Reading {
    let names = names(picture);
    let background = frame_colour(&names, picture.width, picture.height);
    let mut patches = patches(&names, picture.width, picture.height);
    patches.retain(|patch| patch.colour != background && patch.mask.core() >= MIN_CORE);
    patches.sort_by_key(|patch| std::cmp::Reverse(patch.bounds.area()));
    let mut kept: Vec<Patch> = Vec::new();
    for patch in patches {
        // A container's colour that shows again inside it (the hole of a ring, a gap) is no object.
        let part =
            |outer: &Patch| outer.colour == patch.colour && patch.bounds.within(&outer.bounds);
        if !kept.iter().any(part) {
            kept.push(patch);
        }
    }
    let objects = (0..kept.len())
        .map(|index| describe(&kept, index, picture, background))
        .collect();
    Reading {
        height: picture.height,
        width: picture.width,
        background,
        objects,
    }
}

/// The nearest palette colour of every pixel.
fn names(picture: &RgbImage) -> Vec<Colour> {
    let mut last: Option<(&[u8], Colour)> = None;
    let mut names = Vec::with_capacity(picture.width * picture.height);
    for pixel in picture.data.chunks_exact(3) {
        // Drawings are flat: most pixels equal the one before.
        let name = match last {
            Some((same, name)) if same == pixel => name,
            _ => nearest(pixel),
        };
        last = Some((pixel, name));
        names.push(name);
    }
    names
}

fn nearest(pixel: &[u8]) -> Colour {
    let distance = |colour: &Colour| -> u32 {
        let squares = colour.rgb().into_iter().zip(pixel);
        squares.map(|(a, b)| u32::from(a.abs_diff(*b)).pow(2)).sum()
    };
    Colour::ALL
        .into_iter()
        .min_by_key(distance)
        .unwrap_or(Colour::Gray)
}

fn frame_colour(names: &[Colour], width: usize, height: usize) -> Colour {
    let mut counts = [0usize; Colour::ALL.len()];
    for (at, name) in names.iter().enumerate() {
        let (row, column) = (at / width, at % width);
        let inside = (FRAME..width.saturating_sub(FRAME)).contains(&column)
            && (FRAME..height.saturating_sub(FRAME)).contains(&row);
        if !inside {
            counts[*name as usize] += 1;
        }
    }
    Colour::ALL
        .into_iter()
        .max_by_key(|colour| counts[*colour as usize])
        .unwrap_or(Colour::Gray)
}

/// Which pixels of a picture belong to something.
#[derive(Clone)]
struct Mask {
    width: usize,
    on: Vec<bool>,
}

impl Mask {
    fn empty(width: usize, pixels: usize) -> Self {
        Self {
            width,
            on: vec![false; pixels],
        }
    }

    fn count(&self) -> usize {
        self.on.iter().filter(|on| **on).count()
    }

    /// Pixels whose whole neighbourhood (a rim wide) is on.
    fn core(&self) -> usize {
        let (width, height) = (self.width, self.on.len() / self.width);
        let all_on = |row: usize, column: usize| {
            (row - RIM..=row + RIM)
                .all(|r| (column - RIM..=column + RIM).all(|c| self.on[r * width + c]))
        };
        (RIM..height.saturating_sub(RIM))
            .flat_map(|row| (RIM..width.saturating_sub(RIM)).map(move |column| (row, column)))
            .filter(|(row, column)| all_on(*row, *column))
            .count()
    }

    /// The smallest box around what is on; `None` when nothing is.
    fn bounds(&self) -> Option<Bounds> {
        let mut bounds: Option<Bounds> = None;
        for at in (0..self.on.len()).filter(|at| self.on[*at]) {
            let (row, column) = (at / self.width, at % self.width);
            let b = bounds.get_or_insert(Bounds {
                left: column,
                top: row,
                right: column + 1,
                bottom: row + 1,
            });
            b.left = b.left.min(column);
            b.right = b.right.max(column + 1);
            b.bottom = row + 1;
        }
        bounds
    }

    fn fill(&mut self, bounds: &Bounds) {
        for row in bounds.top..bounds.bottom {
            self.on[row * self.width + bounds.left..row * self.width + bounds.right].fill(true);
        }
    }

    /// What lies in `bounds`, stretched to a square of `CELLS`.
    fn stretched(&self, bounds: &Bounds) -> Vec<bool> {
        let at = |cell: usize, from: usize, to: usize| {
            from + ((cell as f64 + 0.5) * (to - from) as f64 / CELLS as f64) as usize
        };
        (0..CELLS * CELLS)
            .map(|cell| {
                let row = at(cell / CELLS, bounds.top, bounds.bottom);
                let column = at(cell % CELLS, bounds.left, bounds.right);
                self.on[row * self.width + column]
            })
            .collect()
    }
}

/// A connected patch of one colour.
struct Patch {
    colour: Colour,
    mask: Mask,
    bounds: Bounds,
}

/// Connected patches (by edges) of equal values that are large enough for an object.
fn patches(names: &[Colour], width: usize, height: usize) -> Vec<Patch> {
    let mut taken = vec![false; names.len()];
    let mut out = Vec::new();
    for start in 0..names.len() {
        if std::mem::replace(&mut taken[start], true) {
            continue;
        }
        let (mut pixels, mut done) = (vec![start], 0);
        while let Some(at) = pixels.get(done).copied() {
            done += 1;
            for next in neighbours(at, width, height).into_iter().flatten() {
                if !taken[next] && names[next] == names[start] {
                    taken[next] = true;
                    pixels.push(next);
                }
            }
        }
        if pixels.len() < MIN_PIXELS {
            continue;
        }
        let mut mask = Mask::empty(width, names.len());
        pixels.iter().for_each(|at| mask.on[*at] = true);
        if let Some(bounds) = mask.bounds() {
            out.push(Patch {
                colour: names[start],
                mask,
                bounds,
            });
        }
    }
    out
}

fn neighbours(at: usize, width: usize, height: usize) -> [Option<usize>; 4] {
    let (row, column) = (at / width, at % width);
    [
        (row > 0).then(|| at - width),
        (row + 1 < height).then(|| at + width),
        (column > 0).then(|| at - 1),
        (column + 1 < width).then(|| at + 1),
    ]
}

fn describe(kept: &[Patch], index: usize, picture: &RgbImage, background: Colour) -> Seen {
    let patch = &kept[index];
    let others = || kept.iter().enumerate().filter(|(n, _)| *n != index);
    let inner: Vec<&Patch> = others()
        .map(|(_, other)| other)
        .filter(|other| other.bounds.within(&patch.bounds))
        .collect();
    let outer = others()
        .map(|(_, other)| other)
        .rfind(|other| patch.bounds.within(&other.bounds));
    let mask = if inner.is_empty() {
        sharpened(patch, picture, outer.map_or(background, |o| o.colour))
    } else {
        let mut mask = patch.mask.clone();
        for other in inner {
            mask.fill(&other.bounds.grown(picture));
        }
        mask
    };
    let bounds = mask.bounds().unwrap_or(patch.bounds);
    let (shape, fit) = best_shape(&mask.stretched(&bounds));
    Seen {
        named: Named {
            colour: patch.colour,
            shape,
        },
        fit,
        bounds,
        x: (bounds.left + bounds.right) as f64 / 2.0,
        y: (bounds.top + bounds.bottom) as f64 / 2.0,
    }
}

/// The patch with its edge where the colour is half way to what surrounds it, rather than where another
/// palette colour comes nearer.
fn sharpened(patch: &Patch, picture: &RgbImage, around: Colour) -> Mask {
    let (from, to) = (
        around.rgb().map(f64::from),
        patch.colour.rgb().map(f64::from),
    );
    let line: [f64; 3] = std::array::from_fn(|channel| to[channel] - from[channel]);
    let length: f64 = line.iter().map(|v| v * v).sum();
    let area = patch.bounds.grown(picture);
    let mut near = vec![false; patch.mask.on.len()];
    for row in area.top..area.bottom {
        for column in area.left..area.right {
            let at = row * picture.width + column;
            let pixel = &picture.data[at * 3..at * 3 + 3];
            let along: f64 = (0..3)
                .map(|channel| (f64::from(pixel[channel]) - from[channel]) * line[channel])
                .sum();
            near[at] = along > 0.5 * length;
        }
    }
    let size = patch.mask.count();
    largest_overlap(&near, patch, picture)
        .filter(|mask| mask.count() < 2 * size)
        .unwrap_or_else(|| patch.mask.clone())
}

/// The connected part of `near` that shares most pixels with the patch.
fn largest_overlap(near: &[bool], patch: &Patch, picture: &RgbImage) -> Option<Mask> {
    let mut left = near.to_vec();
    let mut best = (0, Vec::new());
    for start in 0..near.len() {
        if !std::mem::replace(&mut left[start], false) {
            continue;
        }
        let (mut pixels, mut done) = (vec![start], 0);
        while let Some(at) = pixels.get(done).copied() {
            done += 1;
            for next in neighbours(at, picture.width, picture.height)
                .into_iter()
                .flatten()
            {
                if std::mem::replace(&mut left[next], false) {
                    pixels.push(next);
                }
            }
        }
        let shared = pixels.iter().filter(|at| patch.mask.on[**at]).count();
        if shared > best.0 {
            best = (shared, pixels);
        }
    }
    let mut mask = Mask::empty(picture.width, near.len());
    best.1.iter().for_each(|at| mask.on[*at] = true);
    (best.0 > 0).then_some(mask)
}

fn best_shape(cells: &[bool]) -> (Shape, f64) {
    let mut best = (Shape::Circle, -1.0);
    for (shape, template) in templates() {
        let pairs = || cells.iter().zip(template);
        let both = pairs().filter(|(a, b)| **a && **b).count();
        let either = pairs().filter(|(a, b)| **a || **b).count();
        let fit = both as f64 / either.max(1) as f64;
        if fit > best.1 {
            best = (*shape, fit);
        }
    }
    best
}

/// Every shape, cut to its box and stretched.
fn templates() -> &'static [(Shape, Vec<bool>)] {
    static TEMPLATES: OnceLock<Vec<(Shape, Vec<bool>)>> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        Shape::ALL
            .into_iter()
            .map(|shape| (shape, template(shape)))
            .collect()
    })
}

fn template(shape: Shape) -> Vec<bool> {
    let side = TEMPLATE_SIDE;
    let at = |n: usize| (n as f64 + 0.5) / side as f64 * 2.0 * REACH - REACH;
    let mask = Mask {
        width: side,
        on: (0..side * side)
            .map(|n| shape.distance(at(n % side), at(n / side)) < 0.0)
            .collect(),
    };
    mask.bounds()
        .map(|bounds| mask.stretched(&bounds))
        .unwrap_or_default()
}
