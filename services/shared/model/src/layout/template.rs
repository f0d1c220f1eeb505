//! The sections of a sequence, in order, for each template.
//!
//! Every text section is tokenised on its own: joining strings first would let merges cross a border and change
//! ids. HunyuanImage-3.0: both templates have the same sections; in the pretrain template roles and separators
//! are empty.

use crate::config::Template;
use crate::error::ModelError;
use crate::tokenizer::{SpecialTokens, Tokenizer};

use super::{LayoutInput, Target, TextTask};

/// The constant texts of a template.
pub(super) struct Texts {
    pub(super) user_prefix: &'static str,
    pub(super) bot_prefix: &'static str,
    pub(super) separator: &'static str,
    /// Whether `<answer>` and `</answer>` enclose the image.
    pub(super) answer_tags: bool,
}

impl Texts {
    pub(super) fn of(template: Template) -> Self {
        match template {
            Template::Pretrain => Self {
                user_prefix: "",
                bot_prefix: "",
                separator: "",
                answer_tags: false,
            },
            Template::Instruct => Self {
                user_prefix: "User: ",
                bot_prefix: "Assistant: ",
                separator: "\n\n",
                answer_tags: true,
            },
        }
    }
}

/// One section.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// Text, already tokenised.
    Text {
        ids: Vec<u32>,
        /// Replaced one for one by `<cfg>` in the unconditional row.
        droppable: bool,
    },
    /// Conditioning image number `n`.
    Joint(usize),
    /// The image to generate.
    Generated,
}

/// Builds the section list of one request.
pub(super) struct Sections<'a> {
    /// Ids of what the assistant wrote earlier.
    pub(super) written: &'a [u32],
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) special: &'a SpecialTokens,
    pub(super) size_token: u32,
    pub(super) list: Vec<Section>,
}

impl Sections<'_> {
    pub(super) fn build(&mut self, input: &LayoutInput<'_>) -> Result<(), ModelError> {
        let texts = Texts::of(input.template);
        if let Some(system) = input.system_prompt.filter(|s| !s.is_empty()) {
            // An empty prefix section stands before the system text, as in the reference.
            self.fixed("")?;
            self.fixed(system)?;
            self.fixed(texts.separator)?;
        }
        self.fixed(texts.user_prefix)?;
        self.list
            .extend((0..input.cond_images.len()).map(Section::Joint));
        let prompt = self.tokenizer.encode(input.prompt)?;
        self.push(prompt, true);
        self.fixed(texts.separator)?;
        match input.target {
            Target::Image(_) => {
                self.fixed(texts.bot_prefix)?;
                self.assistant(input)?;
                self.push(self.tag(&texts, self.special.answer), false);
                self.list.push(Section::Generated);
                self.push(self.tag(&texts, self.special.end_answer), false);
                self.fixed(texts.separator)
            }
            Target::Text(task) => self.text_tail(input, &texts, task),
        }
    }

    /// What a text pass continues from.
    fn text_tail(
        &mut self,
        input: &LayoutInput<'_>,
        texts: &Texts,
        task: TextTask,
    ) -> Result<(), ModelError> {
        let mut last = self.tokenizer.encode(texts.bot_prefix)?;
        match task {
            TextTask::Auto => {}
            TextTask::Think => last.push(self.special.think),
            TextTask::Recaption => last.push(self.special.recaption),
            TextTask::Ratio => {
                let text = input.assistant_text.is_some_and(|t| !t.is_empty());
                if text || !self.written.is_empty() {
                    self.push(std::mem::take(&mut last), false);
                    self.assistant(input)?;
                }
                last.extend(self.tag(texts, self.special.answer));
                last.extend([self.special.boi, self.size_token]);
            }
        }
        self.push(last, false);
        Ok(())
    }

    fn tag(&self, texts: &Texts, tag: u32) -> Vec<u32> {
        if texts.answer_tags {
            vec![tag]
        } else {
            Vec::new()
        }
    }

    fn push(&mut self, ids: Vec<u32>, droppable: bool) {
        self.list.push(Section::Text { ids, droppable });
    }

    fn fixed(&mut self, text: &str) -> Result<(), ModelError> {
        let ids = self.tokenizer.encode(text)?;
        self.push(ids, false);
        Ok(())
    }

    /// Text that the assistant wrote earlier, split at its think and recaption tags.
    fn assistant(&mut self, input: &LayoutInput<'_>) -> Result<(), ModelError> {
        let text = input.assistant_text.unwrap_or("");
        for part in split_assistant_text(text, input.drop_think) {
            match part {
                Part::Body(body) => {
                    let ids = self.tokenizer.encode_model_text(body)?;
                    self.push(ids, true);
                }
                Part::Tag(tag) => {
                    let ids = self.tokenizer.encode_model_text(tag)?;
                    self.push(ids, false);
                }
            }
        }
        let think = (self.special.think, self.special.end_think);
        let recaption = (self.special.recaption, self.special.end_recaption);
        for (ids, droppable) in split_written(self.written, think, recaption, input.drop_think) {
            self.push(ids.to_vec(), droppable);
        }
        Ok(())
    }
}

/// A tag that opens a block and the one that closes it.
type Tags = (u32, u32);

/// What a run of ids is to the blocks of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Outside,
    Tag,
    Body,
}

