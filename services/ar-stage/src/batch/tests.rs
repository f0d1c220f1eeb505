//! Batched equals solo, reused equals computed anew, and nobody pays for another.
use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use base::Fault as _;
use model::{
    BalanceOptions, Parts, PrefixKv, RowKind, RowTokens, Target, Template,
    layout::{ImageGrid, LayoutInput},
    text::{Sampling, Writing},
};
use stage::RankLoad;

use super::*;
use crate::{
    order::{Order, Size, Task},
    pictures::{self, Pictures},
    run::Written,
    stream::Layers,
};

/// Largest difference of keys and values that were computed in other pieces, of the largest value.
const CLOSE: f32 = 1e-5;
/// Most tokens of a test's texts.
const LIMIT: usize = 96;

pub(crate) fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo-model/checkpoint")
}

pub(crate) fn open(plan: &str) -> Arc<Ranks> {
    let load = RankLoad {
        parts: Parts::PREFIX,
        alone: Parts::PREFIX_WITH_IMAGES,
        plan: plan.parse().unwrap(),
        balance: BalanceOptions::default(),
        residency: model::Residency::All,
        tiles: model::vae::Tiles::Whole,
    };
    Arc::new(Ranks::open(&checkpoint(), load).unwrap())
}

/// One rank.
pub(crate) fn single() -> Arc<Ranks> {
    static SINGLE: OnceLock<Arc<Ranks>> = OnceLock::new();
    Arc::clone(SINGLE.get_or_init(|| open("single")))
}

pub(crate) fn order(prompt: &str, task: Task, size: Size) -> Order {
    Order {
        prompt: prompt.to_owned(),
        tenant: String::new(),
        system_prompt: None,
        fingerprint: String::new(),
        template: Template::Instruct,
        task,
        size,
        negative_row: true,
        drop_think: false,
        align: false,
        sampling: Sampling::GREEDY,
        max_new: LIMIT,
    }
}

pub(crate) const SQUARE: Size = Size::Given {
    height: 256,
    width: 256,
};

pub(crate) fn batch(ranks: &Arc<Ranks>) -> Batch {
    Batch::new(Arc::clone(ranks), Metrics::default()).unwrap()
}

pub(crate) fn job(batch: &Batch, order: &Order, pictures: &Pictures) -> (Job, Ticket) {
    let (ticket, desk) = ticket();
    let pools = (batch.ranks(), batch.pools());
    let run = Run::new(pools, order.clone(), pictures.clone()).unwrap();
    (Job::new(run, desk), ticket)
}

pub(crate) fn ended(mut ticket: Ticket) -> Outcome {
    let ended = ticket.answer.try_recv().unwrap().unwrap();
    let mut told = String::new();
    while let Ok(text) = ticket.deltas.try_recv() {
        told += &text;
    }
    told += &ended.untold;
    assert_eq!(told, ended.outcome.written.text, "the pieces are the text");
    ended.outcome
}

/// A request on its own.
pub(crate) fn alone(
    ranks: &Arc<Ranks>,
    order: &Order,
    pictures: &Pictures,
    pass_tokens: usize,
) -> Outcome {
    let mut batch = batch(ranks).with_pass_tokens(pass_tokens);
    let (job, ticket) = job(&batch, order, pictures);
    batch.add(job);
    while !batch.is_empty() {
        batch.pass();
    }
    ended(ticket)
}

/// Requests of every kind.
fn orders() -> Vec<Order> {
    let all = Task::Write(Writing::ThinkRecaption);
    let sampled = Sampling {
        temperature: 1.5,
        seed: 9,
        ..Sampling::GREEDY
    };
    vec![
        order("a red circle left of a blue square", all, Size::Model),
        order("a small green star", Task::Draw, SQUARE),
        order("a yellow ring", Task::Write(Writing::Recaption), SQUARE),
        order("a tall picture of a pink heart", Task::Draw, Size::Model),
        order("a cyan cross", Task::Write(Writing::Think), Size::Model),
        Order {
            max_new: 12,
            ..order("what is a circle?", Task::Text, SQUARE)
        },
        Order {
            max_new: 5,
            ..order("a black diamond at the top", all, Size::Model)
        },
        Order {
            sampling: sampled,
            ..order("a white triangle", all, Size::Model)
        },
        Order {
            template: Template::Pretrain,
            negative_row: false,
            ..order("an orange star", Task::Write(Writing::Recaption), SQUARE)
        },
    ]
}

