use super::*;
use crate::Moved;
use crate::shape::tests::published;

const TOP_K: [usize; 32] = [8; 32];

fn job() -> StepJob {
    StepJob {
        tokens: 4097,
        prefixes: vec![250, 250],
        latents: 32 * 4096,
    }
}

fn predictor(shape: &ModelShape, plan: Plan) -> Predictor<'_> {
    Predictor::new(shape, &plan, Routes::Uniform { top_k: &TOP_K }).unwrap()
}

#[test]
fn one_rank_moves_nothing() {
    let shape = published();
    let tally = predictor(&shape, Plan::default())
        .step(0, &[job()])
        .unwrap();
    assert!(tally.groups().is_empty());
    assert_eq!(tally.total(), Moved::default());
}

/// Two all-reduces a layer of the residual stream, of which each of two ranks sends the whole once.
#[test]
fn tensor_ranks_exchange_two_residual_streams_a_layer() {
    let shape = published();
    let plan = Plan {
        tp: 2,
        ..Plan::default()
    };
    let tally = predictor(&shape, plan).step(1, &[job()]).unwrap();
    let [group] = tally.groups() else {
        panic!("{tally:?}");
    };
    assert_eq!(group.axes, Axis::Tp.into());
    assert_eq!(group.operations[Op::AllReduce.kind()], 64);
    let stream = 2 * 4097 * 4096 * 4;
    assert_eq!(group.traffic.total().sent, 64 * stream);
}

/// Only the velocity of the other row travels.
#[test]
fn guidance_ranks_exchange_one_velocity_a_step() {
    let shape = published();
    let plan = Plan {
        cfg: 2,
        ..Plan::default()
    };
    let tally = predictor(&shape, plan).step(0, &[job(), job()]).unwrap();
    assert_eq!(tally.total().sent, 2 * 32 * 4096 * 4);
    let one_row = StepJob {
        prefixes: vec![250],
        ..job()
    };
    assert!(predictor(&shape, plan).step(0, &[one_row]).is_err());
}

#[test]
fn what_one_rank_sends_another_receives() {
    let shape = published();
    for ranks in [2, 4] {
        for plan in Plan::legal(&shape, ranks).unwrap() {
            let predictor = predictor(&shape, plan);
            let mut kinds = [Moved::default(); Op::KINDS];
            for rank in 0..ranks {
                let job = StepJob {
                    tokens: 67,
                    ..job()
                };
                for group in predictor.step(rank, &[job]).unwrap().groups() {
                    for (sum, m) in kinds.iter_mut().zip(group.traffic.by_kind) {
                        sum.sent += m.sent;
                        sum.received += m.received;
                    }
                }
            }
            let (send, recv) = (Op::Send { to: 0 }.kind(), Op::Recv { from: 0 }.kind());
            assert_eq!(kinds[send].sent, kinds[recv].received, "{plan:?}");
            for (kind, sum) in kinds.iter().enumerate() {
                if kind != send && kind != recv {
                    assert_eq!(sum.sent, sum.received, "{plan:?}, kind {kind}");
                }
            }
        }
    }
}

#[test]
fn choices_must_be_there_for_every_layer_and_token() {
    let shape = published();
    let few = Routes::Uniform { top_k: &TOP_K[..3] };
    let e = Predictor::new(&shape, &Plan::default(), few).unwrap_err();
    assert_eq!(e.to_string(), "top_k of layers must be 32, got 3");
    let plan = Plan {
        ep: Axis::Tp.into(),
        tp: 2,
        ..Plan::default()
    };
    let experts = vec![vec![vec![0_u32; 8]; 2]; 32];
    let known = Routes::Known {
        experts: &experts,
        top_k: &TOP_K,
    };
    let two_tokens = StepJob { tokens: 2, ..job() };
    let got = Predictor::new(&shape, &plan, known).unwrap();
    assert!(got.step(0, &[two_tokens]).is_err());
}

/// Expectations are those of choices drawn at random.
#[test]
fn uniform_routes_are_what_random_choices_cost() {
    let shape = published();
    let plan = Plan {
        ulysses: 4,
        ep: Axis::Ulysses.into(),
        ..Plan::default()
    };
    let job = StepJob {
        tokens: 1000,
        prefixes: vec![8],
        latents: 1,
    };
    // A linear congruential sequence; each token's eight experts differ.
    let mut state = 1_u64;
    let mut draw = || {
        let mut chosen: Vec<u32> = Vec::new();
        while chosen.len() < 8 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let expert = (state >> 58) as u32;
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        chosen
    };
    let layer = |_| vec![(0..1000).flat_map(|_| draw()).collect::<Vec<u32>>()];
    let experts: Vec<Vec<Vec<u32>>> = (0..32).map(layer).collect();
    let known = Routes::Known {
        experts: &experts,
        top_k: &TOP_K,
    };
    let real = Predictor::new(&shape, &plan, known).unwrap();
    let real = real.step(2, std::slice::from_ref(&job)).unwrap().total();
    let planned = predictor(&shape, plan).step(2, &[job]).unwrap().total();
    let off = planned.sent as f64 / real.sent as f64;
    assert!((0.98..1.02).contains(&off), "{off}");
}
