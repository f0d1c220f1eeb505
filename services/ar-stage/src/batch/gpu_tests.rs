//! Text under a plan of two GPUs beside text on one.
//!
//! Needs two H100s or H200s: `cargo test -p ar-stage --features cuda --lib -- --ignored gpus`.
use model::{Parts, text::Writing};
use stage::RankLoad;

use super::tests::{SQUARE, batch, checkpoint, ended, job, order};
use super::*;
use crate::{
    ArStageConfig,
    order::{Order, Size, Task},
    pictures::Pictures,
};

/// Largest relative difference of keys and values after the same tokens.
const CLOSE: f64 = 3e-2;

fn open(plan: &str) -> Arc<Ranks> {
    let transport = kv_transfer::engine::Transport::Shm;
    let config = ArStageConfig {
        model: checkpoint(),
        plan: plan.parse().unwrap(),
        device: "cuda".parse().unwrap(),
        kv_transfer: String::new(),
        client: kv_transfer::ClientConfig::only(transport),
        max_queue: 1,
    };
    let gpus = config.on_gpus().unwrap().map(|gpus| (gpus, Parts::NONE));
    let load = RankLoad {
        parts: Parts::NONE,
        alone: Parts::NONE,
        plan: config.plan,
        balance: model::BalanceOptions::default(),
        residency: model::Residency::All,
        tiles: model::vae::Tiles::Whole,
    };
    Arc::new(Ranks::open_on(gpus, (&checkpoint(), load)).unwrap())
}

fn orders() -> Vec<Order> {
    let all = Task::Write(Writing::ThinkRecaption);
    vec![
        order("a red circle left of a blue square", all, Size::Model),
        order("a small green star", Task::Draw, SQUARE),
        order("a tall picture of a pink heart", Task::Draw, Size::Model),
        order("a yellow ring", Task::Write(Writing::Recaption), SQUARE),
    ]
}

/// All requests at once.
fn together(ranks: &Arc<Ranks>) -> Vec<Outcome> {
    let mut batch = batch(ranks);
    let mut tickets = Vec::new();
    for order in orders() {
        let (job, ticket) = job(&batch, &order, &Pictures::default());
        batch.add(job);
        tickets.push(ticket);
    }
    while !batch.is_empty() {
        batch.pass();
    }
    tickets.into_iter().map(ended).collect()
}

fn relative(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let pairs = got.iter().zip(want);
    let gap: f64 = pairs.map(|(g, w)| square(f64::from(g - w))).sum();
    let size: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    (gap / size).sqrt()
}

#[test]
#[ignore = "needs two Hopper GPUs"]
fn two_gpus_answer_requests_as_one_does() {
    let want = together(&open("single"));
    let got = together(&open("tp=2"));
    let mut equal = 0;
    for (got, want) in got.iter().zip(&want) {
        if got.written.text != want.written.text {
            continue;
        }
        equal += 1;
        assert_eq!(got.rows.len(), want.rows.len());
        for (got, want) in got.rows.iter().zip(&want.rows) {
            assert_eq!((got.0, got.1), (want.0, want.1));
            let error = relative(got.2.data(), want.2.data());
            assert!(error < CLOSE, "{error}");
        }
    }
    // A token whose logits are nearly equal may turn out the other way.
    assert!(equal + 1 >= want.len(), "{equal} of {}", want.len());
}
