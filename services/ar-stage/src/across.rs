//! From the ranks of one plan through the pool to the ranks of another: what arrives is what is computed anew, and
//! so are the latents that come of it.
use std::sync::Arc;

use kv_transfer::{FetchRequest, KvClient};
use model::{
    BalanceOptions, DenoiseJob, JobSpec, Latents, PAGE_TOKENS, Parts, PrefixKv,
    text::Writing::{Recaption, Think, ThinkRecaption},
};
use proto::v1::{PrefixHandle, prefix_row::Kind};
use stage::{RankLoad, Ranks};
use tokio::sync::oneshot;

use crate::{
    batch::tests::{
        SQUARE, anew, assert_close, batch, checkpoint, drawings, ended, job, open, order, single,
    },
    order::{Order, Size, Task},
    pictures::{self, Pictures},
    publish::{Pace, Publisher, tests as pool},
    run::{Outcome, foreseen},
};

/// Bytes of the node's pool: room for a request's rows.
const POOL_BYTES: u64 = 64 << 20;
/// Largest difference of latents, of the largest value.
const CLOSE: f32 = 1e-5;
/// Tokens of a pass, so that prompts are read in pieces.
const PASS_TOKENS: usize = 40;

/// Every mode, with the size given and named by the model, and edits.
fn cases() -> Vec<(Order, Pictures)> {
    let shown = pictures::encode(&single(), &drawings(), 3, false).unwrap();
    let tasks = [Think, Recaption, ThinkRecaption].map(Task::Write);
    let prompt = "a red circle left of a blue square";
    let mut cases = Vec::new();
    for task in std::iter::once(Task::Draw).chain(tasks) {
        for size in [SQUARE, Size::Model] {
            cases.push((order(prompt, task, size), Pictures::default()));
        }
    }
    let edit = |task, size| Order {
        max_new: 24,
        ..order("make it green", task, size)
    };
    cases.push((edit(Task::Draw, Size::FirstPicture), shown.clone()));
    cases.push((edit(Task::Draw, Size::Model), shown.clone()));
    cases.push((edit(Task::Write(ThinkRecaption), Size::Model), shown));
    cases
}

/// Ranks that denoise.
fn denoisers(plan: &str) -> Ranks {
    let parts = Parts {
        vae_decoder: false,
        ..Parts::DENOISE
    };
    let load = RankLoad {
        parts,
        alone: parts,
        plan: plan.parse().unwrap(),
        balance: BalanceOptions::default(),
        residency: model::Residency::All,
        tiles: model::vae::Tiles::Whole,
    };
    Ranks::open(&checkpoint(), load).unwrap()
}

/// Computes a request alone and puts its rows into the pool, by the layers that ranks tell on the way.
async fn published(
    ranks: &Arc<Ranks>,
    (order, pictures): &(Order, Pictures),
    (client, endpoint): (&KvClient, &str),
) -> (Outcome, Vec<(Kind, PrefixHandle, kv_transfer::Lease)>) {
    let mut batch = batch(ranks).with_pass_tokens(PASS_TOKENS);
    let (job, mut ticket) = job(&batch, order, pictures);
    batch.add(job);
    while !batch.is_empty() {
        batch.pass();
    }
    let begun = ticket.begun.try_recv().unwrap();
    let mut outcome = ended(ticket);
    let publisher = Publisher {
        client: client.clone(),
        endpoint,
        request_id: "one",
        tenant: "",
        shows: false,
        pace: &Pace::default(),
    };
    let placed = publisher.place(begun.rows, vec![]).await.unwrap();
    let (computed, rest) = oneshot::channel();
    // Layers that were told are not taken from here.
    computed.send(std::mem::take(&mut outcome.rows)).unwrap();
    let rows = publisher.write(placed, rest).await.unwrap();
    let rows = rows
        .into_iter()
        .map(|row| (row.kind, row.handle, row.lease));
    (outcome, rows.collect())
}

/// What a rank of the workers reads of a row: its own heads of it.
async fn part(client: &KvClient, handle: &PrefixHandle, model: &model::Model) -> PrefixKv {
    let tokens = handle.tokens as usize;
    let part = model.rank().kv_shard(tokens).unwrap();
    let request = FetchRequest {
        part: Some(&part),
        expected: Some(&model.info().kv),
        ..FetchRequest::new(handle, "one", "worker")
    };
    let fetched = client.fetch_part(request).await.unwrap();
    let whole = model.info().kv.prefix_bytes(tokens) as u64;
    let share = (part.heads.len() as u64, model.info().kv.kv_heads as u64);
    assert_eq!(fetched.bytes, whole * share.0 / share.1, "its heads alone");
    let bytes = fetched.to_vec().unwrap();
    let values = bytes.as_chunks::<4>().0.iter();
    let values = values.map(|word| f32::from_le_bytes(*word)).collect();
    PrefixKv::of_rank(model.rank(), &model.info().kv, tokens, values).unwrap()
}

