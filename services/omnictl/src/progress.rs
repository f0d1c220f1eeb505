//! The progress bar: on stderr, only on a terminal, silent when asked.
use std::{io::IsTerminal as _, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::text::Console;

/// How often a bar without news moves its spinner.
const TICK: Duration = Duration::from_millis(120);

/// Progress of one request.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    colour: bool,
}

impl Progress {
    /// A bar, or nothing at all when `shown` is false or stderr is no terminal.
    pub(crate) fn new(shown: bool, console: &Console) -> Self {
        let visible = shown && std::io::stderr().is_terminal();
        let target = if visible {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        if visible {
            bar.enable_steady_tick(TICK);
        }
        Self {
            bar,
            colour: console.colour(),
        }
    }

    /// What is going on while there is nothing to count.
    pub(crate) fn phase(&self, text: String) {
        self.bar.set_message(text);
    }

    /// `done` of `total` steps.
    pub(crate) fn step(&self, done: u32, total: u32) {
        if self.bar.length().is_none() {
            let bar = if self.colour {
                "{bar:30.cyan/blue}"
            } else {
                "{bar:30}"
            };
            let style = ProgressStyle::with_template(&format!(
                "{{spinner}} {bar} step {{pos}}/{{len}} {{elapsed}} {{msg}}"
            ));
            if let Ok(style) = style {
                self.bar.set_style(style);
            }
            self.bar.set_length(u64::from(total));
            self.bar.set_message(String::new());
        }
        self.bar.set_position(u64::from(done));
        if done == total {
            self.bar.set_message("decoding");
        }
    }

    /// Removes the bar.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