pub(crate) fn assert_close(what: &str, a: &PrefixKv, b: &PrefixKv) {
    assert_eq!(a.tokens(), b.tokens(), "{what}");
    let scale = b.data().iter().fold(0_f32, |most, v| most.max(v.abs()));
    let pairs = a.data().iter().zip(b.data());
    let off = pairs.fold(0_f32, |most, (a, b)| most.max((a - b).abs())) / scale;
    assert!(off <= CLOSE, "{what}: off by {off}");
}

#[test]
fn requests_that_share_passes_get_what_they_get_alone() {
    let ranks = single();
    let none = Pictures::default();
    let mut batch = batch(&ranks);
    let (mut tickets, mut together) = (Vec::new(), 0);
    let mut waiting = orders().into_iter();
    // Two join every third pass, so that they come and go at different times.
    for pass in 0.. {
        if pass % 3 == 0 {
            for order in waiting.by_ref().take(2) {
                let (job, ticket) = job(&batch, &order, &none);
                batch.add(job);
                tickets.push((order, ticket));
            }
        }
        together = together.max(batch.len());
        batch.pass();
        if batch.is_empty() && waiting.len() == 0 {
            break;
        }
    }
    assert!(together >= 6, "only {together} at once");
    for (order, ticket) in tickets {
        let (got, want) = (ended(ticket), alone(&ranks, &order, &none, PASS_TOKENS));
        assert_eq!(got.written, want.written, "{}", order.prompt);
        assert!(got.rows == want.rows, "{}: other bits", order.prompt);
        let pieces = alone(&ranks, &order, &none, 3);
        assert_eq!(pieces.written, want.written, "{}", order.prompt);
        for (a, b) in pieces.rows.iter().zip(&want.rows) {
            assert_eq!((a.0, a.1), (b.0, b.1));
            assert_close(&order.prompt, &a.2, &b.2);
        }
    }
}

/// The rows of an outcome, everything computed anew, in one piece, from the
/// text that came out of it.
pub(crate) fn anew(
    ranks: &Ranks,
    order: &Order,
    pictures: &Pictures,
    written: &Written,
) -> Vec<PrefixKv> {
    let model = ranks.first();
    let (height, width) = written.size.unwrap();
    let bucket = model.buckets().exact(height, width).unwrap();
    let (height, width) = bucket.grid(model.config().pixels_per_token());
    let layout = model
        .layout(&LayoutInput {
            prompt: &order.prompt,
            system_prompt: order.system_prompt.as_deref(),
            assistant_text: Some(written.text.as_str()).filter(|text| !text.is_empty()),
            template: order.template,
            drop_think: order.drop_think,
            cond_images: &pictures.grids,
            target: Target::Image(ImageGrid {
                ratio_index: bucket.ratio_index,
                height,
                width,
            }),
        })
        .unwrap();
    let row = |kind| RowTokens::with_images(&layout, kind, &pictures.features);
    let (cond, uncond) = (row(RowKind::Cond), row(RowKind::Uncond));
    let rows = if order.negative_row {
        vec![&cond, &uncond]
    } else {
        vec![&cond]
    };
    let inputs = vec![(); ranks.models().len()];
    let parts = ranks
        .run(inputs, |model, ctx, ()| model.prefill(ctx, &rows))
        .unwrap();
    let whole = |row: usize| {
        let models = ranks.models().iter().zip(&parts);
        let shards: Vec<_> = models
            .map(|(model, rows)| (model.rank(), &rows[row]))
            .collect();
        PrefixKv::whole_of(&model.info().kv, &shards).unwrap()
    };
    (0..rows.len()).map(whole).collect()
}