/// The latents after a step from these rows; `rows` are those of each rank.
fn denoised(ranks: &Ranks, size: (usize, usize), rows: Vec<Vec<PrefixKv>>) -> Latents {
    let latents = ranks.run(rows, |model, ctx, rows| {
        let mut rows = rows.into_iter().map(Arc::new);
        let spec = JobSpec {
            height: size.0,
            width: size.1,
            steps: 4,
            guidance: 4.0,
            seed: 5,
            cond: rows.next(),
            uncond: rows.next(),
        };
        let mut job = DenoiseJob::new(model, spec)?;
        model.denoise_step(ctx, &mut [&mut job])?;
        job.latents()
    });
    latents.unwrap().swap_remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_other_ranks_take_over_equals_what_is_computed_anew() {
    let (endpoint, _node) = pool::node_of(POOL_BYTES, 0).await;
    let client = pool::client();
    let cases = cases();
    let (whole, alone_denoiser) = (single(), denoisers("single"));
    let workers = ["tp=2", "tp=4"].map(denoisers);
    for plan in ["single", "tp=2"] {
        let ranks = open(plan);
        for case in &cases {
            let (order, pictures) = case;
            let what = format!("{plan} {:?} {:?}", order.task, order.size);
            let way = (&client, endpoint.as_str());
            let (outcome, rows) = published(&ranks, case, way).await;
            let kinds: Vec<_> = rows.iter().map(|(kind, _, _)| *kind).collect();
            assert_eq!(kinds, [Kind::Cond, Kind::Uncond], "{what}");
            let want = anew(&whole, order, pictures, &outcome.written);
            let size = outcome.written.size.unwrap();
            let expected = denoised(&alone_denoiser, size, vec![want.clone()]);
            for worker in &workers {
                let what = format!("{what} to {}", worker.plan());
                let mut parts = Vec::new();
                for model in worker.models() {
                    let mut of_rank = Vec::new();
                    for ((_, handle, _), want) in rows.iter().zip(&want) {
                        let got = part(&client, handle, model).await;
                        assert_close(&what, &got, &want.part_of(model.rank()).unwrap());
                        of_rank.push(got);
                    }
                    parts.push(of_rank);
                }
                let got = denoised(worker, size, parts);
                let scale = expected.data().iter().fold(0_f32, |m, v| m.max(v.abs()));
                let pairs = got.data().iter().zip(expected.data());
                let off = pairs.fold(0_f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(off <= CLOSE * scale, "{what}: latents {off} of {scale}");
            }
        }
    }
}

/// A stage that starts later finds what prompts begin with in the cache of the node, whatever its plan, and computes
/// only the rest.
#[tokio::test(flavor = "multi_thread")]
async fn what_prompts_begin_with_is_computed_once_on_a_node() {
    let (endpoint, _node) = pool::node_of(POOL_BYTES, POOL_BYTES).await;
    let (client, tasks) = (pool::client(), base::task::Tracker::new());
    let publisher = Publisher {
        client: client.clone(),
        endpoint: &endpoint,
        request_id: "one",
        tenant: "a",
        shows: false,
        pace: &Pace::default(),
    };
    let system = "You draw flat shapes on plain grounds, one beside the other. ".repeat(8);
    let none = Pictures::default();
    let wish = |prompt, task, size| Order {
        system_prompt: Some(system.clone()),
        ..order(prompt, task, size)
    };
    let mut missed = Vec::new();
    let text = Task::Write(Recaption);
    for (plan, prompt, task) in [
        ("single", "a red circle", Task::Draw),
        ("single", "a green star", text),
        ("tp=2", "a blue cross", Task::Draw),
        ("tp=2", "a pink ring", text),
    ] {
        let order = wish(prompt, task, SQUARE);
        let ranks = if plan == "single" {
            single()
        } else {
            open(plan)
        };
        let mut batch = batch(&ranks);
        let ahead = foreseen((&ranks, batch.pools()), &order, &none).unwrap();
        let beginning = ahead.beginning.unwrap();
        assert!(beginning.tokens() >= 2 * PAGE_TOKENS);
        let way = (&ranks, batch.pools(), &tasks);
        let missing = beginning.bring(way, &publisher).await;
        missed.push(missing);
        let (mut job, ticket) = job(&batch, &order, &none);
        assert_eq!(
            job.run.held(),
            if missing { 0 } else { beginning.tokens() },
            "{plan} {prompt}"
        );
        batch.add(job);
        while !batch.is_empty() {
            batch.pass();
        }
        let outcome = ended(ticket);
        let want = anew(&single(), &order, &none, &outcome.written);
        for ((_, _, row), want) in outcome.rows.iter().zip(&want) {
            assert_close(&format!("{plan} {prompt}"), row, want);
        }
        if missing {
            let way = (Arc::clone(&ranks), batch.pools().clone(), tasks.clone());
            let to = (client.clone(), endpoint.clone());
            beginning.leave(way, to, 7).await;
        }
    }
    assert_eq!(missed, [true, false, false, false]);
}
