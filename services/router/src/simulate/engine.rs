//! The clock of events, and what happens at each.
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

use base::rng::Source;

use super::{
    Cluster, Report,
    place::Places,
    report::Tally,
    trace::{Request, Trace, seconds},
};
use crate::{
    RouterError,
    admission::{Admission, Ask, Placed, Ticket},
    batching::{self, Decision, Job, JobId, State, cost::Rules},
    cost::{Constants, Load, Predictor, Rows},
    validate::cost,
};

/// Which batching a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// [`batching::cost`].
    Cost,
    /// [`batching::fifo`].
    FifoSameShape,
}

impl Policy {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::FifoSameShape => "fifo-same-shape",
        }
    }
}

/// What happens. At one time, in the order of being foreseen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request comes.
    Arrive(usize),
    /// Its prefix is there.
    Ready(usize),
    /// It is of no use any more.
    Deadline(usize),
    /// A worker has run a step.
    Stepped(usize),
    /// An image is decoded.
    Decoded(JobId),
    /// A worker has decoded all that was due.
    Freed(usize),
}

/// One worker.
struct Worker {
    state: State,
    predictor: Predictor,
    busy: bool,
    /// What the running step holds, and when it began.
    step: (Load, Duration),
}

/// One request on its way.
struct Progress {
    ticket: Option<Ticket>,
    started: Duration,
    images_left: u32,
    over: bool,
    /// Its first image; the others follow.
    first: JobId,
}

/// Everything at one time.
struct World<'a> {
    trace: &'a Trace,
    policy: Policy,
    rules: Rules,
    truth: (Constants, super::Truth),
    numbers: crate::cost::ModelNumbers,
    dice: Source,
    now: Duration,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    foreseen: u64,
    admission: Admission,
    tickets: BTreeMap<Ticket, usize>,
    progress: Vec<Progress>,
    /// Request of each image, and its worker once it has one.
    images: Vec<(usize, Option<usize>)>,
    places: Places,
    workers: Vec<Worker>,
    tally: Tally,
}

/// Runs `trace` on `cluster` under `policy`. Equal arguments give equal reports.
///
/// # Errors
/// [`RouterError::Invalid`]: a cluster that cannot be priced, a size that the model cannot make.
pub fn run(
    trace: &Trace,
    cluster: &Cluster,
    policy: Policy,
    seed: u64,
) -> Result<Report, RouterError> {
    cluster.check()?;
    let load = offered_load(trace, cluster)?;
    let mut world = World::new(trace, cluster, policy, seed)?;
    while let Some(Reverse((now, _, event))) = world.events.pop() {
        world.now = now;
        world.happen(event)?;
    }
    let corrections = world.workers.iter().map(|w| w.predictor.correction.ratio());
    let correction = corrections.sum::<f64>() / f64::from(cluster.workers);
    Ok(Report {
        cluster: cluster.name.clone(),
        policy: policy.name(),
        seed,
        offered_load: super::report::rounded(load),
        correction: super::report::rounded(correction),
        ..world.tally.report(trace, cluster.workers)
    })
}

/// Time that the trace's requests need at least, as a share of the time that the workers have until the last one
/// comes: each image's own part of its steps and its decoding, nothing that is paid once a step.
///
/// # Errors
/// [`RouterError::Invalid`]: as [`run`].
pub fn offered_load(trace: &Trace, cluster: &Cluster) -> Result<f64, RouterError> {
    let constants = cluster.constants()?;
    let mut needed = 0.0;
    for request in &trace.requests {
        let rows = rows_of(request, &cluster.model)?;
        let image_tokens = request.image_tokens(cluster.model.pixels_per_token)?;
        let steps = f64::from(request.steps) * constants.marginal(rows.into());
        needed += f64::from(request.n) * (steps + constants.decode(image_tokens));
    }
    let there = trace.seconds() * f64::from(cluster.workers);
    // A trace of one moment offers as much as one may like.
    Ok(needed * cluster.truth.scale / there.max(1e-9))
}

