//! What operators ask of a router: records of requests, cordons, events.
use base::Code;
use proto::{
    status::failure,
    v1::{
        ClusterEvent, CordonRequest, ListRequestsRequest, RequestRecord, WatchEventsRequest,
        admin_service_client::AdminServiceClient, get_response::State,
    },
};
use registry::{Role, Snapshots};
use tonic::{Status, transport::Channel};

use super::{
    Cluster, SOON, bounded,
    fake::{self, Script, away},
    request,
};

fn admin(cluster: &Cluster) -> AdminServiceClient<Channel> {
    AdminServiceClient::new(cluster.channel.clone())
}

async fn records(cluster: &Cluster, ids: &[&str]) -> Result<Vec<RequestRecord>, Status> {
    let ask = ListRequestsRequest {
        request_ids: ids.iter().map(|&id| id.to_owned()).collect(),
        limit: 0,
        full: true,
    };
    let answer = bounded(admin(cluster).list_requests(ask)).await;
    answer.map(|answer| answer.into_inner().requests)
}

/// What has happened so far.
async fn events(cluster: &Cluster) -> Vec<ClusterEvent> {
    let ask = WatchEventsRequest::default();
    let stream = bounded(admin(cluster).watch_events(ask)).await.unwrap();
    let mut stream = stream.into_inner();
    let mut all = vec![];
    while let Some(told) = bounded(stream.message()).await.unwrap() {
        all.extend(told.event);
    }
    all
}

async fn cordon(cluster: &Cluster, member: &str, cordoned: bool) -> Result<(), Status> {
    let ask = CordonRequest {
        member_id: member.to_owned(),
        cordoned,
    };
    bounded(admin(cluster).cordon(ask)).await.map(drop)
}

#[tokio::test]
async fn a_record_says_where_each_phase_went_why_and_how_long_it_took() {
    let cluster = Cluster::start().await;
    let (ar, dit, spare) = (Script::new([]), Script::new([away()]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    cluster.members(2).await;
    assert!(cluster.run(request("one")).await.1.is_some());
    let _spare = fake::join(&cluster, Role::DitWorker, "spare", &spare).await;
    cluster.members(3).await;
    assert!(cluster.run(request("two")).await.1.is_none());

    let all = records(&cluster, &[]).await.unwrap();
    let ids: Vec<_> = all
        .iter()
        .map(|record| record.request_id.as_str())
        .collect();
    assert_eq!(ids, ["two", "one"]);
    let (two, one) = (&all[0], &all[1]);
    assert_eq!(one.state(), State::Failed);
    assert!(one.placements[1].outcome.starts_with("lost: "), "{one:?}");
    assert_eq!((two.state(), two.prompt_chars), (State::Done, 9));
    let phases: Vec<_> = two
        .placements
        .iter()
        .map(|p| (p.stage.as_str(), p.outcome.as_str()))
        .collect();
    assert_eq!(phases, [("ar-stage", "done"), ("dit-worker", "done")]);
    let denoise = &two.placements[1];
    assert_eq!((denoise.eligible, denoise.attempt), (2, 1));
    assert_eq!(denoise.candidates.len(), 2);
    assert_eq!(two.prefixes.len(), 2);
    let names: Vec<_> = two.spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "queue", "prefill", "compute", "publish", "image 0", "wait", "transfer", "steps",
            "decode"
        ]
    );
    let of = |name: &str| two.spans.iter().find(|span| span.name == name).unwrap();
    // The stages' own words.
    assert_eq!(
        (of("transfer").duration_ms, of("steps").duration_ms),
        (3.0, 5.0)
    );
    assert_eq!(two.timings.as_ref().unwrap().decode_ms, 6.0);
    let unknown = records(&cluster, &["nobody"]).await.unwrap_err();
    assert_eq!(failure(&unknown).code, Code::NotFound);
}

#[tokio::test]
async fn a_cordoned_worker_gets_nothing_new_and_takes_work_again_afterwards() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    cluster.members(2).await;
    cordon(&cluster, "dit", true).await.unwrap();
    let snapshots = Snapshots::follow(cluster.registry.clone());
    let seen = snapshots.wait(SOON, |now| {
        now.members.get("dit").is_some_and(|m| m.cordoned)
    });
    assert!(seen.await.is_some());
    let refused = cluster.run(request("one")).await.1.unwrap();
    assert_eq!(failure(&refused).message, "no dit-worker is ready");
    cordon(&cluster, "dit", false).await.unwrap();
    let (_, error) = cluster.run(request("two")).await;
    assert!(error.is_none(), "{error:?}");

    let router = snapshots.current();
    let router = router.members.values().find(|m| m.role() == Role::Router);
    let refused = cordon(&cluster, &router.unwrap().id, true)
        .await
        .unwrap_err();
    assert_eq!(failure(&refused).field.as_deref(), Some("member_id"));
    let unknown = cordon(&cluster, "nobody", true).await.unwrap_err();
    assert_eq!(failure(&unknown).code, Code::NotFound);
}

#[tokio::test]
async fn events_tell_members_refusals_and_losses_and_can_be_followed() {
    let cluster = Cluster::start().await;
    let (ar, dit) = (Script::new([]), Script::new([away()]));
    let _ar = fake::join(&cluster, Role::ArStage, "ar", &ar).await;
    let _dit = fake::join(&cluster, Role::DitWorker, "dit", &dit).await;
    cluster.members(2).await;
    let mut bad = request("bad");
    bad.steps = Some(0);
    assert!(cluster.run(bad).await.1.is_some());
    assert!(cluster.run(request("one")).await.1.is_some());
    let told = events(&cluster).await;
    let is = |reason: &str, object: &str| {
        told.iter()
            .any(|e| e.reason == reason && e.object == object)
    };
    assert!(is("MemberJoined", "member/dit"), "{told:?}");
    assert!(is("RequestRefused", "code/INVALID_ARGUMENT"), "{told:?}");
    assert!(is("StageLost", "member/dit") && is("RequestFailed", "request/one"));
    assert!(told.windows(2).all(|two| two[0].number < two[1].number));

    let newest = told.last().unwrap().number;
    let ask = WatchEventsRequest {
        after: newest,
        follow: true,
    };
    let stream = bounded(admin(&cluster).watch_events(ask)).await.unwrap();
    let mut stream = stream.into_inner();
    cordon(&cluster, "dit", true).await.unwrap();
    let next = bounded(stream.message()).await.unwrap().unwrap();
    let next = next.event.unwrap();
    assert_eq!(
        (next.reason.as_str(), next.number),
        ("MemberCordoned", newest + 1)
    );
}
