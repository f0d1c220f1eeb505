use parallel::cost::WeightType;
use proptest::prelude::*;

use super::{cost::Rules, *};
use crate::cost::{Predictor, tests::h200};

const ROOMY: Limits = Limits {
    max_rows: 64,
    max_tokens: 1 << 20,
    max_bytes: u64::MAX,
    token_bytes: 1,
};

/// One row a step: one job at a time, as all jobs here have a row at least.
const ONE: Limits = Limits {
    max_rows: 1,
    ..ROOMY
};

fn job(id: JobId, tokens: u32, steps: u32) -> Job {
    Job {
        id,
        class: Class::Standard,
        arrived: Duration::ZERO,
        deadline: None,
        rows: Rows {
            rows: 1,
            tokens,
            prefix: 100,
        },
        edit: false,
        steps,
        prefix_bytes: 10,
    }
}

/// A worker whose steps take what is predicted, and what it did.
struct Drive {
    state: State,
    predictor: Predictor,
    rules: Rules,
    now: Duration,
    /// Jobs of each step, with steps done before it.
    steps: Vec<Vec<(JobId, u32)>>,
    finished: BTreeMap<JobId, Duration>,
    decided: Vec<Decision>,
}

impl Drive {
    fn new(limits: Limits, streamed_layers: u32) -> Self {
        let weights = if streamed_layers > 0 {
            WeightType::Bf16
        } else {
            WeightType::Fp8
        };
        Self {
            state: State::new(limits),
            predictor: Predictor::new(h200(weights, streamed_layers)),
            rules: Rules::default(),
            now: Duration::ZERO,
            steps: Vec::new(),
            finished: BTreeMap::new(),
            decided: Vec::new(),
        }
    }

    /// A boundary and the step after it. False: there was nothing to run.
    fn turn(&mut self) -> bool {
        let decisions = cost::step(self.now, &self.state, &self.predictor, &self.rules);
        for &decision in &decisions {
            assert!(self.state.apply(decision), "{decision:?}");
        }
        self.decided.extend(decisions);
        let load = self.state.load();
        let live = self.state.live().map(|e| (e.job.id, e.done)).collect();
        if load.rows <= 0.0 {
            return false;
        }
        self.steps.push(live);
        self.now += Duration::from_secs_f64(self.predictor.step(load));
        for entry in self.state.advance() {
            self.finished.insert(entry.job.id, self.now);
        }
        true
    }

    fn last(&self) -> Vec<JobId> {
        let last = self.steps.last().unwrap();
        last.iter().map(|&(id, _)| id).collect()
    }

    fn run(&mut self, turns: usize) {
        for _ in 0..turns {
            if !self.turn() {
                break;
            }
        }
    }
}

#[test]
fn small_jobs_share_a_step_and_large_ones_only_where_that_pays() {
    let batch = |tokens: u32, streamed: u32| {
        let mut drive = Drive::new(ROOMY, streamed);
        drive.state.push(job(1, tokens, 4));
        drive.state.push(job(2, tokens, 4));
        drive.turn();
        drive.last()
    };
    assert_eq!(batch(1025, 0), [1, 2]);
    // Its weights are read in a twentieth of the time that 16384 tokens compute: one after the other.
    assert_eq!(batch(16_385, 0), [1]);
    // Copying in takes longer than computing either: both for the price of one.
    assert_eq!(batch(4097, 8), [1, 2]);
}

#[test]
fn who_is_in_a_hurry_parks_others_who_go_on_where_they_stopped() {
    let mut drive = Drive::new(ONE, 0);
    drive.state.push(job(1, 4096, 5));
    drive.run(2);
    let urgent = Job {
        class: Class::Interactive,
        arrived: drive.now,
        ..job(2, 1024, 2)
    };
    drive.state.push(urgent);
    drive.run(100);
    let expected = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (1, 3), (1, 4)];
    let steps: Vec<_> = drive.steps.iter().flatten().copied().collect();
    assert_eq!(steps, expected);
    let decided = [
        Decision::Join(1),
        Decision::Park(1),
        Decision::Join(2),
        Decision::Resume(1),
    ];
    assert_eq!(drive.decided, decided);
}

