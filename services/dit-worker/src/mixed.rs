//! Hundreds of mixed requests through the step loop of every plan: whoever is not cancelled gets exactly the
//! image that the request gets alone on one rank.
use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, atomic::AtomicBool, atomic::Ordering},
};

use base::{build::BuildInfo, rng::Source};
use model::{
    BalanceOptions, JobOptions, JobSpec, KvCache, Latents, Parts, PrefixKv, input::RowInput,
    positions::ImageSpan,
};
use parallel::RankContext;
use stage::{RankLoad, Ranks, StageError};
use telemetry::{Metrics, names};
use tokio::sync::{mpsc, oneshot};

use crate::{
    batch::tests,
    batch::{Batch, Class, Ended, Entry, StepLimits, Terms},
    checkpoint,
    denoiser::{ModelDenoiser, NewsPlan, RankJob, weight},
    former::Forming,
};

const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../integration-tests/fixtures/golden/model"
);
/// Requests of one run.
const REQUESTS: usize = 500;
/// What sums over ranks change in every other image at most, relative to the largest value (plans of tp and
/// ring).
const TOLERANCE: f32 = 1e-5;
/// Small enough that jobs wait, are overtaken and parked.
const LIMITS: StepLimits = StepLimits {
    max_rows: 8,
    max_tokens: 120,
};
/// Far more boundaries than a run needs.
const MAX_BOUNDARIES: usize = 20_000;

/// One request; equal ones have equal images.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Wish {
    grid: (usize, usize),
    steps: usize,
    guided: bool,
    seed: u64,
    /// Of the rows with and without the prompt, among all prefixes of a run.
    prefixes: (usize, usize),
}

fn ranks(plan: &str) -> Ranks {
    let parts = Parts {
        vae_decoder: false,
        ..Parts::DENOISE
    };
    let load = RankLoad {
        parts,
        alone: parts,
        plan: plan.parse().unwrap(),
        balance: BalanceOptions::default(),
        residency: model::Residency::All,
        tiles: model::vae::Tiles::Whole,
    };
    Ranks::open(Path::new(CHECKPOINT), load).unwrap()
}

/// Prefixes of texts, and of edits, whose pictures' tokens all see each other.
fn prefixes(ranks: &Ranks) -> Vec<Arc<PrefixKv>> {
    let model = ranks.first();
    let prefix = |number: u32| {
        let tokens = 12 + 2 * number as usize;
        let ids: Vec<u32> = (0..tokens as u32)
            .map(|i| (i * 37 + number * 11) % 200)
            .collect();
        let span = ImageSpan {
            tokens: 3..9,
            grid_h: 2,
            grid_w: 3,
        };
        let edit = number % 2 == 1;
        let joint = span.tokens.clone();
        let shown = usize::from(edit);
        let row = RowInput {
            start: 0,
            ids: &ids,
            images: &std::slice::from_ref(&span)[..shown],
            full: &std::slice::from_ref(&joint)[..shown],
            vectors: &[],
        };
        let mut cache = KvCache::new(model.info().kv, tokens).unwrap();
        model
            .fill_rows(&RankContext::single(), &[row], &mut [&mut cache])
            .unwrap();
        Arc::new(cache.into_prefix())
    };
    (0..6).map(prefix).collect()
}

impl Wish {
    fn draw(chance: &Source, always_guided: bool) -> Self {
        let side = || 1 + chance.below(4) as usize;
        Self {
            grid: (side(), side()),
            steps: 1 + chance.below(6) as usize,
            guided: always_guided || chance.below(2) == 0,
            seed: chance.below(1 << 40),
            prefixes: (chance.below(6) as usize, chance.below(6) as usize),
        }
    }

    fn spec(&self, prefixes: &[Arc<PrefixKv>], cell: usize) -> JobSpec {
        JobSpec {
            height: self.grid.0 * cell,
            width: self.grid.1 * cell,
            steps: self.steps,
            guidance: if self.guided { 4.5 } else { 1.0 },
            seed: self.seed,
            cond: Some(Arc::clone(&prefixes[self.prefixes.0])),
            uncond: Some(Arc::clone(&prefixes[self.prefixes.1])),
        }
    }
}

