//! Tokens of a text pass that the model does not choose freely.
//!
//! HunyuanImage-3.0, forced transitions: one pass thinks, rewrites the prompt and names a size, because after
//! some tokens the next ones are forced, and after the size token only ratio tokens may come.

use std::collections::VecDeque;

use super::argmax;
use crate::config::Template;
use crate::error::ModelError;
use crate::layout::TextTask;
use crate::tokenizer::SpecialTokens;

/// What the assistant writes before a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writing {
    /// Reasoning only.
    Think,
    /// The rewritten prompt only.
    Recaption,
    /// Reasoning, then the rewritten prompt.
    ThinkRecaption,
}

impl Writing {
    /// The text task that the pass starts from.
    pub fn task(self) -> TextTask {
        match self {
            Self::Think | Self::ThinkRecaption => TextTask::Think,
            Self::Recaption => TextTask::Recaption,
        }
    }

    /// The tag that the pass starts behind.
    pub fn opening(self, special: &SpecialTokens) -> u32 {
        match self {
            Self::Think | Self::ThinkRecaption => special.think,
            Self::Recaption => special.recaption,
        }
    }

    /// The tag that ends the text proper.
    pub fn closing(self, special: &SpecialTokens) -> u32 {
        match self {
            Self::Think => special.end_think,
            Self::Recaption | Self::ThinkRecaption => special.end_recaption,
        }
    }
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<'a> {
    /// Any token.
    Free,
    /// This token.
    Forced(u32),
    /// The most likely one of these, never a sampled one.
    MostLikelyOf(&'a [u32]),
}

/// Where a text pass stands between its forced transitions.
#[derive(Clone, Debug)]
pub struct Transitions {
    /// Trigger and what it forces; each fires once.
    rules: Vec<(u32, Vec<u32>)>,
    pending: VecDeque<u32>,
    /// Only a ratio may follow this token.
    size_token: Option<u32>,
    ratios: Vec<u32>,
    stops: Vec<u32>,
    last: Option<u32>,
}

impl Transitions {
    /// The transitions of a pass; `auto_size` is the base size whose token precedes the ratio the model is
    /// to name, or `None` when the caller fixed the size.
    ///
    /// # Errors
    /// `Tokenizer` when the size has no token.
    pub fn new(
        special: &SpecialTokens,
        writing: Writing,
        template: Template,
        auto_size: Option<usize>,
    ) -> Result<Self, ModelError> {
        let size_token = auto_size.map(|base| special.size(base)).transpose()?;
        let mut rules = Vec::new();
        if writing == Writing::ThinkRecaption {
            rules.push((special.end_think, vec![special.recaption]));
        }
        let stops = match size_token {
            Some(size) => {
                let answer = (template == Template::Instruct).then_some(special.answer);
                let tail = answer.into_iter().chain([special.boi, size]).collect();
                rules.push((writing.closing(special), tail));
                special.ratios.clone()
            }
            None if writing == Writing::Think => vec![special.end_think, special.end_recaption],
            None => vec![special.end_recaption],
        };
        Ok(Self {
            rules,
            pending: VecDeque::new(),
            size_token,
            ratios: special.ratios.clone(),
            stops,
            last: None,
        })
    }

    /// Free text up to the end of the text.
    pub fn free(special: &SpecialTokens) -> Self {
        Self {
            rules: Vec::new(),
            pending: VecDeque::new(),
            size_token: None,
            ratios: Vec::new(),
            stops: vec![special.eos],
            last: None,
        }
    }

    /// Only the ratio behind the size token of `base_size`, with which the row ends.
    ///
    /// # Errors
    /// `Tokenizer` when the size has no token.
    pub fn ratio(special: &SpecialTokens, base_size: usize) -> Result<Self, ModelError> {
        let size = special.size(base_size)?;
        Ok(Self {
            size_token: Some(size),
            ratios: special.ratios.clone(),
            stops: special.ratios.clone(),
            last: Some(size),
            ..Self::free(special)
        })
    }

    /// What may come next.
    pub fn choice(&self) -> Choice<'_> {
        if let Some(id) = self.pending.front() {
            return Choice::Forced(*id);
        }
        match self.size_token {
            Some(_) if self.last == self.size_token => Choice::MostLikelyOf(&self.ratios),
            _ => Choice::Free,
        }
    }

    /// The next token, greedily; the lower index among equals.
    pub fn pick(&self, logits: &[f32]) -> u32 {
        match self.choice() {
            Choice::Free => argmax(logits),
            Choice::Forced(id) => id,
            Choice::MostLikelyOf(ids) => {
                let scores: Vec<f32> = ids.iter().map(|id| logits[*id as usize]).collect();
                ids[argmax(&scores) as usize]
            }
        }
    }

