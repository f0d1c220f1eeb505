//! What breaks, and when it is whole again.
use std::time::Duration;

use base::rng::Source;
use turmoil::Sim;

use super::{AR, DIT, Judge, REGISTRY, ROUTERS};

/// Something that happens to the cluster.
#[derive(Debug, Clone, PartialEq)]
enum Fault {
    /// A process ends, without a word.
    Crash(&'static str),
    /// It starts again.
    Restart(&'static str),
    /// Nothing passes between two hosts.
    Partition(&'static str, &'static str),
    /// Nothing passes one way.
    OneWay(&'static str, &'static str),
    /// What passes waits until it is released: a process that stands still, or a watch that is slow.
    Hold(&'static str, &'static str),
    /// Both again.
    Repair(&'static str, &'static str),
    Release(&'static str, &'static str),
    /// All that passes takes up to so long.
    Slow(Duration),
}

/// What is still to happen, the next one last.
#[derive(Debug)]
pub(super) struct Plan {
    due: Vec<(Duration, Fault)>,
    judge: Judge,
}

fn one_of(dice: &Source, hosts: &[&'static str]) -> &'static str {
    hosts[usize::try_from(dice.below(hosts.len() as u64)).unwrap()]
}

/// Three to seven things that break within 25 seconds, each for a while of up to 12.
pub(super) fn plan(dice: &Source, judge: &Judge) -> Plan {
    let all: Vec<&'static str> = ROUTERS
        .into_iter()
        .chain([REGISTRY])
        .chain(AR)
        .chain(DIT)
        .collect();
    let mut due = Vec::new();
    for _ in 0..3 + dice.below(5) {
        let at = Duration::from_millis(200 + dice.below(25_000));
        let until = at + Duration::from_millis(100 + dice.below(12_000));
        let host = one_of(dice, &all);
        let other = one_of(dice, &all);
        let (begin, end) = match dice.below(9) {
            0..=2 => (Fault::Crash(host), Fault::Restart(host)),
            3 => (
                Fault::Crash(one_of(dice, &DIT)),
                Fault::Slow(Duration::from_millis(30)),
            ),
            4 if host != other => (Fault::Partition(host, other), Fault::Repair(host, other)),
            5 if host != other => (Fault::OneWay(host, other), Fault::Repair(host, other)),
            6 if host != REGISTRY => (Fault::Hold(REGISTRY, host), Fault::Release(REGISTRY, host)),
            7 if host != other => (Fault::Hold(host, other), Fault::Release(host, other)),
            _ => (
                Fault::Slow(Duration::from_millis(100 + dice.below(700))),
                Fault::Slow(Duration::from_millis(30)),
            ),
        };
        if let Fault::Crash(host) = begin {
            // Nobody stays away.
            due.push((until, Fault::Restart(host)));
        }
        due.push((at, begin));
        due.push((until, end));
    }
    due.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    Plan {
        due,
        judge: judge.clone(),
    }
}

impl Plan {
    /// Lets happen what is due.
    pub(super) fn apply(&mut self, sim: &mut Sim<'_>) {
        while let Some((at, fault)) = self.due.pop() {
            if at > sim.elapsed() {
                self.due.push((at, fault));
                return;
            }
            self.judge
                .note(format!("{fault:?} {}", sim.elapsed().as_millis()));
            happen(sim, &fault);
        }
    }

    /// Everything that was to end ends.
    pub(super) fn heal(&mut self, sim: &mut Sim<'_>) {
        while let Some((_, fault)) = self.due.pop() {
            let ends = matches!(
                fault,
                Fault::Restart(_) | Fault::Repair(..) | Fault::Release(..)
            );
            if ends {
                happen(sim, &fault);
            }
        }
    }
}

fn happen(sim: &mut Sim<'_>, fault: &Fault) {
    match *fault {
        Fault::Crash(host) => sim.crash(host),
        Fault::Restart(host) => {
            if !sim.is_host_running(host) {
                sim.bounce(host);
            }
        }
        Fault::Partition(a, b) => sim.partition(a, b),
        Fault::OneWay(a, b) => sim.partition_oneway(a, b),
        Fault::Repair(a, b) => sim.repair(a, b),
        Fault::Hold(a, b) => sim.hold(a, b),
        Fault::Release(a, b) => sim.release(a, b),
        Fault::Slow(most) => sim.set_max_message_latency(most),
    }
}
