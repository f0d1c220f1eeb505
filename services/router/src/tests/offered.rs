//! Prefixes that are offered while they are computed: a worker is set to them at once, and what was offered in vain
//! is computed elsewhere.
use proto::v1::{Done, LossPolicy, generate_response::Event, get_response::State};
use registry::Role;

use super::{
    Cluster, bounded, collect,
    fake::{self, Act, Script},
    next, request,
};

struct Stages {
    cluster: Cluster,
    ar: Script,
    dit: Script,
    _stages: Vec<fake::Stage>,
}

/// Two AR stages that do what `acts` say, whichever is asked first, and one worker.
async fn stages(acts: [Act; 2], dit: Script) -> Stages {
    let cluster = Cluster::start().await;
    let ar = Script::paced(0);
    *ar.acts.lock().unwrap() = acts.into();
    let mut stages = vec![];
    for id in ["a", "b"] {
        stages.push(fake::join(&cluster, Role::ArStage, id, &ar).await);
    }
    stages.push(fake::join(&cluster, Role::DitWorker, "dit", &dit).await);
    cluster.members(3).await;
    Stages {
        cluster,
        ar,
        dit,
        _stages: stages,
    }
}

fn done(events: &[Event]) -> &Done {
    match events.last() {
        Some(Event::Done(done)) => done,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_worker_is_set_to_prefixes_that_are_still_computed() {
    let stages = stages([Act::Offer, Act::Work], Script::waiting()).await;
    let stream = stages.cluster.open(request("one")).await.unwrap();
    stages.dit.called().await;
    assert_eq!(stages.cluster.state("one").await, State::Prefill);
    let handles = stages.dit.handles.lock().unwrap().clone();
    assert!(handles.iter().all(|handle| handle.pull_token.len() == 16));
    stages.ar.steps.add_permits(1);
    let denoises = async {
        while stages.cluster.state("one").await != State::Denoise {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    bounded(denoises).await;
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    let timings = done(&events).timings.clone().unwrap();
    assert_eq!(timings.prefill_ms, 1.0, "of the last word");
    assert_eq!(timings.transfer_ms, 2.0 + 3.0);
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 1));
    stages.cluster.pool.released(2).await;
}

#[tokio::test]
async fn a_stage_lost_after_its_offer_is_replaced_and_its_prefixes_are_let_go() {
    let stages = stages([Act::OfferAndFail, Act::Work], Script::waiting()).await;
    let stream = stages.cluster.open(request("one")).await.unwrap();
    stages.dit.called().await;
    stages.ar.steps.add_permits(1);
    stages.dit.dropped().await;
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    let report = done(&events).prefix.clone().unwrap();
    assert_eq!(report.recomputed, 0, "a lost stage is no lost prefix");
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (2, 2));
    stages.cluster.pool.released(4).await;
}

#[tokio::test]
async fn what_a_worker_misses_of_an_offer_is_explained_by_the_stage_that_made_it() {
    for policy in [LossPolicy::Fail, LossPolicy::Recompute, LossPolicy::Wait] {
        let dit = Script::new([Act::NoPrefix(true)]);
        let stages = stages([Act::OfferAndFail, Act::Work], dit).await;
        let mut wish = request("one");
        wish.on_prefix_loss = policy.into();
        let stream = stages.cluster.open(wish).await.unwrap();
        stages.dit.called().await;
        stages.ar.steps.add_permits(1);
        let (events, error) = collect(stream).await;
        assert!(error.is_none(), "{policy:?}: {error:?}");
        let report = done(&events).prefix.clone().unwrap();
        assert_eq!((report.recomputed, report.waits), (0, 0));
        assert_eq!((stages.ar.calls(), stages.dit.calls()), (2, 2));
    }
}

#[tokio::test]
async fn a_stage_lost_after_a_worker_has_all_of_its_offer_does_not_matter() {
    let stages = stages([Act::OfferAndFail, Act::Work], Script::paced(1)).await;
    let mut stream = stages.cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Step(_)) {}
    stages.ar.steps.add_permits(1);
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    done(&events);
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 1));
}