/// One request under way.
struct Caller {
    wish: Wish,
    result: oneshot::Receiver<Result<Ended<RankJob>, StageError>>,
    park: Arc<AtomicBool>,
    _progress: mpsc::Receiver<crate::batch::Told<crate::denoiser::News>>,
}

/// What a run saw.
#[derive(Debug, Default)]
struct Tally {
    survived: usize,
    cancelled: usize,
    resumed: usize,
    /// Boundaries at which a job that had begun had to wait.
    overtaken: usize,
}

struct Run<'a> {
    plan: &'a str,
    ranks: Arc<Ranks>,
    prefixes: &'a [Arc<PrefixKv>],
    chance: Source,
    batch: Batch<ModelDenoiser>,
    callers: Vec<Caller>,
    tally: Tally,
    metrics: Metrics,
}

impl<'a> Run<'a> {
    fn new(plan: &'a str, prefixes: &'a [Arc<PrefixKv>], seed: u64) -> Self {
        let ranks = Arc::new(ranks(plan));
        let metrics = Metrics::new(&BuildInfo::default());
        let denoiser = ModelDenoiser {
            ranks: Arc::clone(&ranks),
            metrics: metrics.clone(),
        };
        // By cost every other time, with a step worth sharing.
        let costs = (seed % 2 == 1).then(|| tests::constants(0.1));
        let forming = Forming {
            limits: LIMITS,
            costs,
        };
        Self {
            plan,
            ranks,
            prefixes,
            chance: Source::seeded(seed),
            batch: Batch::new(denoiser, forming),
            callers: Vec::new(),
            tally: Tally::default(),
            metrics,
        }
    }

    fn push(&mut self, wish: Wish, options: &JobOptions) {
        let cell = self.ranks.info().pixels_per_token;
        let news = NewsPlan {
            checkpoint_every: 2,
            previews: 1,
            vae: false,
        };
        let spec = wish.spec(self.prefixes, cell);
        let job = RankJob::new(&self.ranks, &spec, options, news).unwrap();
        let classes = [Class::Interactive, Class::Standard, Class::Background];
        let (progress, seen) = mpsc::channel(16);
        let (result, answered) = oneshot::channel();
        let park = Arc::<AtomicBool>::default();
        self.batch.push(Entry {
            weight: weight(&job),
            job,
            terms: Terms {
                steps: wish.steps,
                ..classes[self.chance.below(3) as usize].into()
            },
            progress,
            result,
            park: Arc::clone(&park),
        });
        self.callers.push(Caller {
            wish,
            result: answered,
            park,
            _progress: seen,
        });
    }

    /// Runs all requests; what became of whom.
    fn run(mut self, requests: usize) -> (Vec<(Wish, Latents)>, Tally, String) {
        let guided = self.plan.contains("cfg=");
        let (mut sent, mut images) = (0, Vec::new());
        for _ in 0..MAX_BOUNDARIES {
            for _ in 0..self.chance.below(4) {
                if sent < requests {
                    let wish = Wish::draw(&self.chance, guided);
                    self.push(wish, &JobOptions::default());
                    sent += 1;
                }
            }
            self.disturb();
            self.batch.boundary();
            self.tally.overtaken += self.batch.overtaken();
            self.batch.step();
            self.collect(&mut images);
            if sent == requests && self.callers.is_empty() {
                return (images, self.tally, self.metrics.encode());
            }
        }
        panic!("{}: {} requests never ended", self.plan, self.callers.len());
    }

    /// Cancels one in sixty, wants one in thirty back, at every boundary.
    fn disturb(&mut self) {
        let mut kept = Vec::new();
        for caller in self.callers.drain(..) {
            match self.chance.below(60) {
                0 => self.tally.cancelled += 1,
                1 | 2 => {
                    caller.park.store(true, Ordering::Release);
                    kept.push(caller);
                }
                _ => kept.push(caller),
            }
        }
        self.callers = kept;
    }