/// Two drawings as files.
pub(crate) fn drawings() -> Vec<Vec<u8>> {
    let drawing = |width: u32, height: u32, colour: [u8; 3]| {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header().unwrap();
        let pixels = colour.repeat((width * height) as usize);
        writer.write_image_data(&pixels).unwrap();
        writer.finish().unwrap();
        out
    };
    vec![
        drawing(256, 256, [250, 30, 30]),
        drawing(90, 50, [20, 40, 250]),
    ]
}

#[test]
fn what_is_taken_over_from_the_text_equals_what_is_computed_anew() {
    let shown = pictures::encode(&single(), &drawings(), 3, false).unwrap();
    let think = Task::Write(Writing::ThinkRecaption);
    let cases = [
        (
            order("a red circle", think, Size::Model),
            Pictures::default(),
        ),
        (
            order("a red circle", Task::Write(Writing::Recaption), SQUARE),
            Pictures::default(),
        ),
        (
            order("a red circle", Task::Draw, Size::Model),
            Pictures::default(),
        ),
        (
            Order {
                max_new: 7,
                ..order("a red circle", think, Size::Model)
            },
            Pictures::default(),
        ),
        (
            Order {
                drop_think: true,
                ..order("a red circle", think, Size::Model)
            },
            Pictures::default(),
        ),
        (
            order("make it green", Task::Draw, Size::FirstPicture),
            shown.clone(),
        ),
        (
            Order {
                max_new: 9,
                ..order("make it green", think, Size::Model)
            },
            shown,
        ),
    ];
    for plan in [
        "single",
        "tp=2",
        "tp=4,ep=tp",
        "pp=2",
        "ring=2",
        "ulysses=2",
    ] {
        let ranks = open(plan);
        for (order, pictures) in &cases {
            let what = format!("{plan} {:?} {:?}", order.task, order.size);
            let got = alone(&ranks, order, pictures, 40);
            let want = anew(&ranks, order, pictures, &got.written);
            assert_eq!(got.rows.len(), want.len(), "{what}");
            for ((kind, _, row), want) in got.rows.iter().zip(&want) {
                assert_close(&format!("{what} {kind:?}"), row, want);
            }
            // All but what stands behind the last token that was fed back.
            let writes = order.task != Task::Draw || order.size == Size::Model;
            let kept = writes && !plan.contains("ring") && !order.drop_think;
            let (reused, tokens) = (got.written.reused, want[0].tokens());
            let least = if kept { tokens - 5 } else { 0 };
            assert!(
                (least..tokens).contains(&reused),
                "{what}: {reused} of {tokens}"
            );
            assert!(kept || order.drop_think || reused == 0, "{what}: {reused}");
        }
    }
}

#[test]
fn a_text_that_never_ends_is_used_as_it_stands_and_that_is_told() {
    let all = Task::Write(Writing::ThinkRecaption);
    let cut = Order {
        max_new: 5,
        ..order("a black diamond", all, Size::Model)
    };
    let written = alone(&single(), &cut, &Pictures::default(), PASS_TOKENS).written;
    assert_eq!(
        (written.new_tokens, written.cut, written.size_fallback),
        (5, true, true)
    );
    assert_eq!(written.size, Some((256, 256)));
    assert!(written.text.starts_with("<think>"), "{}", written.text);
    let whole = order("a tall picture of a black diamond", all, Size::Model);
    let written = alone(&single(), &whole, &Pictures::default(), PASS_TOKENS).written;
    assert_eq!((written.cut, written.size_fallback), (false, false));
    assert_eq!(written.size, Some((320, 192)), "{}", written.text);
    assert!(written.text.ends_with("</recaption>"), "{}", written.text);
}

