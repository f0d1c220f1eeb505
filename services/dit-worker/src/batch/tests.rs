use std::sync::{Arc, Mutex};

use schedule::cost::Constants;

use super::*;

#[derive(Debug, Clone)]
pub(crate) struct FakeJob {
    pub(crate) id: u32,
    pub(crate) done: usize,
    pub(crate) steps: usize,
    /// Fails, panics or turns to NaN in the step with this number.
    pub(crate) trouble: Option<(usize, Trouble)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    Error,
    Panic,
    NotFinite,
}

impl FakeJob {
    pub(crate) fn new(id: u32, steps: usize) -> Self {
        Self {
            id,
            done: 0,
            steps,
            trouble: None,
        }
    }

    fn meets(&self, trouble: Trouble, step: usize) -> bool {
        self.trouble == Some((step, trouble))
    }
}

/// Records which jobs each call packed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fake(pub(crate) Arc<Mutex<Vec<Vec<u32>>>>);

impl Denoiser for Fake {
    type Job = FakeJob;
    type News = ();

    fn step(&self, jobs: &mut [&mut FakeJob]) -> Result<(), StageError> {
        self.0
            .lock()
            .unwrap()
            .push(jobs.iter().map(|job| job.id).collect());
        if jobs
            .iter()
            .any(|job| job.meets(Trouble::Error, job.done + 1))
        {
            return Err(StageError::Cancelled);
        }
        for job in jobs.iter_mut() {
            assert!(!job.meets(Trouble::Panic, job.done + 1), "told to panic");
            job.done += 1;
        }
        Ok(())
    }

    fn steps_done(&self, job: &FakeJob) -> usize {
        job.done
    }

    fn is_done(&self, job: &FakeJob) -> bool {
        job.done == job.steps
    }

    fn check(&self, job: &FakeJob) -> Result<(), StageError> {
        if job.meets(Trouble::NotFinite, job.done) {
            return Err(StageError::NotFinite { what: "latents" });
        }
        Ok(())
    }

    fn news(&self, _: &FakeJob) -> Result<Option<()>, StageError> {
        Ok(None)
    }
}

struct Caller {
    progress: mpsc::Receiver<Told<()>>,
    result: oneshot::Receiver<Result<Ended<FakeJob>, StageError>>,
    park: Arc<AtomicBool>,
}

const ROOMY: StepLimits = StepLimits {
    max_rows: 100,
    max_tokens: 10_000,
};

fn push(batch: &mut Batch<Fake>, job: FakeJob, weight: Weight) -> Caller {
    push_class(batch, job, weight, Class::Standard)
}

fn push_class(batch: &mut Batch<Fake>, job: FakeJob, weight: Weight, class: Class) -> Caller {
    let (progress, seen) = mpsc::channel(64);
    let (result, answered) = oneshot::channel();
    let park = Arc::<AtomicBool>::default();
    batch.push(Entry {
        job,
        weight,
        terms: class.into(),
        progress,
        result,
        park: Arc::clone(&park),
    });
    Caller {
        progress: seen,
        result: answered,
        park,
    }
}

fn light() -> Weight {
    Weight {
        rows: 2,
        tokens: 10,
    }
}

fn steps(batch: &mut Batch<Fake>, count: usize) {
    for _ in 0..count {
        batch.boundary();
        batch.step();
    }
}

fn progress(caller: &mut Caller) -> Vec<usize> {
    std::iter::from_fn(|| caller.progress.try_recv().ok())
        .map(|told| told.step)
        .collect()
}

#[test]
fn jobs_join_and_leave_at_step_boundaries() {
    let fake = Fake::default();
    let mut batch = Batch::new(fake.clone(), ROOMY);
    let mut first = push(&mut batch, FakeJob::new(1, 3), light());
    steps(&mut batch, 1);
    let mut second = push(&mut batch, FakeJob::new(2, 1), light());
    steps(&mut batch, 2);
    assert_eq!(*fake.0.lock().unwrap(), [vec![1], vec![1, 2], vec![1]]);
    assert_eq!(progress(&mut first), [1, 2, 3]);
    assert_eq!(progress(&mut second), [1]);
    assert_eq!(first.result.try_recv().unwrap().unwrap().job.done, 3);
    assert_eq!(second.result.try_recv().unwrap().unwrap().job.done, 1);
    assert_eq!((batch.live(), batch.waiting()), (0, 0));
}

#[test]
fn a_caller_that_left_frees_its_place_at_the_next_boundary() {
    let fake = Fake::default();
    let mut batch = Batch::new(fake.clone(), ROOMY);
    let gone = push(&mut batch, FakeJob::new(1, 9), light());
    let _stays = push(&mut batch, FakeJob::new(2, 9), light());
    steps(&mut batch, 1);
    drop(gone);
    steps(&mut batch, 1);
    assert_eq!(*fake.0.lock().unwrap(), [vec![1, 2], vec![2]]);
}