    /// Takes what has ended; a job that came back goes on as a new one, from its state as it travels.
    fn collect(&mut self, images: &mut Vec<(Wish, Latents)>) {
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.result.try_recv() {
                Err(oneshot::error::TryRecvError::Empty) => self.callers.push(caller),
                Err(oneshot::error::TryRecvError::Closed) => panic!("{}: no word", self.plan),
                Ok(ended) => {
                    let ended = ended.unwrap();
                    let state = ended.job.state().unwrap();
                    if !ended.parked {
                        images.push((caller.wish, state.latents));
                        self.tally.survived += 1;
                        continue;
                    }
                    let sent = checkpoint::write(&state).unwrap();
                    let channels = state.latents.channels();
                    let resume = checkpoint::read(&sent, channels, caller.wish.grid).unwrap();
                    let options = JobOptions {
                        resume: Some(resume),
                        ..JobOptions::default()
                    };
                    self.tally.resumed += 1;
                    self.push(caller.wish, &options);
                }
            }
        }
    }
}

/// The image of each request alone on the ranks of one plan.
struct Solo {
    ranks: Ranks,
    images: HashMap<Wish, Latents>,
}

impl Solo {
    fn new(plan: &str) -> Self {
        Self {
            ranks: ranks(plan),
            images: HashMap::new(),
        }
    }

    fn of(&mut self, wish: &Wish, prefixes: &[Arc<PrefixKv>]) -> &Latents {
        let ranks = &self.ranks;
        self.images.entry(wish.clone()).or_insert_with(|| {
            let spec = wish.spec(prefixes, ranks.info().pixels_per_token);
            let (options, news) = (JobOptions::default(), NewsPlan::default());
            let mut job = RankJob::new(ranks, &spec, &options, news).unwrap();
            for _ in 0..wish.steps {
                RankJob::step_together(ranks, std::slice::from_mut(&mut job)).unwrap();
            }
            job.state().unwrap().latents
        })
    }
}

/// Largest difference, relative to the largest value.
fn apart(got: &Latents, want: &Latents) -> f32 {
    let scale = want.data().iter().fold(0_f32, |m, v| m.max(v.abs()));
    let differences = got.data().iter().zip(want.data());
    differences.fold(0_f32, |m, (g, w)| m.max((g - w).abs())) / scale
}

fn every_survivor_has_its_solo_image(requests: usize, seed: u64) {
    let mut one = Solo::new("single");
    let prefixes = prefixes(&one.ranks);
    let plans = [
        "single",
        "cfg=2,tp=2",
        "ulysses=2",
        "ring=2",
        "pp=2",
        "ulysses=2,ep=ulysses",
    ];
    for (seed, plan) in (seed..).zip(plans) {
        let (images, tally, metrics) = Run::new(plan, &prefixes, seed).run(requests);
        assert_eq!(
            tally.survived + tally.cancelled,
            requests,
            "{plan}: {tally:?}"
        );
        for count in [tally.cancelled, tally.resumed, tally.overtaken] {
            assert!(count > requests / 50, "{plan}: {tally:?}");
        }
        assert!(tally.survived > requests / 2, "{plan}: {tally:?}");
        // Sums over tensor-parallel and ring ranks are formed in another order than on one rank, but in the
        // same one with any batch mates.
        let summed = plan.contains("tp=") || plan.contains("ring=");
        let mut own = summed.then(|| Solo::new(plan));
        let mut differences = Vec::new();
        for (wish, got) in &images {
            let want = own.as_mut().unwrap_or(&mut one).of(wish, &prefixes);
            assert!(got == want, "{plan}: {wish:?}: not its image alone");
            differences.push(apart(got, one.of(wish, &prefixes)));
        }
        differences.sort_by(f32::total_cmp);
        // Guidance amplifies the difference, most where another of two experts was chosen that were as good.
        let middle = differences[differences.len() / 2];
        assert!(middle <= TOLERANCE, "{plan}: {middle}");
        if plan == "single" || plan == "pp=2" {
            let padding = metrics
                .lines()
                .find(|line| line.starts_with(names::STAGE_PADDING.name))
                .map(|line| line.rsplit(' ').next());
            assert_eq!(padding, Some(Some("0")), "{plan}: computed padding");
        }
    }
}

#[test]
fn five_hundred_mixed_requests_get_their_solo_images_on_every_plan() {
    every_survivor_has_its_solo_image(REQUESTS, 7);
}

/// `cargo test -p dit-worker many_runs -- --ignored`
#[test]
#[ignore = "takes minutes"]
fn many_runs_of_mixed_requests_get_their_solo_images_on_every_plan() {
    for seed in 100..110 {
        every_survivor_has_its_solo_image(REQUESTS, seed);
    }
}
