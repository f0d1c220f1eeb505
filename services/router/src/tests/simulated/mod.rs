//! Whole clusters in a simulated network, from a seed: two routers, their registry, two AR stages (each with its pool of
//! prefixes) and three workers, all over real gRPC; crashes, restarts, partitions, slow links, lost and late messages.
//! Time is simulated too, and nothing depends on anything but the seed.
//!
//! What must hold for every seed: each client, sending again what failed for a while, gets its picture and the right
//! one; nothing hangs past a deadline; and when all is over nothing is left at the routers, running or waiting.
//!
//! Not simulated: clocks that run at different rates (no decision here compares clocks of two hosts; lease times differ
//! instead, and the registry's wall clock jumps when it restarts), and etcd itself, in whose place stands the registry
//! with the same semantics.
mod client;
mod faults;
mod hosts;
mod stages;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use base::rng::Source;
use turmoil::{Builder, Sim};

/// Longest simulated time of one seed.
const LIMIT: Duration = Duration::from_secs(240);
/// Step of simulated time.
const TICK: Duration = Duration::from_millis(25);
/// Seeds that CI runs.
const SEEDS: u64 = 200;
/// Clients of one seed.
const CLIENTS: usize = 6;

pub(super) const ROUTERS: [&str; 2] = ["router-a", "router-b"];
pub(super) const REGISTRY: &str = "registry";
pub(super) const AR: [&str; 2] = ["ar-a", "ar-b"];
pub(super) const DIT: [&str; 3] = ["dit-a", "dit-b", "dit-c"];

/// What a run is judged by. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Judge(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    /// What happened, in order.
    log: Vec<String>,
    /// What should not have.
    wrong: Vec<String>,
    pictures: usize,
    cancelled: usize,
    retries: usize,
    resumes: usize,
}

impl Judge {
    pub(super) fn note(&self, what: impl Into<String>) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis();
        self.0
            .lock()
            .unwrap()
            .log
            .push(format!("{at:>7} ms  {}", what.into()));
    }

    pub(super) fn wrong(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(format!("WRONG: {what}"));
        self.0.lock().unwrap().wrong.push(what);
    }

    pub(super) fn picture(&self) {
        self.0.lock().unwrap().pictures += 1;
    }

    pub(super) fn cancelled(&self) {
        self.0.lock().unwrap().cancelled += 1;
    }

    pub(super) fn retried(&self) {
        self.0.lock().unwrap().retries += 1;
    }

    pub(super) fn resumed(&self) {
        self.0.lock().unwrap().resumes += 1;
    }
}

/// Runs one seed; answers what was found, with an error of the simulation itself among what was wrong.
fn run(seed: u64) -> Judge {
    let judge = Judge::default();
    let _dial = proto::dial::simulate(hosts::dial());
    let dice = Source::seeded(seed);
    let mut sim = Builder::new()
        .rng_seed(seed)
        .simulation_duration(LIMIT)
        .tick_duration(TICK)
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(10 + dice.below(40)))
        .build();
    let routers = hosts::build(&mut sim, &dice, &judge);
    for number in 0..CLIENTS {
        client::add(&mut sim, number, &dice, &judge);
    }
    let faults = faults::plan(&dice, &judge);
    if let Err(error) = drive(&mut sim, faults) {
        judge.wrong(format!("the simulation: {error}"));
    }
    for (name, left) in routers.left() {
        if left != (0, 0) {
            judge.wrong(format!(
                "{name} has {} running and {} waiting when all is over",
                left.0, left.1
            ));
        }
    }
    judge
}

/// Steps until every client is done and what they left behind has had time to go.
fn drive(sim: &mut Sim<'_>, mut faults: faults::Plan) -> turmoil::Result {
    loop {
        let done = sim.step()?;
        faults.apply(sim);
        if done {
            break;
        }
    }
    faults.heal(sim);
    let over = sim.elapsed();
    while sim.elapsed() < over + Duration::from_secs(2) {
        sim.step()?;
    }
    Ok(())
}

/// Runs seeds; a failing one prints its log and how to run it alone.
fn check(seeds: impl Iterator<Item = u64>) -> Found {
    let mut all = Found::default();
    for seed in seeds {
        let judge = run(seed);
        let found = std::mem::take(&mut *judge.0.lock().unwrap());
        assert!(
            found.wrong.is_empty(),
            "seed {seed}: {:#?}\n{}\nOMNI_SIM_SEED={seed} cargo test -p router --lib simulated::seeds",
            found.wrong,
            found.log.join("\n"),
        );
        all.pictures += found.pictures;
        all.cancelled += found.cancelled;
        all.retries += found.retries;
        all.resumes += found.resumes;
    }
    all
}

/// The seeds of one half, or the one that `OMNI_SIM_SEED` names; `OMNI_SIM_SEEDS` says how many.
fn seeds(half: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let one: Option<u64> = number("OMNI_SIM_SEED");
    let count = number("OMNI_SIM_SEEDS").unwrap_or(SEEDS);
    let range = one.map_or(0..count, |seed| seed..seed + 1);
    range.filter(move |seed| seed % 2 == half)
}

/// Each picture is made once and right, whatever breaks.
fn half(half: u64) {
    let mut count = 0;
    let found = check(seeds(half).inspect(|_| count += 1));
    println!(
        "{count} seeds: {} pictures, {} cancelled, {} sent again, {} resumed",
        found.pictures, found.cancelled, found.retries, found.resumes
    );
    if count > 50 {
        // A simulation in which nothing ever breaks proves nothing.
        assert!(found.retries > count / 5 && found.resumes > 0 && found.cancelled > 0);
    }
}

#[test]
fn seeds_that_are_even_lose_nothing() {
    half(0);
}

#[test]
fn seeds_that_are_odd_lose_nothing() {
    half(1);
}

#[test]
fn a_seed_always_does_the_same() {
    let log = |seed| {
        let judge = run(seed);
        let found = std::mem::take(&mut *judge.0.lock().unwrap());
        found.log
    };
    assert_eq!(log(4), log(4));
    assert_ne!(log(4), log(5));
}