    /// Takes note of a written token; `true` when the pass is over.
    pub fn accept(&mut self, id: u32) -> bool {
        self.last = Some(id);
        if self.pending.pop_front().is_none()
            && let Some(rule) = self.rules.iter().position(|(after, _)| *after == id)
        {
            self.pending.extend(self.rules.remove(rule).1);
        }
        self.pending.is_empty() && self.stops.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special() -> SpecialTokens {
        SpecialTokens {
            bos: 0,
            eos: 1,
            pad: None,
            boi: 2,
            eoi: 3,
            img: 4,
            cfg: 5,
            timestep: 6,
            guidance: None,
            timestep_r: None,
            joint_img_sep: 7,
            think: 8,
            end_think: 9,
            recaption: 10,
            end_recaption: 11,
            answer: 12,
            end_answer: 13,
            sizes: vec![(256, 14)],
            // Not contiguous, as in the Instruct releases.
            ratios: vec![15, 16, 19],
        }
    }

    /// Logits that favour `id` (and, less, whatever `second` names).
    fn favour(id: u32, second: u32) -> Vec<f32> {
        let mut logits = vec![0.0; 20];
        logits[id as usize] = 2.0;
        logits[second as usize] = 1.0;
        logits
    }

    /// Feeds what the model "wants" and returns what is written.
    fn run(mut at: Transitions, wants: &[(u32, u32)]) -> Vec<u32> {
        let mut out = Vec::new();
        for (first, second) in wants {
            let id = at.pick(&favour(*first, *second));
            out.push(id);
            if at.accept(id) {
                break;
            }
        }
        out
    }

    #[test]
    fn thinking_leads_to_a_recaption_an_answer_and_a_ratio() {
        let at = Transitions::new(
            &special(),
            Writing::ThinkRecaption,
            Template::Instruct,
            Some(256),
        );
        // 17 and 18 are words; the end of text (1) is no stop while a size is due.
        let wants = [
            (17, 0),
            (9, 0),
            (1, 0),
            (18, 0),
            (11, 0),
            (1, 0),
            (1, 0),
            (1, 0),
            (17, 19),
            (17, 0),
        ];
        assert_eq!(
            run(at.unwrap(), &wants),
            [17, 9, 10, 18, 11, 12, 2, 14, 19],
            "recaption, answer, boi and size are forced, the ratio is the likeliest of the ratios"
        );
    }

    #[test]
    fn the_pretrain_template_has_no_answer_tag() {
        let at = Transitions::new(
            &special(),
            Writing::Recaption,
            Template::Pretrain,
            Some(256),
        );
        let wants = [(11, 0), (17, 0), (17, 0), (17, 16)];
        assert_eq!(run(at.unwrap(), &wants), [11, 2, 14, 16]);
    }

    #[test]
    fn a_given_size_ends_the_pass_at_the_closing_tag() {
        let new =
            |writing| Transitions::new(&special(), writing, Template::Instruct, None).unwrap();
        let wants = [(17, 0), (9, 0), (18, 0), (11, 0), (17, 0)];
        assert_eq!(run(new(Writing::ThinkRecaption), &wants), [17, 9, 10, 11]);
        assert_eq!(run(new(Writing::Think), &wants), [17, 9]);
        assert_eq!(run(new(Writing::Recaption), &wants), [17, 9, 18, 11]);
    }

    #[test]
    fn a_transition_fires_once() {
        let at = Transitions::new(
            &special(),
            Writing::ThinkRecaption,
            Template::Instruct,
            None,
        );
        let wants = [(9, 0), (17, 0), (9, 0), (18, 0), (11, 0)];
        assert_eq!(run(at.unwrap(), &wants), [9, 10, 9, 18, 11]);
    }

    #[test]
    fn a_ratio_alone_is_the_likeliest_of_the_ratios_and_free_text_ends_at_its_end() {
        let ratio = Transitions::ratio(&special(), 256).unwrap();
        assert_eq!(run(ratio, &[(17, 19), (17, 0)]), [19]);
        assert!(Transitions::ratio(&special(), 512).is_err());
        let free = Transitions::free(&special());
        assert_eq!(run(free, &[(9, 0), (16, 0), (1, 0), (17, 0)]), [9, 16, 1]);
    }

    #[test]
    fn a_size_without_a_token_is_an_error() {
        let new = Transitions::new(&special(), Writing::Think, Template::Instruct, Some(512));
        assert!(new.is_err());
    }
}