/// Runs a background job while more urgent ones never stop coming, each with a deadline of `due` times its own
/// run, if that is given. Answers when it was done.
fn beside_a_full_higher_class(due: Option<f64>) -> (Duration, Rules, f64) {
    let mut drive = Drive::new(ONE, 0);
    let background = Job {
        class: Class::Background,
        ..job(0, 4096, 20)
    };
    drive.state.push(background);
    let mut next = 1;
    while !drive.finished.contains_key(&0) {
        while drive.state.entries().count() < 4 {
            let urgent = job(next, 1024, 8);
            let alone = 8.0 * drive.predictor.step(urgent.load());
            drive.state.push(Job {
                class: Class::Interactive,
                arrived: drive.now,
                deadline: due.map(|times| drive.now + Duration::from_secs_f64(alone * times)),
                ..urgent
            });
            next += 1;
        }
        assert!(drive.turn());
        assert!(drive.now < Duration::from_secs(3600), "starved");
    }
    assert!(next > 100);
    let alone = 20.0 * drive.predictor.step(background.load());
    (drive.finished[&0], drive.rules, alone)
}

/// The target of a background job, two classes later, and its own run.
fn bound_of(rules: &Rules, alone: f64) -> f64 {
    2.0 * (rules.class_s + rules.class_stretch * alone) + (rules.stretch + 1.0) * alone
}

#[test]
fn among_jobs_of_one_size_the_class_decides_and_a_small_one_of_a_low_class_comes_before_a_large_one()
 {
    let mut drive = Drive::new(ONE, 0);
    let of = |class, job| Job { class, ..job };
    drive.state.push(of(Class::Background, job(1, 4096, 50)));
    drive.state.push(of(Class::Standard, job(2, 4096, 50)));
    drive.state.push(of(Class::Interactive, job(3, 4096, 50)));
    drive.state.push(of(Class::Background, job(4, 256, 8)));
    drive.run(1_000);
    let mut order: Vec<_> = drive.finished.iter().map(|(id, at)| (*at, *id)).collect();
    order.sort_unstable();
    let order: Vec<_> = order.into_iter().map(|(_, id)| id).collect();
    assert_eq!(order, [4, 3, 2, 1]);
}

#[test]
fn a_full_higher_class_holds_a_lower_one_up_for_a_bounded_time() {
    let (done, rules, alone) = beside_a_full_higher_class(None);
    // Whoever comes after its target is behind it.
    let bound = bound_of(&rules, alone);
    assert!(
        done < Duration::from_secs_f64(bound + 1.0),
        "{done:?} {bound}"
    );
    // Deadlines that come before all else do so until it is long overdue.
    let (done, rules, alone) = beside_a_full_higher_class(Some(3.02));
    let bound = bound_of(&rules, alone) + rules.overdue_s;
    assert!(
        done < Duration::from_secs_f64(bound + 1.0),
        "{done:?} {bound}"
    );
}

#[test]
fn a_deadline_far_away_makes_nobody_wait_and_a_near_one_comes_first() {
    let order = |deadline: u64| {
        let mut drive = Drive::new(ONE, 0);
        drive.state.push(Job {
            deadline: Some(Duration::from_millis(deadline)),
            ..job(1, 2048, 2)
        });
        drive.state.push(job(2, 2048, 2));
        drive.state.push(job(3, 512, 2));
        drive.run(100);
        let mut order: Vec<_> = drive.finished.iter().map(|(id, at)| (*at, *id)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, id)| id).collect::<Vec<_>>()
    };
    // As if there were none: the smallest first.
    assert_eq!(order(3_000_000), [3, 1, 2]);
    // Two steps of 83 ms alone; there is no time for anybody else.
    assert_eq!(order(200), [1, 3, 2]);
}