#[test]
fn a_failing_job_fails_alone() {
    for trouble in [Trouble::Error, Trouble::Panic, Trouble::NotFinite] {
        let mut batch = Batch::new(Fake::default(), ROOMY);
        let mut bad = FakeJob::new(2, 4);
        bad.trouble = Some((2, trouble));
        let mut callers: Vec<_> = [FakeJob::new(1, 4), bad, FakeJob::new(3, 4)]
            .into_iter()
            .map(|job| push(&mut batch, job, light()))
            .collect();
        steps(&mut batch, 4);
        let results: Vec<_> = callers
            .iter_mut()
            .map(|caller| caller.result.try_recv().unwrap())
            .collect();
        assert!(results[1].is_err(), "{trouble:?}");
        for good in [&results[0], &results[2]] {
            assert_eq!(good.as_ref().unwrap().job.done, 4, "{trouble:?}");
        }
    }
}

#[test]
fn the_row_and_token_limits_hold_and_arrival_order_is_kept() {
    let fake = Fake::default();
    let limits = StepLimits {
        max_rows: 4,
        max_tokens: 25,
    };
    let mut batch = Batch::new(fake.clone(), limits);
    let heavy = Weight {
        rows: 1,
        tokens: 20,
    };
    let _callers = [
        push(&mut batch, FakeJob::new(1, 1), light()),
        push(&mut batch, FakeJob::new(2, 1), heavy),
        push(&mut batch, FakeJob::new(3, 1), light()),
    ];
    steps(&mut batch, 3);
    // 1 + 2 is too many tokens, and 3 does not overtake 2.
    assert_eq!(*fake.0.lock().unwrap(), [vec![1], vec![2], vec![3]]);
}

#[test]
fn a_job_beyond_the_limits_runs_alone_instead_of_never() {
    let fake = Fake::default();
    let limits = StepLimits {
        max_rows: 1,
        max_tokens: 1,
    };
    let mut batch = Batch::new(fake.clone(), limits);
    let mut caller = push(&mut batch, FakeJob::new(1, 1), light());
    steps(&mut batch, 1);
    assert!(caller.result.try_recv().unwrap().is_ok());
}

#[test]
fn a_slow_reader_of_progress_still_gets_its_result() {
    let mut batch = Batch::new(Fake::default(), ROOMY);
    let (progress, _unread) = mpsc::channel(1);
    let (result, mut answered) = oneshot::channel();
    batch.push(Entry {
        job: FakeJob::new(1, 50),
        weight: light(),
        terms: Class::Standard.into(),
        progress,
        result,
        park: Arc::default(),
    });
    steps(&mut batch, 50);
    assert_eq!(answered.try_recv().unwrap().unwrap().job.done, 50);
}

#[test]
fn an_urgent_job_takes_a_place_and_the_one_it_took_goes_on_later() {
    let fake = Fake::default();
    let limits = StepLimits {
        max_rows: 2,
        max_tokens: 100,
    };
    let mut batch = Batch::new(fake.clone(), limits);
    let mut first = push(&mut batch, FakeJob::new(1, 4), light());
    let _second = push(&mut batch, FakeJob::new(2, 1), light());
    steps(&mut batch, 1);
    let mut urgent = push_class(&mut batch, FakeJob::new(3, 2), light(), Class::Interactive);
    let _last = push_class(&mut batch, FakeJob::new(4, 1), light(), Class::Background);
    steps(&mut batch, 7);
    let ran: Vec<u32> = fake.0.lock().unwrap().concat();
    assert_eq!(ran, [1, 3, 3, 1, 1, 1, 2, 4]);
    assert_eq!(progress(&mut first), [1, 2, 3, 4]);
    for caller in [&mut first, &mut urgent] {
        assert!(!caller.result.try_recv().unwrap().unwrap().parked);
    }
}

#[test]
fn a_job_that_is_wanted_back_leaves_as_it_stands_running_or_not() {
    let limits = StepLimits {
        max_rows: 2,
        max_tokens: 100,
    };
    let mut batch = Batch::new(Fake::default(), limits);
    let mut callers = [
        push(&mut batch, FakeJob::new(1, 9), light()),
        push(&mut batch, FakeJob::new(2, 9), light()),
    ];
    steps(&mut batch, 3);
    for (caller, done) in callers.iter_mut().zip([3, 0]) {
        caller.park.store(true, Ordering::Release);
        batch.boundary();
        let ended = caller.result.try_recv().unwrap().unwrap();
        assert_eq!((ended.job.done, ended.parked), (done, true));
    }
    assert_eq!((batch.live(), batch.waiting()), (0, 0));
}

#[test]
fn a_job_that_arrives_with_all_its_steps_done_takes_no_step() {
    let fake = Fake::default();
    let mut batch = Batch::new(fake.clone(), ROOMY);
    let mut job = FakeJob::new(1, 4);
    job.done = 4;
    let mut caller = push(&mut batch, job, light());
    batch.boundary();
    let ended = caller.result.try_recv().unwrap().unwrap();
    assert!(!ended.parked);
    assert_eq!(batch.live(), 0);
    assert!(fake.0.lock().unwrap().is_empty());
}

