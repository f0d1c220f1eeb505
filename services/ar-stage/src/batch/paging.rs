//! Rows in pages: few of them change no result, and what rows begin with alike is computed once.
use telemetry::names;

use super::{
    tests::{SQUARE, alone, assert_close, batch, drawings, ended, job, open, order, single},
    *,
};
use crate::{
    order::{Order, Size, Task},
    pictures::{self, Pictures},
};
use model::text::{Sampling, Writing};

/// A system prompt of a page and more.
const SENTENCE: &str = "You draw flat shapes on plain grounds. Name the colour, the shape and the place of each \
    before you draw it. Never add what nobody asked for, never leave out what somebody did, and keep shapes apart.";

/// One of several pages.
fn system() -> String {
    SENTENCE.repeat(4)
}

fn with_pages(ranks: &Arc<Ranks>, pages: usize) -> (Batch, Metrics) {
    let metrics = Metrics::default();
    let pools = Pools::new(ranks, pages * PAGE_TOKENS, metrics.clone()).unwrap();
    let batch = Batch::new(Arc::clone(ranks), metrics.clone()).unwrap();
    (batch.with_pools(pools), metrics)
}

/// A value of the metrics, labels included in `name`.
fn value(metrics: &Metrics, name: &str) -> usize {
    let text = metrics.encode();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.trim().parse::<f64>().unwrap() as usize)
}

fn preemptions(metrics: &Metrics) -> usize {
    value(metrics, names::STAGE_PREEMPTIONS.name)
}

fn hits(metrics: &Metrics) -> usize {
    value(metrics, "omni_stage_prefix_tokens_total{outcome=\"hit\"}")
}

fn empty(batch: &mut Batch) {
    for _ in 0..5_000 {
        batch.pass();
        if batch.is_empty() {
            return;
        }
    }
    panic!("requests wait for each other");
}

fn wanted() -> Vec<Order> {
    let all = Task::Write(Writing::ThinkRecaption);
    let sampled = Sampling {
        temperature: 1.5,
        seed: 9,
        ..Sampling::GREEDY
    };
    vec![
        order("a red circle left of a blue square", all, Size::Model),
        order("a yellow ring", Task::Write(Writing::Recaption), SQUARE),
        order("a tall picture of a pink heart", Task::Draw, Size::Model),
        Order {
            sampling: sampled,
            ..order("a white triangle", all, Size::Model)
        },
        order("a small green star", Task::Draw, SQUARE),
        Order {
            max_new: 40,
            ..order("what is a circle?", Task::Text, SQUARE)
        },
    ]
}

#[test]
fn requests_that_lose_their_pages_get_what_they_get_alone() {
    let none = Pictures::default();
    for (plan, pages) in [("single", 4), ("single", 6), ("tp=2", 5)] {
        let ranks = if plan == "single" {
            single()
        } else {
            open(plan)
        };
        let (mut batch, metrics) = with_pages(&ranks, pages);
        let mut tickets = Vec::new();
        for order in wanted() {
            let (job, ticket) = job(&batch, &order, &none);
            batch.add(job);
            tickets.push((order, ticket));
        }
        empty(&mut batch);
        assert!(
            preemptions(&metrics) > 0,
            "{plan}, {pages} pages are enough"
        );
        for (order, ticket) in tickets {
            let (got, want) = (ended(ticket), alone(&ranks, &order, &none, PASS_TOKENS));
            let what = format!("{plan}, {pages} pages: {}", order.prompt);
            assert_eq!(got.written, want.written, "{what}");
            for (a, b) in got.rows.iter().zip(&want.rows) {
                assert_eq!((a.0, a.1), (b.0, b.1), "{what}");
                assert!(a.2 == b.2, "{what}: other bits");
            }
        }
        batch.pools().report();
        let used = value(&metrics, "omni_stage_kv_pages{state=\"used\"}");
        assert_eq!(used, 0, "{plan}: pages are lost");
    }
}

#[test]
fn a_request_that_finds_no_place_even_alone_fails_alone() {
    let ranks = single();
    let (mut batch, _) = with_pages(&ranks, 3);
    let long = order(&"a red circle ".repeat(60), Task::Draw, SQUARE);
    let short = order("a red circle", Task::Draw, SQUARE);
    let none = Pictures::default();
    let (first, mut failed) = job(&batch, &long, &none);
    let (second, ticket) = job(&batch, &short, &none);
    batch.add(first);
    batch.add(second);
    empty(&mut batch);
    let error = failed.answer.try_recv().unwrap().unwrap_err();
    assert_eq!(
        base::Fault::code(&error),
        Code::ResourceExhausted,
        "{error}"
    );
    assert!(error.to_string().contains("3 pages"), "{error}");
    let want = alone(&ranks, &short, &none, PASS_TOKENS);
    assert!(ended(ticket).rows == want.rows);
}

