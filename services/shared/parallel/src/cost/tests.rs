use proptest::prelude::*;

use super::*;
use crate::Axis;
use crate::shape::tests::published as shape;

/// The published model.
fn published() -> ModelSizes {
    ModelSizes {
        shape: shape(),
        top_k: vec![8; 32],
        qk_norm: true,
        vocab: 133_120,
        stem_inner: 1024,
        specials: 1,
        pixels_per_token: 16,
        vae: VaeSizes {
            latent: 32,
            channels: vec![128, 256, 512, 1024, 1024],
            blocks: 3,
            spatial_levels: 4,
            temporal_levels: 2,
        },
    }
}

const WORK: Work = Work {
    image_tokens: 4096,
    rows: 2,
    prefix: 250,
    steps: 50,
    concurrency: 1,
};

fn h200(gigabytes: u64) -> Machine {
    let memory = gigabytes * 1_000_000_000;
    Machine::h200(memory, WeightType::Bf16, Interconnect::NvLink)
}

fn alone(plan: Plan) -> Candidate {
    Candidate {
        plan,
        replicas: 1,
        offload: false,
    }
}

#[test]
fn a_single_rank_holds_the_published_parameters_and_moves_nothing() {
    let (sizes, plan) = (published(), Plan::default());
    let own = sizes.rank_weights(&plan, 0).unwrap();
    // Published counts of each part; norms and routers together, without the final norm of text.
    assert_eq!(own.attention, 1_342_185_472 - 32 * 2 * 128);
    assert_eq!(own.experts, 77_309_411_328);
    assert_eq!(own.shared, 1_207_959_552);
    assert_eq!(own.small, 266_240 - 4096 + 32 * 2 * 128 + 8_388_608);
    let embedders = 3 * 17_833_984;
    assert_eq!(own.ends, 545_259_520 + embedders + 226_819_072 + 60_081_184);
    assert_eq!(own.vae, 871_332_483);
    let got = assess(&sizes, &h200(200), &WORK, alone(plan)).unwrap();
    assert!(got.communication.is_empty() && got.bubble == 0.0 && got.misfit.is_none());
    assert_eq!(got.stream_seconds, 0.0);
}

#[test]
fn a_distilled_model_has_two_more_embedders() {
    let more = ModelSizes {
        specials: 3,
        ..published()
    };
    let ends = |sizes: &ModelSizes| sizes.rank_weights(&Plan::default(), 0).unwrap().ends;
    assert_eq!(ends(&more) - ends(&published()), 35_667_968);
}

/// The published sums: 100 linear, 10 to 12 attention, 2.0 stem and head, for each of two rows.
#[test]
fn one_rank_takes_as_long_as_its_operations_at_the_measured_rates() {
    let got = assess(&published(), &h200(200), &WORK, alone(Plan::default())).unwrap();
    // A layer alone was measured at 14.4 ms for two rows of 4097 queries.
    let layers = got.step_seconds / 32.0;
    assert!((0.014..0.018).contains(&layers), "{layers}");
    let decode = published().vae.decode_flops(4096) / 1e12;
    assert!((decode - 104.6).abs() < 0.5, "{decode}");
}

/// Weights of all ranks are the model's, each part as often as the plan replicates it.
#[test]
fn weights_of_all_ranks_are_the_model_times_its_replication() {
    let sizes = published();
    let whole = sizes.rank_weights(&Plan::default(), 0).unwrap();
    for ranks in [1_u64, 2, 4, 8, 16] {
        for candidate in candidates(&sizes, ranks as usize).unwrap() {
            let plan = candidate.plan;
            let size = |n: usize| n as u64;
            let group = ranks / size(candidate.replicas);
            let mut sum = RankWeights::default();
            for rank in 0..group as usize {
                let own = sizes.rank_weights(&plan, rank).unwrap();
                sum.attention += own.attention;
                sum.experts += own.experts;
                sum.shared += own.shared;
                sum.small += own.small;
                sum.ends += own.ends;
                sum.vae += own.vae;
            }
            let copies = group / size(plan.pp);
            let ep = size(plan.mesh().unwrap().size_of(plan.ep));
            let inner = if plan.ep.contains(Axis::Tp) {
                1
            } else {
                size(plan.tp)
            };
            let split = plan.shared_expert == SharedExpert::Split;
            let name = candidate.plan.to_string();
            assert_eq!(sum.experts, whole.experts * copies / (ep * inner), "{name}");
            let parts = if split { size(plan.tp) } else { 1 };
            assert_eq!(sum.shared, whole.shared * copies / parts, "{name}");
            assert_eq!(sum.small, whole.small * copies, "{name}");
            assert_eq!((sum.ends, sum.vae), (whole.ends * group, whole.vae));
            // Of query heads and output one copy; of key heads one more for each rank beyond them.
            let queries = 2 * 32 * 128 * 4096 * 32;
            let keys = (whole.attention - queries) * (size(plan.tp) / 8).max(1);
            assert_eq!(
                sum.attention,
                (queries + keys) * copies / size(plan.tp),
                "{name}"
            );
        }
    }
}

