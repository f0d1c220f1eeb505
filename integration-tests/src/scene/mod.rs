//! Drawings of flat shapes: what they hold, how they are drawn, and how they are read off pixels again.
//!
//! The demo model draws this world and nothing else, so a picture of it can be judged by meaning: which
//! shapes in which colours stand where.

mod draw;
mod judge;
mod read;
mod shape;

use serde::Deserialize;

pub use draw::draw;
pub use judge::{Change, judge, judge_edit};
pub use read::{Bounds, Reading, Seen, read};
pub use shape::Shape;

/// The colours of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names say it all
pub enum Colour {
    Red,
    Green,
    Blue,
    Yellow,
    Orange,
    Purple,
    Pink,
    Cyan,
    Black,
    White,
    Gray,
}

impl Colour {
    /// All of them; the last one is for backgrounds only.
    pub const ALL: [Self; 11] = [
        Self::Red,
        Self::Green,
        Self::Blue,
        Self::Yellow,
        Self::Orange,
        Self::Purple,
        Self::Pink,
        Self::Cyan,
        Self::Black,
        Self::White,
        Self::Gray,
    ];

    /// Red, green, blue, 0..=255.
    pub fn rgb(self) -> [u8; 3] {
        match self {
            Self::Red => [220, 40, 40],
            Self::Green => [40, 160, 60],
            Self::Blue => [40, 80, 220],
            Self::Yellow => [245, 215, 50],
            Self::Orange => [245, 140, 30],
            Self::Purple => [140, 60, 180],
            Self::Pink => [250, 150, 190],
            Self::Cyan => [60, 200, 220],
            Self::Black => [25, 25, 25],
            Self::White => [245, 245, 245],
            Self::Gray => [150, 150, 150],
        }
    }

    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Red => "red",
            Self::Green => "green",
            Self::Blue => "blue",
            Self::Yellow => "yellow",
            Self::Orange => "orange",
            Self::Purple => "purple",
            Self::Pink => "pink",
            Self::Cyan => "cyan",
            Self::Black => "black",
            Self::White => "white",
            Self::Gray => "gray",
        }
    }
}

/// How a background is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Texture {
    /// One colour.
    Plain,
    /// Diagonal stripes of a second tone.
    Striped,
    /// A grid of dots of a second tone.
    Dotted,
    /// A second tone growing downwards.
    Gradient,
}

/// A relation of two objects; the others are these with the objects swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Relation {
    /// The first is left of the second.
    #[serde(rename = "left of")]
    LeftOf,
    /// The first is above the second.
    #[serde(rename = "above")]
    Above,
    /// The first is inside the second.
    #[serde(rename = "inside")]
    Inside,
}

/// A ninth of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Place {
    /// 0 top, 1 middle, 2 bottom.
    pub row: u8,
    /// 0 left, 1 middle, 2 right.
    pub column: u8,
}

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(words: String) -> Result<Self, String> {
        let place = |row, column| Ok(Self { row, column });
        match words.as_str() {
            "top left" => place(0, 0),
            "top" => place(0, 1),
            "top right" => place(0, 2),
            "left" => place(1, 0),
            "center" => place(1, 1),
            "right" => place(1, 2),
            "bottom left" => place(2, 0),
            "bottom" => place(2, 1),
            "bottom right" => place(2, 2),
            _ => Err(format!("`{words}` is no place")),
        }
    }
}

/// One object of a scene.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Object {
    /// Its shape.
    pub shape: Shape,
    /// Its colour.
    pub colour: Colour,
    /// Pixels from its centre to about its edge.
    pub r: f64,
    /// Centre, pixels from the left.
    pub x: f64,
    /// Centre, pixels from the top.
    pub y: f64,
}

/// Everything that is drawn.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Scene {
    /// Pixels down.
    pub height: usize,
    /// Pixels across.
    pub width: usize,
    /// First tone of the background.
    pub background: Colour,
    /// How the background is filled.
    pub texture: Texture,
    /// Where stripes and dots begin, in periods.
    pub phase: f64,
    /// One to three objects.
    pub objects: Vec<Object>,
    /// Relations between them, by index.
    pub triples: Vec<(usize, Relation, usize)>,
    /// Where a single object stands.
    pub position: Option<Place>,
}

impl Scene {
    /// The full description of the scene.
    pub fn expectation(&self) -> Expectation {
        let named = |object: &Object| Named {
            colour: object.colour,
            shape: object.shape,
        };
        Expectation {
            objects: self.objects.iter().map(named).collect(),
            relations: self.triples.clone(),
            position: self.position,
            background: Some(self.background),
        }
    }
}

/// An object as a prompt names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Named {
    /// Its colour.
    pub colour: Colour,
    /// Its shape.
    pub shape: Shape,
}

/// What a picture must show.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Expectation {
    /// These objects and no others.
    pub objects: Vec<Named>,
    /// Relations between them, by index.
    pub relations: Vec<(usize, Relation, usize)>,
    /// Where the first object stands, if said.
    pub position: Option<Place>,
    /// The background, if said.
    pub background: Option<Colour>,
}