/// One request after the other, in pages that are left behind.
fn after_each_other(batch: &mut Batch, orders: &[(Order, Pictures)], fresh: &Arc<Ranks>) {
    for (order, pictures) in orders {
        let (job, ticket) = job(batch, order, pictures);
        batch.add(job);
        empty(batch);
        let (got, want) = (ended(ticket), alone(fresh, order, pictures, PASS_TOKENS));
        assert_eq!(got.written, want.written, "{}", order.prompt);
        assert_eq!(got.rows.len(), want.rows.len());
        for (a, b) in got.rows.iter().zip(&want.rows) {
            assert_eq!((a.0, a.1), (b.0, b.1), "{}", order.prompt);
            assert_close(&order.prompt, &a.2, &b.2);
        }
    }
}

#[test]
fn what_prompts_begin_with_alike_is_computed_once_and_only_the_prompt_is_the_tenants() {
    let ranks = single();
    let (mut batch, metrics) = with_pages(&ranks, 64);
    let of = |tenant: &str, prompt: &str, task| {
        let order = Order {
            tenant: tenant.to_owned(),
            system_prompt: Some(system()),
            ..order(prompt, task, SQUARE)
        };
        (order, Pictures::default())
    };
    let prompt = "a red circle left of a blue square ".repeat(5);
    after_each_other(&mut batch, &[of("a", &prompt, Task::Draw)], &ranks);
    let mut seen = hits(&metrics);
    let mut more = |batch: &mut Batch, order: (Order, Pictures)| {
        after_each_other(batch, &[order], &ranks);
        let before = std::mem::replace(&mut seen, hits(&metrics));
        seen - before
    };
    let system = more(&mut batch, of("b", "a yellow ring", Task::Draw));
    assert!(
        system >= 4 * PAGE_TOKENS,
        "both rows begin with it: {system}"
    );
    let other = more(&mut batch, of("b", &prompt, Task::Draw));
    let own = more(&mut batch, of("a", &prompt, Task::Draw));
    assert!(
        own > other,
        "the prompt is found by its tenant alone: {own}, {other}"
    );
    let text = more(
        &mut batch,
        of("c", "a cross", Task::Write(Writing::Recaption)),
    );
    assert!(
        text >= 2 * PAGE_TOKENS,
        "texts begin with it as well: {text}"
    );
    let bytes = value(&metrics, names::STAGE_PREFIX_BYTES.name);
    assert_eq!(bytes, hits(&metrics) * ranks.info().kv.bytes_per_token());
}

#[test]
fn a_picture_is_taken_over_whole_or_not_at_all() {
    let ranks = single();
    let shown = |seed| pictures::encode(&ranks, &drawings()[..1], seed, false).unwrap();
    let (mut batch, metrics) = with_pages(&ranks, 64);
    let edit = |prompt: &str, pictures: Pictures| {
        let prompt = format!("{SENTENCE} Make it {prompt}");
        let order = order(&prompt, Task::Draw, Size::FirstPicture);
        (order, pictures)
    };
    let orders = [
        edit("green", shown(3)),
        edit("blue", shown(3)),
        // Another sample of the same picture: other keys behind it.
        edit("blue", shown(4)),
    ];
    after_each_other(&mut batch, &orders[..1], &ranks);
    let first = hits(&metrics);
    after_each_other(&mut batch, &orders[1..2], &ranks);
    let second = hits(&metrics);
    let joint = orders[0].1.grids[0].vae.height * orders[0].1.grids[0].vae.width;
    assert!(
        second - first > joint,
        "the picture as well: {}",
        second - first
    );
    after_each_other(&mut batch, &orders[2..], &ranks);
    assert_eq!(
        hits(&metrics),
        second,
        "what the picture is in is not found by another sample"
    );
}

#[test]
fn pages_that_nobody_has_make_room_the_oldest_first() {
    let ranks = single();
    let (mut batch, metrics) = with_pages(&ranks, 12);
    let of = |system: &str, prompt: &str| {
        let order = Order {
            system_prompt: Some(system.to_owned()),
            negative_row: false,
            ..order(prompt, Task::Draw, SQUARE)
        };
        (order, Pictures::default())
    };
    let others: Vec<String> = (0..4).map(|n| format!("{n} {}", system())).collect();
    let mut all = vec![of(&system(), "a ring")];
    for other in &others {
        all.push(of(other, "a ring"));
        // Used again and again, so that it stays.
        all.push(of(&system(), "a star"));
    }
    after_each_other(&mut batch, &all, &ranks);
    assert_eq!(preemptions(&metrics), 0);
    let before = hits(&metrics);
    after_each_other(&mut batch, &[of(&system(), "a cross")], &ranks);
    let kept = hits(&metrics) - before;
    assert!(kept >= 3 * PAGE_TOKENS, "{kept}");
    let before = hits(&metrics);
    after_each_other(&mut batch, &[of(&others[0], "a cross")], &ranks);
    assert!(hits(&metrics) - before < kept, "the oldest went");
}

#[test]
fn a_batch_has_pages_for_a_request_of_any_length_the_model_takes() {
    let ranks = single();
    let batch = batch(&ranks);
    let longest = ranks.info().max_sequence_tokens;
    assert!(batch.pools().pages() >= 2 * pages_for(longest));
}
