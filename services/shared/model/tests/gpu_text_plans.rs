//! Text under plans of two GPUs beside one GPU.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu_text_plans -- --ignored --test-threads 1`.
//! With two GPUs the ranks reach each other through NCCL and through their memory; with one they share it, and copies
//! on the device take the place of both.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "common/gpu_ranks.rs"]
mod gpu_ranks;
#[path = "common/numbers.rs"]
mod numbers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::backbone::NoProbe;
use model::gpu::{GpuCache, GpuGroup, GpuModel, GpuOptions, GpuShare, WeightType};
use model::input::RowInput;
use model::{LoadOptions, Model, ModelConfig, ModelError, PrefixKv};
use parallel::{Plan, RankContext};

use gpu_ranks::{Meeting, PATIENCE, RANKS};
use numbers::relative;

const STEPS: usize = 12;
/// Longest wait for a rank that does not come.
const SHORT_PATIENCE: Duration = Duration::from_secs(4);
/// Of the prompts.
const LENGTHS: [usize; 5] = [2, 131, 17, 64, 260];
/// Of their first pieces: one of two ranks gets no token of these.
const CUT: usize = 1;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn options(weights: WeightType) -> GpuOptions {
    GpuOptions {
        ordinal: 0,
        weights,
        max_tokens: 2048,
        kv_bytes: 256 << 20,
        resident_layers: None,
        text: true,
    }
}

fn prompts(vocab: usize) -> Vec<Vec<u32>> {
    let token = |len: usize, i: usize| ((i * i * 31 + i * 7 + len * 13) % vocab) as u32;
    let row = |len: &usize| (0..*len).map(|i| token(*len, i)).collect();
    LENGTHS.iter().map(row).collect()
}

fn input(start: usize, ids: &[u32]) -> RowInput<'_> {
    RowInput {
        start,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    }
}

/// What a rank sees of rows that decode together.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// By step and row.
    logits: Vec<Vec<Vec<f32>>>,
    tokens: Vec<Vec<u32>>,
    prefixes: Vec<PrefixKv>,
}

/// Prompts in two pieces, then tokens: those of `given`, or the likeliest.
fn write(model: &mut GpuModel, prompts: &[Vec<u32>], given: Option<&[Vec<u32>]>) -> Seen {
    let mut caches: Vec<GpuCache> = prompts
        .iter()
        .map(|prompt| model.cache(prompt.len() + STEPS).unwrap())
        .collect();
    let run = |model: &mut GpuModel, caches: &mut [GpuCache], inputs: &[RowInput<'_>]| {
        let mut borrowed: Vec<_> = caches.iter_mut().collect();
        let hidden = model.run_rows(inputs, &mut borrowed, true).unwrap();
        hidden.unwrap()
    };
    let first: Vec<_> = prompts.iter().map(|p| input(0, &p[..CUT])).collect();
    let mut borrowed: Vec<_> = caches.iter_mut().collect();
    model.run_rows(&first, &mut borrowed, false).unwrap();
    let rest: Vec<_> = prompts.iter().map(|p| input(CUT, &p[CUT..])).collect();
    let hidden = run(model, &mut caches, &rest);
    let mut ends = prompts.iter().scan(0, |at, p| {
        *at += p.len() - CUT;
        Some(*at)
    });
    let each = prompts.iter().map(|_| {
        let last = hidden.narrow0(ends.next().unwrap() - 1, 1).unwrap();
        model.logits_on_host(&last).unwrap().remove(0)
    });
    let mut last: Vec<Vec<f32>> = each.collect();
    let mut seen = Seen {
        logits: Vec::new(),
        tokens: Vec::new(),
        prefixes: Vec::new(),
    };
    for step in 0..STEPS {
        let tokens: Vec<u32> = last.iter().map(|of_row| likeliest(of_row)).collect();
        let next = given.map_or_else(|| tokens.clone(), |given| given[step].clone());
        seen.logits.push(last);
        seen.tokens.push(tokens);
        let ids: Vec<&[u32]> = next.chunks(1).collect();
        let rows = prompts.iter().zip(&ids);
        let rows: Vec<_> = rows.map(|(p, id)| input(p.len() + step, id)).collect();
        let hidden = run(model, &mut caches, &rows);
        last = model.logits_on_host(&hidden).unwrap();
    }
    model.wait().unwrap();
    let prefixes = caches.into_iter().map(GpuCache::into_prefix);
    seen.prefixes = prefixes.map(|p| p.download().unwrap()).collect();
    seen
}

type Open<'a> = dyn Fn(GpuShare, Arc<dyn GpuGroup>) -> Result<GpuModel, ModelError> + Sync + 'a;
type Run<'a, T> = dyn Fn(&mut GpuModel) -> T + Sync + 'a;

