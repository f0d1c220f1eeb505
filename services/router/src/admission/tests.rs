use proptest::prelude::*;

use super::*;

const FREE: Limits = Limits {
    max_running: 1,
    max_queued: 1_000,
    max_cost: u64::MAX,
    tenant: Quota {
        max_running: usize::MAX,
        max_queued: usize::MAX,
        weight: 1,
    },
    class_wait: Duration::from_secs(30),
};

fn limits(max_running: usize, max_queued: usize, max_cost: u64) -> Limits {
    Limits {
        max_running,
        max_queued,
        max_cost,
        ..FREE
    }
}

fn ask(cost: u64) -> Ask<'static> {
    Ask {
        cost,
        class: Class::Standard,
        tenant: "",
        quota: None,
        now: Duration::ZERO,
        deadline: None,
        alone: None,
    }
}

fn of(tenant: &str, cost: u64) -> Ask<'_> {
    Ask {
        tenant,
        ..ask(cost)
    }
}

/// Takes `ask` in; answers its ticket.
fn put(admission: &mut Admission, ask: Ask<'_>) -> Ticket {
    admission.submit(ask).unwrap().ticket
}

/// Starts at the origin.
fn start(admission: &mut Admission) -> Vec<Ticket> {
    admission.start(Duration::ZERO)
}

/// Runs everything one after the other, a second each; answers the order.
fn drained(admission: &mut Admission) -> Vec<Ticket> {
    let mut order = Vec::new();
    let mut running = start(admission);
    while let Some(ticket) = running.pop() {
        order.push(ticket);
        admission.leave(ticket, Some(Duration::from_secs(1)));
        running.extend(start(admission));
    }
    order
}

/// A router that has done ten requests of cost 100, a second each.
fn practised(limits: Limits) -> Admission {
    let mut admission = Admission::new(limits);
    for _ in 0..10 {
        put(&mut admission, ask(100));
        let [ticket] = start(&mut admission)[..] else {
            panic!("one starts");
        };
        admission.leave(ticket, Some(Duration::from_secs(1)));
    }
    admission
}

#[test]
fn requests_of_one_class_start_in_order_of_arrival() {
    let mut admission = Admission::new(limits(1, 2, u64::MAX));
    let ahead = |admission: &mut Admission| admission.submit(ask(5)).unwrap().ahead;
    assert_eq!(ahead(&mut admission), 0);
    assert_eq!(start(&mut admission), [0]);
    assert_eq!(ahead(&mut admission), 0);
    assert_eq!(ahead(&mut admission), 1);
    assert!(start(&mut admission).is_empty());
    admission.leave(0, None);
    assert_eq!(start(&mut admission), [1]);
    admission.leave(1, None);
    assert_eq!(start(&mut admission), [2]);
}

