use parallel::cost::{Interconnect, WeightType};

use super::*;
use crate::{
    batching::{Class, cost::Rules},
    cost::ModelNumbers,
    simulate::trace::seconds,
};

const POLICIES: [Policy; 2] = [Policy::Cost, Policy::FifoSameShape];

/// The published model.
fn published() -> ModelNumbers {
    ModelNumbers {
        layers: 32,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        experts: 64,
        top_k: 8,
        expert_inner: 3072,
        shared_inner: 3072,
        pixels_per_token: 16,
        specials: 1,
        edit_prefix_share: 1.25,
        decode_flops_per_token: 2.52e10,
    }
}

fn cluster(workers: u32) -> Cluster {
    Cluster {
        name: "test".to_owned(),
        workers,
        plan: "single".to_owned(),
        dtype: WeightType::Bf16,
        interconnect: Interconnect::NvLink,
        streamed_layers: 8,
        model: published(),
        step: StepBounds {
            max_rows: 32,
            max_tokens: 32_768,
            free_gib: 12.0,
        },
        admission: AdmissionBounds::default(),
        rules: Rules::default(),
        truth: Truth {
            scale: 1.0,
            jitter: 0.0,
        },
        constants: None,
    }
}

fn request(at_s: f64) -> Request {
    Request {
        at_s,
        size: "1024x1024".to_owned(),
        steps: 10,
        guidance: 5.0,
        edit: false,
        class: Class::Standard,
        deadline_s: None,
        n: 1,
        prompt_tokens: 100,
    }
}

fn trace(requests: Vec<Request>) -> Trace {
    Trace { requests }
}

#[test]
fn a_request_alone_takes_its_prefill_its_steps_and_its_decoding() {
    let cluster = cluster(1);
    let constants = cluster.constants().unwrap();
    for policy in POLICIES {
        let report = run(&trace(vec![request(1.0)]), &cluster, policy, 1).unwrap();
        // A step takes as long as copying in does.
        let expected =
            constants.prefill(2, 100) + 10.0 * constants.stream_s + constants.decode(4096);
        assert!(
            (report.latency[1].p50_s - expected).abs() < 1e-3,
            "{policy:?}"
        );
        assert_eq!((report.steps, report.images_done), (10, 1));
        assert_eq!((report.jobs_per_step, report.rows_per_step), (1.0, 2.0));
    }
}

#[test]
fn a_request_of_several_images_ends_with_its_last_one() {
    let several = Request {
        n: 3,
        ..request(0.0)
    };
    let report = run(&trace(vec![several]), &cluster(2), Policy::Cost, 1).unwrap();
    assert_eq!(
        (report.requests, report.images, report.images_done),
        (1, 3, 3)
    );
    let one = run(&trace(vec![request(0.0)]), &cluster(2), Policy::Cost, 1).unwrap();
    assert!(report.latency[1].p50_s > one.latency[1].p50_s);
}

#[test]
fn every_request_is_answered_or_refused_for_a_reason() {
    for kind in Kind::ALL {
        // Far more than the cluster can do.
        let trace = generate(kind, 200, 20.0, 3).unwrap();
        let small = Cluster {
            admission: AdmissionBounds {
                max_running: 8,
                max_queued: 40,
            },
            ..cluster(2)
        };
        for policy in POLICIES {
            let report = run(&trace, &small, policy, 1).unwrap();
            let classes = &report.latency[..3];
            let done: u64 = classes.iter().map(|group| group.done).sum();
            let refused = report.refused.queue_full + report.refused.deadline;
            assert_eq!(done + refused, report.requests, "{kind:?} {policy:?}");
            assert!(report.refused.queue_full > 0 && done >= 40, "{report:?}");
        }
    }
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let due = |deadline| Request {
        deadline_s: Some(deadline),
        ..request(0.0)
    };
    let one = Cluster {
        admission: AdmissionBounds {
            max_running: 2,
            max_queued: 8,
        },
        ..cluster(1)
    };
    // Before its prefill is done, in the middle of its steps, while it waits for the others, and not at all.
    let requests = [0.01, 3.0, 4.0, 300.0].map(due).to_vec();
    for policy in POLICIES {
        let report = run(&trace(requests.clone()), &one, policy, 1).unwrap();
        assert_eq!(
            (report.refused.deadline, report.images_done),
            (3, 1),
            "{policy:?}"
        );
    }
}

#[test]
fn equal_seeds_give_equal_reports_and_others_do_not() {
    let jittery = Cluster {
        truth: Truth::default(),
        ..cluster(3)
    };
    let text = |seed, trace_seed| {
        let trace = generate(Kind::Mixed, 60, 1.0, trace_seed).unwrap();
        let report = run(&trace, &jittery, Policy::Cost, seed).unwrap();
        serde_json::to_string(&report).unwrap() + &report.table()
    };
    assert_eq!(text(1, 1), text(1, 1));
    assert_ne!(
        text(1, 1).replace("\"seed\":1", ""),
        text(2, 1).replace("\"seed\":2", "")
    );
    assert_ne!(text(1, 1), text(1, 2));
}

#[test]
fn predictions_that_are_off_are_corrected() {
    let slow = Cluster {
        truth: Truth {
            scale: 1.7,
            jitter: 0.02,
        },
        ..cluster(1)
    };
    let report = run(&trace(vec![request(0.0); 8]), &slow, Policy::Cost, 1).unwrap();
    assert!(
        (report.correction - 1.7).abs() < 0.05,
        "{}",
        report.correction
    );
}