#[test]
fn who_is_not_waited_for_any_more_leaves_at_the_next_token() {
    let ranks = single();
    let long = order(
        "a red circle",
        Task::Write(Writing::ThinkRecaption),
        Size::Model,
    );
    let none = Pictures::default();
    let mut batch = batch(&ranks);
    let (job_a, gone) = job(&batch, &long, &none);
    let (job_b, ticket) = job(&batch, &long, &none);
    batch.add(job_a);
    batch.add(job_b);
    for _ in 0..4 {
        batch.pass();
    }
    assert_eq!(batch.len(), 2);
    drop(gone);
    batch.pass();
    assert_eq!(batch.len(), 1);
    while !batch.is_empty() {
        batch.pass();
    }
    assert_eq!(
        ended(ticket).written,
        alone(&ranks, &long, &none, PASS_TOKENS).written
    );
}

#[test]
fn a_request_that_fails_in_a_pass_fails_alone() {
    for plan in ["single", "tp=2"] {
        let ranks = open(plan);
        let good = order("a red circle", Task::Write(Writing::Recaption), SQUARE);
        let none = Pictures::default();
        let mut batch = batch(&ranks);
        let (mut broken, mut failed) = job(&batch, &good, &none);
        let (fine, ticket) = job(&batch, &good, &none);
        // A defect: its cache has no room on the last rank.
        for (row, _) in broken.run.rows() {
            let last = row.caches.on_host().len() - 1;
            row.caches.on_host()[last] = ranks.models()[last].cache(1).unwrap();
        }
        batch.add(broken);
        batch.add(fine);
        while !batch.is_empty() {
            batch.pass();
        }
        let error = failed.answer.try_recv().unwrap().unwrap_err();
        assert_eq!(error.code(), base::Code::Internal, "{plan}: {error}");
        assert!(ended(ticket).written.text.contains("red circle"), "{plan}");
    }
}

#[test]
fn pictures_that_are_no_pictures_are_refused_by_name() {
    let ranks = single();
    let mut files = drawings();
    files[1].truncate(60);
    let error = pictures::encode(&ranks, &files, 3, false).unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (base::Code::InvalidArgument, Some("images"))
    );
    assert!(error.to_string().contains("images[1]"), "{error}");
}

/// Whatever the plan: the layers that ranks tell on the way are those of the rows at the end, each once and in
/// order.
#[test]
fn layers_are_told_on_the_way_and_are_those_of_the_rows() {
    for plan in ["single", "tp=2", "pp=2", "ulysses=2"] {
        let ranks = if plan == "single" {
            single()
        } else {
            open(plan)
        };
        for order in [
            order("a small green star", Task::Draw, SQUARE),
            order("a yellow ring", Task::Write(Writing::Recaption), SQUARE),
        ] {
            let mut batch = batch(&ranks).with_pass_tokens(24);
            let (job, mut ticket) = job(&batch, &order, &Pictures::default());
            batch.add(job);
            while !batch.is_empty() {
                batch.pass();
            }
            let begun = ticket.begun.try_recv().unwrap();
            let outcome = ended(ticket);
            assert_eq!(begun.written.size, outcome.written.size);
            assert_eq!(begun.rows.len(), outcome.rows.len());
            for (mut row, (kind, identity, prefix)) in begun.rows.into_iter().zip(&outcome.rows) {
                assert_eq!((row.kind, row.identity), (*kind, *identity));
                let mut layers = Layers::new(row.geometry, row.tokens);
                let mut told = Vec::new();
                while let Ok(part) = row.parts.try_recv() {
                    told.extend(layers.add(part));
                }
                let what = format!("{plan}, {}: {kind:?}", order.prompt);
                assert!(told.concat() == prefix.to_bytes(), "{what}");
            }
        }
    }
}

#[test]
fn a_row_that_was_found_meanwhile_is_not_computed_to_its_end() {
    let ranks = single();
    let order = order("a small green star", Task::Draw, SQUARE);
    let mut batch = batch(&ranks).with_pass_tokens(8);
    let (job, mut ticket) = job(&batch, &order, &Pictures::default());
    batch.add(job);
    batch.pass();
    let begun = ticket.begun.try_recv().unwrap();
    for row in &begun.rows {
        row.found.store(true, std::sync::atomic::Ordering::Release);
    }
    batch.pass();
    assert!(batch.is_empty());
    assert!(ended(ticket).rows.is_empty());
}