fn rows_of(request: &Request, model: &crate::cost::ModelNumbers) -> Result<Rows, RouterError> {
    let image = request.image_tokens(model.pixels_per_token)?;
    let edited = if request.edit {
        (f64::from(image) * model.edit_prefix_share).ceil()
    } else {
        0.0
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most 16 times an image
    let edited = edited as u32;
    Ok(Rows {
        rows: request.rows(),
        tokens: image + model.specials,
        prefix: request.prompt_tokens + edited,
    })
}

impl<'a> World<'a> {
    fn new(
        trace: &'a Trace,
        cluster: &Cluster,
        policy: Policy,
        seed: u64,
    ) -> Result<Self, RouterError> {
        let (constants, limits) = (cluster.constants()?, cluster.limits()?);
        let worker = |_| Worker {
            state: State::new(limits),
            predictor: Predictor::new(constants),
            busy: false,
            step: (Load::default(), Duration::ZERO),
        };
        let workers: Vec<Worker> = (0..cluster.workers).map(worker).collect();
        let mut world = Self {
            trace,
            policy,
            rules: cluster.rules,
            truth: (constants, cluster.truth),
            numbers: cluster.model,
            dice: Source::seeded(seed),
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            foreseen: 0,
            admission: Admission::new(cluster.admission()),
            tickets: BTreeMap::new(),
            progress: Vec::new(),
            images: Vec::new(),
            places: Places::new(workers.len()),
            workers,
            tally: Tally::new(seconds(trace.seconds())),
        };
        for (index, request) in trace.requests.iter().enumerate() {
            rows_of(request, &world.numbers)?;
            world.progress.push(Progress {
                ticket: None,
                started: Duration::ZERO,
                images_left: request.n,
                over: false,
                first: world.images.len() as JobId,
            });
            let image = (index, None);
            world.images.extend((0..request.n).map(|_| image));
            world.foresee(request.at(), Event::Arrive(index));
        }
        Ok(world)
    }

    fn foresee(&mut self, at: Duration, event: Event) {
        self.events.push(Reverse((at, self.foreseen, event)));
        self.foreseen += 1;
    }

    fn happen(&mut self, event: Event) -> Result<(), RouterError> {
        match event {
            Event::Arrive(request) => self.arrive(request)?,
            Event::Ready(request) => self.ready(request)?,
            Event::Deadline(request) => self.give_up(request),
            Event::Stepped(worker) => self.stepped(worker)?,
            Event::Decoded(image) => self.decoded(image),
            Event::Freed(worker) => {
                self.workers[worker].busy = false;
                self.kick(worker);
                self.tell(worker);
            }
        }
        Ok(())
    }

    fn arrive(&mut self, index: usize) -> Result<(), RouterError> {
        let request = &self.trace.requests[index];
        let tokens = request.image_tokens(self.numbers.pixels_per_token)?;
        let cost = cost(tokens.into(), request.steps, request.rows(), request.n);
        let ask = Ask {
            cost,
            class: request.class,
            tenant: "",
            quota: None,
            now: self.now,
            deadline: None,
            alone: None,
        };
        match self.admission.submit(ask) {
            Err(_) => {
                self.progress[index].over = true;
                self.tally.queue_full();
            }
            Ok(Placed { ticket, .. }) => {
                self.progress[index].ticket = Some(ticket);
                self.tickets.insert(ticket, index);
                if let Some(deadline) = request.deadline_s {
                    self.foresee(self.now + seconds(deadline), Event::Deadline(index));
                }
                self.start()?;
            }
        }
        Ok(())
    }

    /// Lets in whom admission lets in.
    fn start(&mut self) -> Result<(), RouterError> {
        for ticket in self.admission.start(self.now) {
            let Some(&index) = self.tickets.get(&ticket) else {
                continue;
            };
            self.progress[index].started = self.now;
            let rows = rows_of(&self.trace.requests[index], &self.numbers)?;
            let (constants, truth) = self.truth;
            let prefill = constants.prefill(rows.rows, rows.prefix) * truth.scale;
            self.foresee(self.now + seconds(prefill), Event::Ready(index));
        }
        Ok(())
    }

    /// The prefix is there: each image goes to a worker.
    fn ready(&mut self, index: usize) -> Result<(), RouterError> {
        if self.progress[index].over {
            return Ok(());
        }
        let request = &self.trace.requests[index];
        let rows = rows_of(request, &self.numbers)?;
        let tokens = u64::from(rows.rows) * u64::from(rows.prefix);
        let first = self.progress[index].first;
        let constants = self.truth.0;
        let image_tokens = request.image_tokens(self.numbers.pixels_per_token)?;
        let steps = f64::from(request.steps) * constants.step(Load::from(rows));
        let alone = steps + constants.decode(image_tokens);
        let mut chosen = Vec::new();
        for id in first..first + JobId::from(request.n) {
            let worker = self.places.pick(alone);
            self.images[at(id)].1 = Some(worker);
            let deadline = request.deadline_s.map(|s| request.at() + seconds(s));
            self.workers[worker].state.push(Job {
                id,
                class: request.class,
                arrived: request.at(),
                deadline,
                rows,
                edit: request.edit,
                steps: request.steps,
                prefix_bytes: tokens * self.numbers.prefix_token_bytes(),
            });
            chosen.push(worker);
        }
        // All images are there before any worker begins.
        for worker in chosen {
            self.kick(worker);
            self.tell(worker);
        }
        Ok(())
    }

    /// The router hears how much a worker has to do.
    fn tell(&mut self, index: usize) {
        let worker = &self.workers[index];
        let backlog = worker.state.backlog(&worker.predictor);
        let jobs = worker.state.entries().count();
        self.places.tell(self.now, index, jobs, backlog);
    }

    /// A step boundary of a worker that has nothing else to do.
    fn kick(&mut self, index: usize) {
        if self.workers[index].busy {
            return;
        }
        let worker = &self.workers[index];
        let decisions = match self.policy {
            Policy::Cost => {
                batching::cost::step(self.now, &worker.state, &worker.predictor, &self.rules)
            }
            Policy::FifoSameShape => batching::fifo::step(self.now, &worker.state),
        };
        for decision in decisions {
            if let Decision::Expire(id) = decision {
                self.give_up(self.images[at(id)].0);
            } else {
                self.workers[index].state.apply(decision);
                self.tally.decided(decision);
            }
        }
        let load = self.workers[index].state.load();
        if load.rows > 0.0 {
            let took = seconds(self.real(self.truth.0.step(load)));
            let jobs = self.workers[index].state.live().count();
            self.tally.step(self.now, took, jobs, load);
            self.workers[index].busy = true;
            self.workers[index].step = (load, self.now);
            self.foresee(self.now + took, Event::Stepped(index));
        }
    }

    /// How long what should take `expected` seconds takes this time.
    fn real(&mut self, expected: f64) -> f64 {
        let truth = self.truth.1;
        // Thousandths of the jitter, from -1 to 1.
        let thousandths = u32::try_from(self.dice.below(2001)).unwrap_or(1000);
        let off = f64::from(thousandths) / 1000.0 - 1.0;
        expected * truth.scale * (1.0 + truth.jitter * off)
    }

    fn stepped(&mut self, index: usize) -> Result<(), RouterError> {
        let worker = &mut self.workers[index];
        let (load, began) = worker.step;
        let took = self.now.saturating_sub(began).as_secs_f64();
        worker.predictor.observe(load, took);
        let finished = worker.state.advance();
        let mut done = self.now;
        for entry in &finished {
            let request = &self.trace.requests[self.images[at(entry.job.id)].0];
            let tokens = request.image_tokens(self.numbers.pixels_per_token)?;
            let took = seconds(self.real(self.truth.0.decode(tokens)));
            self.tally.busy(done, took);
            done += took;
            self.foresee(done, Event::Decoded(entry.job.id));
        }
        self.foresee(done, Event::Freed(index));
        Ok(())
    }

    fn decoded(&mut self, image: JobId) {
        let (index, worker) = self.images[at(image)];
        if let Some(worker) = worker {
            self.places.left(worker);
        }
        self.images[at(image)].1 = None;
        if self.progress[index].over {
            return;
        }
        self.progress[index].images_left -= 1;
        if self.progress[index].images_left == 0 {
            let request = &self.trace.requests[index];
            self.tally.done(request, self.now);
            let took = self.now.saturating_sub(self.progress[index].started);
            self.end(index, Some(took));
        }
    }

    /// The deadline of a request has passed: none of its images is of use.
    fn give_up(&mut self, index: usize) {
        if self.progress[index].over {
            return;
        }
        self.tally.missed();
        let first = self.progress[index].first;
        for id in first..first + JobId::from(self.trace.requests[index].n) {
            if let Some(worker) = self.images[at(id)].1
                && self.workers[worker].state.remove(id).is_some()
            {
                self.places.left(worker);
                self.images[at(id)].1 = None;
            }
        }
        self.end(index, None);
    }

    fn end(&mut self, index: usize, took: Option<Duration>) {
        self.progress[index].over = true;
        if let Some(ticket) = self.progress[index].ticket {
            self.tickets.remove(&ticket);
            self.admission.leave(ticket, took);
        }
        // Sizes were checked when the world was made, so nothing can go wrong that has not.
        let _ = self.start();
    }
}

fn at(image: JobId) -> usize {
    // Images are numbered by their place in a vector.
    usize::try_from(image).unwrap_or(usize::MAX)
}
