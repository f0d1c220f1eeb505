//! What follows when a prefix does not come to its worker: what the request says.

use base::{Code, Failure};
use proto::{
    status::failure,
    v1::{Done, GenerateRequest, LossPolicy, Mode, generate_response::Event},
};
use registry::Role;

use super::{
    collect,
    fake::{self, Act, Script, away},
    leases::{Stages, stages},
    request,
};

fn wish(policy: LossPolicy) -> GenerateRequest {
    GenerateRequest {
        on_prefix_loss: policy.into(),
        transfer_timeout_ms: 700,
        ..request("one")
    }
}

impl Stages {
    async fn done(&self, wish: GenerateRequest) -> (Vec<Event>, Done) {
        let (mut events, error) = self.cluster.run(wish).await;
        assert!(error.is_none(), "{error:?}");
        match events.pop() {
            Some(Event::Done(done)) => (events, done),
            other => panic!("{other:?}"),
        }
    }

    async fn failed(&self, wish: GenerateRequest) -> Failure {
        failure(&self.cluster.run(wish).await.1.unwrap())
    }
}

#[tokio::test]
async fn fail_ends_the_request_and_names_the_policy() {
    for policy in [LossPolicy::Fail, LossPolicy::Unspecified] {
        let stages = stages(Script::new([Act::NoPrefix(true), Act::NoPrefix(true)])).await;
        let error = stages.failed(wish(policy)).await;
        assert_eq!(error.code, Code::DataLoss);
        assert!(error.message.contains("on_prefix_loss is fail"), "{error}");
        assert!(error.message.contains("chunks did not come"), "{error}");
        assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 1));
        stages.cluster.pool.released(2).await;
    }
}

#[tokio::test]
async fn recompute_makes_the_same_prefix_again_tells_nothing_twice_and_says_so() {
    let stages = stages(Script::new([Act::NoPrefix(true), Act::NoPrefix(false)])).await;
    let mut wish = wish(LossPolicy::Recompute);
    wish.mode = Mode::Recaption.into();
    let (events, done) = stages.done(wish).await;
    let texts = events
        .iter()
        .filter(|event| matches!(event, Event::Text(_)));
    assert_eq!(texts.count(), 2, "{events:?}");
    let report = done.prefix.unwrap();
    assert_eq!(report.on_loss(), LossPolicy::Recompute);
    assert_eq!((report.recomputed, report.waits), (2, 0));
    assert!(report.reason.contains("chunks did not come"), "{report:?}");
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (3, 3));
    let asked = stages.dit.asked.lock().unwrap().clone().unwrap();
    assert_eq!(asked.transfer_timeout_ms, 700);
    // Those that were lost as well as those that took their place.
    stages.cluster.pool.released(6).await;
}

#[tokio::test]
async fn recompute_for_several_images_is_one_pass_for_all_of_them() {
    let stages = stages(Script::new([Act::NoPrefix(true), Act::NoPrefix(true)])).await;
    let mut wish = wish(LossPolicy::Recompute);
    wish.n = 2;
    let (_, done) = stages.done(wish).await;
    assert_eq!(done.prefix.unwrap().recomputed, 1);
    assert_eq!(stages.ar.calls(), 2);
}

#[tokio::test]
async fn recompute_is_bounded() {
    let stages = stages(Script::new(vec![Act::NoPrefix(true); 9])).await;
    let error = stages.failed(wish(LossPolicy::Recompute)).await;
    assert_eq!(error.code, Code::DataLoss);
    assert!(
        error.message.contains("on_prefix_loss is recompute"),
        "{error}"
    );
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (3, 3));
}

#[tokio::test]
async fn a_recomputed_prefix_that_is_another_one_is_not_used() {
    let stages = stages(Script::waiting()).await;
    let stream = stages
        .cluster
        .open(wish(LossPolicy::Recompute))
        .await
        .unwrap();
    stages.dit.called().await;
    stages.cluster.pool.rename(9);
    stages.cluster.pool.refuse(Code::NotFound, "no such slot");
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(error.code, Code::Unavailable);
    assert!(error.message.contains("another one"), "{error}");
    assert_eq!(stages.dit.calls(), 1);
}

#[tokio::test]
async fn wait_tries_the_same_prefix_again_until_it_comes() {
    let stages = stages(Script::new(vec![Act::NoPrefix(false); 3])).await;
    let (_, done) = stages.done(wish(LossPolicy::Wait)).await;
    let report = done.prefix.unwrap();
    assert_eq!((report.recomputed, report.waits), (0, 3));
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 4));
}

#[tokio::test]
async fn wait_does_not_wait_for_what_is_gone() {
    let stages = stages(Script::new([Act::NoPrefix(true)])).await;
    let error = stages.failed(wish(LossPolicy::Wait)).await;
    assert!(error.message.contains("on_prefix_loss is wait"), "{error}");
    assert_eq!((stages.ar.calls(), stages.dit.calls()), (1, 1));
}

#[tokio::test]
async fn wait_outlasts_a_pool_that_is_silent_for_longer_than_a_time_to_live() {
    let stages = stages(Script::waiting()).await;
    let stream = stages.cluster.open(wish(LossPolicy::Wait)).await.unwrap();
    stages.dit.called().await;
    let pool = &stages.cluster.pool;
    pool.refuse(Code::Unavailable, "away");
    let before = pool.books()[0].renewals;
    pool.until(|books| books.iter().all(|book| book.renewals >= before + 5))
        .await;
    pool.heal();
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
}

#[tokio::test]
async fn each_worker_gets_tokens_of_its_own_and_those_before_are_void() {
    let stages = stages(Script::new([])).await;
    let other = Script::new([]);
    let _other = fake::join(&stages.cluster, Role::DitWorker, "dot", &other).await;
    stages.cluster.members(3).await;
    for script in [&stages.dit, &other] {
        script.acts.lock().unwrap().push_back(away());
    }
    let error = stages.failed(wish(LossPolicy::Fail)).await;
    assert_eq!(error.code, Code::Unavailable);
    for book in stages.cluster.pool.books() {
        let mut receivers: Vec<_> = book.granted.iter().map(|(name, _)| name.clone()).collect();
        receivers.sort();
        assert_eq!(receivers, ["dit", "dot"]);
        let replaced: Vec<_> = book.granted.iter().map(|(_, old)| old.clone()).collect();
        assert_eq!(replaced, [vec![], vec![1; 16]]);
    }
    let handles = other.handles.lock().unwrap().clone();
    assert!(
        handles
            .iter()
            .all(|handle| handle.lease == 0 && handle.pull_token.len() == 16)
    );
}

#[tokio::test]
async fn bad_policies_and_timeouts_are_refused_by_name() {
    let stages = stages(Script::new([])).await;
    let mut bad = wish(LossPolicy::Wait);
    bad.on_prefix_loss = 9;
    let error = stages.failed(bad).await;
    assert_eq!(error.field.as_deref(), Some("on_prefix_loss"), "{error}");
    let mut bad = wish(LossPolicy::Wait);
    bad.transfer_timeout_ms = 600_001;
    let error = stages.failed(bad).await;
    assert_eq!(
        error.field.as_deref(),
        Some("transfer_timeout_ms"),
        "{error}"
    );
}