/// Splits ids as [`split_assistant_text`] splits text: sections and whether they are droppable.
fn split_written(
    ids: &[u32],
    think: Tags,
    recaption: Tags,
    drop_think: bool,
) -> Vec<(&[u32], bool)> {
    let mut parts = Vec::new();
    for (run, place) in split_ids(ids, think, !drop_think) {
        match place {
            Place::Outside => parts.extend(split_ids(run, recaption, true)),
            Place::Tag | Place::Body => parts.push((run, place)),
        }
    }
    let droppable = |(run, place)| (run, place != Place::Tag);
    parts.into_iter().map(droppable).collect()
}

/// Splits ids around their blocks; of blocks that are not kept, nothing stays.
fn split_ids(mut ids: &[u32], (open, close): Tags, keep: bool) -> Vec<(&[u32], Place)> {
    let mut parts = Vec::new();
    loop {
        let block = ids.iter().position(|id| *id == open).and_then(|from| {
            let body = ids[from + 1..].iter().position(|id| *id == close)?;
            Some((from, from + 1 + body))
        });
        let Some((from, to)) = block else {
            parts.extend((!ids.is_empty()).then_some((ids, Place::Outside)));
            return parts;
        };
        parts.extend((from > 0).then_some((&ids[..from], Place::Outside)));
        if keep {
            let tag = |at: usize| (&ids[at..=at], Place::Tag);
            parts.extend([tag(from), (&ids[from + 1..to], Place::Body), tag(to)]);
        }
        ids = &ids[to + 1..];
    }
}

/// A piece of assistant text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Droppable text.
    Body(&'a str),
    /// A tag, kept in both rows.
    Tag(&'static str),
}

/// Splits at `<think>…</think>` and `<recaption>…</recaption>`; text outside them is a part of its own unless
/// empty, and a block whose closing tag is missing stays one part with its opening tag inside.
pub(super) fn split_assistant_text(text: &str, drop_think: bool) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    split_block(
        text,
        ("<think>", "</think>"),
        !drop_think,
        &mut parts,
        &|rest, parts| {
            split_block(
                rest,
                ("<recaption>", "</recaption>"),
                true,
                parts,
                &|rest, parts| {
                    if !rest.is_empty() {
                        parts.push(Part::Body(rest));
                    }
                },
            );
        },
    );
    parts
}

/// Splits `text` around its first block; `other` gets what lies outside of it.
fn split_block<'a>(
    text: &'a str,
    (open, close): (&'static str, &'static str),
    keep: bool,
    parts: &mut Vec<Part<'a>>,
    other: &dyn Fn(&'a str, &mut Vec<Part<'a>>),
) {
    let block = text.split_once(open).and_then(|(before, rest)| {
        rest.split_once(close)
            .map(|(body, after)| (before, body, after))
    });
    let Some((before, body, after)) = block else {
        other(text, parts);
        return;
    };
    other(before, parts);
    if keep {
        parts.extend([Part::Tag(open), Part::Body(body), Part::Tag(close)]);
    }
    split_block(after, (open, close), keep, parts, other);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_blocks_split_into_tags_and_bodies() {
        let text = "<think>a</think><recaption>b</recaption>";
        assert_eq!(
            split_assistant_text(text, false),
            [
                Part::Tag("<think>"),
                Part::Body("a"),
                Part::Tag("</think>"),
                Part::Tag("<recaption>"),
                Part::Body("b"),
                Part::Tag("</recaption>"),
            ]
        );
        assert_eq!(
            split_assistant_text(text, true),
            [
                Part::Tag("<recaption>"),
                Part::Body("b"),
                Part::Tag("</recaption>")
            ]
        );
    }

    #[test]
    fn ids_split_where_their_text_would() {
        // 1 and 2 enclose thoughts, 3 and 4 a recaption.
        let split = |ids: &'static [u32], drop| split_written(ids, (1, 2), (3, 4), drop);
        let both = &[1, 9, 9, 2, 3, 8, 4];
        let tag = |id: &'static u32| (std::slice::from_ref(id), false);
        assert_eq!(
            split(both, false),
            [
                tag(&1),
                (&[9, 9][..], true),
                tag(&2),
                tag(&3),
                (&[8], true),
                tag(&4)
            ]
        );
        assert_eq!(split(both, true), [tag(&3), (&[8][..], true), tag(&4)]);
        for open in [&[1, 9, 9][..], &[3, 8], &[7], &[2, 9, 1], &[1]] {
            assert_eq!(split(open, false), [(open, true)]);
        }
        assert_eq!(split(&[], false), []);
        assert_eq!(
            split(&[7, 1, 3, 2, 6, 3, 4], false),
            [
                (&[7][..], true),
                tag(&1),
                (&[3], true),
                tag(&2),
                (&[6], true),
                tag(&3),
                (&[], true),
                tag(&4),
            ]
        );
    }

    #[test]
    fn an_unclosed_block_stays_whole() {
        for text in ["<think>a", "<recaption>b", "plain", "</think>a<think>"] {
            assert_eq!(split_assistant_text(text, false), [Part::Body(text)]);
        }
        assert_eq!(split_assistant_text("", false), []);
    }

    #[test]
    fn text_around_the_blocks_is_kept() {
        let text = "x<think>a</think>y<recaption>b</recaption>z";
        let bodies: Vec<_> = split_assistant_text(text, false)
            .into_iter()
            .filter_map(|p| match p {
                Part::Body(b) => Some(b),
                Part::Tag(_) => None,
            })
            .collect();
        assert_eq!(bodies, ["x", "a", "y", "b", "z"]);
    }
}