/// What each rank of `plan` sees.
fn under<T: Send>(plan: &str, config: &ModelConfig, open: &Open<'_>, run: &Run<'_, T>) -> Vec<T> {
    let plan: Plan = plan.parse().unwrap();
    let meeting = Meeting::new();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (meeting, plan) = (&meeting, &plan);
                scope.spawn(move || {
                    let share = GpuShare::new(config, plan, rank).unwrap();
                    let mut model = open(share, meeting.join(rank, PATIENCE)).unwrap();
                    run(&mut model)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Greedy tokens of the CPU, and the logits they were chosen from, by step and row.
fn on_cpu(dir: &Path, prompts: &[Vec<u32>]) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
    let model = Model::open(dir, LoadOptions::default()).unwrap();
    let (backbone, single) = (model.backbone().unwrap(), RankContext::single());
    let mut tokens = vec![Vec::new(); STEPS];
    let mut logits = vec![Vec::new(); STEPS];
    for prompt in prompts {
        let mut cache = model.cache(prompt.len() + STEPS).unwrap();
        let (mut ids, mut start) = (prompt.clone(), 0);
        for step in 0..STEPS {
            let rows = [input(start, &ids)];
            let hidden = model.run_rows(&single, &rows, &mut [&mut cache], &mut NoProbe);
            let normed = backbone.final_norm(&hidden.unwrap()).unwrap();
            let all = backbone.logits(&normed).unwrap();
            let last = all.as_f32().unwrap();
            let last = last[last.len() - all.dim(1)..].to_vec();
            start += ids.len();
            ids = vec![likeliest(&last)];
            tokens[step].push(ids[0]);
            logits[step].push(last);
        }
    }
    (tokens, logits)
}

fn likeliest(logits: &[f32]) -> u32 {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    logits.iter().position(|x| *x == most).unwrap() as u32
}

/// Middle relative error of logits, and how many tokens are equal.
fn agreement(got: &Seen, want: &(Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>)) -> (f64, usize) {
    let pairs = got.logits.iter().flatten().zip(want.1.iter().flatten());
    let mut all: Vec<f64> = pairs.map(|(got, want)| relative(got, want)).collect();
    all.sort_by(f64::total_cmp);
    let pairs = got.tokens.iter().flatten().zip(want.0.iter().flatten());
    let equal = pairs.filter(|(got, want)| got == want).count();
    (all[all.len() / 2], equal)
}

/// What the ranks of `tp=2` see of the same tokens as one GPU; what is wrong with it but its logits.
fn both(
    what: &str,
    config: &ModelConfig,
    prompts: &[Vec<u32>],
    given: &[Vec<u32>],
    open: &Open<'_>,
) -> (Seen, Vec<String>) {
    let seen = under("tp=2", config, open, &|model| {
        let all = write(model, prompts, Some(given));
        // A row alone has the bits that it has among others.
        let of_row: Vec<Vec<u32>> = given.iter().map(|t| vec![t[1]]).collect();
        let one = write(model, &prompts[1..2], Some(&of_row));
        (all, one, model.share().shard().clone())
    });
    let mut wrong = Vec::new();
    let (first, one, _) = &seen[0];
    for step in 1..STEPS {
        // The first logits come from a packed pass.
        if one.logits[step][0] != first.logits[step][1] {
            wrong.push(format!("{what}: step {step} depends on the batch"));
        }
    }
    for (rank, (all, ..)) in seen.iter().enumerate() {
        if (&all.logits, &all.tokens) != (&first.logits, &first.tokens) {
            wrong.push(format!("{what}: rank {rank} has other logits"));
        }
    }
    let whole = (0..prompts.len()).map(|row| {
        let parts: Vec<_> = seen
            .iter()
            .map(|(seen, _, shard)| (shard, &seen.prefixes[row]))
            .collect();
        PrefixKv::whole_of(&config.kv_geometry(), &parts).unwrap()
    });
    let prefixes = whole.collect();
    let first = Seen {
        prefixes,
        ..first.clone()
    };
    (first, wrong)
}

/// Middle relative error of prefixes.
fn apart(got: &Seen, want: &Seen) -> f64 {
    let pairs = got.prefixes.iter().zip(&want.prefixes);
    let mut all: Vec<f64> = pairs.map(|(g, w)| relative(g.data(), w.data())).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Beside the CPU: two GPUs are as near as one is. Tokens whose last expert is nearly tied may get another one on
/// either, so that errors of some rows are large and the middle counts.
#[test]
#[ignore = "needs a Hopper GPU"]
fn two_gpus_write_what_one_gpu_writes() {
    let mut wrong = Vec::new();
    for name in [
        "integration-tests/fixtures/golden/model",
        "deploy/demo-model/checkpoint",
    ] {
        let dir = root().join(name);
        let config = ModelConfig::from_dir(&dir).unwrap();
        let prompts = prompts(config.vocab_size);
        let want = on_cpu(&dir, &prompts);
        for (weights, room) in [(WeightType::Bf16, 1e-2), (WeightType::Fp8, 3e-2)] {
            let mut alone = GpuModel::open(&dir, options(weights)).unwrap();
            let one = write(&mut alone, &prompts, Some(&want.0));
            drop(alone);
            let open = |share, group| GpuModel::open_rank(&dir, options(weights), share, group);
            let what = format!("{name} {weights:?}");
            let (two, other) = both(&what, &config, &prompts, &want.0, &open);
            wrong.extend(other);
            let (of_one, of_two) = (agreement(&one, &want), agreement(&two, &want));
            let all = STEPS * prompts.len();
            println!(
                "{what}: errors {:.1e} of two, {:.1e} of one; tokens {} and {} of {all}; prefixes {:.1e}",
                of_two.0,
                of_one.0,
                of_two.1,
                of_one.1,
                apart(&two, &one)
            );
            let near = of_two.0 <= of_one.0 + room && of_two.1 + all / 8 >= of_one.1;
            if !near {
                wrong.push(format!("{what}: {of_two:?} of two, {of_one:?} of one"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Beside one GPU, on the same random weights.
#[test]
#[ignore = "needs a Hopper GPU"]
fn two_gpus_write_text_in_the_released_sizes() {
    let published = root().join("integration-tests/fixtures/published");
    let mut config = ModelConfig::from_dir(&published).unwrap();
    config.layers.truncate(2);
    let prompts = prompts(config.vocab_size);
    let mut wrong = Vec::new();
    for (weights, bar) in [(WeightType::Bf16, 2e-2), (WeightType::Fp8, 8e-2)] {
        let mut alone = GpuModel::random(config.clone(), options(weights), 3).unwrap();
        let one = write(&mut alone, &prompts, None);
        drop(alone);
        let open =
            |share, group| GpuModel::random_rank(config.clone(), options(weights), 3, share, group);
        let what = format!("published {weights:?}");
        let (two, other) = both(&what, &config, &prompts, &one.tokens, &open);
        wrong.extend(other);
        let want = (one.tokens.clone(), one.logits.clone());
        let ((middle, equal), prefix) = (agreement(&two, &want), apart(&two, &one));
        let all = STEPS * prompts.len();
        println!(
            "{what}: errors {middle:.1e}, {equal} of {all} tokens equal, prefixes {prefix:.1e}"
        );
        let near = middle <= bar && prefix <= bar && equal * 8 >= all * 7;
        if !near {
            wrong.push(format!("{what}: {middle:.1e} {prefix:.1e} {equal}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A rank that leaves in the middle: the other one ends, and both can go on in a new group.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_rank_that_fails_ends_the_other_and_both_meet_anew() {
    let dir = root().join("integration-tests/fixtures/golden/model");
    let config = ModelConfig::from_dir(&dir).unwrap();
    let prompts = prompts(config.vocab_size);
    let (first, second) = (Meeting::new(), Meeting::new());
    let plan: Plan = "tp=2".parse().unwrap();
    let texts: Vec<Seen> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (first, second, dir, config) = (&first, &second, &dir, &config);
                let (plan, prompts) = (&plan, &prompts);
                scope.spawn(move || {
                    let share = GpuShare::new(config, plan, rank).unwrap();
                    let group = first.join(rank, SHORT_PATIENCE);
                    let options = options(WeightType::Bf16);
                    let mut model = GpuModel::open_rank(dir, options, share, group).unwrap();
                    let mut cache = model.cache(64).unwrap();
                    // Rank 1 has a row that does not fit its model.
                    let ids = if rank == 0 {
                        &prompts[1][..9]
                    } else {
                        &[u32::MAX; 9]
                    };
                    let rows = [input(0, ids)];
                    let done = model.run_rows(&rows, &mut [&mut cache], true);
                    let ended = done.and_then(|_| model.wait());
                    assert!(ended.is_err(), "rank {rank} went on");
                    // The other one may come later by its patience.
                    let gpu = model.gpu().clone();
                    model.rejoin(second.join_on(gpu, rank, 3 * PATIENCE));
                    write(&mut model, prompts, None)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_eq!(texts[0].logits, texts[1].logits);
}

#[test]
fn plans_that_write_no_text_on_gpus_are_refused_by_name() {
    let dir = root().join("integration-tests/fixtures/golden/model");
    let config = ModelConfig::from_dir(&dir).unwrap();
    let share = |plan: &str| GpuShare::new(&config, &plan.parse().unwrap(), 0).unwrap();
    for plan in [
        "cfg=2",
        "ulysses=2",
        "ring=2",
        "pp=2",
        "tp=2,ep=tp,shared_expert=replicated",
    ] {
        let refused = share(plan).writes_text().unwrap_err();
        assert!(matches!(refused, ModelError::Unimplemented(_)), "{refused}");
        assert!(
            refused
                .to_string()
                .contains(plan.split(',').next().unwrap()),
            "{refused}"
        );
    }
    share("tp=2").writes_text().unwrap();
    share("single").writes_text().unwrap();
}
