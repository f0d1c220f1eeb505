use proptest::prelude::*;
use proto::v1::{ModelInfo, StepCosts};
use registry::Load;

use super::*;

fn worker(id: &str, load: Load) -> Member {
    Member {
        id: id.to_owned(),
        role: Role::DitWorker.into(),
        endpoint: format!("http://host-{id}:1"),
        state: MemberState::Ready.into(),
        model: Some(ModelInfo {
            weights_id: "w".to_owned(),
            ..ModelInfo::default()
        }),
        load: Some(load),
        ..Member::default()
    }
}

fn load(running: u32) -> Load {
    Load {
        running,
        capacity: 4,
        ..Load::default()
    }
}

fn many(count: usize) -> Snapshot {
    let members = (0..count).map(|n| worker(&format!("m{n:05}"), load(3)));
    Snapshot::new(7, members.collect())
}

fn pick(snapshot: &Snapshot, need: &Need, turn: u64) -> Option<String> {
    let none = HashSet::new();
    let wish = Wish {
        role: Role::DitWorker,
        weights_id: "w",
        tried: &none,
        turn,
    };
    let found = Directory::new(snapshot).pick(snapshot, wish, need, &HashMap::new());
    found.map(|member| member.id.clone())
}

#[test]
fn predicted_work_counts_more_than_the_number_of_jobs() {
    let told = |running, backlog_ms| Load {
        backlog_ms,
        ..load(running)
    };
    let members = vec![
        worker("few", told(1, 9_000)),
        worker("many", told(3, 2_000)),
    ];
    let snapshot = Snapshot::new(1, members);
    for turn in 0..4 {
        assert_eq!(pick(&snapshot, &Need::default(), turn).unwrap(), "many");
    }
}

#[test]
fn own_work_counts_who_was_tried_is_not_tried_again_and_equals_take_turns() {
    let members = vec![
        worker("a", load(1)),
        worker("b", load(1)),
        worker("c", load(2)),
    ];
    let snapshot = Snapshot::new(1, members);
    let directory = Directory::new(&snapshot);
    let picked = |tried: &[&str], sent: &[(&str, u32)], turn| {
        let tried = tried.iter().map(|id| (*id).to_owned()).collect();
        let sent = sent.iter().map(|(id, jobs)| ((*id).to_owned(), *jobs));
        let wish = Wish {
            role: Role::DitWorker,
            weights_id: "w",
            tried: &tried,
            turn,
        };
        let found = directory.pick(&snapshot, wish, &Need::default(), &sent.collect());
        found.map(|member| member.id.clone())
    };
    let by_turns: Vec<_> = (0..4).filter_map(|turn| picked(&[], &[], turn)).collect();
    assert_eq!(by_turns, ["a", "b", "a", "b"]);
    assert_eq!(picked(&[], &[("a", 4), ("b", 3)], 0).unwrap(), "c");
    assert_eq!(picked(&["a", "b"], &[], 0).unwrap(), "c");
    assert_eq!(picked(&["a", "b", "c"], &[], 0), None);
}

#[test]
fn a_prefix_is_not_carried_elsewhere_for_less_than_it_costs() {
    let snapshot = |running| {
        Snapshot::new(
            1,
            vec![worker("here", load(running)), worker("there", load(0))],
        )
    };
    let need = Need {
        host: "host-here".to_owned(),
        bytes: 500_000_000,
        seconds: 1.0,
        ..Need::default()
    };
    // One of four places taken by a job of a second is less than half a second of travel, three are more.
    assert_eq!(pick(&snapshot(1), &need, 0).unwrap(), "here");
    assert_eq!(pick(&snapshot(3), &need, 0).unwrap(), "there");
}

#[test]
fn a_worker_without_room_is_taken_only_when_nobody_has_any() {
    let room = |free_bytes, running| Load {
        free_bytes,
        ..load(running)
    };
    let need = Need {
        bytes: 1_000,
        ..Need::default()
    };
    let members = vec![worker("full", room(10, 0)), worker("busy", room(2_000, 4))];
    let snapshot = Snapshot::new(1, members);
    assert_eq!(pick(&snapshot, &need, 0).unwrap(), "busy");
    let full = Snapshot::new(1, vec![worker("full", room(10, 0))]);
    assert_eq!(pick(&full, &need, 0).unwrap(), "full");
}

#[test]
fn among_many_an_idle_one_at_the_prefix_is_found() {
    let mut snapshot = many(1_000);
    snapshot.members.get_mut("m00777").unwrap().load = Some(load(0));
    let need = Need {
        host: "host-m00777".to_owned(),
        bytes: 1,
        seconds: 1.0,
        ..Need::default()
    };
    for turn in 0..50 {
        assert_eq!(pick(&snapshot, &need, turn).unwrap(), "m00777");
    }
}

#[test]
fn few_choices_spread_work_almost_evenly_over_many() {
    let snapshot = many(1_000);
    let directory = Directory::new(&snapshot);
    let (none, mut sent) = (HashSet::new(), HashMap::new());
    for turn in 0..20_000 {
        let wish = Wish {
            role: Role::DitWorker,
            weights_id: "w",
            tried: &none,
            turn,
        };
        let member = directory
            .pick(&snapshot, wish, &Need::default(), &sent)
            .unwrap();
        *sent.entry(member.id.clone()).or_insert(0) += 1;
    }
    let most = sent.values().max().unwrap();
    assert!((20..=24).contains(most), "{most} for a mean of 20");
}

