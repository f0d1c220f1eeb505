//! The prefixes of a request: kept while it runs, released once when it ends, however it ends.
use std::time::Duration;

use base::{Code, Failure};
use proto::{
    status::failure,
    v1::{CancelRequest, generate_response::Event},
};
use registry::Role;
use tonic::Request;

use super::{
    Cluster, bounded, collect,
    fake::{self, Act, Script, away},
    next, request,
};

/// Long enough for a busy machine to renew in time, short enough to be outlived in a test.
const TTL: Duration = Duration::from_millis(1_500);
/// Renewals within it.
const RENEWALS: usize = 3;

pub(super) struct Stages {
    pub(super) cluster: Cluster,
    pub(super) ar: Script,
    pub(super) dit: Script,
    _stages: [fake::Stage; 2],
}

/// A router whose prefixes live [`TTL`], and two stages.
pub(super) async fn stages(dit: Script) -> Stages {
    let cluster = Cluster::configured(|config| config.prefix_ttl = TTL).await;
    let ar = Script::new([]);
    let stages = [
        fake::join(&cluster, Role::ArStage, "ar", &ar).await,
        fake::join(&cluster, Role::DitWorker, "dit", &dit).await,
    ];
    cluster.members(2).await;
    Stages {
        cluster,
        ar,
        dit,
        _stages: stages,
    }
}

impl Stages {
    /// Waits for the releases of `count` leases; nothing may be released twice.
    async fn released(&self, count: usize) {
        self.cluster.pool.released(count).await;
        let releases = self.cluster.pool.books();
        assert!(
            releases.iter().all(|book| book.releases == 1),
            "{releases:?}"
        );
    }
}

#[tokio::test]
async fn a_request_that_ends_well_releases_each_prefix_once() {
    let stages = stages(Script::new([])).await;
    let (events, error) = stages.cluster.run(request("one")).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
    stages.released(2).await;
    let mut one_row = request("two");
    one_row.guidance = Some(1.0);
    assert!(stages.cluster.run(one_row).await.1.is_none());
    stages.released(3).await;
}

#[tokio::test]
async fn the_worker_gets_handles_that_only_read() {
    let stages = stages(Script::new([])).await;
    assert!(stages.cluster.run(request("one")).await.1.is_none());
    let handles = stages.dit.handles.lock().unwrap().clone();
    assert_eq!(handles.len(), 2);
    assert!(
        handles
            .iter()
            .all(|handle| handle.lease == 0 && handle.slot > 0)
    );
}

#[tokio::test]
async fn a_worker_that_fails_or_goes_away_leaves_no_prefix_behind() {
    let broken = Failure::new(Code::Internal, "numbers are not finite");
    let dit = Script::new([Act::Refuse(broken), away(), Act::Silence]);
    let stages = stages(dit).await;
    for (id, count) in [("one", 2), ("two", 4), ("three", 6)] {
        assert!(stages.cluster.run(request(id)).await.1.is_some());
        stages.released(count).await;
    }
}

#[tokio::test]
async fn rows_that_were_not_asked_for_are_released() {
    let stages = stages(Script::new([])).await;
    stages.ar.acts.lock().unwrap().push_back(Act::Twice);
    let mut one_row = request("one");
    one_row.guidance = Some(1.0);
    let error = failure(&stages.cluster.run(one_row).await.1.unwrap());
    assert_eq!(error.code, Code::Internal, "{error}");
    stages.released(2).await;
}

#[tokio::test]
async fn a_cancelled_request_releases_its_prefixes() {
    let stages = stages(Script::paced(1)).await;
    let mut stream = stages.cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Step(_)) {}
    let ask = CancelRequest {
        request_id: "one".into(),
    };
    let mut client = stages.cluster.client.clone();
    bounded(client.cancel(ask)).await.unwrap();
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(error.code, Code::Cancelled);
    stages.released(2).await;
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_no_prefix_behind() {
    let stages = stages(Script::paced(1)).await;
    let mut stream = stages.cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Step(_)) {}
    drop(stream);
    stages.released(2).await;
}

#[tokio::test]
async fn a_request_out_of_time_releases_its_prefixes() {
    let stages = stages(Script::paced(1)).await;
    let mut timed = Request::new(request("one"));
    timed.set_timeout(Duration::from_secs(2));
    let mut client = stages.cluster.client.clone();
    let stream = bounded(client.generate(timed)).await.unwrap().into_inner();
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(error.code, Code::DeadlineExceeded);
    stages.released(2).await;
}

#[tokio::test]
async fn a_router_that_is_told_twice_to_stop_releases_before_it_ends() {
    let stages = stages(Script::paced(1)).await;
    let mut stream = stages.cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Step(_)) {}
    stages.cluster.shutdown.signal();
    stages.cluster.shutdown.signal();
    assert!(collect(stream).await.1.is_some());
    stages.released(2).await;
}

#[tokio::test]
async fn a_request_that_queues_longer_than_the_time_to_live_still_gets_its_image() {
    let stages = stages(Script::waiting()).await;
    let stream = stages.cluster.open(request("one")).await.unwrap();
    // The first renewal comes at once, a time to live holds three more; the pool forgets what is
    // renewed too late.
    let outlived = 1 + 2 * RENEWALS;
    let pool = &stages.cluster.pool;
    pool.until(|books| books.len() == 2 && books.iter().all(|book| book.renewals >= outlived))
        .await;
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
    stages.released(2).await;
}

#[tokio::test]
async fn a_prefix_lost_before_it_was_fetched_ends_the_request_typed() {
    for code in [Code::NotFound, Code::Aborted] {
        let stages = stages(Script::waiting()).await;
        let stream = stages.cluster.open(request("one")).await.unwrap();
        stages.dit.called().await;
        stages.cluster.pool.refuse(code, "slot 10 is not in use");
        let error = failure(&collect(stream).await.1.unwrap());
        assert_eq!(error.code, Code::Unavailable);
        assert!(
            error.message.contains("lost before it was fetched"),
            "{error}"
        );
        stages.dit.dropped().await;
        assert_eq!(stages.dit.calls(), 1, "no other worker can help");
        stages.released(2).await;
    }
}

#[tokio::test]
async fn a_pool_that_cannot_be_asked_for_a_whole_time_to_live_counts_as_lost() {
    let stages = stages(Script::waiting()).await;
    let stream = stages.cluster.open(request("one")).await.unwrap();
    stages.dit.called().await;
    stages.cluster.pool.refuse(Code::Unavailable, "away");
    let error = failure(&collect(stream).await.1.unwrap());
    assert_eq!(error.code, Code::Unavailable);
    assert!(error.message.contains("away"), "{error}");
}

#[tokio::test]
async fn a_prefix_lost_after_it_was_fetched_does_not_matter() {
    let stages = stages(Script::paced(1)).await;
    let mut stream = stages.cluster.open(request("one")).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Event::Step(_)) {}
    let pool = &stages.cluster.pool;
    pool.refuse(Code::NotFound, "slot 10 is not in use");
    // A keeper that has lost its lease lets go of it: it has noticed.
    stages.released(2).await;
    stages.dit.steps.add_permits(10);
    let (events, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert!(matches!(events.last(), Some(Event::Done(_))));
    stages.released(2).await;
}