#[test]
fn a_full_queue_refuses_with_a_hint_that_grows_with_the_work_ahead() {
    let hint = |queued: usize| {
        let mut admission = Admission::new(limits(1, queued, u64::MAX));
        let first = put(&mut admission, ask(100));
        start(&mut admission);
        admission.leave(first, Some(Duration::from_secs(1)));
        for _ in 0..=queued {
            put(&mut admission, ask(100));
            start(&mut admission);
        }
        match admission.submit(ask(100)).unwrap_err() {
            Refused::Queue {
                waiting,
                retry_after,
            } => {
                assert_eq!(waiting, queued);
                retry_after
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(hint(1), Duration::from_secs(2));
    assert_eq!(hint(9), Duration::from_secs(10));
    assert_eq!(hint(1_000), MAX_RETRY);
}

#[test]
fn a_request_above_the_cost_bound_runs_alone() {
    let mut admission = Admission::new(limits(8, 8, 10));
    for cost in [6, 100, 1] {
        put(&mut admission, ask(cost));
    }
    assert_eq!(start(&mut admission), [0]);
    admission.leave(0, None);
    assert_eq!(start(&mut admission), [1]);
    admission.leave(1, None);
    assert_eq!(start(&mut admission), [2]);
}

#[test]
fn leaving_the_queue_makes_room() {
    let mut admission = Admission::new(limits(1, 1, u64::MAX));
    put(&mut admission, ask(1));
    start(&mut admission);
    let waiting = put(&mut admission, ask(1));
    assert!(admission.submit(ask(1)).is_err());
    admission.leave(waiting, None);
    assert!(admission.submit(ask(1)).is_ok());
}

#[test]
fn a_more_urgent_class_goes_first_but_not_for_ever() {
    let mut admission = Admission::new(FREE);
    let class = |class, seconds| Ask {
        class,
        now: Duration::from_secs(seconds),
        ..ask(1)
    };
    let running = put(&mut admission, class(Class::Standard, 0));
    start(&mut admission);
    let background = put(&mut admission, class(Class::Background, 0));
    let standard = put(&mut admission, class(Class::Standard, 1));
    let interactive = put(&mut admission, class(Class::Interactive, 2));
    admission.leave(running, None);
    assert_eq!(admission.start(Duration::from_secs(3)), [interactive]);
    admission.leave(interactive, None);
    assert_eq!(admission.start(Duration::from_secs(3)), [standard]);
    // Two waits later the one in the background is as urgent as any, and older.
    let late = put(&mut admission, class(Class::Interactive, 61));
    admission.leave(standard, None);
    assert_eq!(admission.start(Duration::from_secs(61)), [background]);
    admission.leave(background, None);
    assert_eq!(admission.start(Duration::from_secs(61)), [late]);
}

#[test]
fn tenants_share_by_weight_whoever_asks_more() {
    let mut admission = Admission::new(FREE);
    let heavy = Quota {
        weight: 3,
        ..Quota::default()
    };
    let mut owner = HashMap::new();
    for _ in 0..40 {
        owner.insert(put(&mut admission, of("light", 10)), "light");
    }
    for _ in 0..40 {
        let ask = Ask {
            quota: Some(heavy),
            ..of("heavy", 10)
        };
        owner.insert(put(&mut admission, ask), "heavy");
    }
    let order = drained(&mut admission);
    assert_eq!(order.len(), 80);
    let first: Vec<_> = order[..40].iter().map(|ticket| owner[ticket]).collect();
    let heavy = first.iter().filter(|name| **name == "heavy").count();
    assert!(
        (29..=31).contains(&heavy),
        "{heavy} of 40 for three quarters"
    );
}

#[test]
fn a_tenant_that_was_idle_has_saved_up_nothing() {
    let mut admission = Admission::new(FREE);
    put(&mut admission, of("idle", 1));
    for _ in 0..50 {
        put(&mut admission, of("busy", 10));
    }
    drained(&mut admission);
    let busy = put(&mut admission, of("busy", 10));
    let mut order = vec![busy];
    for _ in 0..6 {
        order.push(put(&mut admission, of("idle", 10)));
        order.push(put(&mut admission, of("busy", 10)));
    }
    let owner = |ticket: &Ticket| order.iter().position(|t| t == ticket).unwrap() % 2;
    let turns: Vec<_> = drained(&mut admission).iter().map(owner).collect();
    let in_a_row = turns.chunk_by(|a, b| a == b).map(<[usize]>::len).max();
    assert!(in_a_row <= Some(2), "{turns:?}");
}

#[test]
fn a_tenant_at_its_quota_is_passed_over_and_refused_by_itself() {
    let one = Quota {
        max_running: 1,
        max_queued: 1,
        weight: 1,
    };
    let mut admission = Admission::new(Limits {
        tenant: one,
        ..limits(4, 100, u64::MAX)
    });
    let first = put(&mut admission, of("a", 1));
    assert_eq!(start(&mut admission), [first]);
    let second = put(&mut admission, of("a", 1));
    let other = put(&mut admission, of("b", 1));
    assert_eq!(start(&mut admission), [other]);
    let refused = admission.submit(of("a", 1)).unwrap_err();
    assert!(
        matches!(refused, Refused::Tenant { waiting: 1, .. }),
        "{refused:?}"
    );
    assert!(admission.submit(of("b", 1)).is_ok());
    admission.leave(first, None);
    assert_eq!(start(&mut admission), [second]);
}

#[test]
fn a_deadline_that_cannot_be_met_is_refused_with_the_time_when_it_could() {
    let within = |seconds| Ask {
        deadline: Some(Duration::from_secs(seconds)),
        ..ask(100)
    };
    let mut admission = practised(FREE);
    for _ in 0..10 {
        put(&mut admission, ask(100));
        start(&mut admission);
    }
    // One runs, nine wait: eleven seconds with this one.
    assert!(admission.submit(within(11)).is_ok());
    let refused = admission.submit(within(5)).unwrap_err();
    let Refused::Late { needs, retry_after } = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(needs, Duration::from_secs(12));
    assert_eq!(retry_after, Duration::from_secs(7));
    // A more urgent one passes those that wait.
    let urgent = Ask {
        class: Class::Interactive,
        ..within(5)
    };
    assert!(admission.submit(urgent).is_ok());
}

#[test]
fn a_deadline_that_is_too_near_even_alone_is_hopeless() {
    let mut admission = practised(FREE);
    let deadline = Some(Duration::from_millis(700));
    let refused = admission
        .submit(Ask {
            deadline,
            ..ask(100)
        })
        .unwrap_err();
    let needs = Duration::from_secs(1);
    assert_eq!(refused, Refused::Hopeless { needs });
    // What a worker tells of its steps counts at once.
    let told = Ask {
        deadline,
        alone: Some(2.0),
        ..ask(1)
    };
    let refused = Admission::new(FREE).submit(told).unwrap_err();
    let needs = Duration::from_secs(2);
    assert_eq!(refused, Refused::Hopeless { needs });
    // Nothing is known yet: nothing is refused.
    assert!(
        Admission::new(FREE)
            .submit(Ask {
                deadline,
                ..ask(u64::MAX)
            })
            .is_ok()
    );
}

#[test]
fn names_of_tenants_are_kept_only_as_long_as_they_matter() {
    let mut admission = Admission::new(FREE);
    for index in 0..10_000 {
        let name = format!("{index}{}", "\u{e9}".repeat(500));
        let ticket = put(&mut admission, of(&name, 1));
        start(&mut admission);
        admission.leave(ticket, None);
    }
    assert!(admission.tenants() <= line::MAX_TENANTS);
}

proptest! {
    /// Bounds hold after every step, and everything admitted starts in the end.
    #[test]
    fn bounds_always_hold(
        steps in proptest::collection::vec((0..40_u64, any::<bool>(), any::<u8>()), 1..200),
        max_running in 1..5_usize, max_queued in 0..5_usize, max_cost in 1..60_u64,
        quota in (1..4_usize, 0..4_usize),
    ) {
        let tenant = Quota { max_running: quota.0, max_queued: quota.1, weight: 1 };
        let mut admission = Admission::new(Limits { tenant, ..limits(max_running, max_queued, max_cost) });
        let (mut costs, mut running) = (HashMap::new(), Vec::new());
        let mut begun = Vec::new();
        for (at, (cost, submit, pick)) in steps.into_iter().enumerate() {
            let now = Duration::from_secs(at as u64);
            if submit {
                let (name, class) = (["a", "b", "c"][usize::from(pick) % 3], Class::ALL[usize::from(pick / 3) % 3]);
                if let Ok(placed) = admission.submit(Ask { class, now, ..of(name, cost) }) {
                    costs.insert(placed.ticket, (cost, name));
                }
            } else if !running.is_empty() {
                let ticket = running.remove(usize::from(pick) % running.len());
                admission.leave(ticket, Some(Duration::from_millis(u64::from(pick))));
            }
            let started = admission.start(now);
            begun.extend(started.iter().copied());
            running.extend(started);
            let total: u64 = running.iter().map(|ticket| costs[ticket].0).sum();
            prop_assert!(running.len() <= max_running);
            prop_assert!(total <= max_cost || running.len() == 1);
            prop_assert!(admission.waiting() <= max_queued.max(1));
            prop_assert_eq!(admission.running(), running.len());
            for name in ["a", "b", "c"] {
                let own = running.iter().filter(|ticket| costs[ticket].1 == name).count();
                prop_assert!(own <= quota.0);
            }
        }
        while let Some(ticket) = running.pop() {
            admission.leave(ticket, None);
            let started = admission.start(Duration::from_secs(1_000));
            begun.extend(started.iter().copied());
            running.extend(started);
        }
        begun.sort_unstable();
        let mut all: Vec<_> = costs.into_keys().collect();
        all.sort_unstable();
        prop_assert_eq!(begun, all);
    }
}