#[test]
fn layers_that_do_not_fit_are_streamed_and_no_more_than_those() {
    let sizes = published();
    let offload = Candidate {
        offload: true,
        ..alone(Plan::default())
    };
    let at = |gigabytes, work| assess(&sizes, &h200(gigabytes), &work, offload).unwrap();
    assert_eq!(at(200, WORK).streamed_layers, 0);
    let tight = at(141, WORK);
    assert!(tight.misfit.is_none());
    assert!((6..14).contains(&tight.streamed_layers), "{tight:?}");
    assert!(tight.memory.peak() <= 141_000_000_000);
    assert_eq!(tight.stream_seconds, tight.memory.streamed as f64 / 55e9);
    assert!(tight.step_seconds >= tight.stream_seconds);
    // Copying does not grow with the batch, computing does: it ends up hidden.
    let four = Work {
        concurrency: 4,
        ..WORK
    };
    let batch = at(141, four);
    assert!(batch.step_seconds > batch.stream_seconds);
    assert!(batch.pictures_per_second > tight.pictures_per_second);
    assert!(at(10, WORK).misfit.is_some());
    // Without offload the same machine does not do.
    let resident = alone(Plan::default());
    let got = assess(&sizes, &h200(141), &WORK, resident).unwrap();
    assert!(matches!(got.misfit, Some(Misfit::Memory { .. })));
}

#[test]
fn a_pipeline_waits_less_the_more_rows_it_has() {
    let plan = Plan {
        pp: 4,
        ..Plan::default()
    };
    let at = |concurrency| {
        let work = Work {
            concurrency,
            ..WORK
        };
        assess(&published(), &h200(141), &work, alone(plan)).unwrap()
    };
    // Two rows on four stages: three of five beats of each stage are idle.
    assert!((at(1).bubble - 0.6).abs() < 0.01, "{}", at(1).bubble);
    assert!(at(8).bubble < 0.17);
    assert!(at(8).pictures_per_second > 1.5 * at(1).pictures_per_second);
}

#[test]
fn guidance_ranks_without_a_second_row_are_refused_by_name() {
    let plan = Plan {
        cfg: 2,
        ..Plan::default()
    };
    let work = Work { rows: 1, ..WORK };
    let got = assess(&published(), &h200(200), &work, alone(plan)).unwrap();
    assert_eq!(got.misfit, Some(Misfit::OneRow));
    let none = Work { steps: 0, ..WORK };
    assert!(assess(&published(), &h200(200), &none, alone(plan)).is_err());
}

#[test]
fn candidates_use_every_gpu_and_differ() {
    let all = candidates(&published(), 8).unwrap();
    assert!(all.iter().all(|c| c.gpus() == 8));
    let names: std::collections::BTreeSet<(usize, String)> = all
        .iter()
        .map(|c| (c.replicas, c.plan.to_string()))
        .collect();
    assert_eq!(names.len(), all.len());
    assert!(names.contains(&(1, "cfg=2,ulysses=4,ep=cfg+ulysses".to_owned())));
    assert!(names.contains(&(8, "single".to_owned())));
    assert!(candidates(&published(), 0).is_err());
}

/// Any of the ways to use up to four GPUs.
fn some_candidate() -> impl Strategy<Value = Candidate> {
    let all: Vec<Candidate> = [1, 2, 4]
        .into_iter()
        .flat_map(|gpus| candidates(&published(), gpus).unwrap())
        .collect();
    prop::sample::select(all)
}

fn some_work() -> impl Strategy<Value = Work> {
    (1_usize..6000, 1_usize..3, 0_usize..4000, 1_usize..9).prop_map(
        |(image_tokens, rows, prefix, concurrency)| Work {
            image_tokens,
            rows,
            prefix,
            concurrency,
            ..WORK
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// More to do is never done sooner.
    #[test]
    fn more_work_never_takes_less_time_or_memory(
        candidate in some_candidate(), work in some_work(), more in 1_usize..300,
    ) {
        let (sizes, machine) = (published(), h200(141));
        let at = |work| assess(&sizes, &machine, &work, candidate).unwrap();
        let base = at(work);
        for bigger in [
            Work { image_tokens: work.image_tokens + more, ..work },
            // Whole chunks of a ring: with one token more, the rank that also decodes may get one less.
            Work { prefix: work.prefix + 8 * more, ..work },
            Work { concurrency: work.concurrency + more % 5, ..work },
            Work { steps: work.steps + more, ..work },
        ] {
            let got = at(bigger);
            let slack = 1.0 - 1e-9;
            prop_assert!(got.step_seconds >= base.step_seconds * slack, "{bigger:?}");
            prop_assert!(got.picture_seconds >= base.picture_seconds * slack, "{bigger:?}");
            prop_assert!(got.streamed_layers >= base.streamed_layers);
            let resident = |a: &Assessment| a.memory.peak() + a.memory.streamed;
            prop_assert!(resident(&got) >= resident(&base), "{bigger:?}");
        }
    }

    /// A plan that fits still fits a larger memory, and is no slower there.
    #[test]
    fn more_memory_never_fits_fewer_plans(
        candidate in some_candidate(), work in some_work(),
        gigabytes in 10_u64..200, more in 0_u64..50,
    ) {
        let sizes = published();
        let at = |gigabytes| assess(&sizes, &h200(gigabytes), &work, candidate).unwrap();
        let (small, large) = (at(gigabytes), at(gigabytes + more));
        prop_assert!(small.misfit.is_some() || large.misfit.is_none());
        prop_assert!(large.step_seconds <= small.step_seconds);
    }

    /// A rate that doubles never slows a step down.
    #[test]
    fn a_faster_machine_is_never_slower(candidate in some_candidate(), work in some_work()) {
        let (sizes, slow) = (published(), h200(141));
        let link = Link { latency: slow.link.latency / 2.0, reduce: slow.link.reduce * 2.0, ..slow.link };
        let at = |machine: Machine| assess(&sizes, &machine, &work, candidate).unwrap().step_seconds;
        for fast in [
            Machine { dense: slow.dense * 2.0, ..slow },
            Machine { experts: slow.experts * 2.0, ..slow },
            Machine { host_rate: slow.host_rate * 2.0, ..slow },
            Machine { link, ..slow },
        ] {
            prop_assert!(at(fast) <= at(slow));
        }
    }
}