/// Of steps of which `fixed_s` is paid whoever is in them.
pub(crate) fn constants(fixed_s: f64) -> Constants {
    Constants {
        fixed_s,
        per_row_s: 0.0,
        per_token_s: 1e-3,
        per_pair_s: 0.0,
        dense_read_s: 0.0,
        experts_read_s: 0.0,
        untouched_share: 1.0,
        stream_s: 0.0,
        decode_token_s: 0.0,
    }
}

/// Pushes a job of one row of `tokens`, with its number of steps among its terms.
fn push_terms(
    batch: &mut Batch<Fake>,
    (id, steps): (u32, usize),
    tokens: usize,
    class: Class,
) -> Caller {
    let weight = Weight { rows: 1, tokens };
    let caller = push_class(batch, FakeJob::new(id, steps), weight, class);
    let last = batch.members.last_mut().unwrap();
    last.entry.terms = Terms {
        steps,
        ..class.into()
    };
    caller
}

#[test]
fn jobs_share_a_step_where_that_saves_time_and_run_one_after_the_other_where_not() {
    for (fixed_s, shared) in [(10.0, true), (0.0, false)] {
        let fake = Fake::default();
        let costs = Some(constants(fixed_s));
        let limits = ROOMY;
        let mut batch = Batch::new(fake.clone(), Forming { limits, costs });
        let _callers = [1, 2].map(|id| push_terms(&mut batch, (id, 2), 10, Class::Standard));
        steps(&mut batch, 4);
        let mut ran = fake.0.lock().unwrap().clone();
        ran.retain(|step| !step.is_empty());
        let want: &[Vec<u32>] = if shared {
            &[vec![1, 2], vec![1, 2]]
        } else {
            &[vec![1], vec![1], vec![2], vec![2]]
        };
        assert_eq!(ran, want, "fixed part {fixed_s}");
    }
}

#[test]
fn by_cost_the_urgent_come_first_then_the_small_and_what_was_begun_goes_on_later() {
    let fake = Fake::default();
    let (limits, costs) = (ROOMY, Some(constants(0.0)));
    let mut batch = Batch::new(fake.clone(), Forming { limits, costs });
    let large = push_terms(&mut batch, (1, 3), 5_000, Class::Standard);
    steps(&mut batch, 1);
    let _others = [
        push_terms(&mut batch, (2, 2), 10, Class::Standard),
        push_terms(&mut batch, (3, 1), 10, Class::Background),
        push_terms(&mut batch, (4, 1), 2_000, Class::Interactive),
    ];
    batch.boundary();
    assert_eq!(batch.former.as_ref().unwrap().parked(), 1);
    assert!(batch.outlook().backlog_s > 0.0);
    steps(&mut batch, 10);
    // What is tiny comes first whatever its class; a large one has the latest target of all.
    assert_eq!(fake.0.lock().unwrap().concat(), [1, 2, 2, 3, 4, 1, 1]);
    drop(large);
    assert_eq!(batch.outlook().backlog_s, 0.0);
}

#[test]
fn by_cost_limits_hold_a_failing_job_fails_alone_and_nobody_is_forgotten() {
    let fake = Fake::default();
    let limits = StepLimits {
        max_rows: 2,
        max_tokens: 100,
    };
    let costs = Some(constants(10.0));
    let mut batch = Batch::new(fake.clone(), Forming { limits, costs });
    let mut callers: Vec<Caller> = (1..=5)
        .map(|id| push_terms(&mut batch, (id, 3), 10, Class::Standard))
        .collect();
    batch.members[1].entry.job.trouble = Some((2, Trouble::Error));
    // Its terms know of one step, it has three: it comes in again as often as it must.
    batch.members[4].entry.terms.steps = 1;
    steps(&mut batch, 20);
    assert!(fake.0.lock().unwrap().iter().all(|step| step.len() <= 2));
    for (index, caller) in callers.iter_mut().enumerate() {
        let result = caller.result.try_recv().unwrap();
        assert_eq!(result.is_err(), index == 1, "{index}");
    }
}

#[test]
fn a_deadline_that_would_be_missed_takes_the_place_of_a_higher_class_between_two_steps() {
    // Steps of four seconds, and a job of four and a half that must be done in six.
    for (due, want) in [(None, [1, 1, 2]), (Some(6), [1, 2, 1])] {
        let fake = Fake::default();
        let (limits, costs) = (ROOMY, Some(constants(0.0)));
        let mut batch = Batch::new(fake.clone(), Forming { limits, costs });
        let _first = push_terms(&mut batch, (1, 2), 4_000, Class::Interactive);
        steps(&mut batch, 1);
        let _second = push_terms(&mut batch, (2, 1), 4_500, Class::Background);
        let terms = &mut batch.members.last_mut().unwrap().entry.terms;
        terms.due = due.map(|seconds| terms.arrived + Duration::from_secs(seconds));
        steps(&mut batch, 4);
        assert_eq!(fake.0.lock().unwrap().concat(), want, "due in {due:?} s");
    }
}
