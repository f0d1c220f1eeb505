//! The committed list of prompts that no training caption shared, and what each must show.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::scene::{Change, Colour, Expectation, Reading, Scene, judge_edit};
use crate::workspace_root;

/// Directory of the trained checkpoint.
pub fn checkpoint_dir() -> PathBuf {
    workspace_root().join("deploy/demo-model/checkpoint")
}

/// Everything that is held out.
#[derive(Clone, Debug, Deserialize)]
pub struct DemoSet {
    /// Pictures to draw.
    pub prompts: Vec<DemoPrompt>,
    /// Pictures to change.
    pub edits: Vec<DemoEdit>,
}

impl DemoSet {
    /// Reads the committed list.
    ///
    /// # Errors
    /// When it is absent or not as described here.
    pub fn load() -> io::Result<Self> {
        Self::read(&workspace_root().join("deploy/demo-model/prompts_eval.json"))
    }

    /// Reads a list of the same form.
    ///
    /// # Errors
    /// When it is absent or not as described here.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }
}

/// The format of a picture, as words name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names say it all
pub enum PictureFormat {
    Square,
    Wide,
    Panorama,
    Tall,
    Tower,
}

impl PictureFormat {
    /// Number of its ratio token.
    pub fn ratio_index(self) -> usize {
        match self {
            Self::Square => 16,
            Self::Wide => 12,
            Self::Panorama => 8,
            Self::Tall => 20,
            Self::Tower => 24,
        }
    }
}

/// A picture to draw.
#[derive(Clone, Debug, Deserialize)]
pub struct DemoPrompt {
    /// Name of the entry.
    pub id: String,
    /// `single`, `two`, `three` (objects) or `ratio` (names the format in words).
    pub category: String,
    /// What is asked for.
    pub prompt: String,
    /// The format asked for, or the square.
    pub format: PictureFormat,
    /// What the picture must show.
    pub expect: Expectation,
    /// A scene that fits the prompt.
    pub scene: Scene,
}

impl DemoPrompt {
    /// The objects that a recaption does not name, as a sentence; none when it names all of them.
    pub fn missing_in(&self, written: &str) -> Option<String> {
        let recaption = written
            .split_once("<recaption>")
            .map_or("", |(_, text)| text);
        let missing: Vec<String> = (self.expect.objects.iter())
            .map(|object| format!("{} {}", object.colour.name(), object.shape.name()))
            .filter(|name| !recaption.contains(name))
            .collect();
        (!missing.is_empty()).then(|| format!("{written:?} lacks {}", missing.join(", ")))
    }
}

/// What an edit changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EditKind {
    /// The colour of one object.
    Recolour,
    /// One object goes.
    Remove,
    /// The colour of the background.
    Background,
}

/// A picture to change.
#[derive(Clone, Debug, Deserialize)]
pub struct DemoEdit {
    /// Name of the entry.
    pub id: String,
    /// Name of the kind.
    pub category: String,
    /// What is asked for.
    pub prompt: String,
    /// The change.
    pub edit: EditRecord,
    /// The picture before it.
    pub source: Scene,
    /// What the picture must show after it.
    pub expect: Expectation,
}

/// The change of an edit.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct EditRecord {
    /// What changes.
    pub kind: EditKind,
    /// Which object, if one changes.
    pub object: usize,
    /// The new colour, if one does.
    pub colour: Option<Colour>,
}

impl DemoEdit {
    /// Makes the change to a scene, as a faultless editor would.
    pub fn apply(&self, scene: &mut Scene) {
        let index = self.edit.object;
        match (self.edit.kind, self.edit.colour) {
            (EditKind::Remove, _) => {
                scene.objects.remove(index);
                scene.triples.clear();
            }
            (EditKind::Recolour, Some(colour)) => scene.objects[index].colour = colour,
            (EditKind::Background, Some(colour)) => scene.background = colour,
            (EditKind::Recolour | EditKind::Background, None) => {}
        }
    }

    /// What is wrong with the picture after the edit.
    pub fn judge(&self, after: &Reading) -> Option<String> {
        let change = match (self.edit.kind, self.edit.colour) {
            (EditKind::Remove, _) => Change::Removed,
            (EditKind::Recolour, Some(colour)) => Change::Recoloured(colour),
            (EditKind::Recolour | EditKind::Background, _) => Change::None,
        };
        let changed = (self.edit.object, change);
        judge_edit(after, &self.expect, &self.source.objects, changed)
    }
}