#[test]
fn a_deadline_that_passed_ends_a_job_wherever_it_is() {
    let mut drive = Drive::new(ONE, 0);
    let soon = Some(Duration::from_millis(1));
    let due = |id| Job {
        deadline: soon,
        ..job(id, 1024, 50)
    };
    drive.state.push(due(1));
    drive.state.push(due(2));
    drive.turn();
    assert_eq!(drive.last(), [1]);
    assert!(!drive.turn());
    assert_eq!(
        drive.decided[1..],
        [Decision::Expire(1), Decision::Expire(2)]
    );
    assert_eq!(drive.state.entries().count(), 0);
}

#[test]
fn memory_that_is_being_freed_for_one_is_not_taken_by_others() {
    let limits = Limits {
        max_bytes: 100,
        token_bytes: 0,
        ..ROOMY
    };
    let mut drive = Drive::new(limits, 0);
    let holding = |id, prefix_bytes, at| Job {
        prefix_bytes,
        arrived: Duration::from_millis(at),
        ..job(id, 1024, 3)
    };
    drive.state.push(holding(1, 60, 0));
    drive.turn();
    // The second does not fit beside the first; the third would, but came later.
    drive.state.push(holding(2, 60, 1));
    drive.state.push(holding(3, 30, 2));
    drive.run(100);
    assert_eq!(drive.steps[1], [(1, 1)]);
    assert_eq!(drive.steps[2], [(1, 2)]);
    assert_eq!(drive.steps[3], [(2, 0), (3, 0)]);
}

#[test]
fn a_job_beyond_the_limits_runs_alone_instead_of_never() {
    let limits = Limits {
        max_rows: 1,
        max_tokens: 10,
        max_bytes: 5,
        token_bytes: 1,
    };
    let mut drive = Drive::new(limits, 0);
    drive.state.push(job(1, 1024, 2));
    drive.state.push(job(2, 1024, 2));
    drive.run(100);
    assert_eq!(drive.finished.len(), 2);
    assert!(drive.steps.iter().all(|step| step.len() == 1));
}

#[test]
fn what_does_not_apply_changes_nothing() {
    let mut state = State::new(ROOMY);
    assert!(state.push(job(1, 10, 1)));
    assert!(!state.push(job(1, 10, 1)), "the name is taken");
    assert!(!state.push(job(2, 10, 0)), "no steps");
    for decision in [
        Decision::Park(1),
        Decision::Resume(1),
        Decision::Join(2),
        Decision::Expire(2),
    ] {
        assert!(!state.apply(decision), "{decision:?}");
    }
    assert_eq!(state.entries().next().unwrap().place, Place::Waiting);
}

#[test]
fn first_come_first_served_batches_the_shape_of_the_oldest_and_lets_nobody_join() {
    let mut state = State::new(ROOMY);
    state.push(job(1, 1024, 2));
    state.push(job(2, 4096, 2));
    state.push(job(3, 1024, 2));
    let edit = Job {
        edit: true,
        ..job(4, 1024, 2)
    };
    state.push(edit);
    let mut seen = Vec::new();
    for turn in 0..6 {
        if turn == 1 {
            state.push(job(5, 1024, 2));
        }
        for decision in fifo::step(Duration::ZERO, &state) {
            assert!(state.apply(decision));
        }
        seen.push(state.live().map(|e| e.job.id).collect::<Vec<_>>());
        state.advance();
    }
    let (first, second, third) = (vec![1, 3], vec![2], vec![4]);
    let expected = [&first, &first, &second, &second, &third, &third];
    assert!(seen.iter().eq(expected), "{seen:?}");
}

