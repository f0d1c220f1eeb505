//! The demo model on its held-out prompts, in this process.

mod grid;
mod set;
mod studio;

pub use grid::{contact_sheet, decode_png, encode_png};
pub use set::{DemoEdit, DemoPrompt, DemoSet, EditKind, PictureFormat, checkpoint_dir};
pub use studio::{MAX_NEW_TOKENS, SEED, Studio, psnr};
