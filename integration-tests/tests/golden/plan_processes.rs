//! A dozen plans on ranks that are processes and talk over UCX, and what happens when one of them is gone.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use base::clock;
use model::{DenoiseJob, Model};
use parallel::{Device, Plan, RankContext};
use ranks::{FileRendezvous, JoinOptions, Transport, UcxWorld};
use rustix::process::{Pid, Signal, kill_process};

use crate::back_support::{ctx, models};
use crate::common::in_set;
use crate::plan_runs::{FILES, LIMIT, cases, denoise, open, run_rank, worst};

const ON_TWO: [&str; 6] = [
    "tp=2",
    "tp=2,ep=tp,shared_expert=replicated",
    "ulysses=2,ep=ulysses",
    "ring=2,ring_prefix=sharded",
    "cfg=2,ep=cfg",
    "pp=2",
];
const ON_FOUR: [&str; 6] = [
    "tp=4,ep=tp",
    "ring=2,ulysses=2",
    "cfg=2,tp=2,ep=cfg+tp",
    "ulysses=2,tp=2,ep=ulysses",
    "pp=2,ring=2",
    "pp=2,cfg=2,ep=cfg",
];

/// Begins every line that a rank has for its test.
const MARK: &str = "rank says ";
/// Longest wait of one rank for another that is well.
const PATIENT: Duration = Duration::from_secs(60);
/// A hang guard: far above what anything here takes.
const GUARD: Duration = Duration::from_secs(120);

/// A rank in a process of its own. It dies with the test.
struct Rank {
    child: Child,
    lines: Receiver<String>,
}

impl Rank {
    fn start(what: &str, plans: &[&str], rank: usize, world: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "plan_processes::a_rank_of_a_plan",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env("OMNI_TEST_WHAT", what)
            .env("OMNI_TEST_PLANS", plans.join(" "))
            .env("OMNI_TEST_RANK", rank.to_string())
            .env("OMNI_TEST_WORLD", world)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(said) = line.split(MARK).nth(1) {
                    // The test may have heard enough.
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        Self { child, lines }
    }

    fn hear(&self) -> String {
        self.lines.recv_timeout(GUARD).expect("a rank says nothing")
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(text: impl std::fmt::Display) {
    println!("{MARK}{text}");
}

fn join(plan: Plan, rank: usize, world: &Path) -> (UcxWorld, RankContext) {
    let options = JoinOptions::new(Transport::Shm, PATIENT, clock::now);
    std::fs::create_dir_all(world).unwrap();
    let meeting = FileRendezvous::new(world, clock::now);
    let world = UcxWorld::join(plan.mesh().unwrap(), rank, &options, &meeting).unwrap();
    let mut group = |axes| Ok(Arc::new(world.group(axes)?) as Arc<dyn parallel::Collective>);
    let ctx = RankContext::connect(&plan, rank, Device::Cpu, &mut group).unwrap();
    (world, ctx)
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn a_rank_of_a_plan() {
    let get = |name: &str| std::env::var(format!("OMNI_TEST_{name}")).unwrap();
    let rank: usize = get("RANK").parse().unwrap();
    let whole: &Model = models()[0].1;
    let cases = cases(whole);
    let want = denoise(&cases, whole, &ctx());
    for (index, text) in get("PLANS").split(' ').enumerate() {
        let plan: Plan = text.parse().unwrap();
        let model = open(plan, rank);
        let directory = Path::new(&get("WORLD")).join(index.to_string());
        let (_world, ctx) = join(plan, rank, &directory);
        if get("WHAT") == "run" {
            let (steps, prefill) = run_rank(&cases, &model, &ctx);
            say(format!("{text} {:e}", worst(&steps, &want).max(prefill)));
        } else {
            step_until_it_fails(&cases, &model, &ctx);
        }
    }
}

/// One step after the other, until a rank is gone; says how long the last one took.
fn step_until_it_fails(cases: &crate::plan_runs::Cases, model: &Model, ctx: &RankContext) {
    let mut steps = 0;
    loop {
        let mut jobs = cases.jobs(model);
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        let start = clock::now();
        if let Err(error) = model.denoise_step(ctx, &mut packed) {
            say(format!("{} ms: {error}", start.elapsed().as_millis()));
            return;
        }
        steps += 1;
        if steps == 1 {
            say("under way");
        }
    }
}

/// Another golden set may have a model that a plan does not fit.
fn fits(text: &str) -> bool {
    let shape = models()[0].1.config().shape();
    text.parse::<Plan>().unwrap().validate(&shape).is_ok()
}

fn run(plans: &[&str]) {
    if !in_set(&FILES) {
        return;
    }
    let plans: Vec<&str> = plans.iter().copied().filter(|text| fits(text)).collect();
    let Some(first) = plans.first() else { return };
    let ranks = first.parse::<Plan>().unwrap().mesh().unwrap().ranks();
    let world = tempfile::tempdir().unwrap();
    let started: Vec<Rank> = (0..ranks)
        .map(|rank| Rank::start("run", &plans, rank, world.path()))
        .collect();
    for text in plans {
        let plan: Plan = text.parse().unwrap();
        let limit = if plan.tp == 1 && plan.ring == 1 {
            0.0
        } else {
            LIMIT
        };
        for (rank, process) in started.iter().enumerate() {
            let said = process.hear();
            let (of, worst) = said.split_once(' ').unwrap();
            assert_eq!(of, text, "rank {rank}");
            println!("{text}, rank {rank}: {worst}");
            assert!(
                worst.parse::<f32>().unwrap() <= limit,
                "{text}, rank {rank}: {worst}"
            );
        }
    }
}

#[test]
fn plans_on_two_processes_over_ucx_equal_one_rank() {
    run(&ON_TWO);
}

#[test]
fn plans_on_four_processes_over_ucx_equal_one_rank() {
    run(&ON_FOUR);
}

#[test]
fn a_rank_that_is_killed_or_stopped_ends_the_step_of_all_others() {
    if !in_set(&FILES) {
        return;
    }
    let plans = ["cfg=2,ulysses=2", "cfg=2,ring=2", "ring=4"];
    let plan = plans.into_iter().find(|text| fits(text)).unwrap();
    for signal in [Signal::KILL, Signal::STOP] {
        let world = tempfile::tempdir().unwrap();
        let plan = [plan];
        let mut ranks: Vec<Rank> = (0..4)
            .map(|rank| Rank::start("fail", &plan, rank, world.path()))
            .collect();
        for rank in &ranks {
            assert_eq!(rank.hear(), "under way");
        }
        let victim = ranks.pop().unwrap();
        kill_process(Pid::from_child(&victim.child), signal).unwrap();
        let sent = clock::now();
        for (number, rank) in ranks.iter_mut().enumerate() {
            let said = rank.hear();
            println!(
                "{signal:?}: rank {number} after {:?}: {said}",
                sent.elapsed()
            );
            assert!(said.contains("rank 3"), "{said}");
            assert!(
                rank.child.wait().unwrap().success(),
                "rank {number} did not end well"
            );
        }
    }
}