fn any_job() -> impl Strategy<Value = Job> {
    let class = prop::sample::select(Class::ALL.to_vec());
    let rows = (1..3_u32, 1..5000_u32, 0..6000_u32);
    (class, rows, 1..12_u32, 1..60_u64).prop_map(|(class, rows, steps, prefix_bytes)| Job {
        class,
        rows: Rows {
            rows: rows.0,
            tokens: rows.1,
            prefix: rows.2,
        },
        prefix_bytes,
        ..job(0, 1, steps)
    })
}

proptest! {
    /// Whatever comes and whenever: every job runs each of its steps once, in order, no step breaks a limit, and
    /// there is a step as long as there are jobs.
    #[test]
    fn no_job_is_lost_or_run_twice_and_limits_hold(
        jobs in proptest::collection::vec((any_job(), 0..4_usize), 1..30),
        max_rows in 1..8_u64, max_tokens in 1000..20_000_u64, max_bytes in 20..200_u64,
        streamed in 0..2_u32,
    ) {
        let limits = Limits { max_rows, max_tokens, max_bytes, token_bytes: 0 };
        let mut drive = Drive::new(limits, streamed * 8);
        let mut all = BTreeMap::new();
        for (id, (job, turns)) in (0..).zip(jobs) {
            let job = Job { id, arrived: drive.now, ..job };
            prop_assert!(drive.state.push(job));
            all.insert(id, job);
            drive.run(turns);
        }
        let steps: usize = all.values().map(|job| job.steps as usize).sum();
        drive.run(steps);
        prop_assert_eq!(drive.finished.len(), all.len());
        let mut done = BTreeMap::<JobId, u32>::new();
        for step in &drive.steps {
            let of = |value: fn(&Job) -> u64| step.iter().map(|(id, _)| value(&all[id])).sum::<u64>();
            let (rows, tokens) = (of(|job| job.rows.rows.into()), of(Job::tokens));
            prop_assert!(rows <= max_rows && tokens <= max_tokens || step.len() == 1);
            for &(id, before) in step {
                let count = done.entry(id).or_default();
                prop_assert_eq!(before, *count);
                *count += 1;
            }
            // Begun and not over: these hold memory.
            let begun = done.iter().filter(|(id, done)| **done < all[id].steps || step.iter().any(|(live, _)| live == *id));
            let held: Vec<u64> = begun.map(|(id, _)| all[id].prefix_bytes).collect();
            prop_assert!(held.iter().sum::<u64>() <= max_bytes || held.len() == 1);
        }
        prop_assert!(all.iter().all(|(id, job)| done[id] == job.steps));
    }

    /// Deadlines of one class that can be met one job after the other, the earliest first, are met, whether jobs may
    /// share steps or not, and whatever is there besides.
    #[test]
    fn deadlines_that_can_be_met_are_met(
        jobs in proptest::collection::vec((1..5000_u32, 1..6_u32, 0.0..0.5_f64, any::<bool>()), 1..12),
        shared in any::<bool>(), streamed in 0..2_u32,
    ) {
        let limits = if shared { ROOMY } else { ONE };
        let mut drive = Drive::new(limits, streamed * 8);
        let (mut end, mut latest) = (Duration::ZERO, Duration::ZERO);
        let mut deadlines = BTreeMap::new();
        for (id, (tokens, steps, slack, due)) in (0..).zip(jobs) {
            let job = job(id, tokens, steps);
            if !due {
                drive.state.push(job);
                continue;
            }
            let alone = drive.predictor.step(job.load()) * f64::from(steps);
            end += Duration::from_secs_f64(alone) + Duration::from_micros(1);
            // Later jobs never have an earlier one.
            latest = latest.max(end + Duration::from_secs_f64(slack));
            deadlines.insert(id, latest);
            drive.state.push(Job { deadline: Some(latest), ..job });
        }
        drive.run(200);
        for (id, deadline) in deadlines {
            prop_assert!(drive.finished.get(&id).is_some_and(|at| *at <= deadline), "job {id}");
        }
    }
}
