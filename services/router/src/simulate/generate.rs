//! Example traces, from a seed.
use base::rng::Source;

use super::trace::{Request, Trace};
use crate::{RouterError, batching::Class};

/// Most requests that are made.
const MAX_REQUESTS: u32 = 100_000;
/// Of a bursty trace: seconds of a burst with the lull after it, the share of it that is the burst, and the
/// share of requests that come in it.
const BURST_PERIOD: f64 = 60.0;
const BURST_SHARE: f64 = 0.2;
const BURST_REQUESTS: f64 = 0.8;

/// What a trace looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The model's defaults: 1024x1024, 50 guided steps, evenly random arrivals.
    Uniform,
    /// The same, most of it in bursts.
    Bursty,
    /// Three sizes, 8 or 50 steps, guided or not, now and then an edit or several images.
    Mixed,
    /// Mostly edits, whose prefixes are long.
    Edits,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Uniform, Self::Bursty, Self::Mixed, Self::Edits];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Bursty => "bursty",
            Self::Mixed => "mixed",
            Self::Edits => "edits",
        }
    }
}

/// `count` requests at `rate` a second on average. The same arguments give the same trace.
///
/// # Errors
/// [`RouterError::Invalid`]: a count or a rate out of bounds.
pub fn generate(kind: Kind, count: u32, rate: f64, seed: u64) -> Result<Trace, RouterError> {
    if !(1..=MAX_REQUESTS).contains(&count) {
        let reason = format!("must be 1 to {MAX_REQUESTS}, got {count}");
        return Err(RouterError::invalid("requests", reason));
    }
    if !(1e-3..=1e4).contains(&rate) {
        return Err(RouterError::invalid(
            "rate",
            format!("must be 0.001 to 10000, got {rate}"),
        ));
    }
    let mut dice = Dice(Source::seeded(seed));
    // Time in which requests come evenly; bursts bend it.
    let mut even = 0.0;
    let requests = (0..count).map(|_| {
        even -= (1.0 - dice.unit()).ln() / rate;
        let at = if kind == Kind::Bursty {
            bent(even)
        } else {
            even
        };
        dice.request(kind, (at * 1e3).round() / 1e3)
    });
    Ok(Trace {
        requests: requests.collect(),
    })
}

/// When, in a world of bursts, as many requests have come as evenly by `even`.
fn bent(even: f64) -> f64 {
    let (period, within) = ((even / BURST_PERIOD).floor(), even / BURST_PERIOD % 1.0);
    let bent = if within < BURST_REQUESTS {
        within * BURST_SHARE / BURST_REQUESTS
    } else {
        BURST_SHARE + (within - BURST_REQUESTS) * (1.0 - BURST_SHARE) / (1.0 - BURST_REQUESTS)
    };
    (period + bent) * BURST_PERIOD
}

struct Dice(Source);

impl Dice {
    /// Evenly from [0, 1).
    fn unit(&mut self) -> f64 {
        #[allow(clippy::cast_precision_loss)] // 53 bits
        let bits = (self.0.next_u64() >> 11) as f64;
        bits / (1_u64 << 53) as f64
    }

    fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    fn one_of<T: Copy>(&mut self, choices: &[(T, f64)], otherwise: T) -> T {
        let mut roll = self.unit();
        for &(choice, share) in choices {
            if roll < share {
                return choice;
            }
            roll -= share;
        }
        otherwise
    }

    fn request(&mut self, kind: Kind, at_s: f64) -> Request {
        let varied = matches!(kind, Kind::Mixed | Kind::Edits);
        let class = self.one_of(
            &[(Class::Interactive, 0.3), (Class::Background, 0.2)],
            Class::Standard,
        );
        let size = self.one_of(&[("512x512", 0.4), ("1280x768", 0.25)], "1024x1024");
        let steps = self.one_of(&[(8, 0.5)], 50);
        let guided = self.chance(0.6);
        let edits = if kind == Kind::Edits { 0.8 } else { 0.15 };
        let edit = self.chance(edits);
        let n = self.one_of(&[(2, 0.08), (4, 0.04)], 1);
        let prompt_tokens = 24 + (self.unit() * self.unit() * 400.0) as u32;
        let deadline = self.chance(0.1).then_some(300.0);
        if varied {
            return Request {
                at_s,
                size: size.to_owned(),
                steps,
                guidance: if guided { 5.0 } else { 1.0 },
                edit,
                class,
                deadline_s: deadline,
                n,
                prompt_tokens,
            };
        }
        Request {
            at_s,
            size: "1024x1024".to_owned(),
            steps: 50,
            guidance: 5.0,
            edit: false,
            class,
            deadline_s: deadline,
            n: 1,
            prompt_tokens,
        }
    }
}