#[test]
fn a_generated_trace_is_what_is_read_back() {
    for kind in Kind::ALL {
        let made = generate(kind, 100, 2.0, 5).unwrap();
        assert_eq!(Trace::parse(&made.to_lines().unwrap()).unwrap(), made);
        // A hundred at two a second.
        assert!(
            (20.0..120.0).contains(&made.seconds()),
            "{kind:?} {}",
            made.seconds()
        );
    }
    assert!(generate(Kind::Mixed, 0, 1.0, 1).is_err());
    assert!(generate(Kind::Mixed, 1, f64::NAN, 1).is_err());
}

#[test]
fn a_trace_may_be_stretched_to_any_load() {
    let (trace, cluster) = (generate(Kind::Mixed, 50, 1.0, 1).unwrap(), cluster(4));
    let now = offered_load(&trace, &cluster).unwrap();
    let half = offered_load(&trace.stretched(now / 0.5), &cluster).unwrap();
    assert!((half - 0.5).abs() < 1e-9);
}

#[test]
fn a_bad_line_is_named_with_its_field() {
    let line = |change: fn(&mut serde_json::Value)| {
        let mut value = serde_json::to_value(request(1.0)).unwrap();
        change(&mut value);
        value.to_string()
    };
    let good = line(|_| {});
    for (bad, field) in [
        (line(|v| v["steps"] = 0.into()), "steps"),
        (line(|v| v["at_s"] = 0.5.into()), "at_s"),
        (line(|v| v["size"] = "12".into()), "size"),
        (line(|v| v["size"] = "9999x16".into()), "size"),
        (line(|v| v["guidance"] = (-1).into()), "guidance"),
        (line(|v| v["n"] = 11.into()), "n"),
        (line(|v| v["deadline_s"] = 0.into()), "deadline_s"),
        (
            line(|v| v["prompt_tokens"] = 1_000_000.into()),
            "prompt_tokens",
        ),
        (line(|v| v["class"] = "royal".into()), "trace"),
        (line(|v| v["sizes"] = 1.into()), "trace"),
        ("nonsense".to_owned(), "trace"),
    ] {
        let error = Trace::parse(&format!("{good}\n\n{bad}\n"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(field) && error.contains("line 3"),
            "{error}"
        );
    }
    assert!(Trace::parse("\n").is_err());
    let odd = Request {
        size: "1000x1000".to_owned(),
        ..request(1.0)
    };
    let error = run(&trace(vec![odd]), &cluster(1), Policy::Cost, 1).unwrap_err();
    assert!(error.to_string().starts_with("size "), "{error}");
}

#[test]
fn a_bad_cluster_is_refused_by_field() {
    type Break = fn(&mut Cluster);
    let broken: [(&str, Break); 9] = [
        ("workers", |c| c.workers = 0),
        ("plan", |c| c.plan = "pp=2".to_owned()),
        ("plan", |c| c.plan = "many".to_owned()),
        ("streamed_layers", |c| c.streamed_layers = 99),
        ("truth.scale", |c| c.truth.scale = f64::NAN),
        ("rules.class_stretch", |c| c.rules.class_stretch = f64::NAN),
        ("rules.class_s", |c| c.rules.class_s = -1.0),
        ("rules.late", |c| c.rules.late = 0.0),
        ("step.free_gib", |c| c.step.free_gib = -1.0),
    ];
    for (field, damage) in broken {
        let mut cluster = cluster(1);
        damage(&mut cluster);
        let error = run(&trace(vec![request(0.0)]), &cluster, Policy::Cost, 1).unwrap_err();
        assert!(error.to_string().starts_with(field), "{field}: {error}");
    }
    assert_eq!(seconds(f64::NAN), std::time::Duration::ZERO);
}

fn committed(name: &str) -> String {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/traces/");
    std::fs::read_to_string(format!("{dir}{name}")).unwrap()
}

/// Reports by cost and by first come of the committed mixed trace at 80 % load.
fn at_eighty_percent(name: &str) -> [Report; 2] {
    let cluster: Cluster = toml::from_str(&committed(name)).unwrap();
    let trace = Trace::parse(&committed("mixed.jsonl")).unwrap();
    let factor = offered_load(&trace, &cluster).unwrap() / 0.8;
    let trace = trace.stretched(factor);
    let reports = POLICIES.map(|policy| run(&trace, &cluster, policy, 1).unwrap());
    for report in &reports {
        println!("{}", report.table());
    }
    let [by_cost, _] = &reports;
    for class in &by_cost.latency {
        assert_eq!(class.done, class.requests, "{} is starved", class.name);
    }
    reports
}

/// 99th percentile of the small ones, over that of first come.
fn small_ones([by_cost, first_come]: &[Report; 2]) -> f64 {
    by_cost.latency[3].p99_s / first_come.latency[3].p99_s
}

#[test]
fn where_layers_are_copied_in_cost_makes_a_third_more_images_and_small_ones_wait_half_as_long() {
    let reports = at_eighty_percent("cluster-8-offload.toml");
    let [by_cost, first_come] = &reports;
    let gain = by_cost.images_per_s / first_come.images_per_s;
    assert!(gain >= 1.3, "{gain}");
    assert!(small_ones(&reports) <= 0.5, "{}", small_ones(&reports));
    let worst = |report: &Report| report.latency.iter().map(|g| g.worst_s).fold(0.0, f64::max);
    assert!(worst(by_cost) < worst(first_come));
}

#[test]
fn where_the_model_is_resident_cost_makes_as_many_images_and_small_ones_wait_half_as_long() {
    let reports = at_eighty_percent("cluster-8-measured.toml");
    let [by_cost, first_come] = &reports;
    assert!(by_cost.images_per_s >= 0.99 * first_come.images_per_s);
    assert!(small_ones(&reports) <= 0.5, "{}", small_ones(&reports));
}