#[test]
fn one_picture_alone_is_predicted_by_the_quickest_worker_that_told() {
    let told = |per_token_s, step_ratio| {
        let id = format!("w{step_ratio}");
        Member {
            step_costs: Some(StepCosts {
                per_token_s,
                fixed_s: 0.5,
                decode_token_s: 0.01,
                ..StepCosts::default()
            }),
            ..worker(
                &id,
                Load {
                    step_ratio,
                    ..load(0)
                },
            )
        }
    };
    let mut broken = told(f64::NAN, 1_000);
    broken.id = "broken".to_owned();
    let snapshot = Snapshot::new(1, vec![told(1e-3, 2_000), told(2e-3, 1_000), broken]);
    let picture = Drawing {
        rows: Rows {
            rows: 2,
            tokens: 100,
            prefix: 7,
        },
        steps: 10,
        image_tokens: 90,
    };
    let directory = Directory::new(&snapshot);
    // Twice as slow as told: 10 steps of 0.5 + 200 x 1e-3, and 90 tokens decoded.
    let seconds = directory.seconds(&snapshot, "w", &picture).unwrap();
    assert!(
        (seconds - 2.0 * (10.0 * 0.7 + 0.9)).abs() < 1e-9,
        "{seconds}"
    );
    assert_eq!(directory.seconds(&snapshot, "v", &picture), None);
}

#[test]
fn a_slower_pool_is_taken_when_the_picture_is_done_there_sooner() {
    let told = |id: &str, per_token_s, backlog_ms| Member {
        step_costs: Some(StepCosts {
            per_token_s,
            ..StepCosts::default()
        }),
        ..worker(
            id,
            Load {
                backlog_ms,
                ..load(1)
            },
        )
    };
    let need = Need {
        picture: Some(Drawing {
            rows: Rows {
                rows: 2,
                tokens: 100,
                prefix: 7,
            },
            steps: 10,
            image_tokens: 90,
        }),
        ..Need::default()
    };
    // A picture takes two seconds at the one and six at the other.
    for (behind_ms, taken) in [(3_000, "quick"), (5_000, "slow")] {
        let members = vec![told("quick", 1e-3, 1 + behind_ms), told("slow", 3e-3, 1)];
        let snapshot = Snapshot::new(1, members);
        assert_eq!(pick(&snapshot, &need, 0).unwrap(), taken, "{behind_ms} ms");
    }
}

#[test]
fn a_directory_is_of_its_members_not_of_their_loads() {
    let snapshot = many(3);
    let directory = Directory::new(&snapshot);
    let mut busier = snapshot.clone();
    busier.members.get_mut("m00001").unwrap().load = Some(load(4));
    assert!(directory.fits(&busier));
    busier.epoch += 1;
    assert!(!directory.fits(&busier));
}

/// Run in a release build by hand; see `services/router/BENCH.md`.
#[test]
#[ignore = "measures; prints microseconds a decision"]
fn decisions_among_a_thousand_and_ten_thousand() {
    for count in [100, 1_000, 10_000] {
        let snapshot = many(count);
        let built = base::clock::now();
        let directory = Directory::new(&snapshot);
        let build = base::clock::millis_since(built);
        let (none, mut sent) = (HashSet::new(), HashMap::new());
        let (rounds, began) = (20_000, base::clock::now());
        for turn in 0..rounds {
            let wish = Wish {
                role: Role::DitWorker,
                weights_id: "w",
                tried: &none,
                turn,
            };
            let member = directory
                .pick(&snapshot, wish, &Need::default(), &sent)
                .unwrap();
            *sent.entry(member.id.clone()).or_insert(0) += 1;
        }
        let each = base::clock::millis_since(began) * 1e3 / rounds as f64;
        println!("{count} pools: {each:.2} us a decision, {build:.2} ms when members change");
    }
}

prop_compose! {
    fn any_member()(
        id in "[a-f]", role in 1..5_i32, state in 1..4_i32, weights in "[vw]", cordoned in any::<bool>(),
        running in 0..9_u32,
    ) -> Member {
        let model = ModelInfo { weights_id: weights, ..ModelInfo::default() };
        Member { role, state, cordoned, model: Some(model), ..worker(&id, load(running)) }
    }
}

proptest! {
    #[test]
    fn only_ready_members_of_the_same_weights_are_picked(
        members in proptest::collection::vec(any_member(), 0..12),
        tried in proptest::collection::hash_set("[a-f]", 0..3),
        turn in any::<u64>(),
    ) {
        let snapshot = Snapshot::new(1, members);
        let legal = |m: &&Member| {
            m.role() == Role::DitWorker && m.state() == MemberState::Ready && !m.cordoned
                && weights_of(m) == Some("w") && !tried.contains(&m.id)
        };
        let wish = Wish { role: Role::DitWorker, weights_id: "w", tried: &tried, turn };
        let chosen = Directory::new(&snapshot).pick(&snapshot, wish, &Need::default(), &HashMap::new());
        let least = snapshot.members.values().filter(legal).map(|m| m.load.unwrap().running).min();
        prop_assert_eq!(chosen.map(|m| m.load.unwrap().running), least);
        prop_assert!(chosen.iter().all(legal));
    }

    /// With few members the choice is exact: nobody legal is further ahead.
    #[test]
    fn the_least_loaded_of_few_is_picked(
        running in proptest::collection::vec(0..9_u32, 1..=SCANNED), turn in any::<u64>(),
    ) {
        let members = running.iter().enumerate().map(|(n, &running)| worker(&format!("m{n:02}"), load(running)));
        let snapshot = Snapshot::new(1, members.collect());
        let chosen = pick(&snapshot, &Need::default(), turn).unwrap();
        let least = running.iter().min().unwrap();
        prop_assert_eq!(&snapshot.members[&chosen].load.unwrap().running, least);
    }
}
